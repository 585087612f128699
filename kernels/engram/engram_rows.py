"""`engram_rows`: a launch that hashes a block of tokens with each program, then one that updates the history.

The first reads ids of earlier positions from the step or from the history; the second writes the history, a program
for each request, after all reads. Every bit equals the reference.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...layout import cdiv
from ..host.launch import launch_kernel
from ..host.pdl import pdl_arguments, pdl_prologue

TOKENS = 32
"""Tokens of a program that hashes."""
SCANNED = 1024
"""Tokens that a program of a request looks at in one pass."""
MAX_ORDERS, MAX_HASHES = 16, 256
"""Longest n-gram (its look-back is unrolled), and most hashes of a length."""


class Shape(NamedTuple):
    """Compile-time sizes of a launch: longest n-gram, hashes of a length, these padded, and tokens of a program."""

    orders: int
    hashes: int
    padded_hashes: int
    tokens: int


class Strides(NamedTuple):
    """Strides of the kernels' arguments; `tokens` are those of ids, positions and requests."""

    tokens: tuple[int, int, int]
    history: tuple[int, ...]
    multipliers: int
    primes: int


@triton.jit(
    do_not_specialize=["tokens", "requests", "columns", "pad"],
    do_not_specialize_on_alignment=["p_ids", "p_positions", "p_requests", "p_history", "p_multipliers", "p_primes"],
)
def engram_rows_kernel(
    p_out,  # [T, (orders - 1) * hashes] int64, contiguous
    p_ids,  # [T] int
    p_positions,  # [T] int
    p_requests,  # [T] int
    p_history,  # [requests, columns] int32
    p_multipliers,  # [orders] int64
    p_primes,  # [(orders - 1) * hashes] int64
    strides,
    tokens,
    requests,
    columns,
    pad,
    SHAPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write rows of tokens [p * TOKENS, (p + 1) * TOKENS) in program p."""
    pdl_prologue(PDL)
    ORDERS: tl.constexpr = SHAPE.orders
    HASHES: tl.constexpr = SHAPE.hashes
    row = tl.program_id(0).to(tl.int64) * SHAPE.tokens + tl.arange(0, SHAPE.tokens)
    o_h = tl.arange(0, SHAPE.padded_hashes)
    m_t, m_h = row < tokens, o_h < HASHES
    token_id = tl.load(p_ids + row * strides.tokens[0], mask=m_t, other=-1).to(tl.int64)
    position = tl.load(p_positions + row * strides.tokens[1], mask=m_t, other=-1).to(tl.int64)
    request = tl.load(p_requests + row * strides.tokens[2], mask=m_t, other=-1).to(tl.int64)
    live = (position >= 0) & (request >= 0) & (request < requests)
    p_row = p_history + tl.where(live, request, 0) * strides.history[0]
    reached = live & (token_id >= 0)
    term = tl.where(reached, token_id, pad) * tl.load(p_multipliers)
    first = tl.zeros((), tl.int64)
    for back in tl.static_range(1, ORDERS):
        before, earlier = row - back, position - back
        reached &= earlier >= 0
        m_b = reached & (before >= 0)
        same = tl.load(p_requests + before * strides.tokens[2], mask=m_b, other=-1).to(tl.int64) == request
        same &= tl.load(p_positions + before * strides.tokens[1], mask=m_b, other=-1).to(tl.int64) == earlier
        in_step = m_b & same
        mine = tl.load(p_ids + before * strides.tokens[0], mask=in_step, other=-1).to(tl.int64)
        m_n = reached & ~in_step
        column = tl.where(m_n, earlier, 0) % columns
        noted = tl.load(p_row + column * strides.history[1], mask=m_n, other=-1).to(tl.int64)
        other = tl.where(in_step, mine, noted)
        reached &= other >= 0
        term = term ^ (tl.where(reached, other, pad) * tl.load(p_multipliers + back * strides.multipliers))
        o_k = (back - 1) * HASHES + o_h
        # [HASHES], 1 for padding
        prime = tl.load(p_primes + o_k.to(tl.int64) * strides.primes, mask=m_h, other=1)
        size = tl.where(m_h, prime, 0)
        hashed = term[:, None] % prime[None, :] + (first + tl.cumsum(size) - size)[None, :]
        p = p_out + row[:, None] * ((ORDERS - 1) * HASHES) + o_k[None, :]
        tl.store(p, hashed, mask=m_t[:, None] & m_h[None, :])
        first += tl.sum(size)


@triton.jit
def _load_tokens(p_positions, p_requests, start, request, tokens, strides, SIZE: tl.constexpr):
    """Return int64 `[SIZE]`: rows from `start` on, and their positions, -1 unless they are of `request`."""
    row = tl.full((), start, tl.int64) + tl.arange(0, SIZE)
    mask = row < tokens
    position = tl.load(p_positions + row * strides.tokens[1], mask=mask, other=-1).to(tl.int64)
    owner = tl.load(p_requests + row * strides.tokens[2], mask=mask, other=-1).to(tl.int64)
    return row, tl.where(owner == request, position, -1)


@triton.jit(
    do_not_specialize=["tokens", "columns"],
    do_not_specialize_on_alignment=["p_history", "p_ids", "p_positions", "p_requests"],
)
def engram_history_kernel(
    p_history,  # [requests, columns] int32
    p_ids,  # [T] int
    p_positions,  # [T] int
    p_requests,  # [T] int
    strides,
    tokens,
    columns,
    SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the ids of the last `columns` positions of request p in program p."""
    pdl_prologue(PDL)
    request = tl.program_id(0).to(tl.int64)
    newest = tl.full((), -1, tl.int64)
    for start in range(0, tokens, SIZE):
        _, position = _load_tokens(p_positions, p_requests, start, request, tokens, strides, SIZE)
        newest = tl.maximum(newest, tl.max(position))
    if newest >= 0:
        for start in range(0, tokens, SIZE):
            row, position = _load_tokens(p_positions, p_requests, start, request, tokens, strides, SIZE)
            mask = (position >= 0) & (position > newest - columns)
            token_id = tl.load(p_ids + row * strides.tokens[0], mask=mask, other=0)
            p = p_history + request * strides.history[0] + tl.where(mask, position, 0) % columns * strides.history[1]
            tl.store(p, token_id.to(tl.int32), mask=mask)


def engram_rows(
    ids: Tensor,
    positions: Tensor,
    requests: Tensor,
    history: Tensor,
    multipliers: Tensor,
    primes: Tensor,
    pad: int,
) -> Tensor:
    """Launch `engram_rows`; every bit equals the reference."""
    tokens, orders, rows = ids.shape[0], multipliers.shape[0], primes.shape[0]
    out = ids.new_empty((tokens, rows), dtype=torch.int64)
    if tokens == 0:
        return out
    known, columns = history.shape
    of_tokens = ids, positions, requests
    strides = Strides(
        (ids.stride(0), positions.stride(0), requests.stride(0)),
        history.stride(),
        multipliers.stride(0),
        primes.stride(0),
    )
    if rows:
        hashes = rows // (orders - 1)
        programs = cdiv(tokens, TOKENS)
        launch_kernel(
            engram_rows_kernel, (programs,), out, *of_tokens, history, multipliers, primes, strides, tokens, known,
            columns, pad, SHAPE=Shape(orders, hashes, triton.next_power_of_2(hashes), TOKENS), num_warps=4,
            **pdl_arguments(ids.device, programs),
        )  # fmt: skip
    if known:
        size = min(SCANNED, triton.next_power_of_2(tokens))
        launch_kernel(
            engram_history_kernel, (known,), history, *of_tokens, strides, tokens, columns, SIZE=size, num_warps=4,
            **pdl_arguments(ids.device, known),
        )  # fmt: skip
    return out


def why_unsupported_engram_rows(
    ids: Tensor,
    positions: Tensor,
    requests: Tensor,
    history: Tensor,
    multipliers: Tensor,
    primes: Tensor,
    pad: int,
) -> str:
    """Return why the kernels do not support a call, "" if they do."""
    orders, rows = multipliers.shape[0], primes.shape[0]
    if orders > MAX_ORDERS or rows > MAX_HASHES * (orders - 1):
        limit = f"n-grams of up to {MAX_ORDERS} with up to {MAX_HASHES} hashes each"
        return f"{limit}, these are of {orders} with {rows} hashes"
    return ""
