"""`advance`: one program moves all requests of a decode batch to the next step.

A single program, because it overwrites what it reads: a chunk of requests is read whole before any of it is written,
and the next chunk writes the start that follows a chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...reference.metadata.advance import PAD_TOKEN, AdvanceArguments
from ..host.launch import launch_kernel

MAX_REQUESTS = 1024
"""Requests that are moved at a time."""
TAIL = 1024
"""Tokens after the last request that are set to padding at a time."""
NO_TOKEN = tl.constexpr(PAD_TOKEN)


@triton.jit(do_not_specialize=["requests", "rows"])
def advance_kernel(
    batch,  # starts [requests + 1] int32, lens [requests] int32, ids [rows] int64, overflow [requests] int32
    inputs,  # new [requests] int, tokens [requests, S] int, drafts [requests, QUERY - 1] int, reserved [requests] int
    strides,  # of starts, lens, ids, overflow, new, reserved; of tokens; of drafts
    requests,
    rows,
    S: tl.constexpr,
    QUERY: tl.constexpr,
    BLOCK: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Move all requests, in a single program."""
    p_starts, p_lens, p_ids, p_overflow = batch
    p_new, p_tokens, p_drafts, p_reserved = inputs
    strides, token_strides, draft_strides = strides
    for first in range(0, requests, BLOCK):
        # [BLOCK]
        o_r = (first + tl.arange(0, BLOCK)).to(tl.int64)
        m_r = o_r < requests
        start = tl.load(p_starts + o_r * strides[0], mask=m_r, other=0).to(tl.int64)
        end = tl.load(p_starts + (o_r + 1) * strides[0], mask=m_r, other=0).to(tl.int64)
        length = tl.load(p_lens + o_r * strides[1], mask=m_r, other=0).to(tl.int64)
        new = tl.load(p_new + o_r * strides[4], mask=m_r, other=0).to(tl.int64)
        reserved = tl.load(p_reserved + o_r * strides[5], mask=m_r, other=0).to(tl.int64)
        query = end - start
        running = (query > 0) & (length >= query)
        new = tl.minimum(tl.maximum(new, 1), query)
        kept = length - query + new
        fits = running & (kept + QUERY <= reserved)
        column = tl.minimum(tl.maximum(new - 1, 0), S - 1)
        token = tl.load(p_tokens + o_r * token_strides[0] + column * token_strides[1], mask=m_r & fits, other=NO_TOKEN)
        tl.debug_barrier()
        tl.store(p_starts + o_r * strides[0], (o_r * QUERY).to(tl.int32), mask=m_r)
        tl.store(p_lens + o_r * strides[1], tl.where(fits, kept + QUERY, 0).to(tl.int32), mask=m_r)
        tl.store(p_overflow + o_r * strides[3], kept.to(tl.int32), mask=m_r & running & (fits == 0))
        tl.store(p_ids + o_r * QUERY * strides[2], token.to(tl.int64), mask=m_r)
        for j in tl.static_range(1, QUERY):
            draft = tl.load(
                p_drafts + o_r * draft_strides[0] + (j - 1) * draft_strides[1], mask=m_r & fits, other=NO_TOKEN
            )
            tl.store(p_ids + (o_r * QUERY + j) * strides[2], draft.to(tl.int64), mask=m_r)
    last = tl.cast(requests, tl.int64)
    tl.store(p_starts + last * strides[0], (last * QUERY).to(tl.int32))
    for first in range(requests * QUERY, rows, TAIL):
        # [TAIL]
        o_n = first + tl.arange(0, TAIL).to(tl.int64)
        tl.store(p_ids + o_n * strides[2], tl.full((TAIL,), NO_TOKEN, tl.int64), mask=o_n < rows)


def advance(op: AdvanceArguments) -> None:
    """Launch `advance`; every byte equals the reference."""
    requests = op.seq_lens.shape[0]
    moved = (op.query_start_loc, op.seq_lens, op.input_ids, op.overflow)
    drafted = op.tokens if op.drafts is None else op.drafts
    launch_kernel(
        advance_kernel,
        (1,),
        moved,
        (op.num_new, op.tokens, drafted, op.reserved),
        (tuple(value.stride(0) for value in (*moved, op.num_new, op.reserved)), op.tokens.stride(), drafted.stride()),
        requests,
        op.input_ids.shape[0],
        S=op.tokens.shape[1],
        QUERY=op.query_len,
        BLOCK=min(MAX_REQUESTS, triton.next_power_of_2(max(requests, 1))),
        TAIL=TAIL,
        num_warps=4,
    )
