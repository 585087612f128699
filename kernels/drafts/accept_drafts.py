"""`accept_drafts` in two launches, whatever the requests: verification, then a token for those that sample.

CTAs of the first launch summarise tiles of rows. The last CTA of a row adds the summaries, and searches the last token
that top-k and top-p keep; the last of a request tests its drafts, and writes all but a sampled token. In the second
launch CTAs split the vocabulary of the row where verification ended, and sum the residuals; the last of a request draws
the token. Greedy requests leave the second launch at once.

Sums are float64, of tiles in their order: a request has the same bits in any batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...layout import cdiv
from ...reference.drafts.distributions import LEAST_RESIDUAL as _LEAST_RESIDUAL
from ...reference.drafts.distributions import NO_TOKEN as _NO_TOKEN
from ...reference.drafts.random_numbers import ACCEPTANCE as _ACCEPTANCE
from ...reference.drafts.random_numbers import RESIDUAL as _RESIDUAL
from ..host.launch import launch_kernel
from ..host.pdl import pdl_arguments, pdl_prologue
from ..host.semaphores import arrival_counters, arrive
from .random_numbers import uniform
from .tiles import INF, draw, largest_logit, reach, samples, weigh
from .top_tokens import LOWEST, last_kept, order_key

NO_TOKEN, LEAST_RESIDUAL = tl.constexpr(_NO_TOKEN), tl.constexpr(_LEAST_RESIDUAL)
ACCEPTANCE, RESIDUAL = tl.constexpr(_ACCEPTANCE), tl.constexpr(_RESIDUAL)
TILE = 4096
"""Most tokens of a tile."""
MOST_WARPS = 16
ROOM = 4096
"""Most logits of a row that are listed for the search of top-k and top-p."""
MOST_TOKENS = 1 << 22
"""Largest vocabulary, for one CTA to hold the summaries of all tiles in registers."""
MOST_DRAFTS = 255
LARGEST, FIRST, SUM, DRAFT_LARGEST, DRAFT_SUM = (tl.constexpr(i) for i in range(5))
"""Summaries of a tile, and of a row: largest logit, its first token or -1, sum of weights; of the draft's logits."""
EDGE, LAST, ENDED = (tl.constexpr(i) for i in range(5, 8))
"""Order key and id of a row's last kept token; accepted drafts of a request, in its first row."""
SUMMARIES, FACTS = 5, 8


class Shape(NamedTuple):
    """Compile-time sizes: drafts of a request, vocabulary, tokens of a tile, tiles, and logits of a list."""

    drafts: int
    vocabulary: int
    tile: int
    tiles: int
    room: int


@triton.jit
def _summary(p_row, stride, tile, p_summary, plane, temperature, KIND: tl.constexpr, SHAPE: tl.constexpr):
    """Summarise a tile of a row: two or three numbers, `plane` elements apart."""
    o_v = tile.to(tl.int64) * SHAPE.tile + tl.arange(0, SHAPE.tile)
    mask = o_v < SHAPE.vocabulary
    logits = tl.load(p_row + o_v * stride, mask=mask, other=-INF).to(tl.float32)
    largest, index = largest_logit(logits, mask)
    tl.store(p_summary + KIND * plane, largest.to(tl.float64))
    if KIND == LARGEST:
        tl.store(p_summary + FIRST * plane, (tile * SHAPE.tile + index).to(tl.float64))
    if samples(temperature):
        weight = tl.where(mask, weigh(logits, largest, temperature), 0.0)
        tl.store(p_summary + (SUM if KIND == LARGEST else DRAFT_SUM) * plane, tl.sum(weight, 0))


@triton.jit
def _total(p_largest, p_sum, temperature, SHAPE: tl.constexpr):
    """Return a row's largest logit, the first tile that has it, and the sum of weights, 0 for a greedy request."""
    o_t = tl.arange(0, triton.next_power_of_2(SHAPE.tiles))
    m_t = o_t < SHAPE.tiles
    largest_of = tl.load(p_largest + o_t, mask=m_t, other=-INF, cache_modifier=".cg").to(tl.float32)
    largest = tl.max(largest_of, 0)
    total = tl.full((), 0.0, tl.float64)
    if samples(temperature):
        sums = tl.load(p_sum + o_t, mask=m_t, other=0.0, cache_modifier=".cg")
        total = tl.sum(tl.where(largest_of > -INF, sums * weigh(largest_of, largest, temperature), 0.0), 0)
    return largest, tl.argmax(largest_of, 0, tie_break_left=True), total


