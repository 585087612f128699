"""Sparse MLA decode on any GPU that Triton supports: `sparse_mla_decode_kernel` and `sparse_mla_decode_latent_kernel`.

A program attends BLOCK_H heads of one token to its split of the token's keys, BLOCK_N of them at a time: first those of
the window cache, then those of the extra cache, in one loop. The grid follows from shapes; lengths are read on the
device, and the splits of a row divide its blocks of keys evenly. A second kernel combines the splits
(split_combine.py).

The latent kernel scores with all dims of a row and takes its first V dims as values. A key is loaded once for both.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...layout import cdiv
from ...reference.attention.sparse_mla_decode import LatentDecodeArguments, output_dtype
from ..host.gpu import Gpu, gpu_of
from ..host.launch import DTYPES, launch_kernel
from ..host.pdl import supports_pdl
from .common import (
    CHANGING,
    DATA_BYTES,
    NOT_FUSED,
    DecodeCall,
    OutputRows,
    Outputs,
    Rope,
    decode_arguments,
    decode_keys,
    fetch_keys,
    load_queries,
    new_outputs,
    operand_dtype,
    outputs_for,
    rotate_and_store_rows,
    valid_slots,
)
from .split_combine import LOG2_E, SplitPlan, combine_splits, finish_softmax, new_partials, partial_softmax, split_plan

MAX_SLOTS = 2**31
MAX_VALUE_DIM = 512


@triton.jit
def _length(p_lens, stride, token, width):
    """Load the number of valid columns of a token's row of indices, int32."""
    length = tl.load(p_lens + token * stride)
    return tl.minimum(tl.maximum(length, 0), width).to(tl.int32)


@triton.jit
def _block_slots(block, end, window_blocks, window_row, extra_row, BLOCK_N: tl.constexpr):
    """Load int32 slots `[BLOCK_N]` of a block of keys, in the cache that the block belongs to; -1 from `end` on."""
    p_window, window_stride, window_length, window_capacity = window_row
    p_extra, extra_stride, extra_length, extra_capacity = extra_row
    first = block < window_blocks
    o_column = (block - tl.where(first, 0, window_blocks)) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Selected as integers: a choice between these pointers does not compile for AMD GPUs with Triton 3.6.
    return valid_slots(
        tl.where(first, p_window.to(tl.int64), p_extra.to(tl.int64)).to(p_window.dtype),
        tl.where(first, window_stride, extra_stride),
        o_column,
        tl.where(block < end, tl.where(first, window_length, extra_length), 0),
        tl.where(first, window_capacity, extra_capacity),
    )


