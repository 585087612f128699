"""Gluon names that differ between Triton versions, the scheduling fence, and views of shared memory."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import shared_memory_descriptor

thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
"""Barrier among the threads of a partition; renamed in Triton 3.7."""


@gluon.jit
def scheduling_fence(count):
    """Issue every load above before waiting for any of them; the Gluon twin of `device.barriers.scheduling_fence`.

    `count` is an int32 above 0 that the compiler does not know. The loop must not be marked as not to be unrolled: the
    assembler does move arithmetic across such a loop.
    """
    for _ in range(count, 1):
        thread_barrier()


FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
"""Shared-memory layout of consecutive elements without swizzling."""

reinterpret = getattr(shared_memory_descriptor, "reinterpret", None) or shared_memory_descriptor._reinterpret
"""View shared memory with the given dtype, shape and layout: `reinterpret(memory, dtype, shape, layout)`. Renamed in
Triton 3.9."""
