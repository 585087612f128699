"""Barriers of Hopper kernels: for threads, and for what the assembler would move."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
"""Among the threads of a partition: from Triton 3.7 on, and before."""


@gluon.jit
def all_on_their_way(count):
    """What was loaded above is on its way before anything below this waits for the first of it.

    The assembler would wait for some loads before it starts others, to need fewer registers. It moves nothing across
    the loops that it makes of this one, which has no turn: `count` is above zero, which no compiler knows. Across one
    that it must leave as it is, it moves arithmetic.
    """
    for _ in range(count, 1):
        thread_barrier()
