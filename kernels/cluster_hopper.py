"""Programs of a Hopper kernel as a cluster: they run side by side, and read each other's shared memory.

Gluon of Triton 3.6 has no words for that. A kernel that is compiled for one program is launched in clusters, and what
crosses over is PTX. It names the shared memory of a program from its start on, by the compiler's symbol `global_smem`:
who writes there must be done with all that the compiler has put there.
"""

from __future__ import annotations

import functools
from typing import Any

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .gpu import Gpu

SIZES = (8, 6, 5, 4, 3, 2)
"""Programs of a cluster. Any Hopper GPU takes up to 8."""
KNOWN = (3, 6), (3, 7)
"""Versions of Triton whose compiled kernels say how they are launched in the way that is changed here."""


@functools.cache
def clusters_known() -> bool:
    """Whether this Triton is one whose kernels can be launched in clusters."""
    return tuple(int(part) for part in triton.__version__.split(".")[:2]) in KNOWN


def clusters_at_once(gpu: Gpu, size: int, programs: int) -> int:
    """Clusters of `size` programs that run at once, where a processor has room for `programs` of them.

    Those of more than two keep to one part of the GPU, and not all parts are whole. An H200 of 132 processors says that
    it takes 66 pairs, but 30 clusters of 4 and 15 of 8; with room for two programs 132, 62 and 30, for three 198, 92
    and 45. One cluster more makes a launch take twice as long.
    """
    usable = gpu.processors if size == 2 else gpu.processors * 10 // 11
    return usable * programs // size


def launch_clusters(kernel: Any, programs: int, cluster: int, shared: int, *args: Any, **constants: Any) -> None:
    """As `kernel[programs,](*args, **constants)`, in clusters of neighbours.

    Args:
        shared: bytes of shared memory that a program has at least.
    """
    compiled = kernel.warmup(*args, grid=(1,), **constants)
    if compiled is None:  # where tests stand in for the compiler
        return
    warps, _, taken = compiled.packed_metadata
    compiled.packed_metadata = warps, cluster, max(shared, taken)
    rest = (constants[name] for name in kernel.arg_names[len(args) :])
    compiled[programs // cluster, 1, 1](*args, *rest)


@gluon.jit
def cluster_arrive():
    """Tell the cluster that this program has come so far, and has stored what it has put in front of this.

    A release for the cluster would wait for global memory too: on an H200 two of them make a product of 4 us take 4.7.
    Shared memory is in one place. What this program sees stored, all see.
    """
    gl.inline_asm_elementwise(
        "fence.acq_rel.cta; barrier.cluster.arrive.relaxed.aligned; mov.u32 $0, 0;",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def cluster_wait():
    """Wait until all have come so far, and see what they have stored."""
    gl.inline_asm_elementwise(
        "barrier.cluster.wait.acquire.aligned; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def put_words(values, offset):
    """Store float32 at bytes `offset` of this program's shared memory."""
    gl.inline_asm_elementwise(
        """{
        .reg .b32 at;
        mov.u32 at, global_smem;
        add.u32 at, at, $2;
        st.shared.f32 [at], $1;
        mov.u32 $0, 0;
        }""",
        "=r,f,r",
        [values, offset],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def words_of(program, offset, wanted):
    """float32 at bytes `offset` of the shared memory of a program of the cluster, 0 where int32 `wanted` is.

    A thread has four neighbours, and loads them if the first is wanted. Who uses what it loads has it before it goes
    on to `cluster_arrive`, behind which the other program may end.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .pred wanted;
        .reg .b32 at;
        setp.ne.b32 wanted, $12, 0;
        mov.u32 at, global_smem;
        mapa.shared::cluster.u32 at, at, $8;
        add.u32 at, at, $4;
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
