"""Sum of a CTA's data over the CTAs of the same number on all ranks, through symmetric memory.

A CTA writes its data into mailboxes on the other ranks and polls those that the others fill on this rank. A word holds
one element and the number of the exchange, and is stored and loaded whole: a word with the number of this exchange has
its element, with no fence, no flag and no read from the other GPU. The next exchange uses the other mailboxes. A rank
that takes part in it has read what the last one left, so no second wait is needed. Ranks launch the same exchanges in
the same order.

All CTAs of a launch have to be resident at once. A rank that does not come within `limit` polls is named in `fault`,
a word on the host; then this launch and all later ones go on without waiting, and their results are not valid.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

Place = Any
"""An address, since Triton takes no tensors of symmetric memory, or in the interpreter a tensor."""


class Peers(NamedTuple):
    """Memory of an exchange, and how long it waits.

    Attributes:
        mailboxes: [2, ranks, CTAs, region] int32 of each rank, zeros at first: the words of rank r are in [:, r].
            Calls of different sizes do not share words, see `mailbox`. Where a rank would write to itself, it keeps
            the numbers of the last exchanges.
        fault: [1] int32 in page-locked memory: 1 + the rank that did not come.
        failed: [1] int32: not 0 after a fault, on the device.
        limit: polls.
    """

    mailboxes: tuple[Place, ...]
    fault: Place
    failed: Tensor
    limit: int


class ExchangeShape(NamedTuple):
    """Compile-time sizes of an exchange: this rank and all ranks, CTAs with mailboxes, and words of a mailbox."""

    rank: int
    ranks: int
    ctas: int
    region: int


@triton.jit
def _pointer(place):
    """Return the pointer that an address is."""
    if place.dtype.is_int():
        place = place.to(tl.pointer_type(tl.int32), bitcast=True)
    return place


@triton.jit
def mailbox(place, count, sender, program, SIZE: tl.constexpr, SHAPE: tl.constexpr):
    """Return the words that rank `sender` writes in exchange `count` of SIZE elements, a power of two, on one rank.

    They begin at SIZE, so that mailboxes of different sizes do not overlap: no word keeps a number from a call of a
    different size until that number comes again.
    """
    row = ((count & 1) * SHAPE.ranks + sender) * SHAPE.ctas + program
    return _pointer(place) + row * SHAPE.region + SIZE


@triton.jit
def send(peers, program, part, SHAPE: tl.constexpr):
    """Send `part` [1, SIZE], of 16 bits an element, to all other ranks; return the number of the exchange."""
    SIZE: tl.constexpr = part.shape[1]
    RANK: tl.constexpr = SHAPE.rank
    RANKS: tl.constexpr = SHAPE.ranks
    boxes = peers[0]
    # This rank has received the last exchange before this launch.
    p_count = mailbox(boxes[RANK], 0, RANK, program, SIZE, SHAPE)
    count = tl.load(p_count) + 1
    words = (part.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) | (count << 16)
    o_in = tl.arange(0, SIZE)[None, :]
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            tl.store(mailbox(boxes[rank], count, RANK, program, SIZE, SHAPE) + o_in, words)
    tl.store(p_count, count)
    return count


@triton.jit
def _missing(words, count):
    """Return whether words lack an element of exchange `count`, as 0 or 1."""
    return tl.max(((words ^ (count << 16)) >> 16 != 0).to(tl.int32))


@triton.jit
def received_sum(peers, count, program, part, SHAPE: tl.constexpr):
    """Return the float32 sum of all ranks' parts in the order of ranks, rounded as an all-reduce's."""
    SIZE: tl.constexpr = part.shape[1]
    RANK: tl.constexpr = SHAPE.rank
    RANKS: tl.constexpr = SHAPE.ranks
    boxes, fault, p_failed, limit = peers
    o_in, total = tl.arange(0, SIZE)[None, :], tl.zeros(part.shape, tl.float32)
    for rank in tl.static_range(RANKS):
        if rank == RANK:
            total += part.to(tl.float32)
        else:
            p_words = mailbox(boxes[RANK], count, rank, program, SIZE, SHAPE) + o_in
            words = tl.load(p_words, volatile=True)
            missing, polls = _missing(words, count), 0
            while (missing != 0) & (polls < limit):
                failed, words = tl.load(p_failed, volatile=True), tl.load(p_words, volatile=True)
                missing, polls = _missing(words, count), tl.where(failed != 0, limit, polls + 1)
            if missing != 0:  # noqa: SIM102 - Triton would run both operands of `and`
                if tl.atomic_xchg(p_failed, 1, sem="relaxed") == 0:
                    tl.store(_pointer(fault), rank + 1)
            total += (words & 0xFFFF).to(tl.int16).to(part.dtype, bitcast=True).to(tl.float32)
    return total.to(part.dtype).to(tl.float32)
