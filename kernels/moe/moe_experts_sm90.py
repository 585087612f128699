"""`moe_experts` on Hopper for MXFP4 experts of few tokens each, whose shared expert, if there is one, is e4m3.

Four launches. The first splits each row of x into two e4m3 (expert_gemm_sm90.py), twice: in the order in which MXFP4 is
unpacked, and as it is for the shared expert; its first CTAs plan the places. `gate_up` and `down` are as in
moe_experts.py, with the hidden state split, too, with a scale for 64 of its columns, those of one CTA. The last launch
adds each token's rows up: to find out which CTA is the last would take every CTA of `down` a microsecond.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...layout import cdiv
from ...reference.moe.expert_weights import SCALE_COLUMNS
from ...reference.moe.moe_experts import ExpertsArguments
from ..host.gpu import Gpu, gpu_of, register_limit
from ..host.launch import launch_kernel
from ..host.pdl import pdl_arguments, pdl_prologue
from .expert_gemm import swiglu
from .expert_gemm_sm90 import Gemm, multiply_e4m3, multiply_mxfp4, split_e4m3, split_element, split_position
from .expert_operands import Weight, descriptor
from .expert_plan import Plan, most_tiles, plan_some
from .expert_sum import add_up_places

MOST_PLACES = 1024
MOST_EACH = 8
"""Most places for an expert, on average: more would take several tiles of `TOKENS`, each with the weight unpacked."""
FEW_CTAS = 8
"""CTAs of 64 rows for an SM up to which bfloat16 is faster: a third launch is not worth its time."""
ROWS, HALF = 128, 64
"""Rows of a tile; in `gate_up` half of them are gate, and as many columns of the hidden state have one scale."""
TOKENS, SHARED_TOKENS = 8, 16
BLOCK_K, STAGES, REGISTERS = 256, 3, 168
"""K-block, stages and registers of a thread with which an SM holds three CTAs."""
SHARED_STAGES = 4
PLANNED = 16
"""Places that a CTA plans."""
SPLIT_WARPS = 8


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
def _places(p_tile, TILE: tl.constexpr):
    """Return places of a tile and their mask."""
    o_place = tl.arange(0, TILE)
    mask = o_place < tl.load(p_tile + 1)
    return tl.load(p_tile + 2 + o_place, mask, 0).to(tl.int64), mask


@triton.jit
def _store_hidden(hidden, acc, place, mask, first, limit, SIZE: tl.constexpr, UNPACKED: tl.constexpr):
    """Store a tile's columns of the hidden state, split, with their scale; as unpacked rows are with UNPACKED."""
    p_hidden, p_scale = hidden
    COLUMNS: tl.constexpr = acc.shape[0] // 2
    high, low, scale = split_e4m3(swiglu(acc, limit, COLUMNS, acc.shape[1]), 0)
    o_n = first + tl.arange(0, COLUMNS)
    if UNPACKED:
        o_n = split_position(o_n)
    p_row = p_hidden + place[None, :] * (2 * SIZE) + o_n[:, None]
    tl.store(p_row, high, mask[None, :])
    tl.store(p_row + SIZE, low, mask[None, :])
    tl.store(p_scale + place * (SIZE // COLUMNS) + first // COLUMNS, scale, mask)


@triton.jit(do_not_specialize=["tokens", "places", "first_expert", "tiles"])
def split_kernel(
    split,  # [1 or 2, T, 2, HIDDEN] e4m3, and scales [T] float32
    p_tiles,  # [tiles, 2 + TOKENS] int32
    p_x,  # [T, HIDDEN] bfloat16
    p_ids,  # [places] int
    x_strides,
    tokens,
    places,
    first_expert,
    tiles,
    HIDDEN: tl.constexpr,
    HIDDEN_POW2: tl.constexpr,
    PLAN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Plan some places, or split a token's row: in the order of unpacked weights, then as it is."""
    pdl_prologue(PDL)
    p_split, p_split_scale = split
    row = tl.program_id(0) - tl.cdiv(places, PLAN.block)
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
    hidden,  # [places, 2, INNER] e4m3, and scales [places, INNER / HALF] float32
    shared_hidden,  # the same of the shared expert, by token
    split,  # [1 or 2, T, 2, HIDDEN] e4m3, and scales [T] float32
    p_tiles,  # [tiles, 2 + TOKENS] int32
    weight,
    p_words,
    shared_weight,
    p_shared_scale,
    tokens,
    limit,
    TOP_K: tl.constexpr,
    ROUTED: tl.constexpr,  # Gemm
    SHARED: tl.constexpr,  # Gemm, or None
    PDL: tl.constexpr,
):
    """Compute half as many columns of the hidden state as the tile has rows, for places or for the shared expert."""
    pdl_prologue(PDL)
    p_split, p_split_scale = split
    HIDDEN: tl.constexpr = ROUTED.k
    INNER: tl.constexpr = ROUTED.n // 2
    HALF: tl.constexpr = ROUTED.rows // 2
    o_r = tl.arange(0, ROUTED.rows)
    program, shared = tl.program_id(0), 0
    if SHARED is not None:
        SHARED_INNER: tl.constexpr = SHARED.n // 2
        shared = tl.cdiv(tokens, SHARED.tokens) * (SHARED_INNER // HALF)
        if program < shared:
            first = program % (SHARED_INNER // HALF) * HALF
            begin = program // (SHARED_INNER // HALF) * SHARED.tokens
            token, part, mask = _shared_columns(begin, tokens, SHARED.tokens)
            o_row = first + o_r // HALF * SHARED_INNER + o_r % HALF
            columns = p_split + (tokens + token) * (2 * HIDDEN) + part * HIDDEN, p_split_scale + token, mask
            acc = multiply_e4m3(shared_weight, p_shared_scale, first, o_row, columns, SHARED)
            o_t = begin + tl.arange(0, SHARED.tokens)
            _store_hidden(shared_hidden, acc, o_t.to(tl.int64), o_t < tokens, first, limit, SHARED_INNER, False)
    if program >= shared:
        first = (program - shared) % (INNER // HALF) * HALF
        p_tile = p_tiles + (program - shared) // (INNER // HALF) * (2 + ROUTED.tokens)
        expert = tl.load(p_tile)
        if expert >= 0:
            place, part, mask = _columns(p_tile, ROUTED.tokens)
            token = place // TOP_K
            o_row = first + o_r // HALF * INNER + o_r % HALF
            columns = p_split + token * (2 * HIDDEN) + part * HIDDEN, p_split_scale + token, mask
            acc = multiply_mxfp4(weight, p_words, expert, first, o_row, columns, ROUTED)
            place, mask = _places(p_tile, ROUTED.tokens)
            _store_hidden(hidden, acc, place, mask, first, limit, INNER, True)


@triton.jit(do_not_specialize=["tokens", "places"])
def split_down_kernel(
    p_results,  # [places, or + T with a shared expert, HIDDEN] float32
    hidden,
    shared_hidden,
    p_weights,  # [places] float32
    p_tiles,
    weight,
    p_words,
    shared_weight,
    p_shared_scale,
    tokens,
    places,
    ROUTED: tl.constexpr,
    SHARED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute columns of the results of a tile; what is not said is as in `split_gate_up_kernel`."""
    pdl_prologue(PDL)
    HIDDEN: tl.constexpr = ROUTED.n
    INNER: tl.constexpr = ROUTED.k
    BLOCKS: tl.constexpr = HIDDEN // ROUTED.rows
    program, shared = tl.program_id(0), 0
    first, slot = program % BLOCKS * ROUTED.rows, program // BLOCKS
    o_row = first + tl.arange(0, ROUTED.rows)
    if SHARED is not None:
        shared = tl.cdiv(tokens, SHARED.tokens)
        if slot < shared:
            p_state, p_scale = shared_hidden
            begin = slot * SHARED.tokens
            token, part, mask = _shared_columns(begin, tokens, SHARED.tokens)
            p_scale += token * (SHARED.k // SHARED.scale_k)
            columns = p_state + token * (2 * SHARED.k) + part * SHARED.k, p_scale, mask
            acc = multiply_e4m3(shared_weight, p_shared_scale, first, o_row, columns, SHARED)
            o_t = begin + tl.arange(0, SHARED.tokens)
            p_row = p_results + (places + o_t.to(tl.int64))[None, :] * HIDDEN + o_row[:, None]
            tl.store(p_row, acc, (o_t < tokens)[None, :])
    if slot >= shared:
        p_tile = p_tiles + (slot - shared) * (2 + ROUTED.tokens)
        expert = tl.load(p_tile)
        if expert >= 0:
            p_state, p_scale = hidden
            place, part, mask = _columns(p_tile, ROUTED.tokens)
            p_scale += place * (INNER // ROUTED.scale_k)
            columns = p_state + place * (2 * INNER) + part * INNER, p_scale, mask
            acc = multiply_mxfp4(weight, p_words, expert, first, o_row, columns, ROUTED)
            place, mask = _places(p_tile, ROUTED.tokens)
            acc *= tl.load(p_weights + place, mask, 0.0)[None, :]
            tl.store(p_results + place[None, :] * HIDDEN + o_row[:, None], acc, mask[None, :])


def fits(w13: Weight, w2: Weight, shared: tuple[Weight, Weight] | None, places: int, gpu: Gpu) -> bool:
    """Return whether each expert has few of the places, and its CTAs are enough for the GPU."""
    experts = len(w13.values)
    if (w13.kind, w2.kind) != ("mxfp4", "mxfp4") or any(each.kind != "e4m3" for each in shared or ()):
        return False
    ctas = min(places, experts) * 2 * w2.size / 64 / gpu.sms
    return places <= min(MOST_PLACES, MOST_EACH * experts) and ctas > FEW_CTAS


def launch(call: ExpertsArguments, w13: Weight, w2: Weight, shared: tuple[Weight, Weight] | None, out: Tensor) -> None:
    """Fill `out` with the results of a call that fits, of at most MOST_PLACES places."""
    (tokens, hidden), top_k, device = call.x.shape, call.ids.shape[1], call.x.device
    experts, places, inner = len(w13.values), tokens * top_k, w2.size
    shared_inner = shared[1].size if shared is not None else 0
    e4m3, tiles = torch.float8_e4m3fn, most_tiles(places, experts, TOKENS)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    orders = 1 if shared is None else 2
    split = empty(orders, tokens, 2, hidden, dtype=e4m3), empty(tokens)
    tile_list = empty(tiles, 2 + TOKENS, dtype=torch.int32)
    states = empty(places, 2, inner, dtype=e4m3), empty(places, inner // HALF)
    shared_states: tuple[Tensor | None, Tensor | None] = None, None
    if shared is not None:
        shared_states = empty(tokens, 2, shared_inner, dtype=e4m3), empty(tokens, shared_inner // HALF)
    results = empty(places + (tokens if shared is not None else 0), hidden)

    programs = cdiv(places, PLANNED) + orders * tokens
    launch_kernel(
        split_kernel,
        (programs,),
        split,
        tile_list,
        call.x,
        call.ids,
        call.x.stride(),
        tokens,
        places,
        call.first_expert,
        tiles,
        HIDDEN=hidden,
        HIDDEN_POW2=triton.next_power_of_2(hidden),
        PLAN=Plan.of(experts, places, tiles, PLANNED, TOKENS),
        num_warps=SPLIT_WARPS,
        **pdl_arguments(device, programs),
    )
    shared_slots = cdiv(tokens, SHARED_TOKENS) if shared is not None else 0

    def product(weight: Weight, other: Weight | None, halves: int, scale_k: int) -> tuple[tuple[Any, ...], dict]:
        """Return weights and constants of a launch."""
        rows, size = weight.values.shape[1], weight.size
        block_k, ptx = BLOCK_K if size % BLOCK_K == 0 else SCALE_COLUMNS, gpu_of(device).backend == "cuda"
        routed = Gemm(rows, size, ROWS, TOKENS, scale_k, block_k, STAGES, ptx)
        own = descriptor(weight.values.view(torch.uint8), halves, ROWS, block_k // 2)
        constants = {"ROUTED": routed, "SHARED": None, "num_warps": 4, **register_limit(device, REGISTERS)}
        if other is None:
            return (own, weight.scale, None, None), constants
        rows, size = other.values.shape[1], other.size
        constants["SHARED"] = Gemm(rows, size, ROWS, SHARED_TOKENS, scale_k, HALF, SHARED_STAGES, ptx)
        return (own, weight.scale, descriptor(other.values, halves, ROWS, HALF), other.scale), constants

    first, second = (None, None) if shared is None else shared
    operands, constants = product(w13, first, 2, hidden)
    programs = shared_slots * (shared_inner // HALF) + tiles * (inner // HALF)
    launch_kernel(
        split_gate_up_kernel,
        (programs,),
        states,
        shared_states,
        split,
        tile_list,
        *operands,
        tokens,
        float(call.limit),
        TOP_K=top_k,
        **constants,
        **pdl_arguments(device, programs),
    )
    operands, constants = product(w2, second, 1, HALF)
    programs = (shared_slots + tiles) * (hidden // ROWS)
    launch_kernel(
        split_down_kernel,
        (programs,),
        results,
        states,
        shared_states,
        call.weights,
        tile_list,
        *operands,
        tokens,
        places,
        **constants,
        **pdl_arguments(device, programs),
    )
    add_up_places(call, results, shared is not None, experts, out)
