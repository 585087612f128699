"""Barriers of Hopper kernels: for threads, and for what the assembler would move."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
"""Among the threads of a partition: from Triton 3.7 on, and before."""


@gluon.jit
def all_on_their_way(count):
    """See barriers.py. Across a loop that is told to stay one, the assembler does move arithmetic."""
    for _ in range(count, 1):
        thread_barrier()
