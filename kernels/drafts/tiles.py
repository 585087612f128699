"""Softmax of a row that is split into tiles: what a tile tells of itself, and a token drawn from the tiles' sums.

A tile gives its largest logit, infinite where the row has no token, the first token that has it, and the float64 sum of
exp((logit - largest of the tile) / temperature). Sums of tiles are added in the order of tiles, so that a row has the
same bits in any batch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...reference.drafts.distributions import LEAST_TEMPERATURE as _LEAST_TEMPERATURE

INF = tl.constexpr(float("inf"))
LEAST_TEMPERATURE = tl.constexpr(_LEAST_TEMPERATURE)


@triton.jit
def samples(temperature):
    """Return whether a float64 temperature samples."""
    return (temperature < LEAST_TEMPERATURE) == 0


@triton.jit
def largest_logit(logits, mask, AXIS: tl.constexpr = 0):
    """Return the largest of float32 logits along an axis, infinite if one is NaN, and the first index that has it."""
    known = tl.where(mask & (logits == logits), logits, -INF)
    strange = tl.max((mask & (logits != logits)).to(tl.int32), AXIS) > 0
    return tl.where(strange, INF, tl.max(known, AXIS)), tl.argmax(known, AXIS, tie_break_left=True)


@triton.jit
def weigh(logits, largest, temperature):
    """Return exp((logit - largest) / temperature) in float64, 0 for a logit of -inf."""
    finite = tl.where(tl.abs(largest) < INF, largest, 0.0).to(tl.float64)
    # A division takes longer than the exponential; the temperature, and so its reciprocal, is one number a row.
    return tl.exp((logits.to(tl.float64) - finite) * (1.0 / temperature))


@triton.jit
def draw(sums, goal_of, mask):
    """Return the first index where the running sum passes `goal_of` times the total, -1 where nothing has a weight.

    With it come the goal and the running sum before the index. `sums`: float64 `[BLOCK]`, at least 0.
    """
    sums = tl.where(mask, sums, 0.0)
    reached = tl.cumsum(sums, 0)
    total = tl.max(reached, 0)
    goal = goal_of * total
    index, before = reach(sums, 0.0, goal)
    return tl.where(total < INF, index, -1), goal, before


@triton.jit
def reach(sums, start, goal):
    """Return the first index where `start` and the running sum pass `goal`, and the running sum before it.

    The index is the last with a positive sum where rounding leaves the goal above all, -1 where none is positive.
    """
    o_b = tl.arange(0, sums.shape[0])
    reached = start + tl.cumsum(sums, 0)
    index = tl.sum((reached <= goal).to(tl.int32), 0)
    index = tl.minimum(index, tl.max(tl.where(sums > 0, o_b, -1), 0))
    before = tl.max(tl.where(o_b < index, reached, start), 0)
    return index, before
