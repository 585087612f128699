"""`markov_drafts`: two launches a draft, the logits of all tokens and the choice.

CTAs of the first launch split the vocabulary and multiply a tile of w2 by the rows of w1 of up to 16 requests on tensor
cores, add the block's logits, and summarise the tile. In the second a CTA for each request chooses from the summaries,
and reads the logits of one tile if it samples. Every request is multiplied by the same instructions, so that a draft
has the same bits in any batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...layout import cdiv
from ...reference.drafts.distributions import NO_TOKEN as _NO_TOKEN
from ...reference.drafts.random_numbers import PROPOSAL as _PROPOSAL
from ..host.launch import launch_kernel
from ..host.pdl import pdl_arguments, pdl_prologue
from .random_numbers import uniform
from .tiles import INF, draw, largest_logit, reach, samples, weigh

NO_TOKEN, PROPOSAL = tl.constexpr(_NO_TOKEN), tl.constexpr(_PROPOSAL)
BLOCK_R = 16
"""Requests of a CTA, the fewest rows that tensor cores multiply."""
BLOCK_V = 128
"""Tokens of a tile."""
BLOCK_K = 64
MOST_TILES = 8192
"""Most tiles, for one CTA to hold all summaries in registers."""


class Shape(NamedTuple):
    """Compile-time sizes: drafts of a request, vocabulary, rank, tokens of a tile, tiles, and requests of a CTA."""

    drafts: int
    vocabulary: int
    rank: int
    block_v: int
    tiles: int
    block_r: int


@triton.jit
def _previous(p_anchors, p_drafts, anchor_stride, request, mask, number, N: tl.constexpr):
    """Return the token before draft `number` of each request: the anchor, or the draft before."""
    first = number == 0
    anchor = tl.load(p_anchors + request * anchor_stride, mask=mask & first, other=NO_TOKEN)
    draft = tl.load(p_drafts + request * N + number - 1, mask=mask & (first == 0), other=NO_TOKEN)
    return tl.where(first, anchor, draft)


@triton.jit(do_not_specialize=["requests", "number"])
def markov_logits_kernel(
    p_logits,  # [R, N, V] float32, contiguous
    summaries,  # largest [R, TILES] float32, first [R, TILES] int32, sums [R, TILES] float64, contiguous
    p_drafts,  # [R, N] int64, contiguous
    p_base,  # [R, N, V] float
    p_anchors,  # [R] int64
    weights,  # w1 and w2 [V, RANK]
    p_numbers,  # [R, 4] float64
    strides,  # of base, anchors, w1, w2 and the rows of numbers
    requests,
    number,
    SHAPE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the logits of draft `number` for a tile of tokens and BLOCK_R requests, and summarise the tile."""
    pdl_prologue(PDL)
    p_largest, p_first, p_sums = summaries
    p_w1, p_w2 = weights
    base_strides, anchor_stride, w1_strides, w2_strides, numbers_stride = strides
    N: tl.constexpr = SHAPE.drafts
    V: tl.constexpr = SHAPE.vocabulary
    RANK: tl.constexpr = SHAPE.rank
    BLOCK_V: tl.constexpr = SHAPE.block_v
    BLOCK_R: tl.constexpr = SHAPE.block_r
    tile = tl.program_id(0)
    # [BLOCK_R], [BLOCK_V]
    o_r = tl.program_id(1).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_v = tile.to(tl.int64) * BLOCK_V + tl.arange(0, BLOCK_V)
    m_r, m_v = o_r < requests, o_v < V
    previous = _previous(p_anchors, p_drafts, anchor_stride, o_r, m_r, number, N)
    known = (previous >= 0) & (previous < V)
    previous = tl.where(known, previous, 0)
    bias = tl.zeros((BLOCK_R, BLOCK_V), tl.float32)
    for start in range(0, RANK, BLOCK_K):
        o_k = start + tl.arange(0, BLOCK_K)
        m_k = o_k < RANK
        p_row = p_w1 + previous[:, None] * w1_strides[0] + o_k[None, :] * w1_strides[1]
        row = tl.load(p_row, mask=known[:, None] & m_k[None, :], other=0.0)
        p_column = p_w2 + o_v[None, :] * w2_strides[0] + o_k[:, None] * w2_strides[1]
        column = tl.load(p_column, mask=m_v[None, :] & m_k[:, None], other=0.0)
        bias = tl.dot(row, column, bias, input_precision="ieee")
    mask = m_r[:, None] & m_v[None, :]
    p_base_rows = p_base + o_r[:, None] * base_strides[0] + number * base_strides[1] + o_v[None, :] * base_strides[2]
    logits = tl.load(p_base_rows, mask=mask, other=0.0).to(tl.float32) + tl.where(known[:, None], bias, 0.0)
    tl.store(p_logits + (o_r[:, None] * N + number) * V + o_v[None, :], logits, mask=mask)
    largest, index = largest_logit(logits, m_v[None, :], 1)
    tl.store(p_largest + o_r * SHAPE.tiles + tile, largest, mask=m_r)
    tl.store(p_first + o_r * SHAPE.tiles + tile, tile * BLOCK_V + index, mask=m_r)
    temperature = tl.load(p_numbers + o_r * numbers_stride, mask=m_r, other=0.0)
    m_s = samples(temperature)
    if tl.max(m_s.to(tl.int32), 0) > 0:
        weight = weigh(logits, largest[:, None], tl.where(m_s, temperature, 1.0)[:, None])
        tl.store(p_sums + o_r * SHAPE.tiles + tile, tl.sum(tl.where(m_v[None, :], weight, 0.0), 1), mask=m_s)


