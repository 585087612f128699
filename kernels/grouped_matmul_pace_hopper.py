"""How a weight comes on Hopper, a few strips at a time, while kernels in front have something to load themselves.

What all programs ask for at once waits for memory, and every load that comes after it waits behind it: for V4-Flash's
wq_b, which starts while the product of hidden and the insert still run, those of their weights, tokens and scales.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .. import layout
from .barriers_hopper import thread_barrier
from .copies_hopper import copy_tile

STRIP = gl.constexpr(layout.ACT_TILE)


@gluon.jit
def bring_paced(weights, w_ring, row, begin, filled, PACE: gl.constexpr):
    """Bring the first `filled` strips from `begin` on, PACE at a time, and return barriers for `await_paced`."""
    BLOCK_N: gl.constexpr = w_ring.shape[1]
    BLOCK_K: gl.constexpr = w_ring.shape[2]
    pace = gl.allocate_shared_memory(gl.int64, [PACE, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(PACE):
        mbarrier.init(pace.index(i), count=1)
    fence_async_shared()
    thread_barrier()
    for i in range(filled):
        own = pace.index(i % PACE)
        if i >= PACE:
            mbarrier.wait(own, (i // PACE - 1) & 1)
        mbarrier.expect(own, BLOCK_N * STRIP)
        copy_tile(weights, [row, (begin + i) * BLOCK_K], own, w_ring.index(i))
    return pace


@gluon.jit
def await_paced(pace, filled, PACE: gl.constexpr):
    """Wait for the last PACE strips; those before them are there."""
    for i in gl.static_range(PACE):
        last = filled - 1 - i
        if last >= 0:
            mbarrier.wait(pace.index(last % PACE), (last // PACE) & 1)