@triton.jit
def _finish_row(row, request, scratch, rows, p_row, of_request, strides, HAS_DRAFT, SHAPE: tl.constexpr):
    """Write the facts of a row from the summaries of its tiles."""
    p_summaries, p_facts, p_listed, p_ids = scratch
    plane, p_summary, p_fact = rows * SHAPE.tiles, p_summaries + row * SHAPE.tiles, p_facts + row
    p_numbers = of_request[0] + request * strides[4]
    temperature = tl.load(p_numbers)
    largest, tile, total = _total(p_summary + LARGEST * plane, p_summary + SUM * plane, temperature, SHAPE)
    first = tl.load(p_summary + FIRST * plane + tile, cache_modifier=".cg")
    usable = tl.abs(largest) < INF
    edge, last = tl.full((), LOWEST, tl.int32), tl.full((), -1, tl.int32)
    top_k, top_p = tl.load(p_numbers + strides[5]), tl.load(p_numbers + 2 * strides[5])
    limited = ((top_k > 0) & (top_k < SHAPE.vocabulary)) | ((top_p >= 1) == 0)
    if usable & limited & samples(temperature):
        read = p_row, strides[1], SHAPE.vocabulary
        lists = p_listed + row * SHAPE.room, p_ids + row * SHAPE.room
        edge, last, total = last_kept(
            read, (largest, temperature), total, top_k, top_p, lists, SHAPE.room, SHAPE.vocabulary, SHAPE.tile
        )
    tl.store(p_fact + LARGEST * rows, largest.to(tl.float64))
    tl.store(p_fact + FIRST * rows, tl.where(usable, first, NO_TOKEN))
    tl.store(p_fact + SUM * rows, total)
    tl.store(p_fact + EDGE * rows, edge.to(tl.float64))
    tl.store(p_fact + LAST * rows, last.to(tl.float64))
    if HAS_DRAFT:
        largest, _, total = _total(p_summary + DRAFT_LARGEST * plane, p_summary + DRAFT_SUM * plane, temperature, SHAPE)
        tl.store(p_fact + DRAFT_LARGEST * rows, largest.to(tl.float64))
        tl.store(p_fact + DRAFT_SUM * rows, total)


@triton.jit
def _probability(logits, token, largest, temperature, total, edge, last):
    """Return the target's probabilities of tokens of these logits."""
    key = order_key(logits)
    mask = (key > edge) | ((key == edge) & (token <= last))
    return tl.where(mask, weigh(logits, largest, temperature), 0.0) / total


