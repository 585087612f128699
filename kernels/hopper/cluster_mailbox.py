"""Thread block clusters for Gluon kernels: launches, and messages between the shared memories of their CTAs.

Gluon of Triton 3.6 has no clusters. A kernel compiled for single CTAs is launched in clusters, and inline PTX crosses
between CTAs, in one of two ways:

- Mailbox: a dedicated shared-memory buffer with an mbarrier. Asynchronous stores of 16 bytes from registers signal the
  receiver's mbarrier, and a receiver waits only for the bytes it expects.
- Fetch: a CTA stores values at the start of the compiler's shared memory (`global_smem`), over what it no longer needs.
  After a cluster barrier with release the others load them; without the release, loads have returned old values.
  Every CTA then waits until all have loaded.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..host.gpu import Gpu
from ..host.launch import FUSING, bound, built_only, note

CLUSTER_SIZES = (8, 6, 5, 4, 3, 2)
"""CTAs per cluster, largest first. 8 is the largest size that every Hopper GPU supports."""
MAILBOX_ALIGN = 1024
"""Alignment of a mailbox's size in bytes: tiles in the compiler's shared memory, which follows it, need as much."""
BARRIER_BYTES = 16
"""Size of the mbarrier at the start of a mailbox."""
MAX_CLUSTERS = {
    2: (66, 132, 198, 264),
    3: (39, 79, 124, 163),
    4: (30, 62, 92, 124),
    5: (22, 47, 69, 94),
    6: (17, 39, 62, 79),
    8: (15, 30, 45, 62),
}
"""Clusters that an H200 runs at once (cuOccupancyMaxActiveClusters), by cluster size and for 1 to 4 CTAs per SM. A
cluster of more than two CTAs stays within one GPC, and GPCs have different numbers of SMs."""
H200_SMS = 132
DEFAULT_SHARED_BYTES = 48 * 1024
"""Shared memory that a kernel may use without opting in to more."""

_BARRIER_BYTES = gl.constexpr(BARRIER_BYTES)


def mailbox_bytes(message_bytes: int) -> int:
    """Return the shared memory that a mailbox for `message_bytes` takes."""
    return -(-(BARRIER_BYTES + message_bytes) // MAILBOX_ALIGN) * MAILBOX_ALIGN


def max_clusters(gpu: Gpu, size: int, ctas_per_sm: int) -> int:
    """Return how many clusters of `size` CTAs run at once with 1 to 4 CTAs per SM; one more needs a second wave.

    GPUs with other numbers of SMs are assumed to have GPCs like those of an H200.
    """
    return MAX_CLUSTERS[size][ctas_per_sm - 1] * gpu.sms // H200_SMS


def launch_clusters(kernel: Any, ctas: int, cluster: int, fetched_bytes: int, *args: Any, **constants: Any) -> None:
    """Launch `ctas` CTAs of a kernel, neighbours in clusters of `cluster`; otherwise like `launch_kernel`.

    Args:
        fetched_bytes: bytes that each CTA stores at the start of `global_smem` for the others to load.
    """
    if built_only(kernel, args, constants):
        return
    compiled = kernel.warmup(*args, grid=(1,), **(FUSING | constants))
    if compiled is None:  # where tests stand in for the compiler
        return
    warps, _, shared = compiled.packed_metadata
    # Triton counts neither mailboxes nor fetched bytes: opt in to more shared memory in any case.
    compiled.metadata = compiled.metadata._replace(shared=max(shared, DEFAULT_SHARED_BYTES + 1))
    compiled.packed_metadata = warps, cluster, max(shared, fetched_bytes)
    values, grid = bound(kernel, args, constants), (ctas // cluster, 1, 1)
    compiled[grid](*values)
    note(compiled, grid, values)


@triton.constexpr_function
def _mailbox_asm(size: int) -> str:
    return f"{{ .shared .align 1024 .b8 inbox[{size}]; mov.u32 $0, inbox; }}"


@gluon.jit
def allocate_mailbox(SIZE: gl.constexpr):
    """Allocate a mailbox of SIZE bytes (`mailbox_bytes`) and return its int32 address, the same in every CTA.

    0 if SIZE is 0. A kernel may allocate one mailbox.
    """
    mailbox = 0
    if SIZE > 0:
        ASM: gl.constexpr = _mailbox_asm(SIZE)
        mailbox = gl.inline_asm_elementwise(ASM, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    return mailbox


@gluon.jit
def open_mailbox(mailbox, message_bytes):
    """Initialize the mailbox to expect `message_bytes`, and announce it to the cluster without waiting."""
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
        [mailbox, message_bytes],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def wait_mailboxes_open():
    """Wait until every CTA of the cluster has opened its mailbox; nothing may be sent before."""
    gl.inline_asm_elementwise(
        "barrier.cluster.wait.acquire.aligned; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@triton.constexpr_function
def _cluster_barrier_asm(release: bool) -> str:
    how = "release" if release else "relaxed"
    return f"barrier.cluster.arrive.{how}.aligned; barrier.cluster.wait.acquire.aligned; mov.u32 $0, 0;"


@gluon.jit
def cluster_barrier(RELEASE: gl.constexpr):
    """Wait for all threads of the cluster; with RELEASE, shared-memory stores before it are visible after it."""
    ASM: gl.constexpr = _cluster_barrier_asm(RELEASE)
    gl.inline_asm_elementwise(ASM, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def send_messages(mailbox, cta, offset, wanted, values):
    """Send float32 `values` to byte `offset` of the mailbox of CTA `cta`, if `wanted` is not 0.

    A thread sends four neighbours together, as the int32 arguments of the first of them say. Offsets are multiples of
    16.
    """
    at = mailbox + _BARRIER_BYTES + offset
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
        [mailbox, cta, at, wanted, values],
        dtype=gl.int32,
        is_pure=False,
        pack=4,
    )


@gluon.jit
def wait_messages(mailbox):
    """Wait until all expected bytes are in the mailbox."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred here;
        AWAIT_LETTERS:
        mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 here, [$1], 0;
        @!here bra AWAIT_LETTERS;
        mov.u32 $0, 0;
        }""",
        "=r,r",
        [mailbox],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def read_messages(mailbox, offset):
    """Load float32 from byte `offset` of this CTA's mailbox.

    A thread loads four neighbours together, from the offset of the first of them.
    """
    return gl.inline_asm_elementwise(
        "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];",
        "=&f,=&f,=&f,=&f,r,r,r,r",
        [mailbox + _BARRIER_BYTES + offset],
        dtype=gl.float32,
        is_pure=False,
        pack=4,
    )


@gluon.jit
def store_fetched_words(values, offset):
    """Store float32 at byte `offset` of `global_smem`, for other CTAs to load with `fetch_words`."""
    start = gl.inline_asm_elementwise("mov.u32 $0, global_smem;", "=r", [], dtype=gl.int32, is_pure=True, pack=1)
    # The compiler sees the sum, so that it can fold constant differences into the instructions.
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
def store_fetched_pairs(values, offset):
    """Store pairs of neighbouring float32 at the byte `offset` of the first; otherwise like `store_fetched_words`."""
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
def fetch_words(cta, offset, wanted):
    """Load float32 from byte `offset` of `global_smem` of CTA `cta`, 0 where int32 `wanted` is 0.

    A thread loads four neighbours together, as the arguments of the first of them say.
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
        [offset, cta, wanted],
        dtype=gl.float32,
        is_pure=False,
        pack=4,
    )