@triton.jit
def _fetch_block(
    first,
    slot,
    window,
    extra,
    WINDOW_PAGE: tl.constexpr,
    EXTRA_PAGE: tl.constexpr,
    FORMAT: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Load the bytes stored at `slot` `[BLOCK_N]` of the window cache, or of the extra one if not `first`."""
    p_window, window_page_stride, window_row_stride, window_dim_stride = window
    p_extra, extra_page_stride, extra_row_stride, extra_dim_stride = extra
    safe = tl.maximum(slot, 0)
    return fetch_keys(
        tl.where(first, p_window, p_extra),
        (
            tl.where(first, window_page_stride, extra_page_stride).to(tl.int64),
            tl.where(first, window_row_stride, extra_row_stride),
            tl.where(first, window_dim_stride, extra_dim_stride),
        ),
        slot,
        tl.where(first, safe // WINDOW_PAGE, safe // EXTRA_PAGE),
        tl.where(first, safe % WINDOW_PAGE, safe % EXTRA_PAGE),
        tl.where(first, WINDOW_PAGE, EXTRA_PAGE) * DATA_BYTES,
        FORMAT,
        D,
        BLOCK_D,
    )


class Tiles(NamedTuple):
    """Tiling of a launch.

    Attributes:
        block_h, block_n: heads and keys that a program takes at a time. warps: of a program.
        keys_first: scores are [keys, heads] and the output is [dims, heads]; else both are transposed.
        prefetch: load the next block of keys before working on this one.
    """

    block_h: int
    block_n: int
    warps: int
    keys_first: bool = False
    prefetch: bool = False


class Strides(NamedTuple):
    """Strides of the tensors of a call in elements; of the lse and of lengths and positions from token to token.

    Attributes:
        window, extra: strides of a page, a row and a dim; a byte cache has the first alone.
    """

    out: Any
    lse: Any
    q: Any
    window: Any
    extra: Any
    window_indices: Any
    extra_indices: Any
    window_lens: Any
    extra_lens: Any
    sink: Any
    positions: Any
    table: Any


class Shape(NamedTuple):
    """Compile-time sizes and formats of a launch.

    Attributes:
        heads, dim, block_dim: heads, their dims, and the power of two that holds these. fmt: of the caches.
        window_page, extra_page: tokens in a page.
        dtype: of the operands of both GEMMs, which accumulate in float32. rounded: of attention's output.
        pdl: lets the combine kernel start early.
    """

    heads: int
    dim: int
    block_dim: int
    fmt: str
    window_page: int
    extra_page: int
    dtype: Any
    rounded: Any
    tiles: Tiles
    pdl: bool


@triton.jit(**CHANGING)
def sparse_mla_decode_kernel(
    outputs,  # out [T, H, D] or e4m3 [groups, T, K], see common.store_rows; lse [T, H] or None; scale; or `Partials`
    p_q,  # [T, H, D], e4m3 as uint8
    window,  # cache [P, page_bytes] uint8 or [P, S, D], and indices [T, W] int
    p_window_lens,  # [T] int
    extra,  # cache, and indices [T, K] int
    p_extra_lens,
    p_sink,  # [H] float32 or None
    p_kv_scale,  # [1] float32 or None
    p_positions,  # [T] int or None
    p_table,  # [max_pos, rope] float32 or None
    scale,  # of the scores, times log2(e)
    eps,  # of the query norm, None for queries that are normed and rotated
    splits,
    min_blocks,
    first_token,  # of this launch
    tokens,
    padded_tokens,
    strides,  # `Strides`
    max_pos,
    window_width,
    extra_width,
    window_capacity,  # slots in the cache
    extra_capacity,
    SHAPE: tl.constexpr,
    EPILOGUE: tl.constexpr,
):
    """Attend head block p % HEAD_BLOCKS of split p // HEAD_BLOCKS; the splits of a token are neighbours."""
    H: tl.constexpr = SHAPE.heads
    D: tl.constexpr = SHAPE.dim
    BLOCK_D: tl.constexpr = SHAPE.block_dim
    FORMAT: tl.constexpr = SHAPE.fmt
    WINDOW_PAGE: tl.constexpr = SHAPE.window_page
    EXTRA_PAGE: tl.constexpr = SHAPE.extra_page
    DTYPE: tl.constexpr = SHAPE.dtype
    BLOCK_H: tl.constexpr = SHAPE.tiles.block_h
    BLOCK_N: tl.constexpr = SHAPE.tiles.block_n
    KEYS_FIRST: tl.constexpr = SHAPE.tiles.keys_first
    PREFETCH: tl.constexpr = SHAPE.tiles.prefetch
    HEAD_BLOCKS: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    KEY_AXIS: tl.constexpr = 0 if KEYS_FIRST else 1
    HEAD_AXIS: tl.constexpr = 1 - KEY_AXIS
    p_out, p_lse, p_scale = outputs
    p_window_cache, p_window_indices = window
    p_extra_cache, p_extra_indices = extra
    if SHAPE.pdl:
        tl.extra.cuda.gdc_launch_dependents()
    split = tl.program_id(0) // HEAD_BLOCKS
    token = (first_token + split // splits).to(tl.int64)
    first_head = tl.program_id(0) % HEAD_BLOCKS * BLOCK_H
    o_head = first_head + tl.arange(0, BLOCK_H)
    m_head = o_head < H
    rope = Rope(p_positions, strides.positions, p_table, strides.table, max_pos)

    window_length = _length(p_window_lens, strides.window_lens, token, window_width)
    extra_length = _length(p_extra_lens, strides.extra_lens, token, extra_width)
    window_blocks = tl.cdiv(window_length, BLOCK_N)
    blocks = window_blocks + tl.cdiv(extra_length, BLOCK_N)
    # Programs beyond the splits of a token have no blocks.
    own_splits = tl.maximum(tl.minimum(splits, tl.cdiv(blocks, min_blocks)), 1)
    begin = blocks * tl.minimum(split % splits, own_splits) // own_splits
    end = blocks * tl.minimum(split % splits + 1, own_splits) // own_splits
    p_window_row = p_window_indices + token * strides.window_indices[0]
    window_row = p_window_row, strides.window_indices[1], window_length, window_capacity
    p_extra_row = p_extra_indices + token * strides.extra_indices[0]
    extra_row = p_extra_row, strides.extra_indices[1], extra_length, extra_capacity
    window = p_window_cache, strides.window[0], strides.window[1], strides.window[2]
    extra = p_extra_cache, strides.extra[0], strides.extra[1], strides.extra[2]

    top = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    if KEYS_FIRST:
        acc = tl.zeros((BLOCK_D, BLOCK_H), tl.float32)
    else:
        acc = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)

    slot = _block_slots(begin, end, window_blocks, window_row, extra_row, BLOCK_N)
    live = slot >= 0
    if PREFETCH:
        stored = _fetch_block(begin < window_blocks, slot, window, extra, WINDOW_PAGE, EXTRA_PAGE, FORMAT, D, BLOCK_D)
        slot = _block_slots(begin + 1, end, window_blocks, window_row, extra_row, BLOCK_N)

    # Queries are loaded after the first keys have been requested.
    p_q += token * strides.q[0] + o_head.to(tl.int64) * strides.q[1]
    heads = p_q, strides.q[2]
    if eps is not None:
        # A branch, so that the compiler does not choose the layout of the keys by how queries are rotated: it would
        # store every key twice.
        q = tl.zeros((BLOCK_H, BLOCK_D), DTYPE)
        if begin < end:
            q = load_queries(heads, m_head, token, rope, eps, DTYPE, D, BLOCK_D, EPILOGUE.rope)
    else:
        q = load_queries(heads, m_head, token, rope, eps, DTYPE, D, BLOCK_D, EPILOGUE.rope)
    if KEYS_FIRST:
        q = tl.trans(q)
    if PREFETCH:
        k = decode_keys(stored, p_kv_scale, FORMAT, DTYPE)
    for block in tl.range(begin, end, num_stages=1):
        fetched = block + 1 if PREFETCH else block
        stored = _fetch_block(fetched < window_blocks, slot, window, extra, WINDOW_PAGE, EXTRA_PAGE, FORMAT, D, BLOCK_D)
        fetched_live = slot >= 0
        slot = _block_slots(fetched + 1, end, window_blocks, window_row, extra_row, BLOCK_N)
        if not PREFETCH:
            k = decode_keys(stored, p_kv_scale, FORMAT, DTYPE)
            live = fetched_live

        # [BLOCK_N, BLOCK_H] if KEYS_FIRST, else [BLOCK_H, BLOCK_N]
        if KEYS_FIRST:
            scores = tl.dot(k, q, input_precision="ieee")
        else:
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = tl.where(tl.expand_dims(live, HEAD_AXIS), scores * scale, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, KEY_AXIS))
        # -inf - -inf is NaN: a head without keys so far is shifted by zero.
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        rescale = tl.exp2(top - shift)
        weights = tl.exp2(scores - tl.expand_dims(shift, KEY_AXIS))
        total = total * rescale + tl.sum(weights, KEY_AXIS)
        acc *= tl.expand_dims(rescale, KEY_AXIS)
        if KEYS_FIRST:
            acc = tl.dot(tl.trans(k), weights.to(DTYPE), acc, input_precision="ieee")
        else:
            acc = tl.dot(weights.to(DTYPE), k, acc, input_precision="ieee")
        top = new_top
        if PREFETCH:
            k = decode_keys(stored, p_kv_scale, FORMAT, DTYPE)
            live = fetched_live

    factor, lse = partial_softmax(top, total)
    # [BLOCK_H, BLOCK_D]
    rows = tl.trans(acc * tl.expand_dims(factor, KEY_AXIS)) if KEYS_FIRST else acc * tl.expand_dims(factor, KEY_AXIS)
    if EPILOGUE.split:
        o_row = split.to(tl.int64) * H + o_head
        tl.store(p_lse + o_row, lse, mask=m_head)
        if begin < end:
            o_dim = tl.arange(0, BLOCK_D)
            m_out = m_head[:, None] & (o_dim < D)[None, :]
            tl.store(p_out + o_row[:, None] * D + o_dim[None, :], rows, mask=m_out)
    else:
        # Computed as the combine kernel does for one split, so that the bits are equal.
        factor, lse = finish_softmax(lse, tl.where(total == 0, 0.0, 1.0), p_sink, strides.sink, o_head, m_head)
        if p_lse is not None:
            tl.store(p_lse + token * strides.lse + o_head, lse, mask=m_head)
        rows = (rows * factor[:, None]).to(SHAPE.rounded)
        out = OutputRows(p_out, strides.out, p_scale, tokens, padded_tokens)
        rotate_and_store_rows(rows, out, token, first_head, rope, H, D, EPILOGUE)


