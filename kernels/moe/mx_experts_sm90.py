"""`mx_experts` on Hopper for few tokens an expert: MXFP4 weights and rounded inputs meet as e4m3.

Four launches. The first rounds x to mxfp8 in the order of unpacked MXFP4 rows, and to bfloat16 for the shared expert;
its first CTAs plan the places. `gate_up` and `down` multiply a tile of rows of one expert with up to TOKENS of its
places (expert_gemm_mxfp8.py), and the shared expert as bfloat16 (expert_gemm.py). A CTA of `gate_up` has whole groups
of 32 columns of the hidden state, so it rounds them as it stores them. The last launch adds each token's results up.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...layout import MX_TILE as _MX_TILE
from ...layout import cdiv
from ...reference.moe.expert_weights import SCALE_COLUMNS
from ...reference.moe.moe_experts import ExpertsArguments
from ..device.quant import ue8m0_scale
from ..host.gpu import Gpu, register_limit
from ..host.launch import launch_kernel
from ..host.pdl import pdl_constants, pdl_prologue, uses_pdl
from .expert_gemm import multiply
from .expert_gemm_mxfp8 import MxRows, multiply_mxfp8, mxfp8_tiles
from .expert_gemm_sm90 import split_position
from .expert_operands import GemmTile, Problem, TokenRows, Weight, WeightRows, Weights, descriptor
from .expert_plan import PlanShape, most_tiles, plan_some, tile_places
from .expert_sum import add_up_places
from .moe_experts import MIXED_BLOCK_K, rounded_hidden
from .moe_experts_sm90 import HALF, PLANNED, REGISTERS, ROWS, SHARED_TOKENS, TOKENS, most_tokens

MX_TILE = tl.constexpr(_MX_TILE)
BLOCK_K, STAGES, SHARED_STAGES = SCALE_COLUMNS, 4, 3
"""K-block of MXFP4, and stages; a K-block of 256 elements spills with the registers that let an SM hold three CTAs."""
ROUNDED_COLUMNS = 1024
"""Elements of x that a CTA rounds."""
FEWEST_TOKENS = 2
"""One token has too few CTAs for the plan, and the launch that adds up, to pay."""


class RoundShape(NamedTuple):
    """Compile-time sizes of a launch that rounds rows and plans places.

    Attributes:
        hidden: columns of x. columns: of these, those of a CTA. plan: of the places.
    """

    hidden: int
    columns: int
    plan: PlanShape


class GemmShape(NamedTuple):
    """Compile-time sizes of a launch of GEMMs.

    Attributes:
        hidden, inner, shared_inner: columns of x and of both hidden states. top_k: experts of a token.
        tile, shared_tile: of the routed experts and of the shared one.
    """

    hidden: int
    inner: int
    shared_inner: int
    top_k: int
    tile: GemmTile
    shared_tile: GemmTile


@triton.jit(do_not_specialize=["places", "first_expert", "tiles"])
def round_kernel(
    results,  # x [T, HIDDEN] e4m3, its scales [T, HIDDEN / 32] uint8, x [T, HIDDEN] bfloat16, tiles [tiles, 2 + TOKENS]
    inputs,  # x [T, HIDDEN] bfloat16, ids [places] int
    x_strides,
    places,
    first_expert,
    tiles,
    SHAPE: tl.constexpr,  # `RoundShape`
    PDL: tl.constexpr,
):
    """Plan a block of places, or round some columns of a token's row."""
    pdl_prologue(PDL)
    p_values, p_bytes, p_shared, p_tiles = results
    p_x, p_ids = inputs
    PLAN: tl.constexpr = SHAPE.plan
    HIDDEN: tl.constexpr = SHAPE.hidden
    COLUMNS: tl.constexpr = SHAPE.columns
    BLOCKS: tl.constexpr = (HIDDEN + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0) - tl.cdiv(places, PLAN.block)
    if program < 0:
        plan_some(p_tiles, p_ids, tl.program_id(0), places, first_expert, tiles, PLAN)
    else:
        token = (program // BLOCKS).to(tl.int64)
        # [tiles of the CTA, MX_TILE]
        o_tile = program % BLOCKS * (COLUMNS // MX_TILE) + tl.arange(0, COLUMNS // MX_TILE)
        o = o_tile[:, None] * MX_TILE + tl.arange(0, MX_TILE)[None, :]
        x = tl.load(p_x + token * x_strides[0] + o * x_strides[1], o < HIDDEN, 0.0).to(tl.float32)
        values, byte = mxfp8_tiles(x)
        tl.store(p_values + token * HIDDEN + split_position(o), values, o < HIDDEN)
        tl.store(p_bytes + token * (HIDDEN // MX_TILE) + o_tile, byte.to(tl.uint8), o_tile < HIDDEN // MX_TILE)
        rounded = values.to(tl.float32) * ue8m0_scale(byte)[:, None]
        tl.store(p_shared + token * HIDDEN + o, rounded.to(tl.bfloat16), o < HIDDEN)


@triton.jit
def _rows(p_x, p_words, SIZE: tl.constexpr, p_tile, TOP_K: tl.constexpr, TOKENS: tl.constexpr):
    """Return the `MxRows` of a tile: row `place // TOP_K` of each place."""
    o_column = tl.arange(0, 2 * TOKENS)
    mask = o_column < tl.load(p_tile + 1)
    row = tl.load(p_tile + 2 + o_column, mask, 0).to(tl.int64) // TOP_K
    place, word_mask = tile_places(p_tile, TOKENS)
    return MxRows(p_x + row * SIZE, mask, p_words + place // TOP_K * (SIZE // (4 * MX_TILE)), word_mask)


@triton.jit
def _store_mxfp8(hidden, acc, weights, place, mask, first, limit, INNER: tl.constexpr, TILE: tl.constexpr):
    """Store a tile's columns of the hidden state, times routing weights, in mxfp8 in the order of unpacked rows."""
    p_values, p_bytes = hidden
    COLUMNS: tl.constexpr = TILE.rows // 2
    TOKENS: tl.constexpr = TILE.tokens
    state = rounded_hidden(acc, weights, limit, COLUMNS, TOKENS, False)
    # [COLUMNS / 32, TOKENS, 32]
    values, byte = mxfp8_tiles(tl.permute(tl.reshape(state, (COLUMNS // MX_TILE, MX_TILE, TOKENS)), (0, 2, 1)))
    values = tl.reshape(tl.permute(values, (0, 2, 1)), (COLUMNS, TOKENS))
    o_n = split_position(first + tl.arange(0, COLUMNS))
    tl.store(p_values + place[None, :] * INNER + o_n[:, None], values, mask[None, :])
    o_tile = first // MX_TILE + tl.arange(0, COLUMNS // MX_TILE)
    tl.store(p_bytes + place[None, :] * (INNER // MX_TILE) + o_tile[:, None], byte.to(tl.uint8), mask[None, :])


@triton.jit(do_not_specialize=["tokens"])
def mx_gate_up_kernel(
    states,  # routed [places, INNER] e4m3, scales [places, INNER / 32] uint8, shared [T, SHARED_INNER] bfloat16
    inputs,  # x [T, HIDDEN] e4m3, scales [T, HIDDEN / 128] int32, x [T, HIDDEN] bfloat16, tiles, weights of places
    weight,
    shared_weight,
    scales,  # words of the routed weight, bytes of the shared one
    tokens,
    limit,
    SHAPE: tl.constexpr,  # `GemmShape`
    PDL: tl.constexpr,
):
    """Compute ROWS / 2 columns of the hidden state of a tile of places, or of tokens for the shared expert."""
    pdl_prologue(PDL)
    p_hidden, p_hidden_bytes, p_shared_hidden = states
    p_x, p_x_words, p_shared_x, p_tiles, p_weights = inputs
    p_words, p_shared_scale = scales
    TILE: tl.constexpr = SHAPE.tile
    SHARED_TILE: tl.constexpr = SHAPE.shared_tile
    HIDDEN: tl.constexpr = SHAPE.hidden
    INNER: tl.constexpr = SHAPE.inner
    SHARED_INNER: tl.constexpr = SHAPE.shared_inner
    TOP_K: tl.constexpr = SHAPE.top_k
    ROWS: tl.constexpr = TILE.rows
    HALF: tl.constexpr = ROWS // 2
    TOKENS: tl.constexpr = TILE.tokens
    SHARED_TOKENS: tl.constexpr = SHARED_TILE.tokens
    o_r = tl.arange(0, ROWS)
    program = tl.program_id(0)
    shared = tl.cdiv(tokens, SHARED_TOKENS) * (SHARED_INNER // HALF)
    if program < shared:
        first = program % (SHARED_INNER // HALF) * HALF
        o_t = program // (SHARED_INNER // HALF) * SHARED_TOKENS + tl.arange(0, SHARED_TOKENS)
        o_row = first + o_r // HALF * SHARED_INNER + o_r % HALF
        rows = WeightRows(shared_weight, p_shared_scale, tl.full((), 0, tl.int32), first, o_row)
        x = TokenRows(p_shared_x + o_t.to(tl.int64) * HIDDEN, 1, o_t < tokens)
        acc = multiply(rows, x, 2 * SHARED_INNER, HIDDEN, SHARED_TILE)
        state = rounded_hidden(acc, None, limit, HALF, SHARED_TOKENS, True).to(tl.bfloat16)
        p_row = p_shared_hidden + o_t.to(tl.int64)[None, :] * SHARED_INNER + (first + tl.arange(0, HALF))[:, None]
        tl.store(p_row, state, (o_t < tokens)[None, :])
    else:
        first = (program - shared) % (INNER // HALF) * HALF
        p_tile = p_tiles + (program - shared) // (INNER // HALF) * (2 + TOKENS)
        expert = tl.load(p_tile)
        if expert >= 0:
            place, mask = tile_places(p_tile, TOKENS)
            rows = WeightRows(weight, p_words, expert, first, first + o_r // HALF * INNER + o_r % HALF)
            x = _rows(p_x, p_x_words, HIDDEN, p_tile, TOP_K, TOKENS)
            acc = multiply_mxfp8(rows, x, 2 * INNER, HIDDEN, TILE)
            weights = tl.load(p_weights + place, mask, 0.0)
            _store_mxfp8((p_hidden, p_hidden_bytes), acc, weights, place, mask, first, limit, INNER, TILE)


@triton.jit(do_not_specialize=["tokens", "places"])
def mx_down_kernel(
    p_results,  # [places + T, HIDDEN] bfloat16
    inputs,  # states as `mx_gate_up_kernel` writes them, scales as int32 words, tiles
    weight,
    shared_weight,
    scales,
    tokens,
    places,
    SHAPE: tl.constexpr,  # `GemmShape`
    PDL: tl.constexpr,
):
    """Compute ROWS columns of the results of a tile, each rounded to bfloat16."""
    pdl_prologue(PDL)
    p_hidden, p_hidden_words, p_shared_hidden, p_tiles = inputs
    p_words, p_shared_scale = scales
    TILE: tl.constexpr = SHAPE.tile
    SHARED_TILE: tl.constexpr = SHAPE.shared_tile
    HIDDEN: tl.constexpr = SHAPE.hidden
    INNER: tl.constexpr = SHAPE.inner
    SHARED_INNER: tl.constexpr = SHAPE.shared_inner
    ROWS: tl.constexpr = TILE.rows
    TOKENS: tl.constexpr = TILE.tokens
    SHARED_TOKENS: tl.constexpr = SHARED_TILE.tokens
    BLOCKS: tl.constexpr = HIDDEN // ROWS
    first, slot = tl.program_id(0) % BLOCKS * ROWS, tl.program_id(0) // BLOCKS
    o_row = first + tl.arange(0, ROWS)
    shared = tl.cdiv(tokens, SHARED_TOKENS)
    if slot < shared:
        o_t = slot * SHARED_TOKENS + tl.arange(0, SHARED_TOKENS)
        rows = WeightRows(shared_weight, p_shared_scale, tl.full((), 0, tl.int32), first, o_row)
        x = TokenRows(p_shared_hidden + o_t.to(tl.int64) * SHARED_INNER, 1, o_t < tokens)
        acc = multiply(rows, x, HIDDEN, SHARED_INNER, SHARED_TILE)
        p_row = p_results + (places + o_t.to(tl.int64))[None, :] * HIDDEN + o_row[:, None]
        tl.store(p_row, acc.to(tl.bfloat16), (o_t < tokens)[None, :])
    else:
        p_tile = p_tiles + (slot - shared) * (2 + TOKENS)
        expert = tl.load(p_tile)
        if expert >= 0:
            place, mask = tile_places(p_tile, TOKENS)
            x = _rows(p_hidden, p_hidden_words, INNER, p_tile, 1, TOKENS)
            acc = multiply_mxfp8(WeightRows(weight, p_words, expert, first, o_row), x, HIDDEN, INNER, TILE)
            p_row = p_results + place[None, :] * HIDDEN + o_row[:, None]
            tl.store(p_row, acc.to(tl.bfloat16), mask[None, :])


class MxPlan(NamedTuple):
    """The launches of a call: their CTAs, compile-time sizes and tiles, and whether they use PDL.

    `tiles` is the number of tiles that the places may need.
    """

    tiles: int
    round: int
    round_shape: RoundShape
    round_pdl: bool
    gate_up: int
    gate_up_tile: GemmTile
    gate_up_shared: GemmTile
    gate_up_pdl: bool
    down: int
    down_tile: GemmTile
    down_shared: GemmTile
    down_pdl: bool

    @property
    def variant(self) -> MxPlan:
        """The plan without the numbers of CTAs and tiles."""
        return self._replace(tiles=0, round=0, gate_up=0, down=0)


def fits(problem: Problem, tokens: int) -> bool:
    """Return whether the launches take the formats of the weights, and each expert has few of the places."""
    if problem.shared is None or problem.rounding != (True, True):
        return False
    kinds = problem.w13.kind, problem.w2.kind, *(weight.kind for weight in problem.shared)
    rows = problem.w2.size % HALF == problem.shared[1].size % HALF == problem.w2.rows % ROWS == 0
    few = FEWEST_TOKENS <= tokens <= most_tokens(problem)
    return kinds == ("mxfp4", "mxfp4", "blocks", "blocks") and rows and few


@functools.lru_cache(1024)
def plan(problem: Problem, tokens: int, gpu: Gpu) -> MxPlan:
    """Return the launches of a call that fits."""
    w13, w2, shared = problem.w13, problem.w2, problem.shared
    assert shared is not None
    places, experts = tokens * problem.top_k, w13.experts
    tiles, shared_slots = most_tiles(places, experts, TOKENS), cdiv(tokens, SHARED_TOKENS)
    place_plan = PlanShape(
        experts, PLANNED, TOKENS, triton.next_power_of_2(max(16, places)), triton.next_power_of_2(tiles)
    )
    ptx = gpu.backend == "cuda"

    tile = GemmTile(ROWS, TOKENS, BLOCK_K, STAGES, "mxfp4", interleaved=False, tma=True, ptx=ptx)

    def shared_tile_of(size: int) -> GemmTile:
        block_k = MIXED_BLOCK_K if size % MIXED_BLOCK_K == 0 else _MX_TILE
        return GemmTile(ROWS, SHARED_TOKENS, block_k, SHARED_STAGES, "blocks", interleaved=False, tma=True, ptx=ptx)

    rounds = cdiv(places, PLANNED) + tokens * cdiv(w13.size, ROUNDED_COLUMNS)
    gate_up = shared_slots * (shared[1].size // HALF) + tiles * (w2.size // HALF)
    down = (shared_slots + tiles) * (w2.rows // ROWS)
    return MxPlan(
        tiles=tiles,
        round=rounds,
        round_shape=RoundShape(w13.size, ROUNDED_COLUMNS, place_plan),
        round_pdl=uses_pdl(gpu, rounds),
        gate_up=gate_up,
        gate_up_tile=tile,
        gate_up_shared=shared_tile_of(shared[0].size),
        gate_up_pdl=uses_pdl(gpu, gate_up),
        down=down,
        down_tile=tile,
        down_shared=shared_tile_of(shared[1].size),
        down_pdl=uses_pdl(gpu, down),
    )


def launch(call: ExpertsArguments, weights: Weights, plan: MxPlan, out: Tensor) -> None:
    """Fill `out` with the results of a call that fits; `call.ids` and `call.weights` are contiguous."""
    (tokens, hidden), top_k, device, (w13, w2, shared) = call.x.shape, call.ids.shape[1], call.x.device, weights
    assert shared is not None
    places, inner, shared_inner = tokens * top_k, w2.size, shared[1].size
    e4m3, u8, bf16, i32 = torch.float8_e4m3fn, torch.uint8, torch.bfloat16, torch.int32

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    values, scales = empty(tokens, hidden, dtype=e4m3), empty(tokens, hidden // _MX_TILE, dtype=u8)
    shared_x, tile_list = empty(tokens, hidden, dtype=bf16), empty(plan.tiles, 2 + TOKENS, dtype=i32)
    states, state_scales = empty(places, inner, dtype=e4m3), empty(places, inner // _MX_TILE, dtype=u8)
    shared_states = empty(tokens, shared_inner, dtype=bf16)
    results = empty(places + tokens, hidden, dtype=bf16)
    launch_kernel(
        round_kernel,
        (plan.round,),
        (values, scales, shared_x, tile_list),
        (call.x, call.ids),
        call.x.stride(),
        places,
        call.first_expert,
        plan.tiles,
        SHAPE=plan.round_shape,
        num_warps=4,
        **pdl_constants(plan.round_pdl),
    )
    sizes = hidden, inner, shared_inner, top_k
    options = {"num_warps": 4} | register_limit(device, REGISTERS)

    def operands(weight: Weight, second: Weight, halves: int, shape: GemmShape) -> tuple[Any, ...]:
        """Return the weights of a launch as its arguments."""
        routed = descriptor(weight.values.view(u8), halves, ROWS, shape.tile.block_k // 2)
        one = descriptor(second.values, halves, ROWS, shape.shared_tile.block_k)
        return routed, one, (weight.scale, second.scale)

    shape = GemmShape(*sizes, plan.gate_up_tile, plan.gate_up_shared)
    launch_kernel(
        mx_gate_up_kernel,
        (plan.gate_up,),
        (states, state_scales, shared_states),
        (values, scales.view(i32), shared_x, tile_list, call.weights),
        *operands(w13, shared[0], 2, shape),
        tokens,
        float(call.limit),
        SHAPE=shape,
        **options,
        **pdl_constants(plan.gate_up_pdl),
    )
    shape = GemmShape(*sizes, plan.down_tile, plan.down_shared)
    launch_kernel(
        mx_down_kernel,
        (plan.down,),
        results,
        (states, state_scales.view(i32), shared_states, tile_list),
        *operands(w2, shared[1], 1, shape),
        tokens,
        places,
        SHAPE=shape,
        **options,
        **pdl_constants(plan.down_pdl),
    )
    add_up_places(call, results, True, len(w13.values), out)
