"""`moe_experts` in two launches: gate, up and SwiGLU, then down and the weighted sum; many places are planned before.

A CTA multiplies a tile of rows of one expert with a tile of its tokens (expert_gemm.py). Few places need no plan: a CTA
finds those of its expert among all ids. MXFP4 rows in the order of a checkpoint meet x in the unpacked order, which a
small launch writes before. The shared expert's tiles are CTAs of the same launches, the first ones. `down` writes a row
for each place, and the last CTA of a block of columns adds each token's rows in their order: the same bits in any order
of arrival. Very many tokens are added by a separate launch, and come in passes that bound the scratch.

`mx_experts` (mx_experts.py) runs these launches with other roundings: see `Rounding`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..._compat import triton_known
from ...layout import WEIGHT_TILE, cdiv
from ...ops.common.invariance import STEP, TOKENS
from ...reference.moe.expert_weights import SCALE_COLUMNS, columns, weight_format
from ...reference.moe.moe_experts import ExpertsArguments
from ..device.mx_values import MX_TILE, rounded_mxfp8
from ..host.addresses import first_byte
from ..host.gpu import SM90, Gpu, gpu_of, register_limit
from ..host.launch import launch_kernel
from ..host.pdl import pdl_constants, pdl_prologue, uses_pdl
from ..host.semaphores import arrival_counters
from . import moe_experts_sm90 as sm90
from . import moe_experts_sm90_few_tokens as few_tokens
from .expert_gemm import multiply, swiglu, unpacked_element, unpacked_position
from .expert_operands import (
    GemmTile,
    Problem,
    Rounding,
    TokenRows,
    Weight,
    WeightRows,
    Weights,
    WeightShape,
    weights_of,
)
from .expert_plan import FIELDS, local_expert, most_tiles, plan_places, sort_programs
from .expert_sum import SUM_TOKENS, ExpertIds, SumShape, add_up_last, add_up_places

FEW_PLACES = 1024
"""Most places without a plan: each CTA looks at all of them."""
FEW_TOKENS = 1024
"""Most tokens that the last CTA of a block of columns adds up."""
EXACT_TOKENS = 128
"""Most tokens with results of experts in float32 until they are added; those of more are bfloat16."""
MOST_TOKENS = 16384
"""Tokens of a pass, which bounds the scratch of V4-Flash to 1.6 GB. More tokens come in passes of equal size."""
MOST_EXPERTS = 1024
"""Experts that a CTA of the plan holds counts of."""
FEW_CTAS = 8
"""Most CTAs of 64 rows for an SM; with more, MXFP4 has tiles of 128 rows."""
MIXED_BLOCK_K = 64
"""K-block of an e4m3 shared expert next to MXFP4 experts: a larger one would leave shared memory for fewer CTAs."""
BLOCKS_TOKENS, BLOCKS_STAGES = 64, 2
"""Most tokens of a tile of a shared expert in 32x32 blocks, and stages beyond 32 tokens: with 128 tokens and three
stages a CTA sometimes computed other values (kernel-notes/moe.md)."""
REORDERED_COLUMNS = 1024
"""Elements of x that a CTA brings into the order of unpacked weights."""
INVARIANT_TILE, INVARIANT_CTAS, INVARIANT_PASS = 16, 4.0, 4096
"""Tokens of a tile, CTAs of 64 rows for an SM and most tokens of a pass that batch-invariant calls are planned for;
they keep results in float32, which takes twice the scratch."""
PLAN_NONE, PLAN_PLACES, PLAN_TILES = 0, 1, 2


@triton.jit
def _tile(p_ids, p_tiles, slot, places, first_expert, EXPERTS: tl.constexpr, PLACES_POW2: tl.constexpr,
          PLAN: tl.constexpr, TOKENS: tl.constexpr):  # fmt: skip
    """Return expert, first and end of the tile's places in its list, and without a plan the rank of each place."""
    if PLAN == 2:
        expert = tl.load(p_tiles + slot * FIELDS)
        begin = tl.load(p_tiles + slot * FIELDS + 1)
        end = tl.minimum(tl.load(p_tiles + slot * FIELDS + 2), begin + TOKENS)
        end = tl.where(expert >= 0, end, begin)
        rank = tl.full((1,), 0, tl.int32)
    else:
        o_place = tl.arange(0, PLACES_POW2)
        local = local_expert(p_ids, o_place, o_place < places, first_expert, EXPERTS)
        expert = slot
        if PLAN == 1:  # the slot is a place; the first of an expert's places stands for it
            expert = tl.sum(tl.where(o_place == slot, local, 0), 0)
        mine = ((local == expert) & (local >= 0)).to(tl.int32)
        rank = tl.where(mine == 1, tl.cumsum(mine, 0) - 1, -1)
        begin, end = 0, tl.sum(mine, 0)
        if PLAN == 1:
            end = tl.where(tl.sum(tl.where(o_place < slot, mine, 0), 0) > 0, 0, end)
    return expert, begin, end, rank


