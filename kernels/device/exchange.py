"""Exchange of a CTA's data with the CTAs of the same number on the other ranks, through symmetric memory.

Every rank has a buffer with two mailboxes for each CTA, and a flag for each CTA and rank, which the others write. A CTA
fills its mailbox, raises its flag on every rank to the number of this exchange, and waits until all others have raised
theirs; then all mailboxes can be read. The next exchange uses the other mailbox: a rank that takes part in it has read
what the last one left, so no second wait is needed. Ranks launch the same exchanges in the same order.

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
        mailboxes: [2, CTAs, region] of each rank, of the dtype that is exchanged.
        flags: [ranks, CTAs] int32 of each rank.
        fault: [1] int32 in page-locked memory: 1 + the rank that did not come.
        counts: [CTAs] int32: exchanges that a CTA has taken part in.
        failed: [1] int32: not 0 after a fault, on the device.
        limit: polls.
    """

    mailboxes: tuple[Place, ...]
    flags: tuple[Place, ...]
    fault: Place
    counts: Tensor
    failed: Tensor
    limit: int


@triton.jit
def _pointer(place, DTYPE: tl.constexpr):
    """Return the pointer that an address is."""
    if place.dtype.is_int():
        place = place.to(tl.pointer_type(DTYPE), bitcast=True)
    return place


@triton.jit
def mailbox(place, count, program, DTYPE: tl.constexpr, CTAS: tl.constexpr, REGION: tl.constexpr):
    """Return the mailbox of a CTA in exchange `count`, among those of one rank."""
    return _pointer(place, DTYPE) + ((count & 1) * CTAS + program) * REGION


@triton.jit
def exchange_number(peers, program):
    """Return the number of the exchange that a CTA begins."""
    return tl.load(peers[3] + program) + 1


@triton.jit
def meet(peers, count, program, RANK: tl.constexpr, RANKS: tl.constexpr, CTAS: tl.constexpr):
    """Say that this CTA's mailbox of exchange `count` is filled, and wait until those of all other ranks are."""
    _, flags, fault, p_counts, p_failed, limit = peers
    # Every thread stores before one signals.
    tl.debug_barrier()
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            tl.atomic_xchg(_pointer(flags[rank], tl.int32) + RANK * CTAS + program, count, sem="release", scope="sys")
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            p_flag = _pointer(flags[RANK], tl.int32) + rank * CTAS + program
            seen, polls = tl.atomic_add(p_flag, 0, sem="acquire", scope="sys"), 0
            # The other rank may be one exchange ahead.
            while (seen - count < 0) & (polls < limit):
                seen, polls = tl.atomic_add(p_flag, 0, sem="acquire", scope="sys"), polls + 1
                if tl.load(p_failed, volatile=True) != 0:
                    polls = limit
            late = seen - count < 0
            first = tl.atomic_xchg(p_failed, 1, late, sem="relaxed") == 0
            tl.store(_pointer(fault, tl.int32), rank + 1, late & first)
    tl.debug_barrier()
    tl.store(p_counts + program, count)


@triton.jit
def gathered(
    mailboxes, count, program, o, mask, DTYPE: tl.constexpr, RANKS: tl.constexpr, CTAS: tl.constexpr,
    REGION: tl.constexpr,
):  # fmt: skip
    """Return the float32 sum of elements `o` of all ranks' mailboxes, in their order, rounded as an all-reduce's."""
    total = tl.zeros(o.shape, tl.float32)
    for rank in tl.static_range(RANKS):
        p = mailbox(mailboxes[rank], count, program, DTYPE, CTAS, REGION)
        total += tl.load(p + o, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    return total.to(DTYPE).to(tl.float32)