@triton.jit(do_not_specialize=["number"])
def markov_choose_kernel(
    p_drafts,  # [R, N] int64, contiguous
    p_logits,  # [R, N, V] float32, contiguous
    summaries,  # as for markov_logits_kernel
    p_anchors,  # [R] int64
    of_request,  # numbers [R, 4] float64, seeds [R] int64, positions [R] int64
    strides,  # of the anchors, and of the rows of numbers, seeds and positions
    number,
    SHAPE: tl.constexpr,
    TILES_POW2: tl.constexpr,
    PDL: tl.constexpr,
):
    """Choose draft `number` of one request."""
    pdl_prologue(PDL)
    p_largest, p_first, p_sums = summaries
    p_numbers, p_seeds, p_positions = of_request
    anchor_stride, numbers_stride, seed_stride, position_stride = strides
    N: tl.constexpr = SHAPE.drafts
    V: tl.constexpr = SHAPE.vocabulary
    BLOCK_V: tl.constexpr = SHAPE.block_v
    request = tl.program_id(0).to(tl.int64)
    o_t, o_b = tl.arange(0, TILES_POW2), tl.arange(0, BLOCK_V)
    m_t = o_t < SHAPE.tiles
    previous = _previous(p_anchors, p_drafts, anchor_stride, request, True, number, N)
    largest_of = tl.load(p_largest + request * SHAPE.tiles + o_t, mask=m_t, other=-INF)
    largest = tl.max(largest_of, 0)
    tile = tl.argmax(largest_of, 0, tie_break_left=True)
    token = tl.load(p_first + request * SHAPE.tiles + tile)
    usable = (previous >= 0) & (previous < V) & (tl.abs(largest) < INF)
    temperature = tl.load(p_numbers + request * numbers_stride)
    if usable & samples(temperature):
        sums = tl.load(p_sums + request * SHAPE.tiles + o_t, mask=m_t, other=0.0)
        sums = tl.where(largest_of > -INF, sums * weigh(largest_of, largest, temperature), 0.0)
        position = tl.load(p_positions + request * position_stride) + number + 1
        chance = uniform(tl.load(p_seeds + request * seed_stride), position, PROPOSAL)
        tile, goal, before = draw(sums, chance, m_t)
        if tile >= 0:
            o_v = tile * BLOCK_V + o_b
            logits = tl.load(p_logits + (request * N + number) * V + o_v, mask=o_v < V, other=-INF)
            index, _ = reach(weigh(logits, largest, temperature), before, goal)
            token = tile * BLOCK_V + tl.maximum(index, 0)
    tl.store(p_drafts + request * N + number, tl.where(usable, token, NO_TOKEN).to(tl.int64))


def markov_drafts(
    base_logits: Tensor,
    anchors: Tensor,
    w1: Tensor,
    w2: Tensor,
    numbers: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:
    """Launch `markov_drafts`; logits equal the reference up to the order of sums, drafts where these leave no doubt."""
    (requests, count, vocabulary), device = base_logits.shape, base_logits.device
    drafts = torch.empty((requests, count), dtype=torch.int64, device=device)
    logits = torch.empty((requests, count, vocabulary), dtype=torch.float32, device=device)
    if requests == 0:
        return drafts, logits
    tiles = cdiv(vocabulary, BLOCK_V)
    summaries = tuple(
        torch.empty((requests, tiles), dtype=dtype, device=device)
        for dtype in (torch.float32, torch.int32, torch.float64)
    )
    shape = Shape(count, vocabulary, w1.shape[1], BLOCK_V, tiles, BLOCK_R)
    blocks = cdiv(requests, BLOCK_R)
    for number in range(count):
        launch_kernel(
            markov_logits_kernel,
            (tiles, blocks),
            logits,
            summaries,
            drafts,
            base_logits,
            anchors,
            (w1, w2),
            numbers,
            (base_logits.stride(), anchors.stride(0), w1.stride(), w2.stride(), numbers.stride(0)),
            requests,
            number,
            SHAPE=shape,
            BLOCK_K=BLOCK_K,
            num_warps=4,
            **pdl_arguments(device, tiles * blocks),
        )
        launch_kernel(
            markov_choose_kernel,
            (requests,),
            drafts,
            logits,
            summaries,
            anchors,
            (numbers, seeds, positions),
            (anchors.stride(0), numbers.stride(0), seeds.stride(0), positions.stride(0)),
            number,
            SHAPE=shape,
            TILES_POW2=triton.next_power_of_2(tiles),
            num_warps=4,
            **pdl_arguments(device, requests),
        )
    return drafts, logits


def why_unsupported_markov_drafts(
    base_logits: Tensor,
    anchors: Tensor,
    w1: Tensor,
    w2: Tensor,
    numbers: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> str:
    """Return why a call cannot use the kernel, "" if it can."""
    vocabulary, most = w1.shape[0], MOST_TILES * BLOCK_V
    return f"the kernel chooses from up to {most} tokens, not {vocabulary}" if vocabulary > most else ""
