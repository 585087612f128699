"""A scheduling fence for Triton kernels; hopper/gluon.py has its Gluon twin."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scheduling_fence(pointer):
    """Issue every load above before waiting for any of them.

    To save registers, the assembler would wait for some loads before it issues others. It moves nothing across a loop;
    this one has no iterations, which no compiler knows, because it cannot tell that an address is above 0.
    """
    for _ in range(pointer.to(tl.int64), 1):
        tl.debug_barrier()
