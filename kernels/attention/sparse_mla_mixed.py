"""`sparse_mla_mixed`: sparse MLA over a window and entries, each cache in its format, on any GPU that Triton supports.

On sm_90, more than 32 heads of the model's formats run sparse_mla_mixed_sm90.py.

A program attends BLOCK_H heads of one token to its split of the token's keys, BLOCK_N of them at a time: a loop over
blocks of the window, then one over blocks of entries. Rows are decoded to exact bfloat16, or stay as plain rows are.
The grid follows from shapes; the splits of a row divide its blocks of keys evenly, and a second kernel combines them
(split_combine.py). A repeated call gives the same bits.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...layout import GRIDS, byte_pages, cdiv, page_layout
from ...reference.attention.sparse_mla_mixed import MixedArguments
from ..device.grid_format import dequantize
from ..host.gpu import Gpu, gpu_of, sm90_module
from ..host.launch import DTYPES, launch_kernel
from ..host.pdl import supports_pdl
from .common import NOT_FUSED, Outputs, decode_keys, fetch_keys
from .sparse_mla_decode_triton import DecodePlan, Tiles
from .split_combine import LOG2_E, combine_splits, finish_softmax, new_partials, partial_softmax, split_plan

MAX_DIM = 512
MAX_SLOTS = 2**31


class Rows(NamedTuple):
    """Rows of a cache, as kernels take them: tensors, strides, columns of slots and slots in the cache.

    Attributes:
        cache_strides: of a page, a row and a channel; a cache of bytes has the first alone.
    """

    p_cache: Any
    p_slots: Any
    cache_strides: Any
    slot_strides: Any
    width: Any
    capacity: Any


class RowShape(NamedTuple):
    """Compile-time format of a cache.

    Attributes:
        fmt: one of `layout.ROW_FORMATS`. page: rows of a page.
        data, scale: bytes of a row in a format of pages. quantised: whether the format is one of `layout.GRIDS`.
    """

    fmt: str
    page: int
    data: int = 0
    scale: int = 0
    quantised: bool = False


class Shape(NamedTuple):
    """Compile-time sizes of a launch.

    Attributes:
        heads, dim, block_dim: heads, channels, and the power of two that holds these. tiles: see `Tiles`.
        dtype: of the operands of both GEMMs, which accumulate in float32. rounded: of the output.
        split: store partial results, which the combine kernel finishes. pdl: lets that kernel start early.
    """

    heads: int
    dim: int
    block_dim: int
    tiles: Tiles
    dtype: Any
    rounded: Any
    split: bool
    pdl: bool


@triton.jit
def _fetch_block(rows, token, block, end, ROW: tl.constexpr, SHAPE: tl.constexpr):
    """Load the stored bytes of a block of keys, and a mask of the keys there are; none from block `end` on."""
    BLOCK_D: tl.constexpr = SHAPE.block_dim
    FORMAT: tl.constexpr = ROW.fmt
    o_column = block * SHAPE.tiles.block_n + tl.arange(0, SHAPE.tiles.block_n)
    p_slot = rows.p_slots + token * rows.slot_strides[0] + o_column.to(tl.int64) * rows.slot_strides[1]
    slot = tl.load(p_slot, mask=(o_column < rows.width) & (block < end), other=-1)
    live = (slot >= 0) & (slot < rows.capacity)
    slot = tl.where(live, slot, -1).to(tl.int32)
    safe = tl.maximum(slot, 0)
    page, offset = safe // ROW.page, safe % ROW.page
    if ROW.quantised:
        # Bytes of the padding of BLOCK_D are 0, and so are its channels.
        BYTES: tl.constexpr = BLOCK_D * ROW.data // SHAPE.dim
        SCALES: tl.constexpr = BLOCK_D * ROW.scale // SHAPE.dim
        p_page = rows.p_cache + page.to(tl.int64) * rows.cache_strides[0]
        o_byte, o_scale = tl.arange(0, BYTES)[None, :], tl.arange(0, SCALES)[None, :]
        p_data = (p_page + offset * ROW.data)[:, None] + o_byte
        data = tl.load(p_data, mask=live[:, None] & (o_byte < ROW.data), other=0)
        p_scale = (p_page + (ROW.page * ROW.data + offset * ROW.scale))[:, None] + o_scale
        stored = data, tl.load(p_scale, mask=live[:, None] & (o_scale < ROW.scale), other=0)
    else:
        scale_start = ROW.page * ROW.data
        stored = fetch_keys(
            rows.p_cache, rows.cache_strides, slot, page, offset, scale_start, FORMAT, SHAPE.dim, BLOCK_D
        )
    return stored, live


@triton.jit
def _decode_block(stored, ROW: tl.constexpr, SHAPE: tl.constexpr):
    """Convert stored bytes to keys `[BLOCK_N, BLOCK_D]` in the dtype of operands, zeros for no key."""
    FORMAT: tl.constexpr = ROW.fmt
    if ROW.quantised:
        k = dequantize(stored[0], stored[1], FORMAT).to(SHAPE.dtype)
    else:
        k = decode_keys(stored, None, FORMAT, SHAPE.dtype)
    return k


@triton.jit
def _attend_blocks(q, rows, token, begin, end, state, scale, ROW: tl.constexpr, SHAPE: tl.constexpr):
    """Attend blocks of keys, and return the new state: top score, sum of weights, and weighted values.

    The rows of the next block are loaded before the GEMMs of a block and decoded after them. Keys that a loop carries
    pass through shared memory once for both GEMMs; decoded next to a GEMM they would be decoded for each, and on NVIDIA
    GPUs Triton multiplies joined values wrong if fewer than 32 keys are summed.
    """
    top, total, acc = state
    KEY_AXIS: tl.constexpr = 0 if SHAPE.tiles.keys_first else 1
    HEAD_AXIS: tl.constexpr = 1 - KEY_AXIS
    stored, live = _fetch_block(rows, token, begin, end, ROW, SHAPE)
    k = _decode_block(stored, ROW, SHAPE)
    for block in tl.range(begin, end, num_stages=1):
        stored, next_live = _fetch_block(rows, token, block + 1, end, ROW, SHAPE)
        # [BLOCK_N, BLOCK_H] with keys first, else [BLOCK_H, BLOCK_N]
        if SHAPE.tiles.keys_first:
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
        if SHAPE.tiles.keys_first:
            acc = tl.dot(tl.trans(k), weights.to(SHAPE.dtype), acc, input_precision="ieee")
        else:
            acc = tl.dot(weights.to(SHAPE.dtype), k, acc, input_precision="ieee")
        top, live = new_top, next_live
        k = _decode_block(stored, ROW, SHAPE)
    return top, total, acc


@triton.jit(do_not_specialize=["splits", "first_token"])
def sparse_mla_mixed_kernel(
    p_out,  # [T, H, D], contiguous; or partial results [tokens of this launch, splits, H, D] float32
    p_lse,  # None; or partial results [tokens of this launch, splits, H] in base 2
    p_q,  # [T, H, D]
    window,  # `Rows`
    entries,  # `Rows`, or None
    p_sink,  # [H] float32
    scale,  # of the scores, times log2(e)
    splits,
    first_token,  # of this launch
    q_strides,
    sink_stride,
    WINDOW: tl.constexpr,  # `RowShape`
    ENTRIES: tl.constexpr,
    SHAPE: tl.constexpr,  # `Shape`
):
    """Attend head block p % HEAD_BLOCKS of split p // HEAD_BLOCKS; the splits of a token are neighbours."""
    # Triton 3.6 loses the constants of tuples within a tuple at a loop or branch, unless the outer one is built here.
    window = Rows(*window)
    if entries is not None:
        entries = Rows(*entries)
    H: tl.constexpr = SHAPE.heads
    D: tl.constexpr = SHAPE.dim
    BLOCK_H: tl.constexpr = SHAPE.tiles.block_h
    BLOCK_N: tl.constexpr = SHAPE.tiles.block_n
    BLOCK_D: tl.constexpr = SHAPE.block_dim
    HEAD_BLOCKS: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    KEY_AXIS: tl.constexpr = 0 if SHAPE.tiles.keys_first else 1
    if SHAPE.pdl:
        tl.extra.cuda.gdc_launch_dependents()
    split = tl.program_id(0) // HEAD_BLOCKS
    token = (first_token + split // splits).to(tl.int64)
    o_head = tl.program_id(0) % HEAD_BLOCKS * BLOCK_H + tl.arange(0, BLOCK_H)
    o_dim = tl.arange(0, BLOCK_D)[None, :]
    m_head = o_head < H
    m_out = m_head[:, None] & (o_dim < D)
    window_blocks = tl.cdiv(window.width, BLOCK_N)
    blocks = window_blocks
    if entries is not None:
        blocks += tl.cdiv(entries.width, BLOCK_N)
    begin = blocks * (split % splits) // splits
    end = blocks * (split % splits + 1) // splits

    p_head = p_q + token * q_strides[0] + o_head.to(tl.int64) * q_strides[1]
    q = tl.load(p_head[:, None] + o_dim * q_strides[2], mask=m_out, other=0.0).to(SHAPE.dtype)
    top = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    if SHAPE.tiles.keys_first:
        q = tl.trans(q)
        acc = tl.zeros((BLOCK_D, BLOCK_H), tl.float32)
    else:
        acc = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
    state = top, total, acc
    state = _attend_blocks(q, window, token, begin, tl.minimum(end, window_blocks), state, scale, WINDOW, SHAPE)
    if entries is not None:
        begin = tl.maximum(begin - window_blocks, 0)
        state = _attend_blocks(q, entries, token, begin, end - window_blocks, state, scale, ENTRIES, SHAPE)
    top, total, acc = state

    factor, lse = partial_softmax(top, total)
    acc *= tl.expand_dims(factor, KEY_AXIS)
    # [BLOCK_H, BLOCK_D]
    out = tl.trans(acc) if SHAPE.tiles.keys_first else acc
    if SHAPE.split:
        o_row = split.to(tl.int64) * H + o_head
        tl.store(p_lse + o_row, lse, mask=m_head)
    else:
        # Computed as the combine kernel does for one split, so that the bits are equal.
        o_row = token * H + o_head
        factor, _ = finish_softmax(lse, tl.where(total == 0, 0.0, 1.0), p_sink, sink_stride, o_head, m_head)
        out = (out * factor[:, None]).to(SHAPE.rounded)
    tl.store(p_out + o_row[:, None] * D + o_dim, out, mask=m_out)


def choose_tiles(gpu: Gpu, dtype: torch.dtype) -> Tiles:
    """Return tiles for operands of `dtype` that fit registers and shared memory of the GPU."""
    if dtype is torch.float32 or gpu.backend == "hip":
        return Tiles(16, 16, 4)
    # More heads spill on NVIDIA GPUs.
    return Tiles(16, 64, 8)


class Problem(NamedTuple):
    """Sizes and formats of a call, tokens apart.

    Attributes:
        heads, dim: of the outputs.
        widths: columns of the rows of slots of each cache. dtype: of the operands of the GEMMs.
    """

    heads: int
    dim: int
    widths: tuple[int, ...]
    dtype: torch.dtype


def operand_dtype(a: MixedArguments) -> torch.dtype:
    """Return the dtype of the operands of both GEMMs: that of the queries if all keys have it, else float32."""
    caches = [(a.window, a.window_format)] + ([] if a.entries is None else [(a.entries, a.entry_format)])
    keys = {cache.dtype if fmt == "plain" else torch.bfloat16 for cache, fmt in caches}
    return a.q.dtype if keys == {a.q.dtype} else torch.float32


def problem_of(a: MixedArguments) -> Problem:
    """Return the sizes and formats of a call."""
    widths = tuple(slots.shape[1] for slots in (a.window_slots, a.entry_slots) if slots is not None)
    return Problem(a.q.shape[1], a.q.shape[2], widths, operand_dtype(a))


@functools.lru_cache(1024)
def plan(problem: Problem, tokens: int, gpu: Gpu, splits: int = 0, tiles: Tiles | None = None) -> DecodePlan:
    """Return the launches of a call of `tokens` tokens. `splits` and `tiles` overrule what is chosen for the GPU."""
    tiles = tiles or choose_tiles(gpu, problem.dtype)
    head_blocks = cdiv(problem.heads, tiles.block_h)
    blocks = sum(cdiv(width, tiles.block_n) for width in problem.widths)
    shape = tokens, problem.heads, problem.dim
    split = split_plan(shape, head_blocks, blocks, tiles.block_n, gpu, splits)
    return DecodePlan(tiles, head_blocks, split, pdl=split.splits > 1 and supports_pdl(gpu))


def _rows(cache: Tensor, slots: Tensor, fmt: str, block_size: int, channels: int) -> tuple[Rows, RowShape]:
    """Return a cache and the rows of it to attend as the kernel takes them."""
    page = page_layout(fmt, channels)
    pages = cache if page is None else byte_pages(cache, fmt, block_size, head_dim=channels)
    strides = (*pages.stride(), 0, 0)[:3]
    rows = Rows(pages, slots, strides, slots.stride(), slots.shape[1], pages.shape[0] * block_size)
    if page is None:
        return rows, RowShape(fmt, block_size)
    return rows, RowShape(fmt, block_size, page.data, page.scale, fmt in GRIDS)


def launch(a: MixedArguments, gpu: Gpu, splits: int = 0, tiles: Tiles | None = None) -> Tensor:
    """Run a call on `gpu`. `splits` and `tiles` overrule the plan."""
    q = a.q
    tokens, heads, dim = q.shape
    out = q.new_empty(q.shape)
    if out.numel() == 0:
        return out
    window, window_shape = _rows(a.window, a.window_slots, a.window_format, a.window_block_size, dim)
    entries, entry_shape = None, RowShape("", 1)
    if a.entries is not None and a.entry_slots is not None:
        entries, entry_shape = _rows(a.entries, a.entry_slots, a.entry_format, a.entry_block_size, dim)
    problem = problem_of(a)
    tiles, _, split, pdl = planned = plan(problem, tokens, gpu, splits, tiles)
    partials = new_partials(split, heads, dim, q)
    block_dim = max(16, triton.next_power_of_2(dim))
    for first in range(0, tokens, split.tokens):
        end = min(tokens, first + split.tokens)
        launch_kernel(
            sparse_mla_mixed_kernel,
            planned.grid(end - first),
            out if partials is None else partials.values,
            None if partials is None else partials.lse,
            q,
            window,
            entries,
            a.sink,
            a.scale * LOG2_E.value,
            split.splits,
            first,
            q.stride(),
            a.sink.stride(0),
            WINDOW=window_shape,
            ENTRIES=entry_shape,
            SHAPE=Shape(
                heads, dim, block_dim, tiles, DTYPES[problem.dtype], DTYPES[q.dtype], partials is not None, pdl
            ),
            num_warps=tiles.warps,
        )
        if partials is not None:
            combine_splits(Outputs(out, None), partials, a.sink, NOT_FUSED, q.dtype, (first, end), pdl)
    return out


def sparse_mla_mixed(a: MixedArguments) -> Tensor:
    """Launch `sparse_mla_mixed`. Weights are rounded to the dtype of the keys; sums are float32."""
    gpu = gpu_of(a.q.device)
    sm90 = sm90_module(gpu, "attention.sparse_mla_mixed_sm90")
    if sm90 is not None and not sm90.why_unsupported(a):
        out: Tensor = sm90.launch(a, gpu)
        return out
    return launch(a, gpu)


def why_unsupported_sparse_mla_mixed(a: MixedArguments) -> str:
    """Return why the kernel does not support a call, "" if it does."""
    dim = a.q.shape[2]
    if isinstance(dim, int) and dim > MAX_DIM:
        return f"rows have {dim} channels, supported are 1 to {MAX_DIM}"
    caches = [(a.window, a.window_block_size)] + ([] if a.entries is None else [(a.entries, a.entry_block_size)])
    slots = max(cache.shape[0] * size for cache, size in caches)
    if slots >= MAX_SLOTS:
        return f"caches have fewer than {MAX_SLOTS} slots, this one has {slots}"
    return ""