@triton.jit
def _finish_request(request, results, p_facts, rows, inputs, of_request, strides, SHAPE: tl.constexpr):
    """Test the drafts of a request, and write its result but for a sampled token."""
    p_num_new, p_tokens = results
    p_logits, p_drafts, p_draft_logits = inputs
    p_numbers, p_seeds, p_positions = of_request
    logit_row, logit_column, draft_row, draft_column, number_row, _, seed, at, q_request, q_row, q_column = strides
    N: tl.constexpr = SHAPE.drafts
    V: tl.constexpr = SHAPE.vocabulary
    # [N + 1], of a power of two
    o_n = tl.arange(0, triton.next_power_of_2(N + 1))
    m_n, m_d = o_n <= N, o_n < N
    row = request * (N + 1) + o_n
    p_fact = p_facts + row
    first = tl.load(p_fact + FIRST * rows, mask=m_n, other=NO_TOKEN, cache_modifier=".cg").to(tl.int64)
    draft = tl.load(p_drafts + request * draft_row + o_n * draft_column, mask=m_d, other=NO_TOKEN)
    drafted = (draft >= 0) & (draft < V) & (first != NO_TOKEN)
    temperature = tl.load(p_numbers + request * number_row)
    if samples(temperature):
        id_ = tl.where(drafted, draft, 0)
        largest = tl.load(p_fact + LARGEST * rows, mask=m_n, other=0.0, cache_modifier=".cg").to(tl.float32)
        total = tl.load(p_fact + SUM * rows, mask=m_n, other=1.0, cache_modifier=".cg")
        edge = tl.load(p_fact + EDGE * rows, mask=m_n, other=0.0, cache_modifier=".cg").to(tl.int32)
        last = tl.load(p_fact + LAST * rows, mask=m_n, other=0.0, cache_modifier=".cg").to(tl.int32)
        p_logit = p_logits + row * logit_row + id_ * logit_column
        logit = tl.load(p_logit, mask=drafted, other=0.0).to(tl.float32)
        target = _probability(logit, id_, largest, temperature, total, edge, last)
        proposal = tl.full(o_n.shape, 1.0, tl.float64)
        if p_draft_logits is not None:
            largest = tl.load(p_fact + DRAFT_LARGEST * rows, mask=m_d, other=INF, cache_modifier=".cg").to(tl.float32)
            total = tl.load(p_fact + DRAFT_SUM * rows, mask=m_d, other=1.0, cache_modifier=".cg")
            p_logit = p_draft_logits + request * q_request + o_n * q_row
            logit = tl.load(p_logit + id_ * q_column, mask=drafted, other=0.0)
            proposal = weigh(logit, largest, temperature) / total
            drafted = drafted & (tl.abs(largest) < INF)
        position = tl.load(p_positions + request * at) + o_n + 1
        chance = uniform(tl.load(p_seeds + request * seed), position, ACCEPTANCE)
        passed = drafted & (chance * proposal < target)
    else:
        passed = drafted & (draft == first)
    ended = tl.min(tl.where(passed, N, o_n), 0)
    # A sampled token replaces the likeliest in the second launch.
    token = tl.where(o_n < ended, draft, tl.where(o_n == ended, first, NO_TOKEN))
    tl.store(p_tokens + request * (N + 1) + o_n, token, mask=m_n)
    tl.store(p_num_new + request, ended + 1)
    tl.store(p_facts + request * (N + 1) + ENDED * rows, ended.to(tl.float64))