def choose_tiles(gpu: Gpu, heads: int, dtype: torch.dtype) -> Tiles:
    """Return tiles for `heads` heads and operands of `dtype` that fit the GPU's shared memory."""
    if dtype is torch.float32:
        return Tiles(16, 16, 4)
    if gpu.backend == "cuda" and gpu.capability // 10 in (9, 10):
        if heads <= 16:
            return Tiles(16, 64, 8, prefetch=True)
        return Tiles(32, 64, 8, keys_first=True, prefetch=True) if heads <= 32 else Tiles(64, 64, 8)
    if heads <= 16:
        return Tiles(16, 32, 4, prefetch=True)
    if gpu.backend == "hip":
        return Tiles(32, 16, 4, prefetch=True) if heads <= 32 else Tiles(64, 16, 8, prefetch=True)
    return Tiles(32, 32, 8, keys_first=True, prefetch=True)


class Problem(NamedTuple):
    """Sizes and formats of a call, tokens apart.

    Attributes:
        heads, value_dim: of the outputs.
        widths: columns of the rows of slots of each cache. dtype: of the operands of the GEMMs.
        invariant: whether the bits of a token must not depend on the batch. latent: whether values are a part of keys.
    """

    heads: int
    value_dim: int
    widths: tuple[int, ...]
    dtype: torch.dtype
    invariant: bool = False
    latent: bool = False


