"""`moe_experts` on Hopper for MXFP4 experts of few tokens each, whose shared expert, if there is one, is e4m3.

Four launches. The first splits each row of x into two e4m3 (expert_gemm_sm90.py), twice: in the order of unpacked
MXFP4, and as it is for the shared expert; its first CTAs plan the places. `gate_up` and `down` are as in
moe_experts.py, with the hidden state split, too, with a scale for 64 of its columns, those of one CTA. The last launch
adds each token's rows up: to find out which CTA is the last would take every CTA of `down` a microsecond.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...layout import cdiv
from ...reference.moe.expert_weights import SCALE_COLUMNS
from ...reference.moe.moe_experts import ExpertsArguments
from ..host.gpu import Gpu, register_limit
from ..host.launch import launch_kernel
from ..host.pdl import pdl_constants, pdl_prologue, uses_pdl
from .expert_gemm import swiglu
from .expert_gemm_sm90 import multiply_e4m3, multiply_mxfp4, split_e4m3, split_element, split_position
from .expert_operands import GemmTile, Problem, SplitRows, Weight, WeightRows, Weights, WeightShape, descriptor
from .expert_plan import PlanShape, most_tiles, plan_some, tile_places
from .expert_sum import add_up_places

MOST_PLACES = 1024
MOST_EACH = 8
"""Most places for an expert, on average: more would take several tiles of `TOKENS`, each with the weight unpacked."""
FEW_CTAS = 8
"""Most CTAs of 64 rows for an SM for which bfloat16 is faster: with so few, launches and CTAs count more than
instructions."""
ROWS, HALF = 128, 64
"""Rows of a tile; in `gate_up` half of them are gate, and as many columns of the hidden state have one scale."""
TOKENS, SHARED_TOKENS = 8, 16
BLOCK_K, STAGES, REGISTERS = 256, 3, 168
"""K-block, stages and registers per thread that let an SM hold three CTAs."""
SHARED_STAGES = 4
PLANNED = 16
"""Places that a CTA plans."""
SPLIT_WARPS = 8


class SplitShape(NamedTuple):
    """Compile-time sizes of a launch that splits rows and plans places: columns of x, and the plan."""

    hidden: int
    plan: PlanShape


@triton.jit
def _shared_columns(begin, tokens, TILE: tl.constexpr):
    """Return tokens, parts and mask of the columns of a tile of the shared expert: high parts, then low ones."""
    o_column = tl.arange(0, 2 * TILE)
    token = begin + o_column % TILE
    return token.to(tl.int64), o_column // TILE, token < tokens


@triton.jit
def _columns(p_tile, TILE: tl.constexpr):
    """Return places, parts and mask of the columns of a tile."""
    o_column = tl.arange(0, 2 * TILE)
    mask = o_column % TILE < tl.load(p_tile + 1)
    return tl.load(p_tile + 2 + o_column % TILE, mask, 0).to(tl.int64), o_column // TILE, mask


@triton.jit
def _store_hidden(hidden, acc, place, mask, first, limit, SIZE: tl.constexpr, UNPACKED: tl.constexpr,
                  TILE: tl.constexpr):  # fmt: skip
    """Store a tile's columns of the hidden state, split, in the order of unpacked rows with UNPACKED."""
    p_hidden, p_scale = hidden
    COLUMNS: tl.constexpr = TILE.rows // 2
    high, low, scale = split_e4m3(swiglu(acc, limit, COLUMNS, TILE.tokens), 0)
    o_n = first + tl.arange(0, COLUMNS)
    if UNPACKED:
        o_n = split_position(o_n)
    p_row = p_hidden + place[None, :] * (2 * SIZE) + o_n[:, None]
    tl.store(p_row, high, mask[None, :])
    tl.store(p_row + SIZE, low, mask[None, :])
    tl.store(p_scale + place * (SIZE // COLUMNS) + first // COLUMNS, scale, mask)


@triton.jit(do_not_specialize=["tokens", "places", "first_expert", "tiles"])
def split_kernel(
    results,  # rows [1 or 2, T, 2, hidden] e4m3, their scales [T] float32, tiles [tiles, 2 + tile] int32
    inputs,  # x [T, hidden] bfloat16, ids [places] int
    x_strides,
    tokens,
    places,
    first_expert,
    tiles,
    SHAPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Plan a block of places, or split a token's row: in the order of unpacked weights, then as it is."""
    pdl_prologue(PDL)
    p_split, p_split_scale, p_tiles = results
    p_x, p_ids = inputs
    PLAN: tl.constexpr = SHAPE.plan
    HIDDEN: tl.constexpr = SHAPE.hidden
    HIDDEN_POW2: tl.constexpr = triton.next_power_of_2(HIDDEN)
    plans = tl.cdiv(places, PLAN.block)
    row = tl.program_id(0) - plans
    if row < 0:
        plan_some(p_tiles, p_ids, tl.program_id(0), places, first_expert, tiles, PLAN)
    else:
        o = tl.arange(0, HIDDEN_POW2)
        element = tl.where(row < tokens, split_element(o), o)
        token = (row % tokens).to(tl.int64)
        x = tl.load(p_x + token * x_strides[0] + element * x_strides[1], o < HIDDEN, 0.0)
        high, low, scale = split_e4m3(x.to(tl.float32), 0)
        p_row = p_split + row.to(tl.int64) * (2 * HIDDEN) + o
        tl.store(p_row, high, o < HIDDEN)
        tl.store(p_row + HIDDEN, low, o < HIDDEN)
        tl.store(p_split_scale + token, scale)


@triton.jit(do_not_specialize=["tokens"])
def split_gate_up_kernel(
    p_hidden,  # [places, 2, INNER] e4m3
    p_hidden_scale,  # [places, INNER / HALF] float32
    p_shared_hidden,  # [T, 2, SHARED_INNER] e4m3
    p_shared_hidden_scale,  # [T, SHARED_INNER / HALF] float32
    p_split,  # [1 or 2, T, 2, HIDDEN] e4m3
    p_split_scale,  # [T] float32
    p_tiles,  # [tiles, 2 + TOKENS] int32
    weight,
    p_words,
    shared_weight,
    p_shared_scale,
    tokens,
    limit,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    SHARED_INNER: tl.constexpr,
    TOP_K: tl.constexpr,
    TILE: tl.constexpr,  # `GemmTile`
    SHARED_TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute ROWS / 2 columns of the hidden state of a tile of places, or of tokens for the shared expert."""
    pdl_prologue(PDL)
    ROWS: tl.constexpr = TILE.rows
    HALF: tl.constexpr = ROWS // 2
    TOKENS: tl.constexpr = TILE.tokens
    SHARED_TOKENS: tl.constexpr = SHARED_TILE.tokens
    o_r = tl.arange(0, ROWS)
    program, shared = tl.program_id(0), 0
    if SHARED_INNER > 0:
        shared = tl.cdiv(tokens, SHARED_TOKENS) * (SHARED_INNER // HALF)
        if program < shared:
            first = program % (SHARED_INNER // HALF) * HALF
            begin = program // (SHARED_INNER // HALF) * SHARED_TOKENS
            token, part, mask = _shared_columns(begin, tokens, SHARED_TOKENS)
            o_row = first + o_r // HALF * SHARED_INNER + o_r % HALF
            rows = WeightRows(shared_weight, p_shared_scale, 0, first, o_row)
            p_x = p_split + (tokens + token) * (2 * HIDDEN) + part * HIDDEN
            acc = multiply_e4m3(rows, SplitRows(p_x, p_split_scale + token, mask), HIDDEN, HIDDEN, SHARED_TILE)
            o_t = begin + tl.arange(0, SHARED_TOKENS)
            hidden = p_shared_hidden, p_shared_hidden_scale
            _store_hidden(hidden, acc, o_t.to(tl.int64), o_t < tokens, first, limit, SHARED_INNER, False, SHARED_TILE)
    if program >= shared:
        first = (program - shared) % (INNER // HALF) * HALF
        p_tile = p_tiles + (program - shared) // (INNER // HALF) * (2 + TOKENS)
        expert = tl.load(p_tile)
        if expert >= 0:
            place, part, mask = _columns(p_tile, TOKENS)
            token = place // TOP_K
            rows = WeightRows(weight, p_words, expert, first, first + o_r // HALF * INNER + o_r % HALF)
            x = SplitRows(p_split + token * (2 * HIDDEN) + part * HIDDEN, p_split_scale + token, mask)
            acc = multiply_mxfp4(rows, x, 2 * INNER, HIDDEN, HIDDEN, TILE)
            place, mask = tile_places(p_tile, TOKENS)
            _store_hidden((p_hidden, p_hidden_scale), acc, place, mask, first, limit, INNER, True, TILE)


@triton.jit(do_not_specialize=["tokens", "places"])
def split_down_kernel(
    p_results,  # [places, or + T with a shared expert, HIDDEN] float32
    p_hidden,  # [places, 2, INNER] e4m3
    p_hidden_scale,  # [places, INNER / HALF] float32
    p_shared_hidden,  # [T, 2, SHARED_INNER] e4m3
    p_shared_hidden_scale,  # [T, SHARED_INNER / HALF] float32
    p_weights,  # [places] float32
    p_tiles,  # [tiles, 2 + TOKENS] int32
    weight,
    p_words,
    shared_weight,
    p_shared_scale,
    tokens,
    places,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    SHARED_INNER: tl.constexpr,
    HALF: tl.constexpr,
    TILE: tl.constexpr,  # `GemmTile`
    SHARED_TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute ROWS columns of the results of a tile."""
    pdl_prologue(PDL)
    ROWS: tl.constexpr = TILE.rows
    TOKENS: tl.constexpr = TILE.tokens
    SHARED_TOKENS: tl.constexpr = SHARED_TILE.tokens
    BLOCKS: tl.constexpr = HIDDEN // ROWS
    program, shared = tl.program_id(0), 0
    first, slot = program % BLOCKS * ROWS, program // BLOCKS
    o_row = first + tl.arange(0, ROWS)
    if SHARED_INNER > 0:
        shared = tl.cdiv(tokens, SHARED_TOKENS)
        if slot < shared:
            begin = slot * SHARED_TOKENS
            token, part, mask = _shared_columns(begin, tokens, SHARED_TOKENS)
            rows = WeightRows(shared_weight, p_shared_scale, 0, first, o_row)
            p_x = p_shared_hidden + token * (2 * SHARED_INNER) + part * SHARED_INNER
            x = SplitRows(p_x, p_shared_hidden_scale + token * (SHARED_INNER // HALF), mask)
            acc = multiply_e4m3(rows, x, SHARED_INNER, HALF, SHARED_TILE)
            o_t = begin + tl.arange(0, SHARED_TOKENS)
            p_row = p_results + (places + o_t.to(tl.int64))[None, :] * HIDDEN + o_row[:, None]
            tl.store(p_row, acc, (o_t < tokens)[None, :])
    if slot >= shared:
        p_tile = p_tiles + (slot - shared) * (2 + TOKENS)
        expert = tl.load(p_tile)
        if expert >= 0:
            place, part, mask = _columns(p_tile, TOKENS)
            p_x = p_hidden + place * (2 * INNER) + part * INNER
            x = SplitRows(p_x, p_hidden_scale + place * (INNER // HALF), mask)
            acc = multiply_mxfp4(WeightRows(weight, p_words, expert, first, o_row), x, HIDDEN, INNER, HALF, TILE)
            place, mask = tile_places(p_tile, TOKENS)
            acc *= tl.load(p_weights + place, mask, 0.0)[None, :]
            tl.store(p_results + place[None, :] * HIDDEN + o_row[:, None], acc, mask[None, :])


class SplitPlan(NamedTuple):
    """The launches of a call: their CTAs, compile-time sizes and tiles, and whether they use PDL.

    `tiles` is the number of tiles that the places may need.
    """

    tiles: int
    split: int
    split_shape: SplitShape
    split_pdl: bool
    gate_up: int
    gate_up_tile: GemmTile
    gate_up_pdl: bool
    down: int
    down_tile: GemmTile
    down_pdl: bool
    shared_tile: GemmTile

    @property
    def variant(self) -> SplitPlan:
        """The plan without the numbers of CTAs and tiles."""
        return self._replace(tiles=0, split=0, gate_up=0, down=0)


def takes(problem: Problem) -> bool:
    """Return whether the launches take the formats of the weights."""
    formats = problem.w13.kind, problem.w2.kind, *(weight.kind for weight in problem.shared or ())
    return not problem.interleaved and formats[:2] == ("mxfp4", "mxfp4") and set(formats[2:]) <= {"e4m3"}


def most_tokens(problem: Problem) -> int:
    """Return the most tokens of a call: each expert has few of their places."""
    return max(1, min(MOST_PLACES, MOST_EACH * problem.w13.experts) // problem.top_k)


def fits(problem: Problem, tokens: int, gpu: Gpu) -> bool:
    """Return whether each expert has few of the places, and its CTAs are enough for the GPU."""
    ctas = min(tokens * problem.top_k, problem.w13.experts) * 2 * problem.w2.size / 64 / gpu.sms
    return takes(problem) and tokens <= most_tokens(problem) and ctas > FEW_CTAS


def plan_split(problem: Problem, tokens: int, gpu: Gpu) -> SplitPlan:
    """Return the launches of a call that fits."""
    w13, w2, shared = problem.w13, problem.w2, problem.shared
    places, experts = tokens * problem.top_k, w13.experts
    tiles, shared_slots = most_tiles(places, experts, TOKENS), cdiv(tokens, SHARED_TOKENS) if shared else 0
    tile_pow2 = triton.next_power_of_2(tiles)
    place_plan = PlanShape(experts, PLANNED, TOKENS, triton.next_power_of_2(max(16, places)), tile_pow2)
    ptx = gpu.backend == "cuda"

    def tile_of(weight: WeightShape) -> GemmTile:
        block_k = BLOCK_K if weight.size % BLOCK_K == 0 else SCALE_COLUMNS
        return GemmTile(ROWS, TOKENS, block_k, STAGES, "mxfp4", interleaved=False, tma=True, ptx=ptx)

    split = cdiv(places, PLANNED) + (2 if shared else 1) * tokens
    gate_up = shared_slots * (shared[1].size // HALF if shared else 0) + tiles * (w2.size // HALF)
    down = (shared_slots + tiles) * (w2.rows // ROWS)
    return SplitPlan(
        tiles=tiles,
        split=split,
        split_shape=SplitShape(w13.size, place_plan),
        split_pdl=uses_pdl(gpu, split),
        gate_up=gate_up,
        gate_up_tile=tile_of(w13),
        gate_up_pdl=uses_pdl(gpu, gate_up),
        down=down,
        down_tile=tile_of(w2),
        down_pdl=uses_pdl(gpu, down),
        shared_tile=GemmTile(ROWS, SHARED_TOKENS, HALF, SHARED_STAGES, "e4m3", interleaved=False, tma=True, ptx=ptx),
    )


def launch(call: ExpertsArguments, weights: Weights, plan: SplitPlan, out: Tensor) -> None:
    """Fill `out` with the results of a call that fits, of at most MOST_PLACES places."""
    (tokens, hidden), top_k, device, (w13, w2, shared) = call.x.shape, call.ids.shape[1], call.x.device, weights
    places, inner = tokens * top_k, w2.size
    shared_inner = shared[1].size if shared is not None else 0
    e4m3 = torch.float8_e4m3fn

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    split, split_scale = empty(1 if shared is None else 2, tokens, 2, hidden, dtype=e4m3), empty(tokens)
    tile_list = empty(plan.tiles, 2 + TOKENS, dtype=torch.int32)
    states = empty(places, 2, inner, dtype=e4m3), empty(places, inner // HALF)
    shared_states: tuple[Tensor | None, Tensor | None] = None, None
    if shared is not None:
        shared_states = empty(tokens, 2, shared_inner, dtype=e4m3), empty(tokens, shared_inner // HALF)
    results = empty(places + (tokens if shared is not None else 0), hidden)
    launch_kernel(
        split_kernel,
        (plan.split,),
        (split, split_scale, tile_list),
        (call.x, call.ids),
        call.x.stride(),
        tokens,
        places,
        call.first_expert,
        plan.tiles,
        SHAPE=plan.split_shape,
        num_warps=SPLIT_WARPS,
        **pdl_constants(plan.split_pdl),
    )
    sizes = {"HIDDEN": hidden, "INNER": inner, "SHARED_INNER": shared_inner, "num_warps": 4}
    sizes |= register_limit(device, REGISTERS)

    def operands(weight: Weight, second: Weight | None, halves: int, tile: GemmTile) -> tuple[object, ...]:
        """Return the weights of a launch as its arguments."""
        values = descriptor(weight.values.view(torch.uint8), halves, ROWS, tile.block_k // 2)
        if second is None:
            return values, weight.scale, None, None
        return values, weight.scale, descriptor(second.values, halves, ROWS, HALF), second.scale

    shared13, shared2 = shared or (None, None)
    launch_kernel(
        split_gate_up_kernel,
        (plan.gate_up,),
        *states,
        *shared_states,
        split,
        split_scale,
        tile_list,
        *operands(w13, shared13, 2, plan.gate_up_tile),
        tokens,
        float(call.limit),
        TOP_K=top_k,
        TILE=plan.gate_up_tile,
        SHARED_TILE=plan.shared_tile,
        **sizes,
        **pdl_constants(plan.gate_up_pdl),
    )
    launch_kernel(
        split_down_kernel,
        (plan.down,),
        results,
        *states,
        *shared_states,
        call.weights,
        tile_list,
        *operands(w2, shared2, 1, plan.down_tile),
        tokens,
        places,
        HALF=HALF,
        TILE=plan.down_tile,
        SHARED_TILE=plan.shared_tile,
        **sizes,
        **pdl_constants(plan.down_pdl),
    )
    add_up_places(call, results, shared is not None, len(w13.values), out)
