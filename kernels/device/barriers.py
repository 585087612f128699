"""A barrier for what the assembler would move; barriers_hopper.py has the same for Gluon."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scheduling_fence(pointer):
    """What was loaded above is on its way before anything below this waits for the first of it.

    The assembler would wait for some loads before it starts others, to need fewer registers. It moves nothing across
    the loops that it makes of this one, which has no turn: addresses are above zero, which no compiler knows.
    """
    for _ in range(pointer.to(tl.int64), 1):
        tl.debug_barrier()