class DecodePlan(NamedTuple):
    """The launches of a call: tiles, blocks of heads, splits of keys, and whether the combine kernel starts early."""

    tiles: Tiles
    head_blocks: int
    split: SplitPlan
    pdl: bool

    @property
    def variant(self) -> tuple[Any, ...]:
        """The plan without its grids."""
        return self.tiles, self.split.variant, self.pdl

    def grid(self, tokens: int) -> tuple[int]:
        """Return the grid of a launch over `tokens` tokens."""
        return (tokens * self.head_blocks * self.split.splits,)


def problem_of(call: DecodeCall) -> Problem:
    """Return the sizes and formats of a call."""
    _, heads, head_dim = call.q.shape
    widths = tuple(keys.indices.shape[1] for keys in call.caches)
    dtype = operand_dtype(call.q, call.window.pages(call.cache_format), call.cache_format)
    return Problem(heads, head_dim, widths, dtype, bool(call.batch_invariant))


def latent_problem_of(op: LatentDecodeArguments) -> Problem:
    """Return the sizes and formats of a call with values that are a part of its keys."""
    dtype = operand_dtype(op.q, op.k_cache, "plain")
    return Problem(op.q.shape[1], op.value_dim, (op.indices.shape[1],), dtype, latent=True)


@functools.lru_cache(1024)
def plan(problem: Problem, tokens: int, gpu: Gpu, splits: int = 0, tiles: Tiles | None = None) -> DecodePlan:
    """Return the launches of a call of `tokens` tokens. `splits` and `tiles` overrule what is chosen for the GPU."""
    choose = choose_latent_tiles if problem.latent else choose_tiles
    tiles = tiles or choose(gpu, problem.heads, problem.dtype)
    head_blocks, blocks = (
        cdiv(problem.heads, tiles.block_h),
        sum(cdiv(width, tiles.block_n) for width in problem.widths),
    )
    shape = tokens, problem.heads, problem.value_dim
    split = split_plan(shape, head_blocks, blocks, tiles.block_n, gpu, splits, problem.invariant)
    return DecodePlan(tiles, head_blocks, split, pdl=not problem.latent and split.splits > 1 and supports_pdl(gpu))