@triton.jit
def _places(p_order, rank, o_list, end, PLACES_POW2: tl.constexpr, PLAN: tl.constexpr):
    """Return the places at positions `o_list` of an expert's list."""
    if PLAN == 2:
        found = tl.load(p_order + o_list, o_list < end, 0)
    else:
        o_place = tl.arange(0, PLACES_POW2)
        found = tl.sum(tl.where(rank[None, :] == o_list[:, None], o_place[None, :], 0), 1)
    return found


@triton.jit
def rounded_hidden(acc, weights, limit, HALF: tl.constexpr, TOKENS: tl.constexpr, MXFP8: tl.constexpr):
    """Return the float32 hidden states `[HALF, TOKENS]` of `mx_experts`, times routing weights `[TOKENS]` or None."""
    hidden = swiglu(acc.to(tl.bfloat16).to(tl.float32), limit, HALF, TOKENS)
    if weights is not None:
        hidden *= weights[None, :]
    hidden = hidden.to(tl.bfloat16).to(tl.float32)
    if MXFP8:
        by_token = tl.permute(tl.reshape(hidden, (HALF // MX_TILE, MX_TILE, TOKENS)), (0, 2, 1))
        hidden = tl.reshape(tl.permute(rounded_mxfp8(by_token), (0, 2, 1)), (HALF, TOKENS))
    return hidden


@triton.jit
def _store_hidden(
    p_hidden,
    acc,
    o_out,
    mask,
    first,
    limit,
    INNER: tl.constexpr,
    PERMUTED: tl.constexpr,
    TILE: tl.constexpr,
    weights=None,
    ROUNDS: tl.constexpr = False,
    MXFP8: tl.constexpr = False,
):
    """Store silu(gate) * up of a tile; its first half of rows is gate. With ROUNDS, see `rounded_hidden`."""
    HALF: tl.constexpr = TILE.rows // 2
    o_n = first + tl.arange(0, HALF)
    if PERMUTED:
        o_n = unpacked_position(o_n)
    p_row = p_hidden + o_out.to(tl.int64)[None, :] * INNER + o_n[:, None]
    if ROUNDS:
        hidden = rounded_hidden(acc, weights, limit, HALF, TILE.tokens, MXFP8)
    else:
        hidden = swiglu(acc, limit, HALF, TILE.tokens)
    tl.store(p_row, hidden.to(p_hidden.dtype.element_ty), mask[None, :])


@triton.jit
def reorder_kernel(p_out, p_x, x_strides, HIDDEN: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr):
    """Write columns of a token's x in the order that a checkpoint's rows have when unpacked."""
    pdl_prologue(PDL)
    token = (tl.program_id(0) // tl.cdiv(HIDDEN, COLUMNS)).to(tl.int64)
    o = tl.program_id(0) % tl.cdiv(HIDDEN, COLUMNS) * COLUMNS + tl.arange(0, COLUMNS)
    x = tl.load(p_x + token * x_strides[0] + unpacked_element(o) * x_strides[1], o < HIDDEN)
    tl.store(p_out + token * HIDDEN + o, x, o < HIDDEN)


@triton.jit(do_not_specialize=["tokens", "places", "first_expert"])
def gate_up_kernel(
    p_hidden,  # [places, INNER] bfloat16
    p_shared_hidden,  # [T, SHARED_INNER] bfloat16
    p_x,  # [T, HIDDEN] bfloat16
    p_reordered,  # the same in the order of unpacked MXFP4 rows, if such are multiplied, else None
    p_ids,  # [places] int
    p_order,
    p_tiles,
    weight,
    p_scale,
    shared_weight,
    p_shared_scale,
    x_strides,
    tokens,
    places,
    first_expert,
    limit,
    p_weights,  # [places] float32 with ROUNDING, else None
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    SHARED_INNER: tl.constexpr,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    PLACES_POW2: tl.constexpr,
    PLAN: tl.constexpr,
    PERMUTED_HIDDEN: tl.constexpr,
    TILE: tl.constexpr,  # `GemmTile`
    SHARED_TILE: tl.constexpr,
    PDL: tl.constexpr,
    ROUNDING: tl.constexpr = None,  # `Rounding`
):
    """Compute HALF columns of the hidden state of a tile of places, or of tokens for the shared expert."""
    pdl_prologue(PDL)
    ROWS: tl.constexpr = TILE.rows
    HALF: tl.constexpr = ROWS // 2
    TOKENS: tl.constexpr = TILE.tokens
    SHARED_TOKENS: tl.constexpr = SHARED_TILE.tokens
    PERMUTED: tl.constexpr = TILE.kind == "mxfp4" and not TILE.interleaved
    SHARED_PERMUTED: tl.constexpr = SHARED_TILE.kind == "mxfp4"
    o_r = tl.arange(0, ROWS)
    program, shared = tl.program_id(0), 0
    if SHARED_INNER > 0:
        shared = tl.cdiv(tokens, SHARED_TOKENS) * (SHARED_INNER // HALF)
        if program < shared:
            first = program % (SHARED_INNER // HALF) * HALF
            o_row = first + o_r // HALF * SHARED_INNER + o_r % HALF
            o_t = program // (SHARED_INNER // HALF) * SHARED_TOKENS + tl.arange(0, SHARED_TOKENS)
            p_rows, stride = p_x + o_t.to(tl.int64) * x_strides[0], x_strides[1]
            if SHARED_PERMUTED:
                p_rows, stride = p_reordered + o_t.to(tl.int64) * HIDDEN, 1
            rows = WeightRows(shared_weight, p_shared_scale, tl.full((), 0, tl.int32), first, o_row)
            x = TokenRows(p_rows, stride, o_t < tokens)
            acc = multiply(rows, x, 2 * SHARED_INNER, HIDDEN, SHARED_TILE)
            _store_hidden(
                p_shared_hidden, acc, o_t, o_t < tokens, first, limit, SHARED_INNER, SHARED_PERMUTED, SHARED_TILE, None,
                ROUNDING is not None, ROUNDING is not None and ROUNDING.shared,
            )  # fmt: skip
    if program >= shared:
        first = (program - shared) % (INNER // HALF) * HALF
        slot = (program - shared) // (INNER // HALF)
        expert, begin, end, rank = _tile(p_ids, p_tiles, slot, places, first_expert, EXPERTS, PLACES_POW2, PLAN, TOKENS)
        o_row = first + o_r // HALF * INNER + o_r % HALF
        for at in range(begin, end, TOKENS):
            o_list = at + tl.arange(0, TOKENS)
            place = _places(p_order, rank, o_list, end, PLACES_POW2, PLAN)
            o_token = (place // TOP_K).to(tl.int64)
            p_rows, stride = p_x + o_token * x_strides[0], x_strides[1]
            if PERMUTED:
                p_rows, stride = p_reordered + o_token * HIDDEN, 1
            rows = WeightRows(weight, p_scale, expert, first, o_row)
            acc = multiply(rows, TokenRows(p_rows, stride, o_list < end), 2 * INNER, HIDDEN, TILE)
            weights = None
            if ROUNDING is not None:
                weights = tl.load(p_weights + place, o_list < end, 0.0)
            _store_hidden(
                p_hidden, acc, place, o_list < end, first, limit, INNER, PERMUTED_HIDDEN, TILE, weights,
                ROUNDING is not None, ROUNDING is not None and ROUNDING.routed,
            )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "places", "first_expert"])
def down_kernel(
    p_out,  # [T, HIDDEN] bfloat16, contiguous
    p_results,  # [places, or + T with a shared expert, HIDDEN] float32 or bfloat16
    p_arrived,  # [HIDDEN / ROWS] int32
    p_hidden,  # [places, INNER] bfloat16
    p_shared_hidden,  # [T, SHARED_INNER] bfloat16
    p_weights,  # [places] float32
    p_ids,  # [places] int
    p_order,
    p_tiles,
    weight,
    p_scale,
    shared_weight,
    p_shared_scale,
    tokens,
    places,
    first_expert,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    SHARED_INNER: tl.constexpr,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    PLACES_POW2: tl.constexpr,
    PLAN: tl.constexpr,
    SUM: tl.constexpr,  # `SumShape`, or None
    TILE: tl.constexpr,  # `GemmTile`
    SHARED_TILE: tl.constexpr,
    PDL: tl.constexpr,
    ROUNDING: tl.constexpr = None,  # `Rounding`: hidden states have been multiplied by routing weights
):
    """Compute ROWS columns of the results of a tile; with SUM, the last CTA of the columns adds them up."""
    pdl_prologue(PDL)
    ROWS: tl.constexpr = TILE.rows
    TOKENS: tl.constexpr = TILE.tokens
    SHARED_TOKENS: tl.constexpr = SHARED_TILE.tokens
    program, shared = tl.program_id(0), 0
    first = program % (HIDDEN // ROWS) * ROWS
    slot = program // (HIDDEN // ROWS)
    o_row = first + tl.arange(0, ROWS)
    if SHARED_INNER > 0:
        shared = tl.cdiv(tokens, SHARED_TOKENS)
        if slot < shared:
            o_t = slot * SHARED_TOKENS + tl.arange(0, SHARED_TOKENS)
            p_rows = p_shared_hidden + o_t.to(tl.int64) * SHARED_INNER
            rows = WeightRows(shared_weight, p_shared_scale, tl.full((), 0, tl.int32), first, o_row)
            acc = multiply(rows, TokenRows(p_rows, 1, o_t < tokens), HIDDEN, SHARED_INNER, SHARED_TILE)
            p_row = p_results + (places + o_t.to(tl.int64))[None, :] * HIDDEN + o_row[:, None]
            tl.store(p_row, acc.to(p_results.dtype.element_ty), (o_t < tokens)[None, :])
    if slot >= shared:
        expert, begin, end, rank = _tile(
            p_ids, p_tiles, slot - shared, places, first_expert, EXPERTS, PLACES_POW2, PLAN, TOKENS
        )
        for at in range(begin, end, TOKENS):
            o_list = at + tl.arange(0, TOKENS)
            place = _places(p_order, rank, o_list, end, PLACES_POW2, PLAN)
            rows = WeightRows(weight, p_scale, expert, first, o_row)
            x = TokenRows(p_hidden + place.to(tl.int64) * INNER, 1, o_list < end)
            acc = multiply(rows, x, HIDDEN, INNER, TILE)
            if ROUNDING is None:
                acc *= tl.load(p_weights + place, o_list < end, 0.0)[None, :]
            p_row = p_results + place.to(tl.int64)[None, :] * HIDDEN + o_row[:, None]
            tl.store(p_row, acc.to(p_results.dtype.element_ty), (o_list < end)[None, :])
    if SUM is not None:
        BLOCKS: tl.constexpr = HIDDEN // ROWS
        ids = ExpertIds(p_ids, tokens, places, first_expert)
        add_up_last(p_arrived, program % BLOCKS, BLOCKS, p_out, p_results, ids, o_row, SUM)


class ExpertTiling(NamedTuple):
    """How a launch is tiled: a CTA's rows, tokens, K-block, warps and stages, and registers of a thread, 0 for any."""

    rows: int
    tokens: int
    block_k: int
    warps: int
    stages: int
    registers: int = 0


RESIDENT = {2: (256, 3, 0), 3: (256, 3, 168), 4: (128, 3, 128)}
"""K-block, stages and registers that let an SM of Hopper hold so many CTAs of 64 MXFP4 rows."""


HOPPER_MANY = {
    ("float", 64): ExpertTiling(128, 64, 128, 4, 2),
    ("float", 128): ExpertTiling(256, 128, 64, 8, 4),
    ("mxfp4", 64): ExpertTiling(128, 64, 128, 4, 3),
    ("mxfp4", 128): ExpertTiling(128, 128, 64, 4, 3),
    ("e4m3", 64): ExpertTiling(128, 64, 128, 4, 4),
    ("e4m3", 128): ExpertTiling(128, 128, 64, 4, 4),
}
"""Tilings for many tokens on Hopper, by format and tokens. With 4 warps a warp unpacks for twice as many products."""


def _most_tokens_of_tile(gpu: Gpu, weights: Sequence[WeightShape]) -> int:
    """Return the largest tile of tokens that `weights` of one kind of experts take."""
    if gpu.capability != SM90:
        return 128 if gpu.backend == "cuda" else 64
    return 64 if any(weight.kind == "e4m3" and not weight.power_scales for weight in weights) else 128


def choose_tokens(places: int, experts: int, largest: int) -> int:
    """Return the tokens of a tile: about as many as an expert has, so that weights are read and unpacked once."""
    if places <= FEW_PLACES:
        return 16
    places_per_expert = places / experts
    if places_per_expert <= 12:
        return 16
    return 32 if places_per_expert <= 24 else min(largest, 64 if places_per_expert <= 64 else 128)


def _tokens_of_shared(gpu: Gpu, tokens: int, tile: int, largest: int) -> int:
    """Return the tokens of a tile of the shared expert."""
    few = max(tile, min(64, max(16, triton.next_power_of_2(tokens))))
    if gpu.capability != SM90:
        return few
    return largest if tokens > FEW_TOKENS else min(few, largest)


def choose_tiling(gpu: Gpu, tokens: int, kind: str, rows: int, size: int, ctas: float) -> ExpertTiling:
    """Return the tiling of `tokens` tokens, of a divisor of `rows` rows of K = `size`, of `ctas` CTAs of 64 for an SM.

    Few tokens read weights as fast as memory gives them: many stages, and few CTAs at once on their SMs. Many tokens
    fill the tensor cores.
    """
    deep = gpu.backend == "cuda" and gpu.capability // 10 in (9, 10)
    hopper, few = gpu.capability == SM90, ctas <= FEW_CTAS
    most = {"e4m3": WEIGHT_TILE, "blocks": WEIGHT_TILE, "mxfp4": SCALE_COLUMNS, "float": 64 if tokens > 32 else 128}[
        kind
    ]
    stages, registers = 4 if deep else 2, 0
    if kind == "mxfp4" and hopper and tokens <= 32:
        registers = 168
        if few:
            most, stages, registers = next((RESIDENT[n] for n in RESIDENT if ctas <= n), (SCALE_COLUMNS, 4, 168))
    block_k = next(k for k in (256, 128, 64, 32) if k <= most and size % k == 0)
    if tokens > 32:
        many = HOPPER_MANY.get((kind, tokens)) if hopper else None
        if many is not None and rows % many.rows == size % 128 == 0:
            return many
        warps = 8 if rows % 128 == 0 else 4
        return ExpertTiling(16 * warps, tokens, block_k, warps, 3 if deep else 2)
    wide = kind == "mxfp4" and not few and rows % 128 == 0 and deep
    return ExpertTiling(128 if wide else 64, tokens, block_k, 4, stages, registers)


class GemmPlan(NamedTuple):
    """A launch of GEMMs: its CTAs, tiles of both kinds of experts, warps, registers of a thread or 0, and PDL."""

    programs: int
    tile: GemmTile
    shared_tile: GemmTile
    warps: int
    registers: int
    pdl: bool


class ExpertsPlan(NamedTuple):
    """The launches of a pass.

    Attributes:
        lists: how a CTA finds its places: PLAN_NONE, PLAN_PLACES or PLAN_TILES. sort: CTAs that sort places, 0 without.
        places_pow2: places, rounded up to a power of two, where a CTA looks at all of them.
        reorder: CTAs that reorder x, 0 without such a launch. reorder_pdl: whether it uses PDL.
        exact: whether experts' results are kept in float32. sums: whether the last CTA of `down` adds them up.
        rounding: None for `moe_experts`.
    """

    lists: int
    sort: int
    places_pow2: int
    reorder: int
    reorder_pdl: bool
    gate_up: GemmPlan
    down: GemmPlan
    exact: bool
    sums: bool
    rounding: Rounding | None = None

    @property
    def variant(self) -> ExpertsPlan:
        """The plan without the numbers of CTAs."""
        return self._replace(
            sort=triton.next_power_of_2(self.sort) if self.sort else 0,
            reorder=min(self.reorder, 1),
            gate_up=self.gate_up._replace(programs=0),
            down=self.down._replace(programs=0),
        )


def problem_of(call: ExpertsArguments) -> Problem:
    """Return the sizes and formats of a call."""
    w13, w2, shared = weights_of(call)
    shapes = None if shared is None else (shared[0].shape, shared[1].shape)
    return Problem(w13.shape, w2.shape, shapes, call.ids.shape[1], call.interleaved)


def on_sm90(gpu: Gpu) -> bool:
    """Return whether launches for Hopper can run: a GPU of sm_90, and a version of Triton that is known."""
    return gpu.capability == SM90 and triton_known()


def _splits(problem: Problem, gpu: Gpu, invariant: str) -> bool:
    """Return whether batch-invariant calls of all sizes split rows into two e4m3."""
    return invariant == STEP and on_sm90(gpu) and sm90.takes(problem)


def most_tokens(problem: Problem, gpu: Gpu, invariant: str) -> int:
    """Return the most tokens of a pass."""
    if _splits(problem, gpu, invariant):
        return sm90.most_tokens(problem)
    return INVARIANT_PASS if invariant else MOST_TOKENS


@functools.lru_cache(1024)
def plan(
    problem: Problem, tokens: int, gpu: Gpu, invariant: str = ""
) -> ExpertsPlan | sm90.SplitPlan | few_tokens.FewTokensPlan:  # fmt: skip
    """Return the launches of a pass of `tokens` tokens, at most `most_tokens`.

    With `invariant`, a value of `dsv4.batch_invariant`, tiles and roundings are the same for any number of tokens: only
    lists of places depend on it.
    """
    if on_sm90(gpu) and not invariant and problem.rounding is None and few_tokens.fits(problem, tokens):
        return few_tokens.plan_few(problem, tokens, gpu)
    few_on_sm90 = on_sm90(gpu) and problem.rounding is None and sm90.fits(problem, tokens, gpu)
    if _splits(problem, gpu, invariant) if invariant else few_on_sm90:
        return sm90.plan_split(problem, tokens, gpu)
    w13, w2, experts = problem.w13, problem.w2, problem.w13.experts
    places, (shared13, shared2) = tokens * problem.top_k, problem.shared or (None, None)
    tile = INVARIANT_TILE if invariant else choose_tokens(places, experts, _most_tokens_of_tile(gpu, (w13, w2)))
    lists, slots, sort = (PLAN_PLACES, places, 0) if places <= experts else (PLAN_NONE, experts, 0)
    if places > FEW_PLACES:
        lists, slots, sort = PLAN_TILES, most_tiles(places, experts, tile), sort_programs(places)
    largest = _most_tokens_of_tile(gpu, problem.shared or ())
    if shared13 is not None and shared13.kind == "blocks":
        largest = min(largest, BLOCKS_TOKENS)
    shared_tile = _tokens_of_shared(gpu, INVARIANT_TILE if invariant else tokens, tile, largest)
    shared_slots = cdiv(tokens, shared_tile) if problem.shared is not None else 0
    # The interpreter, too, reads descriptors.
    tma = gpu.backend != "hip" and (gpu.backend != "cuda" or gpu.capability >= 90)
    ptx = gpu.backend == "cuda" and gpu.capability >= 90

    def gemms(first: WeightShape, second: WeightShape | None, columns: int, shared_columns: int) -> GemmPlan:
        """Return a launch whose tiles have all rows, of which `columns` and `shared_columns` are results."""
        ctas, rows = (slots + shared_slots) * first.rows / 64 / gpu.sms, first.rows
        if invariant:
            ctas = INVARIANT_CTAS
        if second is not None:
            rows = math.gcd(rows, second.rows)
        tiling = choose_tiling(gpu, tile, first.kind, rows, first.size, ctas)
        of_tile = GemmTile(
            tiling.rows, tile, tiling.block_k, tiling.stages, first.kind, problem.interleaved, tma, ptx
        )  # fmt: skip
        of_shared = of_tile._replace(tokens=shared_tile, kind="none", interleaved=False)
        if second is not None:
            shared_tiling = choose_tiling(gpu, shared_tile, second.kind, rows, second.size, ctas)
            mixed = first.kind == "mxfp4" and second.kind in ("e4m3", "blocks") and ctas > FEW_CTAS
            if mixed:
                shared_tiling = shared_tiling._replace(block_k=min(shared_tiling.block_k, MIXED_BLOCK_K))
            if mixed or shared_tiling.rows > tiling.rows:  # more stages would take the shared memory of a further CTA
                shared_tiling = shared_tiling._replace(stages=min(shared_tiling.stages, 3))
            if second.kind == "blocks" and shared_tile > 32:
                shared_tiling = shared_tiling._replace(stages=min(shared_tiling.stages, BLOCKS_STAGES))
            of_shared = of_shared._replace(
                kind=second.kind, block_k=shared_tiling.block_k, stages=shared_tiling.stages
            )  # fmt: skip
        programs = shared_slots * (shared_columns // tiling.rows) + slots * (columns // tiling.rows)
        pdl = uses_pdl(gpu, programs)
        return GemmPlan(programs, of_tile, of_shared, tiling.warps, tiling.registers, pdl)

    reads_unpacked = "mxfp4" in (w13.kind if not problem.interleaved else "", shared13.kind if shared13 else "")
    reorder = tokens * cdiv(w13.size, REORDERED_COLUMNS) if reads_unpacked else 0
    return ExpertsPlan(
        lists=lists,
        sort=sort,
        places_pow2=16 if lists == PLAN_TILES else triton.next_power_of_2(max(16, places)),
        reorder=reorder,
        reorder_pdl=reads_unpacked and uses_pdl(gpu, reorder),
        gate_up=gemms(w13, shared13, w13.rows, shared13.rows if shared13 else 0),
        down=gemms(w2, shared2, w2.rows, w2.rows),
        exact=problem.rounding is None and (bool(invariant) or tokens <= EXACT_TOKENS),
        sums=not invariant and tokens <= FEW_TOKENS,
        rounding=problem.rounding,
    )


def moe_experts(call: ExpertsArguments) -> Tensor:
    """Add each token's experts up, on tensor cores; hidden states are rounded to bfloat16 between the GEMMs."""
    return _run(call, "")


def invariant_moe_experts(call: ExpertsArguments, level: str = TOKENS) -> Tensor:
    """Run the op with tiles and roundings that are the same in calls of any size."""
    return _run(call, level)


def _run(call: ExpertsArguments, invariant: str) -> Tensor:
    out = torch.empty(call.x.shape, dtype=call.x.dtype, device=call.x.device)
    ids, weights, gpu = call.ids.contiguous(), call.weights.contiguous(), gpu_of(call.x.device)
    problem, operands = problem_of(call), weights_of(call)
    passes = cdiv(len(out), most_tokens(problem, gpu, invariant))
    for number in range(passes):
        rows = slice(len(out) * number // passes, len(out) * (number + 1) // passes)
        one = call._replace(x=call.x[rows], ids=ids[rows], weights=weights[rows])
        pass_plan = plan(problem, len(one.x), gpu, invariant)
        if isinstance(pass_plan, few_tokens.FewTokensPlan):
            few_tokens.launch(one, operands, pass_plan, out[rows])
        elif isinstance(pass_plan, sm90.SplitPlan):
            sm90.launch(one, operands, pass_plan, out[rows])
        else:
            launch(one, operands, pass_plan, out[rows])
    return out


def launch(
    call: ExpertsArguments, weights: Weights, plan: ExpertsPlan, out: Tensor, reordered: Tensor | None = None
) -> None:
    """Fill `out` with the results of a pass. `reordered` is x for MXFP4 rows, if it has been written before."""
    (tokens, hidden), top_k, device = call.x.shape, call.ids.shape[1], call.x.device
    w13, w2, shared = weights
    shared13, shared2 = shared or (None, None)
    experts, places, inner = call.w13.shape[0], tokens * top_k, w2.size
    shared_inner = 0 if shared2 is None else shared2.size

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def operands(first: Weight, second: Weight | None, halves: int, gemms: GemmPlan) -> tuple[Any, ...]:
        """Return the weights of a launch as its arguments."""
        rows, tma = gemms.tile.rows, gemms.tile.tma
        routed = first.operand(halves, rows, gemms.tile.block_k, tma), first.scale
        if second is None:
            return *routed, None, None
        return *routed, second.operand(halves, rows, gemms.shared_tile.block_k, tma), second.scale

    def options(gemms: GemmPlan) -> dict[str, Any]:
        """Return the constants and options of a launch."""
        constants = {"TILE": gemms.tile, "SHARED_TILE": gemms.shared_tile, "num_warps": gemms.warps}
        constants |= {"ROUNDING": plan.rounding}
        return constants | register_limit(device, gemms.registers) | pdl_constants(gemms.pdl)

    order = tiles = None
    if plan.lists == PLAN_TILES:
        order, tiles = plan_places(call.ids, call.first_expert, experts, plan.gate_up.tile.tokens)
    hidden_states = empty(places, inner)
    shared_states = empty(tokens, shared_inner) if shared_inner else None
    rows = places + (tokens if shared_inner else 0)
    results = empty(rows, hidden, dtype=torch.float32 if plan.exact else torch.bfloat16)
    sizes = {
        "HIDDEN": hidden,
        "INNER": inner,
        "SHARED_INNER": shared_inner,
        "TOP_K": top_k,
        "EXPERTS": experts,
        "PLACES_POW2": plan.places_pow2,
        "PLAN": plan.lists,
    }
    if plan.reorder and reordered is None:
        reordered = empty(tokens, hidden)
        launch_kernel(
            reorder_kernel,
            (plan.reorder,),
            reordered,
            call.x,
            call.x.stride(),
            HIDDEN=hidden,
            COLUMNS=REORDERED_COLUMNS,
            num_warps=4,
            **pdl_constants(plan.reorder_pdl),
        )
    launch_kernel(
        gate_up_kernel,
        (plan.gate_up.programs,),
        hidden_states,
        shared_states,
        call.x,
        reordered,
        call.ids,
        order,
        tiles,
        *operands(w13, shared13, 2, plan.gate_up),
        call.x.stride(),
        tokens,
        places,
        call.first_expert,
        float(call.limit),
        call.weights if plan.rounding else None,
        PERMUTED_HIDDEN=w2.kind == "mxfp4" and not call.interleaved,
        **sizes,
        **options(plan.gate_up),
    )
    launch_kernel(
        down_kernel,
        (plan.down.programs,),
        out,
        results,
        arrival_counters(hidden // plan.down.tile.rows, device) if plan.sums else None,
        hidden_states,
        shared_states,
        call.weights,
        call.ids,
        order,
        tiles,
        *operands(w2, shared2, 1, plan.down),
        tokens,
        places,
        call.first_expert,
        SUM=SumShape(hidden, top_k, experts, shared is not None, SUM_TOKENS) if plan.sums else None,
        **sizes,
        **options(plan.down),
    )
    if not plan.sums:
        add_up_places(call, results, shared is not None, experts, out)


def why_unsupported_moe_experts(call: ExpertsArguments) -> str:
    """Return why a call cannot use the kernels, "" if it can."""
    if call.x.dtype is not torch.bfloat16:
        return f"the kernels multiply bfloat16, x is {call.x.dtype}"
    if call.w13.shape[0] > MOST_EXPERTS:
        return f"the kernels take up to {MOST_EXPERTS} experts, not {call.w13.shape[0]}"
    pairs = [("w13", call.w13, call.w13_scale), ("w2", call.w2, call.w2_scale)]
    if call.shared_w13 is not None and call.shared_w2 is not None:
        pairs += [("shared_w13", call.shared_w13, call.shared_w13_scale)]
        pairs += [("shared_w2", call.shared_w2, call.shared_w2_scale)]
    for name, weight, scale in pairs:
        kind = weight_format(weight)
        if kind == "float" and weight.dtype is not torch.bfloat16:
            return f"the kernels take floating weights in bfloat16, {name} is {weight.dtype}"
        size, block = columns(weight), 64 if kind == "float" else SCALE_COLUMNS
        if size % block or weight.shape[-2] % 64 or size == 0:
            return f"{name} has N of a multiple of 64 and K of {block}, not {weight.shape[-2]} and {size}"
        if not weight.is_contiguous() or first_byte(weight) % 16 or not (scale is None or scale.is_contiguous()):
            return f"{name} is read by TMA: contiguous, at an address of a multiple of 16"
    return ""
