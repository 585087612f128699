"""Programs of a Hopper kernel as a cluster: they run side by side, and reach each other's shared memory.

Gluon of Triton 3.6 has no words for that. A kernel that is compiled for one program is launched in clusters, and what
crosses over is PTX. Few results are sent from registers, 16 bytes at a time, to an inbox that is there for nothing
else: they count themselves off at its barrier, and nobody waits for anybody but for what is sent. Where inboxes were
what the compiler had its tiles in, all met when all had multiplied, which cost an H200 0.2 to 0.5 us of a product of up
to 8 tokens. Many results are fetched, from the start of the compiler's shared memory, `global_smem`, once nobody needs
what was there. That takes a release, of 0.3 us, and of a microsecond where 320 programs do so at once; without it, 11
of 200,000 products had other bits. And all wait until all have what they want.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..host.gpu import Gpu
from ..host.launch import FUSING, bound, note

SIZES = (8, 6, 5, 4, 3, 2)
"""Programs of a cluster. Any Hopper GPU takes up to 8."""
INBOX_ALIGN = 1024
"""The compiler's shared memory begins behind the inbox, and what copies and matrix products use there is aligned to as
much."""
BARRIER_BYTES = 16
"""Of an inbox, in front of what is sent."""
AT_ONCE = {
    2: (66, 132, 198, 264),
    3: (39, 79, 124, 163),
    4: (30, 62, 92, 124),
    5: (22, 47, 69, 94),
    6: (17, 39, 62, 79),
    8: (15, 30, 45, 62),
}
"""Clusters, by their size, that an H200 says it runs at once (cuOccupancyMaxActiveClusters), where a processor has room
for 1 to 4 of their programs. Those of more than two keep to one part of the GPU, and not all parts are whole."""
PROCESSORS = 132
UNASKED_BYTES = 48 * 1024
"""Shared memory that any kernel may have without asking for more."""

_BARRIER_BYTES = gl.constexpr(BARRIER_BYTES)


def inbox_bytes(letters: int) -> int:
    """What an inbox for so many bytes takes of the shared memory of a program."""
    return -(-(BARRIER_BYTES + letters) // INBOX_ALIGN) * INBOX_ALIGN


def clusters_at_once(gpu: Gpu, size: int, programs: int) -> int:
    """Clusters of `size` programs that run at once, where a processor has room for `programs` of them, 1 to 4.

    One cluster more makes a launch take twice as long. GPUs with other numbers of processors are taken to be like the
    H200 in their parts.
    """
    return AT_ONCE[size][programs - 1] * gpu.sms // PROCESSORS


def launch_clusters(kernel: Any, programs: int, cluster: int, room: int, *args: Any, **constants: Any) -> None:
    """As `launch_kernel(kernel, (programs,), *args, **constants)`, in clusters of neighbours.

    Args:
        room: shared memory of a program that others reach, in bytes.
    """
    compiled = kernel.warmup(*args, grid=(1,), **(FUSING | constants))
    if compiled is None:  # where tests stand in for the compiler
        return
    warps, _, shared = compiled.packed_metadata
    # Triton asks for what the compiler has, and knows neither of inboxes nor of `room`.
    compiled.metadata = compiled.metadata._replace(shared=max(shared, UNASKED_BYTES + 1))
    compiled.packed_metadata = warps, cluster, max(shared, room)
    values, grid = bound(kernel, args, constants), (programs // cluster, 1, 1)
    compiled[grid](*values)
    note(compiled, grid, values)


@triton.constexpr_function
def _inbox(size: int) -> str:
    return f"{{ .shared .align 1024 .b8 inbox[{size}]; mov.u32 $0, inbox; }}"


@gluon.jit
def place_inbox(SIZE: gl.constexpr):
    """int32 address of SIZE bytes, `inbox_bytes`, at the same place in every program; 0 where that is none.

    A kernel has one.
    """
    inbox = 0
    if SIZE > 0:
        ASM: gl.constexpr = _inbox(SIZE)
        inbox = gl.inline_asm_elementwise(ASM, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    return inbox


@gluon.jit
def open_inbox(inbox, letters):
    """What a program does early, with the whole cluster: it waits for `letters` bytes from now on."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .b32 thread;
        .reg .b64 state;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        @first mbarrier.init.shared::cta.b64 [$1], 1;
        @first mbarrier.arrive.expect_tx.shared::cta.b64 state, [$1], $2;
        @first fence.mbarrier_init.release.cluster;
        barrier.cluster.arrive.relaxed.aligned;
        mov.u32 $0, 0;
        }""",
        "=r,r,r",
        [inbox, letters],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def inboxes_open():
    """Wait until those of the whole cluster are: nobody sends before."""
    gl.inline_asm_elementwise(
        "barrier.cluster.wait.acquire.aligned; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@triton.constexpr_function
def _meet(release: bool) -> str:
    how = "release" if release else "relaxed"
    return f"barrier.cluster.arrive.{how}.aligned; barrier.cluster.wait.acquire.aligned; mov.u32 $0, 0;"


@gluon.jit
def meet(RELEASE: gl.constexpr):
    """Wait until the whole cluster is here, and see what it has stored before, if that is to be released."""
    ASM: gl.constexpr = _meet(RELEASE)
    gl.inline_asm_elementwise(ASM, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def send_words(inbox, program, offset, wanted, values):
    """Float32 `values`, four that a thread has beside each other, to the inbox of a program of the cluster.

    All others are int32. Those of the first of four say whether, and to which of its bytes, a multiple of 16 of them.
    """
    at = inbox + _BARRIER_BYTES + offset
    gl.inline_asm_elementwise(
        """{
        .reg .pred wanted;
        .reg .b32 at, done;
        setp.ne.b32 wanted, $16, 0;
        mapa.shared::cluster.u32 at, $12, $8;
        mapa.shared::cluster.u32 done, $4, $8;
        @wanted st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [at], {$20, $21, $22, $23}, [done];
        mov.u32 $0, 0;
        mov.u32 $1, 0;
        mov.u32 $2, 0;
        mov.u32 $3, 0;
        }""",
        "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,f,f,f,f",
        [inbox, program, at, wanted, values],
        dtype=gl.int32,
        is_pure=False,
        pack=4,
    )


@gluon.jit
def await_letters(inbox):
    """Wait for all that this program is sent."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred here;
        AWAIT_LETTERS:
        mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 here, [$1], 0;
        @!here bra AWAIT_LETTERS;
        mov.u32 $0, 0;
        }""",
        "=r,r",
        [inbox],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def received_words(inbox, offset):
    """Float32 at bytes `offset` of this program's inbox, four of a thread beside each other, by the first's."""
    return gl.inline_asm_elementwise(
        "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];",
        "=&f,=&f,=&f,=&f,r,r,r,r",
        [inbox + _BARRIER_BYTES + offset],
        dtype=gl.float32,
        is_pure=False,
        pack=4,
    )


@gluon.jit
def put_words(values, offset):
    """Store float32 at bytes `offset` of this program's shared memory."""
    start = gl.inline_asm_elementwise("mov.u32 $0, global_smem;", "=r", [], dtype=gl.int32, is_pure=True, pack=1)
    # A sum that the compiler sees is part of the instruction where it knows by how much addresses differ.
    gl.inline_asm_elementwise(
        """{
        st.shared.f32 [$2], $1;
        mov.u32 $0, 0;
        }""",
        "=r,f,r",
        [values, start + offset],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def put_pairs(values, offset):
    """As `put_words`, of neighbours of two, by the offset of the first."""
    start = gl.inline_asm_elementwise("mov.u32 $0, global_smem;", "=r", [], dtype=gl.int32, is_pure=True, pack=1)
    gl.inline_asm_elementwise(
        """{
        st.shared.v2.f32 [$4], {$2, $3};
        mov.u32 $0, 0;
        mov.u32 $1, 0;
        }""",
        "=r,=r,f,f,r,r",
        [values, start + offset],
        dtype=gl.int32,
        is_pure=False,
        pack=2,
    )


@gluon.jit
def words_of(program, offset, wanted):
    """float32 at bytes `offset` of the shared memory of a program of the cluster, 0 where int32 `wanted` is.

    A thread has four neighbours, and loads them if the first is wanted.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .pred wanted;
        .reg .b32 at;
        setp.ne.b32 wanted, $12, 0;
        mov.u32 at, global_smem;
        add.u32 at, at, $4;
        mapa.shared::cluster.u32 at, at, $8;
        mov.f32 $0, 0f00000000;
        mov.f32 $1, 0f00000000;
        mov.f32 $2, 0f00000000;
        mov.f32 $3, 0f00000000;
        @wanted ld.shared::cluster.v4.f32 {$0, $1, $2, $3}, [at];
        }""",
        "=&f,=&f,=&f,=&f,r,r,r,r,r,r,r,r,r,r,r,r",
        [offset, program, wanted],
        dtype=gl.float32,
        is_pure=False,
        pack=4,
    )
