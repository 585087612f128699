"""Gluon names that differ between Triton versions, the scheduling fence, and views of shared memory."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import shared_memory_descriptor

thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
"""Among the threads of a partition: from Triton 3.7 on, and before."""


@gluon.jit
def scheduling_fence(count):
    """See barriers.py. Across a loop that is told to stay one, the assembler does move arithmetic."""
    for _ in range(count, 1):
        thread_barrier()


FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
"""Elements one after another."""

reinterpret = getattr(shared_memory_descriptor, "reinterpret", None) or shared_memory_descriptor._reinterpret
"""Memory as a tensor of another dtype, shape and layout: `reinterpret(memory, dtype, shape, layout)`. Triton
3.9 has renamed it."""
