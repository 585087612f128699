"""Sparse MLA decode on sm_90, in Gluon: blocks of 64 heads, bfloat16 queries, any of three formats of caches.

Both caches are `fp8_ds_mla` or bfloat16, or the window is mxfp8 and the other one nvfp4, as those of DeepSeek-V4.1.

A program attends 64 heads of one token to its split of the token's keys, window cache first, 64 keys at a time. Its
three warpgroups share two buffers of bfloat16 keys:

    producer  gathers 32 keys at a time into registers, dequantises them exactly, stores them swizzled; or copies rows
    left      scores, online softmax, weights to shared memory, dims 0 to 255 of the output
    right     addresses of the keys that are gathered next, and dims 256 to 511

Left and right each load half of the queries while the first keys are in flight, and each finishes its half of the dims.
Right works four blocks ahead of its GEMM: it reads the slots of both caches, stores where each key lies, and prefetches
the keys into L2. The register counts avoid spills in loops; with fewer than 160 for right, wgmma would serialise.

The launcher here serves the other sm_90 decode kernels, too. Experiments are in docs/kernel-notes/attention.md.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ... import layout
from ..hopper.gluon import FLAT, reinterpret, thread_barrier
from ..host.addresses import first_byte
from ..host.gpu import Gpu
from ..host.launch import launch_kernel
from ..host.pdl import pdl_option, supports_pdl
from .common import CHANGING, GRIDS, DecodeCall, Outputs, decode_arguments, outputs_for
from .kv_load_sm90 import (
    KeyAddresses,
    KeyIndices,
    copy_keys,
    load_slots,
    prefetch_block,
    produce_grid_keys,
    produce_keys,
    row_length,
    store_addresses,
)
from .prologue_epilogue_sm90 import (
    BLOCK_H,
    HALF,
    SWIZZLED,
    D,
    DecodeShape,
    DecodeStrides,
    HeadRows,
    Queries,
    angle_pointer,
    copy_queries,
    fetch_angles,
    fetch_queries,
    norm_factors,
    query_layout,
    rotate_queries,
    rotated_width,
    split_range,
    store_partial,
    store_rows,
)
from .split_combine import LN_2 as _LN_2
from .split_combine import LOG2_E as _LOG2_E
from .split_combine import combine_splits, new_partials, split_plan, warps_at_once

HEADS, KEYS = BLOCK_H.value, 64
MIN_HEADS = 33
"""Fewest heads per rank of this kernel; sparse_mla_decode_sm90_few_heads.py has fewer."""
RIGHT_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(160), gl.constexpr(144)
PAGE_ALIGN = 16
"""Alignment of pages in bytes: keys are loaded 16 bytes at a time."""

BLOCK_N = gl.constexpr(KEYS)
BUFFERS = gl.constexpr(2)
AHEAD = gl.constexpr(4)  # blocks from the one in the GEMM to the one whose slots are read
PLACES = gl.constexpr(8)  # of blocks whose addresses are stored: a power of two, more than AHEAD + 1
LOG2_E = gl.constexpr(_LOG2_E.value)
LN_2 = gl.constexpr(_LN_2.value)
COPY_ARRIVALS = gl.constexpr(128 + 1)  # one per thread of a warpgroup, and one for their stores

SCORES = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16]))
OUTPUT = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HALF.value, 16]))

QUERIES = gl.constexpr(query_layout(BLOCK_H.value))


class SharedTiles(NamedTuple):
    """Shared memory and barriers of a program.

    Attributes:
        q_tile: bfloat16 `[64, 512]`; keys: bfloat16 `[BUFFERS, 64, 512]`; weights_tile: bfloat16 `[64, 64]`.
        factors: float32 `[64]`, rescaling of the sums so far, at last 1 / denominator.
        head_factors: float32 `[64]`, score scales of normed heads, at last what the sink leaves of the output.
        ready, free: barriers of the buffers of keys; the others are named after the tile.
    """

    q_tile: Any
    keys: Any
    weights_tile: Any
    factors: Any
    head_factors: Any
    ready: Any
    free: Any
    weights_ready: Any
    weights_free: Any
    q_ready: Any


class BlocksOfKeys(NamedTuple):
    """Keys of a program: window and extra `KeyIndices`, first block of the extra cache, first block of the program."""

    window: Any
    extra: Any
    boundary: Any
    begin: Any


@gluon.jit
def _lane_sums(weights):
    """Return `[64, 8]`: sums over the part of a row that a thread holds."""
    return gl.sum(gl.reshape(weights, [BLOCK_H, BLOCK_N // 8, 8]), 1)


@gluon.jit
def _scores(q_tile, keys):
    """Start the scores of a block of keys."""
    zero = gl.zeros([BLOCK_H, BLOCK_N], gl.float32, SCORES)
    return warpgroup_mma(q_tile, keys.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _softmax(scores, live, acc, top, sums, number, scale, scales, tiles):
    """Store the weights of block `number` for both consumers, and rescale the sums so far."""
    if scales is not None:  # of each head, in shared memory: in registers they would be spilled
        scale = gl.expand_dims(scales.load(gl.SliceLayout(1, SCORES)), 1)
    scores = gl.where(gl.expand_dims(live, 0) > 0, scores * scale, float("-inf"))
    new_top = gl.maximum(top, gl.max(scores, 1))
    # -inf - -inf is NaN: a head without keys so far is shifted by zero.
    shift = gl.where(new_top == float("-inf"), 0.0, new_top)
    rescale = gl.exp2(top - shift)
    weights = gl.exp2(scores - gl.expand_dims(shift, 1))
    mbarrier.wait(tiles.weights_free, (number & 1) ^ 1)
    tiles.weights_tile.store(weights.to(gl.bfloat16))
    tiles.factors.store(rescale)
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(tiles.weights_ready, count=1)
    sums = sums * gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, sums.type.layout)), 1)
    acc = acc * gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, OUTPUT)), 1)
    return acc, new_top, sums + _lane_sums(weights)


@gluon.jit
def _left(
    queries, rows, scale, blocks, lives, tiles, PARTIAL: gl.constexpr, EPILOGUE: gl.constexpr, PLAIN: gl.constexpr
):
    """Run the first warpgroup: scores, softmax, the left half of the output."""
    keys, heads = tiles.keys, rows.heads
    if queries.eps is not None:
        rotated = fetch_queries(
            queries.p_q, queries.head_stride, heads, BLOCK_H, PARTIAL, QUERIES, 0, rotated_width(BLOCK_H, EPILOGUE.rope)
        )
        cos, sin = fetch_angles(queries.p_cos, rotated, EPILOGUE.rope)
    copy_queries(queries.p_q, queries.head_stride, tiles.q_tile, heads, 0, BLOCK_H // 2, PARTIAL)
    if queries.eps is not None:
        rotated = rotate_queries(rotated, cos, sin, EPILOGUE.rope)
    mbarrier.wait(tiles.q_ready, 0)
    scales = None if queries.eps is None else tiles.head_factors
    if queries.eps is not None:
        tiles.head_factors.store(norm_factors(tiles.q_tile, rotated, queries.eps, SCORES) * scale)
        fence_async_shared()
        thread_barrier()
    acc = gl.zeros([BLOCK_H, HALF], gl.float32, OUTPUT)
    top = gl.full([BLOCK_H], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    sums = _lane_sums(gl.zeros([BLOCK_H, BLOCK_N], gl.float32, SCORES))
    if blocks > 0:
        mbarrier.wait(tiles.ready.index(0), 0)
        if PLAIN:
            fence_async_shared()
        scores = _scores(tiles.q_tile, keys.index(0))
        live = lives.index(0).load(gl.SliceLayout(0, SCORES))
        scores = warpgroup_mma_wait(0, deps=[scores])
        for number in range(blocks - 1):
            buffer = number % BUFFERS
            following = (number + 1) % BUFFERS
            acc, top, sums = _softmax(scores, live, acc, top, sums, number, scale, scales, tiles)
            acc = warpgroup_mma(tiles.weights_tile, keys.index(buffer).slice(0, HALF, 1), acc, is_async=True)
            mbarrier.wait(tiles.ready.index(following), ((number + 1) // BUFFERS) & 1)
            if PLAIN:
                # Copies write through the generic proxy, wgmma reads through the asynchronous one.
                fence_async_shared()
            scores = _scores(tiles.q_tile, keys.index(following))
            live = lives.index((number + 1) % PLACES).load(gl.SliceLayout(0, SCORES))
            acc = warpgroup_mma_wait(1, deps=[acc])
            thread_barrier()
            mbarrier.arrive(tiles.free.index(buffer), count=1)
            scores = warpgroup_mma_wait(0, deps=[scores])
        acc, top, sums = _softmax(scores, live, acc, top, sums, blocks - 1, scale, scales, tiles)
        last = keys.index((blocks - 1) % BUFFERS).slice(0, HALF, 1)
        acc = warpgroup_mma(tiles.weights_tile, last, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
    total = gl.convert_layout(gl.sum(sums, 1), gl.SliceLayout(1, SCORES))
    o_head = gl.arange(0, BLOCK_H, gl.SliceLayout(1, SCORES))
    shift = gl.where(top == float("-inf"), 0.0, top)
    lse = gl.where(total == 0, float("-inf"), shift + gl.log2(total))
    factor = gl.where(total == 0, 0.0, 1.0 / total)
    mbarrier.wait(tiles.weights_free, (blocks & 1) ^ 1)
    tiles.factors.store(factor)
    if EPILOGUE.split:
        gl.store(rows.p_lse + o_head, lse, mask=o_head < heads)
    else:
        if rows.p_lse is not None:
            gl.store(rows.p_lse + o_head, gl.where(total == 0, float("inf"), lse * LN_2), mask=o_head < heads)
        if rows.p_sink is not None:
            # Computed as the combine kernel does for one split, so that the bits are equal.
            sink = gl.load(rows.p_sink + o_head, mask=o_head < heads, other=0.0)
            kept = 1.0 / (1.0 + gl.exp2(sink * LOG2_E - gl.where(total == 0, 0.0, lse)))
            tiles.head_factors.store(kept)
    thread_barrier()
    mbarrier.arrive(tiles.weights_ready, count=1)
    if EPILOGUE.split:
        if blocks > 0:
            by_row = gl.convert_layout(factor, gl.SliceLayout(1, OUTPUT))
            store_partial(acc, by_row, tiles.q_tile, rows, 0, PARTIAL)
    else:
        by_head = tiles.factors, None if rows.p_sink is None else tiles.head_factors
        store_rows(acc, by_head, keys.index(0), rows, queries.p_cos, 0, PARTIAL, EPILOGUE)


@gluon.jit
def _right(
    keys, addresses, queries, rows, blocks, tiles,
    PARTIAL: gl.constexpr, EPILOGUE: gl.constexpr, PLAIN: gl.constexpr, GRIDS: gl.constexpr,
):  # fmt: skip
    """Run the second warpgroup: addresses of `BlocksOfKeys`, and the right half of the output."""
    window, extra, boundary, begin = keys
    FIRST: gl.constexpr = AHEAD * BLOCK_N
    ALL: gl.constexpr = PLACES * BLOCK_N
    token = rows.token
    slot = load_slots(window, extra, token, boundary, begin, FIRST, BLOCK_N)
    first_places = (
        reinterpret(addresses.rows, gl.int64, [ALL], FLAT).slice(0, FIRST),
        reinterpret(addresses.scales, gl.int64, [ALL], FLAT).slice(0, FIRST),
        reinterpret(addresses.lives, gl.float32, [ALL], FLAT).slice(0, FIRST),
    )
    store_addresses(window, extra, boundary, begin, slot, first_places, BLOCK_N, PLAIN, GRIDS)
    thread_barrier()
    mbarrier.arrive(addresses.placed, count=1)
    copy_queries(queries.p_q, queries.head_stride, tiles.q_tile, rows.heads, BLOCK_H // 2, BLOCK_H // 2, PARTIAL)
    mbarrier.arrive(tiles.q_ready, count=1)
    acc = gl.zeros([BLOCK_H, HALF], gl.float32, OUTPUT)
    slot = load_slots(window, extra, token, boundary, begin + AHEAD, BLOCK_N, BLOCK_N)
    for number in range(blocks):
        buffer = number % BUFFERS
        mbarrier.wait(tiles.ready.index(buffer), (number // BUFFERS) & 1)
        mbarrier.wait(tiles.weights_ready, number & 1)
        if PLAIN:
            fence_async_shared()
        acc = acc * gl.expand_dims(tiles.factors.load(gl.SliceLayout(1, OUTPUT)), 1)
        acc = warpgroup_mma(tiles.weights_tile, tiles.keys.index(buffer).slice(HALF, HALF, 1), acc, is_async=True)
        fetched, place = number + AHEAD - 1, (number + AHEAD - 1) % PLACES
        if fetched < blocks:
            prefetch_block(
                window, extra, boundary, begin + fetched, addresses.rows.index(place), addresses.scales.index(place),
                PLAIN, GRIDS,
            )  # fmt: skip
        acc = warpgroup_mma_wait(0, deps=[acc])
        thread_barrier()
        mbarrier.arrive(tiles.weights_free, count=1)
        mbarrier.arrive(tiles.free.index(buffer), count=1)
        ahead = number + AHEAD
        place = ahead % PLACES
        store_addresses(
            window, extra, boundary, begin + ahead, slot,
            (addresses.rows.index(place), addresses.scales.index(place), addresses.lives.index(place)), BLOCK_N,
            PLAIN, GRIDS,
        )  # fmt: skip
        slot = load_slots(window, extra, token, boundary, begin + ahead + 1, BLOCK_N, BLOCK_N)
    mbarrier.wait(tiles.weights_ready, blocks & 1)
    if EPILOGUE.split:
        if blocks > 0:
            by_row = tiles.factors.load(gl.SliceLayout(1, OUTPUT))
            store_partial(acc, by_row, tiles.q_tile, rows, HALF, PARTIAL)
    else:
        by_head = tiles.factors, None if rows.p_sink is None else tiles.head_factors
        store_rows(acc, by_head, tiles.keys.index(1), rows, queries.p_cos, HALF, PARTIAL, EPILOGUE)


@gluon.jit(**CHANGING)
def sparse_mla_decode_sm90_kernel(
    outputs,  # out [T, H, 512] bfloat16 or e4m3 [groups, T, K], lse [T, H] float32 or None, scale; or `Partials`
    p_q,  # [T, H, 512] bfloat16
    window,  # words [P, page_bytes / 4] int32, or plain [P, page tokens, 256] int32; and indices [T, W] int
    p_window_lens,  # [T] int
    extra,  # words, and indices [T, K] int
    p_extra_lens,
    p_sink,  # [H] float32 or None
    p_positions,  # [T] int or None
    p_table,  # [max_pos, rope] float32 or None
    scale,  # of the scores, times log2(e)
    eps,  # of the query norm, None for queries that are normed and rotated
    splits,
    min_blocks,
    first_token,  # of this launch
    tokens,
    padded_tokens,
    strides,  # `DecodeStrides`
    max_pos,
    window_width,
    extra_width,
    window_capacity,  # slots in the cache
    extra_capacity,
    SHAPE: gl.constexpr,  # `DecodeShape`
    EPILOGUE: gl.constexpr,
):
    """Attend head block p % HEAD_BLOCKS of split p // HEAD_BLOCKS; the splits of a token are neighbours."""
    H: gl.constexpr = SHAPE.heads
    PLAIN: gl.constexpr = SHAPE.plain
    GRIDS: gl.constexpr = SHAPE.grids
    WINDOW_LOG_PAGE: gl.constexpr = SHAPE.window_log_page
    EXTRA_LOG_PAGE: gl.constexpr = SHAPE.extra_log_page
    q_tile = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_H, D], SWIZZLED)
    keys = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, BLOCK_N, D], SWIZZLED)
    weights_tile = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_H, BLOCK_N], SWIZZLED)
    factors = gl.allocate_shared_memory(gl.float32, [BLOCK_H], FLAT)
    head_factors = gl.allocate_shared_memory(gl.float32, [BLOCK_H], FLAT)
    address_rows = gl.allocate_shared_memory(gl.int64, [PLACES, BLOCK_N], FLAT)
    address_scales = gl.allocate_shared_memory(gl.int64, [PLACES, BLOCK_N], FLAT)
    lives = gl.allocate_shared_memory(gl.float32, [PLACES, BLOCK_N], FLAT)
    ready = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    weights_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    weights_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    placed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(BUFFERS):
        mbarrier.init(ready.index(i), count=COPY_ARRIVALS if PLAIN else 1)
        mbarrier.init(free.index(i), count=2)
    mbarrier.init(weights_ready, count=1)
    mbarrier.init(weights_free, count=1)
    mbarrier.init(q_ready, count=1)
    mbarrier.init(placed, count=1)
    gdc_launch_dependents()
    gdc_wait()
    HEAD_BLOCKS: gl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    PARTIAL: gl.constexpr = H % BLOCK_H != 0
    p_out, p_lse, p_scale = outputs
    p_window_words, p_window_indices = window
    p_extra_words, p_extra_indices = extra
    split = gl.program_id(0) // HEAD_BLOCKS
    head = gl.program_id(0) % HEAD_BLOCKS * BLOCK_H
    token = (first_token + split // splits).to(gl.int64)
    window_length = row_length(p_window_lens, strides.window_lens, token, window_width)
    extra_length = row_length(p_extra_lens, strides.extra_lens, token, extra_width)
    if p_positions is not None:
        p_table = angle_pointer(p_positions, p_table, strides, max_pos, token)
    window_blocks = (window_length + BLOCK_N - 1) // BLOCK_N
    blocks = window_blocks + (extra_length + BLOCK_N - 1) // BLOCK_N
    begin, end = split_range(blocks, split, splits, min_blocks)
    # First block of the extra cache. Out of reach if no key of it is needed, because it may have no pages then.
    boundary = gl.where(end <= window_blocks, 2**30, window_blocks)
    p_q += token * strides.q_token + head.to(gl.int64) * strides.q_head
    if p_sink is not None:
        p_sink += head
    if EPILOGUE.split:
        row = split.to(gl.int64) * H + head
        p_out += row * D
        p_lse += row
        if p_scale is not None:
            p_scale += row * (D // HALF)
    else:
        if EPILOGUE.groups == 0:
            p_out += token * strides.out_token + head.to(gl.int64) * strides.out_head
        if p_lse is not None:
            p_lse += token * strides.lse + head
    addresses = KeyAddresses(address_rows, address_scales, lives, placed)
    queries = Queries(p_q, strides.q_head, p_table, eps)
    heads = H - head
    rows = HeadRows(p_sink, p_lse, p_out, strides.out_head, p_scale, tokens, padded_tokens, token, head, heads)
    tiles = SharedTiles(
        q_tile, keys, weights_tile, factors, head_factors, ready, free, weights_ready, weights_free, q_ready
    )
    gl.warp_specialize([
        (_left, (queries, rows, scale, end - begin, lives, tiles, PARTIAL, EPILOGUE, PLAIN)),
        (_right, (BlocksOfKeys(
            KeyIndices(p_window_words, strides.window_page, WINDOW_LOG_PAGE, p_window_indices,
                       strides.window_indices, window_length, window_capacity),
            KeyIndices(p_extra_words, strides.extra_page, EXTRA_LOG_PAGE, p_extra_indices,
                       strides.extra_indices, extra_length, extra_capacity),
            boundary, begin,
        ), addresses, queries, rows, end - begin, tiles, PARTIAL, EPILOGUE, PLAIN, GRIDS)),
        (copy_keys if PLAIN else (produce_grid_keys if GRIDS else produce_keys),
         (p_window_words, p_extra_words, (boundary, begin), end, addresses, (keys, ready, free))),
    ], [4, 4], [RIGHT_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


class Variant(NamedTuple):
    """A decode kernel for sm_90 and how it is launched.

    Attributes:
        kernel, constants: the kernel and its own compile-time arguments. block_h, block_n: its heads and keys.
        warps: of a program, or of its first partition.
        flat: programs are numbered in one grid dim; else head blocks, splits and tokens are a dim each.
        float16: it can store partial results as float16.
    """

    kernel: Any
    constants: dict[str, Any]
    block_h: int
    block_n: int
    warps: int = 4
    flat: bool = True
    float16: bool = False


def why_unsupported(call: DecodeCall) -> str:
    """Return why this kernel does not support a call that the Triton kernel supports, "" if it does."""
    if call.q.shape[1] < MIN_HEADS:
        return f"it takes {MIN_HEADS} heads or more, these are {call.q.shape[1]}"
    return why_unsupported_sm90(call)


def why_unsupported_sm90(call: DecodeCall) -> str:
    """Return why no decode kernel for sm_90 can load the keys or queries of a call, "" if they can."""
    q, table, plain = call.q, call.fused.cos_sin_cache, call.cache_format == "plain"
    if call.cache_format not in ("fp8_ds_mla", "plain") or q.dtype is not torch.bfloat16:
        return f"it takes fp8_ds_mla or plain keys and bfloat16 queries, these are {call.cache_format} and {q.dtype}"
    for keys in call.caches:
        page, stride, offset = keys.block_size, keys.cache.stride(0) * keys.cache.itemsize, first_byte(keys.cache)
        if page & (page - 1):
            return f"pages have a power of two of tokens, these have {page}"
        if stride % PAGE_ALIGN or offset % PAGE_ALIGN:
            at = f"these start at byte {offset}, {stride} bytes apart"
            return f"pages start at multiples of {PAGE_ALIGN} bytes, {at}"
        if plain and (keys.cache.dtype is not torch.bfloat16 or keys.cache.shape[2] != layout.HEAD_DIM):
            return f"rows are {layout.HEAD_DIM} bfloat16, these are {keys.cache.shape[2]} {keys.cache.dtype}"
        if plain and keys.cache.stride()[1:] != (layout.HEAD_DIM, 1):
            return f"rows of a page are contiguous, these have strides {keys.cache.stride()}"
    if table is not None and table.shape[1] > layout.HEAD_DIM // 2:
        return f"at most {layout.HEAD_DIM // 2} dims are rotated, these are {table.shape[1]}"
    rows = {"q": q, "attn_sink": call.sink, "indices": call.window.indices, "extra_indices": call.extra.indices}
    for name, x in (rows | {"cos_sin_cache": table}).items():
        if x is not None and x.stride(-1) != 1:
            return f"the last dim of {name} is contiguous, this one has stride {x.stride(-1)}"
    return ""


def launch(call: DecodeCall, gpu: Gpu, splits: int = 0, into: Outputs | None = None) -> tuple[Tensor, Tensor]:
    """Run `call` on `gpu` and return its outputs, in `into` or newly allocated; `splits` overrules `split_plan`."""
    into = into or outputs_for(call.q, call.fused)
    launch_into(into, call, gpu, splits)
    return into.pair()


def launch_into(into: Outputs, call: DecodeCall, gpu: Gpu, splits: int = 0) -> None:
    """Run `call` on `gpu`, whose cache format may be GRIDS."""
    variant = Variant(sparse_mla_decode_sm90_kernel, {}, HEADS, KEYS, float16=True)
    _launch_variant(variant, call, gpu, splits, into)


def launch_variant(
    variant: Variant, call: DecodeCall, gpu: Gpu, splits: int, into: Outputs | None
) -> tuple[Tensor, Tensor]:
    """Run `call` with one of the decode kernels for sm_90."""
    into = into or outputs_for(call.q, call.fused)
    _launch_variant(variant, call, gpu, splits, into)
    return into.pair()


def _launch_variant(variant: Variant, call: DecodeCall, gpu: Gpu, splits: int, into: Outputs) -> None:
    q, fused = call.q, call.fused
    tokens, heads, head_dim = q.shape
    if tokens * heads == 0:
        return
    words = [keys.pages(call.cache_format).view(torch.int32) for keys in call.caches]
    # Invalid slots load the first key instead: rows of a cache without pages are empty.
    widths = [keys.indices.shape[1] if keys.cache.shape[0] else 0 for keys in call.caches]
    head_blocks = layout.cdiv(heads, variant.block_h)
    blocks = sum(layout.cdiv(width, variant.block_n) for width in widths)
    plan = split_plan(
        q.shape, head_blocks, blocks, variant.block_n, gpu, splits, bool(call.batch_invariant), variant.float16
    )
    partials = new_partials(plan, heads, head_dim, q)
    at_once = 0 if call.batch_invariant else warps_at_once(plan.splits)
    _, position_stride, _, table_strides, _ = fused.rope()
    outer = [*into.strides(), into.lse_stride(), *q.stride()[:2]]
    outer += [cache.stride(0) * 4 // PAGE_ALIGN for cache in words]
    outer += [keys.indices.stride(0) for keys in call.caches]
    outer += [keys.len_stride() for keys in call.caches]
    strides = DecodeStrides._make([*outer, position_stride, table_strides[0]])
    window_page, extra_page = (keys.block_size.bit_length() - 1 for keys in call.caches)
    shape = DecodeShape(heads, window_page, extra_page, call.cache_format == "plain", call.cache_format == GRIDS)
    for first in range(0, tokens, plan.tokens):
        end = min(tokens, first + plan.tokens)
        grid = head_blocks, plan.splits, end - first
        counts = plan.splits, plan.min_blocks, first, tokens, into.padded_tokens()
        launch_kernel(
            variant.kernel,
            (math.prod(grid),) if variant.flat else grid,
            *decode_arguments(call, partials or into, words, widths, strides, counts),
            SHAPE=shape,
            **variant.constants,
            EPILOGUE=fused.epilogue(split=partials is not None),
            num_warps=variant.warps,
            # A contracted multiply and add rounds once where the separate ops round twice.
            enable_fp_fusion=False,
            **pdl_option(True),
        )
        if partials is not None:
            pieces = first, end
            combine_splits(into, partials, call.sink, fused, torch.bfloat16, pieces, supports_pdl(gpu), at_once)