def launch(
    call: DecodeCall, gpu: Gpu, splits: int = 0, into: Outputs | None = None, tiles: Tiles | None = None
) -> tuple[Tensor, Tensor]:
    """Run `call` on `gpu` and return its outputs, in `into` or newly allocated.

    `splits` and `tiles` overrule the plan.
    """
    q, fused = call.q, call.fused
    tokens, heads, head_dim = q.shape
    into = into or outputs_for(q, fused)
    if tokens * heads == 0:
        return into.pair()
    pages = [keys.pages(call.cache_format) for keys in call.caches]
    problem = problem_of(call)
    tiles, _, split, pdl = planned = plan(problem, tokens, gpu, splits, tiles)
    partials = new_partials(split, heads, head_dim, q)
    _, position_stride, _, table_strides, _ = fused.rope()
    window, extra = call.caches
    page_strides = [(*cache.stride(), 0, 0)[:3] for cache in pages]  # pages of bytes have two dims, pages of rows three
    sink_stride = 0 if call.sink is None else call.sink.stride(0)
    strides = Strides(
        *(into.strides(), into.lse_stride(), q.stride()),
        *(page_strides[0], page_strides[1]),
        *(window.indices.stride(), extra.indices.stride()),
        *(window.len_stride(), extra.len_stride()),
        *(sink_stride, position_stride, table_strides),
    )
    sizes = heads, head_dim, max(16, triton.next_power_of_2(head_dim))
    dtypes = DTYPES[problem.dtype], DTYPES[output_dtype(q)]
    shape = Shape(*sizes, call.cache_format, window.block_size, extra.block_size, *dtypes, tiles, pdl)
    for first in range(0, tokens, split.tokens):
        end = min(tokens, first + split.tokens)
        counts = split.splits, split.min_blocks, first, tokens, into.padded_tokens()
        launch_kernel(
            sparse_mla_decode_kernel,
            planned.grid(end - first),
            *decode_arguments(call, partials or into, pages, problem.widths, strides, counts, call.kv_scale),
            SHAPE=shape,
            EPILOGUE=fused.epilogue(split=partials is not None),
            num_warps=tiles.warps,
            # A contracted multiply and add rounds once where the separate ops round twice.
            enable_fp_fusion=False,
        )
        if partials is not None:
            combine_splits(into, partials, call.sink, fused, output_dtype(q), (first, end), pdl)
    return into.pair()