@triton.jit
def accept_verify_kernel(
    results,  # num_new [R] int32, tokens [R, N + 1] int64, contiguous
    scratch,  # summaries [5, rows, TILES] and facts [8, rows] float64, listed logits and int32 ids [rows, ROOM]
    p_arrived,  # [R * (N + 1) + R] counters
    inputs,  # logits [R * (N + 1), V] float, drafts [R, N] int64, draft_logits [R, N, V] float32 or None
    of_request,  # numbers [R, 4] float64, seeds [R] int64, positions [R] int64
    strides,  # of logits, drafts, numbers, seeds, positions and draft_logits, in one flat tuple
    SHAPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Summarise a tile of a row; the last CTA of a row and of a request finish them."""
    pdl_prologue(PDL)
    p_summaries, p_facts, _, _ = scratch
    p_logits, _, p_draft_logits = inputs
    N: tl.constexpr = SHAPE.drafts
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows = tl.num_programs(0).to(tl.int64)
    request, j = row // (N + 1), row % (N + 1)
    temperature = tl.load(of_request[0] + request * strides[4])
    p_summary, plane = p_summaries + row * SHAPE.tiles + tile, rows * SHAPE.tiles
    p_row = p_logits + row * strides[0]
    _summary(p_row, strides[1], tile, p_summary, plane, temperature, LARGEST, SHAPE)
    has_draft = False
    if p_draft_logits is not None:
        has_draft = (j < N) & samples(temperature)
        if has_draft:
            p_draft_row = p_draft_logits + request * strides[8] + j * strides[9]
            _summary(p_draft_row, strides[10], tile, p_summary, plane, temperature, DRAFT_LARGEST, SHAPE)
    if arrive(p_arrived + row) == SHAPE.tiles - 1:
        tl.store(p_arrived + row, 0)
        _finish_row(row, request, scratch, rows, p_row, of_request, strides, has_draft, SHAPE)
        if arrive(p_arrived + rows + request) == N:
            tl.store(p_arrived + rows + request, 0)
            _finish_request(request, results, p_facts, rows, inputs, of_request, strides, SHAPE)


@triton.jit
def _left(request, j, o_v, softmax, proposal, inputs, strides, SHAPE: tl.constexpr):
    """Return the target's probabilities of tokens `o_v`, and their residuals, max(p - q, 0)."""
    p_logits, _, p_draft_logits = inputs
    largest, temperature, total, edge, last = softmax
    has_draft, draft, draft_largest, draft_total = proposal
    N: tl.constexpr = SHAPE.drafts
    mask = o_v < SHAPE.vocabulary
    p_row = p_logits + (request * (N + 1) + j) * strides[0]
    logits = tl.load(p_row + o_v * strides[1], mask=mask, other=-INF).to(tl.float32)
    target = tl.where(mask, _probability(logits, o_v, largest, temperature, total, edge, last), 0.0)
    if p_draft_logits is None:
        taken = (o_v == draft).to(tl.float64)
    else:
        p_row = p_draft_logits + request * strides[8] + j * strides[9]
        logits = tl.load(p_row + o_v * strides[10], mask=mask & has_draft, other=-INF)
        taken = weigh(logits, draft_largest, temperature) / draft_total
    return target, tl.maximum(target - tl.where(has_draft, taken, 0.0), 0.0)


@triton.jit
def accept_draw_kernel(
    p_tokens,  # [R, N + 1] int64, contiguous
    p_facts,  # [8, R * (N + 1)] float64, contiguous
    p_sums,  # [2, R, TILES] float64, contiguous
    p_arrived,  # [R] counters
    inputs,  # as for accept_verify_kernel
    of_request,
    strides,
    SHAPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sum a tile of the distribution of a request's next token; the last CTA of a request draws it."""
    pdl_prologue(PDL)
    p_numbers, p_seeds, p_positions = of_request
    p_drafts, p_draft_logits = inputs[1], inputs[2]
    N: tl.constexpr = SHAPE.drafts
    TILES: tl.constexpr = SHAPE.tiles
    request, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    requests = tl.num_programs(0).to(tl.int64)
    rows = requests * (N + 1)
    temperature = tl.load(p_numbers + request * strides[4])
    if samples(temperature):
        j = tl.load(p_facts + request * (N + 1) + ENDED * rows).to(tl.int64)
        p_fact = p_facts + request * (N + 1) + j
        first = tl.load(p_fact + FIRST * rows).to(tl.int64)
        if first != NO_TOKEN:
            largest = tl.load(p_fact + LARGEST * rows).to(tl.float32)
            edge, last = tl.load(p_fact + EDGE * rows).to(tl.int32), tl.load(p_fact + LAST * rows).to(tl.int32)
            softmax = largest, temperature, tl.load(p_fact + SUM * rows), edge, last
            at = request * strides[2] + j * strides[3]
            draft = tl.load(p_drafts + at, mask=j < N, other=NO_TOKEN)
            has_draft = (draft >= 0) & (draft < SHAPE.vocabulary)
            draft_largest, draft_total = tl.full((), 0.0, tl.float32), tl.full((), 1.0, tl.float64)
            if p_draft_logits is not None:
                draft_largest = tl.load(p_fact + DRAFT_LARGEST * rows, mask=j < N, other=INF).to(tl.float32)
                draft_total = tl.load(p_fact + DRAFT_SUM * rows, mask=j < N, other=1.0)
                has_draft = has_draft & (tl.abs(draft_largest) < INF)
            proposal = has_draft, draft, draft_largest, draft_total
            o_b = tl.arange(0, SHAPE.tile)
            o_v = tile.to(tl.int64) * SHAPE.tile + o_b
            target, left = _left(request, j, o_v, softmax, proposal, inputs, strides, SHAPE)
            p_left = p_sums + request * TILES
            p_target = p_left + requests * TILES
            tl.store(p_left + tile, tl.sum(left, 0))
            tl.store(p_target + tile, tl.sum(target, 0))
            if arrive(p_arrived + request) == TILES - 1:
                tl.store(p_arrived + request, 0)
                o_t = tl.arange(0, triton.next_power_of_2(TILES))
                m_t = o_t < TILES
                sums = tl.load(p_left + o_t, mask=m_t, other=0.0, cache_modifier=".cg")
                rounding = tl.sum(sums, 0) < LEAST_RESIDUAL
                if rounding:
                    sums = tl.load(p_target + o_t, mask=m_t, other=0.0, cache_modifier=".cg")
                position = tl.load(p_positions + request * strides[7]) + j + 1
                chance = uniform(tl.load(p_seeds + request * strides[6]), position, RESIDUAL)
                chosen, goal, before = draw(sums, chance, m_t)
                if chosen >= 0:
                    o_v = chosen.to(tl.int64) * SHAPE.tile + o_b
                    target, left = _left(request, j, o_v, softmax, proposal, inputs, strides, SHAPE)
                    index, _ = reach(tl.where(rounding, target, left), before, goal)
                    token = chosen.to(tl.int64) * SHAPE.tile + tl.maximum(index, 0)
                    tl.store(p_tokens + request * (N + 1) + j, token)


def accept_drafts(
    logits: Tensor,
    drafts: Tensor,
    draft_logits: Tensor | None,
    numbers: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:
    """Launch `accept_drafts`; results equal the reference but where a number meets a sum to the rounding of float64."""
    (requests, count), vocabulary, device = drafts.shape, logits.shape[1], logits.device
    num_new = torch.empty((requests,), dtype=torch.int32, device=device)
    tokens = torch.empty((requests, count + 1), dtype=torch.int64, device=device)
    if requests == 0:
        return num_new, tokens
    rows, tile = requests * (count + 1), min(TILE, triton.next_power_of_2(vocabulary))
    tiles = cdiv(vocabulary, tile)
    summaries = torch.empty((SUMMARIES, rows, tiles), dtype=torch.float64, device=device)
    facts = torch.empty((FACTS, rows), dtype=torch.float64, device=device)
    sums = torch.empty((2, requests, tiles), dtype=torch.float64, device=device)
    arrived = arrival_counters(rows + requests, device)
    inputs, of_request = (logits, drafts, draft_logits), (numbers, seeds, positions)
    draft_strides = (0, 0, 0) if draft_logits is None else draft_logits.stride()
    strides = (
        *logits.stride(),
        *drafts.stride(),
        *numbers.stride(),
        seeds.stride(0),
        positions.stride(0),
        *draft_strides,
    )
    lists = tuple(torch.empty((rows, ROOM), dtype=dtype, device=device) for dtype in (torch.float32, torch.int32))
    shape = Shape(count, vocabulary, tile, tiles, ROOM)
    warps = min(MOST_WARPS, max(1, tile // 128))
    launch_kernel(
        accept_verify_kernel,
        (rows, tiles),
        (num_new, tokens),
        (summaries, facts, *lists),
        arrived,
        inputs,
        of_request,
        strides,
        SHAPE=shape,
        num_warps=warps,
        **pdl_arguments(device, rows * tiles),
    )
    launch_kernel(
        accept_draw_kernel,
        (requests, tiles),
        tokens,
        facts,
        sums,
        arrived,
        inputs,
        of_request,
        strides,
        SHAPE=shape,
        num_warps=warps,
        **pdl_arguments(device, requests * tiles),
    )
    return num_new, tokens


def why_unsupported_accept_drafts(
    logits: Tensor,
    drafts: Tensor,
    draft_logits: Tensor | None,
    numbers: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> str:
    """Return why a call cannot use the kernel, "" if it can."""
    vocabulary, count = logits.shape[1], drafts.shape[1]
    if vocabulary > MOST_TOKENS:
        return f"the kernel chooses from up to {MOST_TOKENS} tokens, not {vocabulary}"
    return f"the kernel tests up to {MOST_DRAFTS} drafts a request, not {count}" if count > MOST_DRAFTS else ""
