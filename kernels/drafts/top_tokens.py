"""Search for the last token that top-k and top-p keep, by one CTA.

A bracket of order keys is divided by four in each step, by counts or by float64 sums of weights above three pivots.
First a few steps by counts find up to ROOM of the largest logits, which are listed; the search then reads this list. If
the boundary may lie beyond it, the search reads the row in each step.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..host.semaphores import settle
from .tiles import INF, weigh

LOWEST = tl.constexpr(-(2**31))
"""Below the order key of every logit."""
ALL = tl.constexpr(2**31 - 1)


@triton.jit
def order_key(x):
    """Return int32 keys that order float32 `x`, which is not NaN; both zeros have the key 0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _block(row, start, BLOCK: tl.constexpr):
    """Load float32 logits `[BLOCK]` of a row (pointer, stride, length) from `start` on, with their places and mask."""
    p_row, stride, length = row
    o_v = start + tl.arange(0, BLOCK)
    mask = o_v < length
    return tl.load(p_row + o_v.to(tl.int64) * stride, mask=mask, other=-INF).to(tl.float32), o_v, mask


@triton.jit
def _above(row, softmax, bracket, pivots, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    """Return how many keys of [low, high) are at or above each of three pivots, or the sums of their weights."""
    low, high = bracket
    first, second, third = pivots
    dtype: tl.constexpr = tl.float64 if WEIGHTED else tl.int32
    a = tl.zeros((BLOCK,), dtype)
    b = tl.zeros((BLOCK,), dtype)
    c = tl.zeros((BLOCK,), dtype)
    for start in range(0, row[2], BLOCK):
        logits, _, mask = _block(row, start, BLOCK)
        key = order_key(logits)
        inside = mask & (key >= low) & (key < high)
        if WEIGHTED:
            if tl.max(inside.to(tl.int32), 0) > 0:
                value = tl.where(inside, weigh(logits, softmax[0], softmax[1]), 0.0)
                a += tl.where(key >= first, value, 0.0)
                b += tl.where(key >= second, value, 0.0)
                c += tl.where(key >= third, value, 0.0)
        else:
            a += (inside & (key >= first)).to(tl.int32)
            b += (inside & (key >= second)).to(tl.int32)
            c += (inside & (key >= third)).to(tl.int32)
    return tl.sum(a, 0), tl.sum(b, 0), tl.sum(c, 0)


@triton.jit
def _search(row, softmax, goal, bracket, enough, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    """Return the largest key with at least `goal` at or above it, the key after it, and the sum above it.

    The bracket (low, high) holds it: no key is at or above high. Ends before where `enough`, less than the goal, is at
    or above the key after.
    """
    low, high = bracket
    above = goal * 0
    # Most boundaries lie between logits so many temperatures below the largest.
    first, second, third = _near(softmax, 40.0), _near(softmax, 8.0), _near(softmax, 2.0)
    while (high.to(tl.int64) - low > 1) & (above < enough):
        first = tl.minimum(tl.maximum(first, low + 1), high - 1)
        second = tl.minimum(tl.maximum(second, first), high - 1)
        third = tl.minimum(tl.maximum(third, second), high - 1)
        a, b, c = _above(row, softmax, (low, high), (first, second, third), WEIGHTED, BLOCK)
        a, b, c = a + above, b + above, c + above
        in_third, in_second, in_first = c >= goal, b >= goal, a >= goal
        above = tl.where(in_third, above, tl.where(in_second, c, tl.where(in_first, b, a)))
        high = tl.where(in_third, high, tl.where(in_second, third, tl.where(in_first, second, first)))
        low = tl.where(in_third, third, tl.where(in_second, second, tl.where(in_first, first, low)))
        width = high.to(tl.int64) - low
        first = (low + width // 4).to(tl.int32)
        second = (low + width // 2).to(tl.int32)
        third = (low + width // 4 * 3).to(tl.int32)
    return low, high, above


@triton.jit
def _near(softmax, distance):
    """Return the order key of the logit `distance` temperatures below the largest."""
    logit = softmax[0].to(tl.float64) - distance * softmax[1]
    return order_key(tl.where(logit == logit, logit, -INF).to(tl.float32))


@triton.jit
def _list(row, edge, lists, BLOCK: tl.constexpr):
    """List the logits from the key `edge` on, and their ids, in the order of ids."""
    p_logits, p_ids = lists
    count = tl.full((), 0, tl.int32)
    for start in range(0, row[2], BLOCK):
        logits, o_v, mask = _block(row, start, BLOCK)
        listed = mask & (order_key(logits) >= edge)
        index = count + tl.cumsum(listed.to(tl.int32), 0) - 1
        tl.store(p_logits + index, logits, mask=listed)
        tl.store(p_ids + index, o_v, mask=listed)
        count += tl.sum(listed.to(tl.int32), 0)
    settle()


@triton.jit
def _nth_equal(row, edge, count, BLOCK: tl.constexpr):
    """Return the index of key `edge` that is number `count`, from 1 on, or the last; and its number."""
    seen = tl.full((), 0, tl.int32)
    last = tl.full((), -1, tl.int32)
    for start in range(0, row[2], BLOCK):
        logits, o_v, mask = _block(row, start, BLOCK)
        equal = (mask & (order_key(logits) == edge)).to(tl.int32)
        number = seen + tl.cumsum(equal, 0)
        last = tl.maximum(last, tl.max(tl.where((equal > 0) & (number <= count), o_v, -1), 0))
        seen += tl.sum(equal, 0)
    return last, tl.minimum(seen, count)


@triton.jit
def _last_kept(row, softmax, total, top_k, top_p, V: tl.constexpr, BLOCK: tl.constexpr):
    """Return key and index of the last logit of a row that is kept, and the sum of the kept weights."""
    highest = order_key(softmax[0])
    edge = tl.full((), LOWEST, tl.int32)
    equal = tl.full((), V, tl.int32)
    mass_above, mass = total, total
    if (top_k > 0) & (top_k < V):
        goal = tl.ceil(top_k).to(tl.int32)
        edge, after, count = _search(row, softmax, goal, (edge, highest + 1), ALL, False, BLOCK)
        equal = goal - count
        mass_above, _second, _third = _above(row, softmax, (after, highest + 1), (after, after, after), True, BLOCK)
        mass = mass_above + equal * _weight_of(edge, softmax)
    if (top_p >= 1) == 0:
        goal = top_p * mass
        if goal > 0:
            if mass_above >= goal:
                edge, _after, mass_above = _search(row, softmax, goal, (edge + 1, highest + 1), INF, True, BLOCK)
                equal = tl.full((), V, tl.int32)
            weight = _weight_of(edge, softmax)
            needed = tl.ceil((goal - mass_above) / tl.where(weight > 0, weight, 1.0))
            equal = tl.minimum(equal, tl.maximum(tl.minimum(needed, V * 1.0), 1.0).to(tl.int32))
        else:
            edge, equal, mass_above = highest, tl.full((), 1, tl.int32), total * 0.0
    index, equal = _nth_equal(row, edge, equal, BLOCK)
    return edge, index, mass_above + equal * _weight_of(edge, softmax)


@triton.jit
def last_kept(row, softmax, total, top_k, top_p, lists, ROOM: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr):
    """Return key and id of the last token that is kept, in the order of top-k, and the sum of the kept weights.

    Kept are larger keys, and equal ones up to the id. `row`: pointer, stride, and V; `softmax`: the finite largest
    logit and the temperature; `total`: the sum of all weights; `lists`: room for ROOM logits and ids, not used for V up
    to ROOM.
    """
    if V <= ROOM:
        edge, index, mass = _last_kept(row, softmax, total, top_k, top_p, V, BLOCK)
    else:
        highest = order_key(softmax[0])
        room = tl.full((), ROOM + 1, tl.int32)
        bracket = tl.full((), LOWEST, tl.int32), highest + 1
        _low, edge, count = _search(row, softmax, room, bracket, ROOM // 2, False, BLOCK)
        _list(row, edge, lists, BLOCK)
        listed = lists[0], 1, count
        if (top_k > 0) & (top_k < V):
            fits = top_k <= count
        else:
            mass, _second, _third = _above(listed, softmax, (edge, highest + 1), (edge, edge, edge), True, BLOCK)
            fits = top_p * total <= mass
        if fits:
            edge, index, mass = _last_kept(listed, softmax, total, top_k, top_p, V, BLOCK)
            index = tl.load(lists[1] + index)
        else:
            edge, index, mass = _last_kept(row, softmax, total, top_k, top_p, V, BLOCK)
    return edge, index, mass


@triton.jit
def _weight_of(key, softmax):
    """Return the weight of logits of an order key."""
    largest, temperature = softmax
    logit = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return weigh(logit, largest, temperature)