@triton.jit(
    do_not_specialize=["splits", "min_blocks", "first_token", "width", "slots"],
    do_not_specialize_on_alignment=["p_lens"],
)
def sparse_mla_decode_latent_kernel(
    p_out,  # [T, H, V], contiguous; with SPLIT [tokens of this launch, splits, H, V] float32
    p_lse,  # [T, H] float32, contiguous; with SPLIT [tokens of this launch, splits, H] in base 2
    p_q,  # [T, H, D]
    p_cache,  # [P, PAGE, D]
    p_indices,  # [>= T, width] int
    p_lens,  # [>= T] int
    scale,  # of the scores, times log2(e)
    splits,
    min_blocks,  # of keys in a split
    first_token,  # of this launch
    q_strides,
    cache_strides,
    index_strides,
    len_stride,
    width,
    slots,
    H: tl.constexpr,
    V: tl.constexpr,
    R: tl.constexpr,  # D - V
    PAGE: tl.constexpr,
    DTYPE: tl.constexpr,  # of the operands of both GEMMs, which accumulate in float32
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Attend split p % splits of head block p // splits % HEAD_BLOCKS of a token."""
    HEAD_BLOCKS: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    split = tl.program_id(0) % splits
    item = tl.program_id(0) // splits
    local = (item // HEAD_BLOCKS).to(tl.int64)
    token = first_token + local
    o_head = item % HEAD_BLOCKS * BLOCK_H + tl.arange(0, BLOCK_H)
    m_head = o_head < H
    o_value, o_rest = tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_R)
    m_value, m_rest = (o_value < V)[None, :], (o_rest < R)[None, :]
    length = tl.minimum(tl.maximum(tl.load(p_lens + token * len_stride), 0), width).to(tl.int32)
    blocks = tl.cdiv(length, BLOCK_N)
    own_splits = tl.minimum(splits, tl.cdiv(blocks, min_blocks))
    size = tl.cdiv(blocks, tl.maximum(own_splits, 1))
    begin = split * size * BLOCK_N
    end = tl.minimum(begin + size * BLOCK_N, length)

    p_heads = (p_q + token * q_strides[0] + o_head.to(tl.int64) * q_strides[1])[:, None]
    # [BLOCK_H, BLOCK_V] and [BLOCK_H, BLOCK_R]
    q = tl.load(p_heads + (o_value * q_strides[2])[None, :], mask=m_head[:, None] & m_value, other=0.0).to(DTYPE)
    p_q_rest = p_heads + ((V + o_rest) * q_strides[2])[None, :]
    q_rest = tl.load(p_q_rest, mask=m_head[:, None] & m_rest, other=0.0).to(DTYPE)
    top = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, BLOCK_V), tl.float32)
    for start in range(begin, end, BLOCK_N):
        o_column = start + tl.arange(0, BLOCK_N)
        p_column = p_indices + token * index_strides[0] + o_column.to(tl.int64) * index_strides[1]
        slot = tl.load(p_column, mask=o_column < end, other=-1).to(tl.int64)
        live = (slot >= 0) & (slot < slots)
        slot = tl.where(live, slot, 0)
        p_key = (p_cache + slot // PAGE * cache_strides[0] + slot % PAGE * cache_strides[1])[:, None]
        # [BLOCK_N, BLOCK_V] and [BLOCK_N, BLOCK_R]
        k = tl.load(p_key + (o_value * cache_strides[2])[None, :], mask=live[:, None] & m_value, other=0.0).to(DTYPE)
        p_k_rest = p_key + ((V + o_rest) * cache_strides[2])[None, :]
        k_rest = tl.load(p_k_rest, mask=live[:, None] & m_rest, other=0.0).to(DTYPE)
        # [BLOCK_H, BLOCK_N]
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision="ieee")
        scores = tl.where(live[None, :], scores * scale, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # -inf - -inf is NaN: a head without keys so far is shifted by zero.
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        rescale = tl.exp2(top - shift)
        weights = tl.exp2(scores - shift[:, None])
        total = total * rescale + tl.sum(weights, 1)
        acc = tl.dot(weights.to(DTYPE), k, acc * rescale[:, None], input_precision="ieee")
        top = new_top
    if SPLIT:
        factor, lse = partial_softmax(top, total)
        o_row = (local * splits + split) * H + o_head
    else:
        factor, lse = finish_softmax(top, total, None, 0, o_head, m_head)
        o_row = token * H + o_head
    tl.store(p_lse + o_row, lse, mask=m_head)
    out = (acc * factor[:, None]).to(p_out.dtype.element_ty)
    tl.store(p_out + o_row[:, None] * V + o_value[None, :], out, mask=m_head[:, None] & m_value)


def choose_latent_tiles(gpu: Gpu, heads: int, dtype: torch.dtype) -> Tiles:
    """Return tiles of the latent kernel for `heads` heads and operands of `dtype`."""
    tiles = choose_tiles(gpu, heads, dtype)
    if gpu.capability // 10 == 10 and tiles.block_h == 64:
        # More operands go through shared memory there: 64 keys would need 345 KiB of 227.
        return tiles._replace(block_n=32)
    return tiles


def why_unsupported_sparse_mla_decode_latent(op: LatentDecodeArguments) -> str:
    """Return why the kernel does not support a call, "" if it does."""
    dim, slots = op.q.shape[2], op.k_cache.shape[0] * op.block_size
    if op.value_dim > MAX_VALUE_DIM or dim - op.value_dim > MAX_VALUE_DIM:
        return f"at most {MAX_VALUE_DIM} dims are values and as many are not, these are {op.value_dim} of {dim}"
    if slots >= MAX_SLOTS:
        return f"caches have fewer than {MAX_SLOTS} slots, this one has {slots}"
    return ""


def sparse_mla_decode_latent(
    op: LatentDecodeArguments, tiles: Tiles | None = None, splits: int = 0
) -> tuple[Tensor, Tensor]:
    """Launch `sparse_mla_decode_latent`. Weights are rounded to the dtype of the keys; sums are float32.

    A repeated call gives the same bits. `tiles` and `splits` overrule what is chosen for the GPU.
    """
    q, k_cache, indices, lens = op.q, op.k_cache, op.indices, op.lens
    tokens, heads, head_dim = q.shape
    values = q[..., : op.value_dim]
    into = new_outputs(values)
    if tokens * heads == 0:
        return into.pair()
    problem = latent_problem_of(op)
    tiles, _, split, pdl = planned = plan(problem, tokens, gpu_of(q.device), splits, tiles)
    partials = new_partials(split, heads, op.value_dim, q)
    for first in range(0, tokens, split.tokens):
        end = min(tokens, first + split.tokens)
        launch_kernel(
            sparse_mla_decode_latent_kernel,
            planned.grid(end - first),
            *(partials or into)[:2],
            q,
            k_cache,
            indices,
            lens,
            op.scale * LOG2_E.value,
            split.splits,
            split.min_blocks,
            first,
            q.stride(),
            k_cache.stride(),
            indices.stride(),
            lens.stride(0),
            indices.shape[1],
            k_cache.shape[0] * op.block_size,
            H=heads,
            V=op.value_dim,
            R=head_dim - op.value_dim,
            PAGE=op.block_size,
            DTYPE=DTYPES[problem.dtype],
            BLOCK_H=tiles.block_h,
            BLOCK_N=tiles.block_n,
            BLOCK_V=max(16, triton.next_power_of_2(op.value_dim)),
            BLOCK_R=max(16, triton.next_power_of_2(head_dim - op.value_dim)),
            SPLIT=partials is not None,
            num_warps=tiles.warps,
        )
        if partials is not None:
            combine_splits(into, partials, None, NOT_FUSED, output_dtype(q), (first, end), pdl)
    return into.pair()
