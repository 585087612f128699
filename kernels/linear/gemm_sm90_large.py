"""GEMM for many tokens on sm_90: persistent CTAs of one producer warp and two consumer warpgroups.

A CTA takes its items in turn: tiles of 128 tokens and one or two blocks of 128 rows of the weight, or splits of their
K. The producer loads K-blocks of both operands, and the scales of e4m3, into a ring of buffers without stopping between
items. Each consumer multiplies 64 tokens; a buffer is free when both have read it. Tokens are the first operand of the
MMA, so that a thread needs two of their scales, not 32.

For e4m3, shared memory is the bound before the tensor core: per K-block, 640 cycles of 128 bytes against 512 of MMAs.
With two blocks of rows tokens are written once for both, which makes it 576; the registers of a consumer then hold the
sums of both and one product, so that the consumers alternate at the tensor core (ping-pong).

No kernel of the same step writes the weight, so its copies start before the previous kernel has ended (PDL).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ... import layout
from ...layout import cdiv
from ..hopper.gluon import FLAT, thread_barrier
from ..hopper.quant import scale_value
from ..hopper.tma import copy_elements, copy_tile, store_tile
from ..host.gpu import Gpu
from ..host.launch import launch_kernel
from ..host.semaphores import arrival_counters
from .gemm_sm90_operands import (
    CTA_RESERVED_BYTES,
    K_BLOCK,
    K_BLOCK_BYTES,
    SCALES_PER_WORD,
    SM_SHARED_BYTES,
    TMA_ALIGN,
    tma_descriptor,
    tma_matrix,
    why_unsupported_operands,
)

if TYPE_CHECKING:
    from .gemm import Operands

TILE_ROWS = 128
"""Rows of the weight in a block of a tile: they share their scales."""
HALF_TOKENS = 64
"""Tokens per consumer warpgroup."""

ROWS = gl.constexpr(TILE_ROWS)
HALF = gl.constexpr(HALF_TOKENS)
TOKENS = gl.constexpr(2 * HALF_TOKENS)
LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))  # of the producer warp
SCALE_ARRIVALS = gl.constexpr(32)


@gluon.jit
def half_start(half: gl.constexpr, first_token, tokens):
    """Return the first token of half `half` of the tile that starts at `first_token`.

    TMA copies fill rows past the end at a fifth of their rate. The last tokens are rather computed twice, to the same
    sums.
    """
    return gl.minimum(first_token + half * HALF, gl.maximum(tokens - HALF, 0))


@gluon.jit
def tokens_of(o_m, first_token, tokens):
    """Return the tokens of rows `o_m` of a tile; with fewer than HALF tokens, rows past the end repeat the last one."""
    token = o_m % HALF + gl.where(o_m < HALF, half_start(0, first_token, tokens), half_start(1, first_token, tokens))
    return gl.minimum(token, tokens - 1)


@gluon.jit
def scale_element(p_scales, k_block):
    """Return the index of a K-block's scale within a row: words hold the UE8M0 bytes of four."""
    return k_block // SCALES_PER_WORD if p_scales.dtype.element_ty == gl.int32 else k_block


@gluon.jit
def _locate(item, shape, BLOCKS: gl.constexpr):
    """Return an item's tile, split, first token, group and first row. Neighbours share a tile of the weight."""
    tokens, rows, tiles, _ = shape
    tile, part = item % tiles, item // tiles
    token_blocks = (tokens + TOKENS - 1) // TOKENS
    column = tile // token_blocks
    columns = rows // (BLOCKS * ROWS)
    group = column // columns
    return tile, part, tile % token_blocks * TOKENS, group, group * rows + column % columns * (BLOCKS * ROWS)


@gluon.jit
def _load_rows(weights, row, o_k, slot, ready, w_ring, BYTES: gl.constexpr, BLOCKS: gl.constexpr):
    """Load a K-block of a tile's rows into a buffer that expects BYTES in all."""
    mbarrier.expect(ready.index(slot), BYTES)
    for block in gl.static_range(BLOCKS):
        copy_tile(weights, [row + block * ROWS, o_k], ready.index(slot), w_ring.index(BLOCKS * slot + block))


@gluon.jit
def _produce(descriptors, scales, strides, shape, rings, barriers, K_BLOCKS: gl.constexpr):
    """Load the K-blocks of all items. What depends on the item alone is computed once per item."""
    weights, inputs = descriptors
    p_x_scale, p_weight_scale = scales
    w_ring, x_ring, x_scales, w_scales = rings
    x_group_row, x_group_column, x_token, x_group, x_k, w_row, w_k = strides
    ready, free = barriers
    tokens, _, _, items = shape
    RING: gl.constexpr = x_ring.shape[0] // 2
    BLOCKS: gl.constexpr = w_ring.shape[0] // RING
    BLOCK_K: gl.constexpr = w_ring.shape[2]
    BYTES: gl.constexpr = (BLOCKS * ROWS + TOKENS) * K_BLOCK
    first = gl.program_id(0)
    programs = gl.num_programs(0)
    for early in gl.static_range(RING):
        if early % K_BLOCKS == 0:
            _, part, _, _, row = _locate(first + early // K_BLOCKS * programs, shape, BLOCKS)
        if first + early // K_BLOCKS * programs < items:
            o_k = (part * K_BLOCKS + early % K_BLOCKS) * BLOCK_K
            _load_rows(weights, row, o_k, early, ready, w_ring, BYTES, BLOCKS)
    gdc_launch_dependents()
    gdc_wait()
    o_m = gl.arange(0, TOKENS, LANES)
    one = gl.arange(0, 1, LANES)
    base = 0
    for item in range(first, items, programs):
        _, part, first_token, group, row = _locate(item, shape, BLOCKS)
        x_row, x_column = group * x_group_row, group * x_group_column
        if p_x_scale is not None:
            token = tokens_of(o_m, first_token, tokens).to(gl.int64)
            p_scales = p_x_scale + group.to(gl.int64) * x_group + token * x_token
            p_scale = p_weight_scale + (row // ROWS * w_row + one)
        for i in range(K_BLOCKS):
            number = base + i
            slot = number % RING
            k_block = part * K_BLOCKS + i
            o_k = k_block * BLOCK_K
            if number >= RING:
                mbarrier.wait(free.index(slot), ((number // RING) & 1) ^ 1)
                _load_rows(weights, row, o_k, slot, ready, w_ring, BYTES, BLOCKS)
            for half in gl.static_range(2):
                at = [x_row + half_start(half, first_token, tokens), x_column + o_k]
                copy_tile(inputs, at, ready.index(slot), x_ring.index(2 * slot + half))
            if p_x_scale is not None:
                x_word, w_word = scale_element(p_scales, k_block), scale_element(p_scale, k_block)
                copy_elements(x_scales.index(slot), p_scales + x_word * x_k)
                for block in gl.static_range(BLOCKS):
                    copy_elements(w_scales.index(BLOCKS * slot + block), p_scale + (block * w_row + w_word * w_k))
                async_copy.mbarrier_arrive(ready.index(slot), increment_count=False)
        base += K_BLOCKS


@gluon.jit
def _load_scale(scales, k_block, LAYOUT: gl.constexpr):
    """Load float32 scales of a K-block, or UE8M0 bytes from words of four K-blocks."""
    scale = scales.load(LAYOUT)
    if scales.dtype == gl.int32:
        scale = scale_value((scale >> (8 * (k_block % SCALES_PER_WORD))) & 255)
    return scale


@gluon.jit
def _start_mma(
    number, rings, pingpong, half: gl.constexpr, block: gl.constexpr, acc, ADD: gl.constexpr, RING: gl.constexpr
):  # fmt: skip
    """Start the MMA of K-block `number` with a block of rows, when it is this consumer's turn."""
    HALVES: gl.constexpr = rings[1].shape[0] // RING
    BLOCKS: gl.constexpr = rings[0].shape[0] // RING
    slot = number % RING
    rows = rings[0].index(BLOCKS * slot + block).permute((1, 0))
    if pingpong is not None:
        mbarrier.wait(pingpong.index(half), (BLOCKS * number + block) & 1)
    acc = warpgroup_mma(rings[1].index(HALVES * slot + half), rows, acc, use_acc=ADD, is_async=True)
    if pingpong is not None:
        mbarrier.arrive(pingpong.index(1 - half), count=1)
    return acc


@gluon.jit
def _token_scales(
    number, k_block, rings, half: gl.constexpr, block: gl.constexpr, ACC: gl.constexpr, RING: gl.constexpr
):  # fmt: skip
    """Return the product of both scales of a K-block by token, `[HALF, 1]`."""
    BLOCKS: gl.constexpr = rings[0].shape[0] // RING
    slot = number % RING
    x_scale = _load_scale(rings[2].index(slot).slice(half * HALF, HALF, 0), k_block, gl.SliceLayout(1, ACC))
    w_scale = _load_scale(rings[3].index(BLOCKS * slot + block), k_block, gl.SliceLayout(1, ACC))
    return gl.expand_dims(x_scale * w_scale, 1)


@gluon.jit
def _release(number, free, RING: gl.constexpr):
    """Free the buffer of a K-block, once every thread has read it."""
    thread_barrier()
    mbarrier.arrive(free.index(number % RING), count=1)


@gluon.jit
def accumulate(rings, barriers, half: gl.constexpr, base, first, count, RING: gl.constexpr):
    """Multiply `count` K-blocks from `first` on; return float32 `[HALF, ROWS]` for either block of rows.

    `base` is the number of K-blocks before among all of this CTA. With one block of rows, the second result is zero.
    `barriers` are `ready` and `free` of the ring, and `pingpong` or None.
    """
    ready, free, pingpong = barriers
    BLOCKS: gl.constexpr = rings[0].shape[0] // RING
    BLOCK_K: gl.constexpr = rings[0].shape[2]
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, BLOCK_K // 4]
    )
    zero = gl.zeros([HALF, ROWS], gl.float32, ACC)
    acc, acc_2 = zero, zero
    for i in range(count):
        number = base + i
        mbarrier.wait(ready.index(number % RING), (number // RING) & 1)
        if rings[2] is None:
            acc = _start_mma(number, rings, None, half, 0, acc, True, RING)
            if BLOCKS == 2:
                acc_2 = _start_mma(number, rings, None, half, 1, acc_2, True, RING)
                acc, acc_2 = warpgroup_mma_wait(0, deps=[acc, acc_2])
            else:
                acc = warpgroup_mma_wait(0, deps=[acc])
            _release(number, free, RING)
        else:
            product = _start_mma(number, rings, pingpong, half, 0, zero, False, RING)
            scales = _token_scales(number, first + i, rings, half, 0, ACC, RING)
            product = warpgroup_mma_wait(0, deps=[product])
            if BLOCKS == 2:
                # The second product reuses the registers of the first, so the first is added before.
                acc = warpgroup_mma_wait(0, deps=[acc + product * scales])
                product = _start_mma(number, rings, pingpong, half, 1, product, False, RING)
                scales = _token_scales(number, first + i, rings, half, 1, ACC, RING)
                product = warpgroup_mma_wait(0, deps=[product])
                _release(number, free, RING)
                acc_2 += product * scales
            else:
                _release(number, free, RING)
                acc += product * scales
    return acc, acc_2


@gluon.jit
def _store_block(out, sums, token, row, out_tile):
    """Store a block of a tile with the TMA, once it has read the previous one from shared memory."""
    tma.store_wait(0)
    thread_barrier()
    out_tile.store(sums.to(out.dtype))
    fence_async_shared()
    thread_barrier()
    store_tile(out, [token, row], out_tile)


@gluon.jit
def _consume(
    out, partials, shape, rings, out_tiles, barriers, half: gl.constexpr, SPLITS: gl.constexpr, K_BLOCKS: gl.constexpr
):  # fmt: skip
    """Compute one half of the tokens of all items."""
    p_partial, p_arrived = partials
    tokens, _, tiles, items = shape
    RING: gl.constexpr = rings[1].shape[0] // 2
    BLOCKS: gl.constexpr = rings[0].shape[0] // RING
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, rings[0].shape[2] // 4]
    )
    out_tile = out_tiles.index(half)
    o_m = gl.expand_dims(gl.arange(0, HALF, gl.SliceLayout(1, ACC)), 1)
    o_n = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(0, ACC)), 0)
    base = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        tile, part, first_token, _, row = _locate(item, shape, BLOCKS)
        acc, acc_2 = accumulate(rings, barriers, half, base, part * K_BLOCKS, K_BLOCKS, RING)
        base += K_BLOCKS
        last = True
        if SPLITS > 1:
            # In groups of eight rows, so that the stores of a warp are contiguous.
            tile_half = tile * 2 + half
            p_tile = p_partial + tile_half.to(gl.int64) * (HALF * ROWS) + ((o_n // 8 * HALF + o_m) * 8 + o_n % 8)
            split_stride = tiles.to(gl.int64) * (TOKENS * ROWS)
            gl.store(p_tile + part * split_stride, acc)
            # Every thread has stored before one of them announces it.
            thread_barrier()
            last = gl.atomic_add(p_arrived + tile_half, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
            if last:
                acc = gl.zeros([HALF, ROWS], gl.float32, ACC)
                for other in gl.static_range(SPLITS):
                    acc += gl.load(p_tile + other * split_stride, cache_modifier=".cg")
                gl.store(p_arrived + tile_half, 0)
        if last:
            token = half_start(half, first_token, tokens)
            _store_block(out, acc, token, row, out_tile)
            if BLOCKS == 2:
                _store_block(out, acc_2, token, row + ROWS, out_tile)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "x_group_row", "x_group_column", "x_scale_token_stride", "x_scale_group_stride", "x_scale_k_stride", "tokens",
        "items", "tiles",
    ]
)  # fmt: skip
def gemm_sm90_large_kernel(
    weights,  # descriptor of [G * N, K] in blocks of [128, BLOCK_K]
    inputs,  # descriptor of rows of x in blocks of [64, BLOCK_K]
    out,  # descriptor of [T, G * N] in blocks of [64, 128]
    p_partial,  # [SPLITS, tiles, 128 * 128] float32, contiguous, or None
    p_arrived,  # [>= 2 * tiles] int32, zero before and after, or None
    p_x_scale,  # [T, G, K-blocks] float32, [T, G, words] int32, or None
    p_weight_scale,  # [row blocks, K-blocks] float32, [row blocks, words] int32, or None
    x_group_row,  # start of a group in `inputs`, in units of the group
    x_group_column,
    x_scale_token_stride,
    x_scale_group_stride,
    x_scale_k_stride,
    weight_scale_row_stride,
    weight_scale_k_stride,
    tokens,
    rows,  # N, a multiple of the rows of a tile
    tiles,
    items,  # SPLITS per tile; item i is split i // tiles of tile i % tiles
    SPLITS: gl.constexpr,  # 1 if tiles have two blocks
    K_BLOCKS: gl.constexpr,  # of an item
    RING: gl.constexpr,
    BLOCKS: gl.constexpr,  # of 128 rows in a tile, one or two
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Compute every num_programs-th item from item p on, in program p."""
    BLOCK_K: gl.constexpr = weights.block_shape[1]
    w_ring = gl.allocate_shared_memory(weights.dtype, [BLOCKS * RING, ROWS, BLOCK_K], weights.layout)
    x_ring = gl.allocate_shared_memory(inputs.dtype, [2 * RING, HALF, BLOCK_K], weights.layout)
    out_tiles = gl.allocate_shared_memory(out.dtype, [2, HALF, ROWS], out.layout)
    ready = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    if p_x_scale is not None:
        x_scales = gl.allocate_shared_memory(p_x_scale.dtype.element_ty, [RING, TOKENS], FLAT)
        w_scales = gl.allocate_shared_memory(p_weight_scale.dtype.element_ty, [BLOCKS * RING, 1], FLAT)
        rings = w_ring, x_ring, x_scales, w_scales
    else:
        rings = w_ring, x_ring, None, None
    ARRIVALS: gl.constexpr = 1 if p_x_scale is None else 1 + SCALE_ARRIVALS
    for i in gl.static_range(RING):
        mbarrier.init(ready.index(i), count=ARRIVALS)
        mbarrier.init(free.index(i), count=2)
    if BLOCKS == 2 and p_x_scale is not None:
        pingpong = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for half in gl.static_range(2):
            mbarrier.init(pingpong.index(half), count=1)
        mbarrier.arrive(pingpong.index(0), count=1)
        barriers = ready, free, pingpong
    else:
        barriers = ready, free, None
    fence_async_shared()
    thread_barrier()
    shape = tokens, rows, tiles, items
    strides = (
        x_group_row, x_group_column, x_scale_token_stride, x_scale_group_stride, x_scale_k_stride,
        weight_scale_row_stride, weight_scale_k_stride,
    )  # fmt: skip
    partials = p_partial, p_arrived
    gl.warp_specialize([
        (_consume, (out, partials, shape, rings, out_tiles, barriers, 0, SPLITS, K_BLOCKS)),
        (_consume, (out, partials, shape, rings, out_tiles, barriers, 1, SPLITS, K_BLOCKS)),
        (_produce, ((weights, inputs), (p_x_scale, p_weight_scale), strides, shape, rings, (ready, free), K_BLOCKS)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


TILE_TOKENS = 2 * HALF_TOKENS
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 232, 32
COMPILER_BYTES = 512
"""Shared memory that the compiler takes: captures of the partitions, padding of barriers, ping-pong."""


def choose_splits(gpu: Gpu, tiles: int, k_blocks: int) -> int:
    """Return the splits per tile: doubled while every SM has an item at most, of four K-blocks at least."""
    splits = 1
    while k_blocks % (2 * splits) == 0 and 2 * splits * tiles <= gpu.sms and k_blocks // (2 * splits) >= 4:
        splits *= 2
    return splits


def choose_blocks(gpu: Gpu, tiles: int, rows: int) -> int:
    """Return 2 blocks of 128 rows per tile if that gives no SM more work than `tiles` of one block do, else 1."""
    if rows % (2 * TILE_ROWS):
        return 1
    return 2 if 2 * cdiv(tiles // 2, gpu.sms) <= cdiv(tiles, gpu.sms) else 1


def why_unsupported(operands: Operands, quantize: bool, out: Tensor) -> str:
    """Return why this kernel cannot fill `out`, "" if it can."""
    if out.stride(0) * out.element_size() % TMA_ALIGN or out.data_ptr() % TMA_ALIGN:
        return f"rows of the result must start at multiples of {TMA_ALIGN} bytes, its strides are {out.stride()}"
    return why_unsupported_tiles(operands, quantize)


def why_unsupported_tiles(operands: Operands, quantize: bool) -> str:
    """Return why operands cannot be multiplied in tiles of 128 tokens and rows, "" if they can."""
    x, _, weight, weight_scale = operands
    rows = weight.shape[0] // x.shape[1]
    if quantize:
        return "x must come quantized"
    if rows % TILE_ROWS:
        return f"the weight must have a multiple of {TILE_ROWS} rows per group, not {rows}"
    if weight_scale is not None and scale_words(weight_scale) is None:
        return f"scales of the weight must be float32, or bytes in words of four; they are {describe(weight_scale)}"
    return why_unsupported_operands(x, weight, quantize)


def describe(scale: Tensor) -> str:
    """Return dtype, shape and strides of a tensor for a message."""
    return f"{scale.dtype} {tuple(scale.shape)} with strides {scale.stride()}"


def scale_words(scale: Tensor) -> Tensor | None:
    """Return scales as 32-bit elements: float32, or UE8M0 bytes in words of four; None if bytes do not allow it."""
    if scale.dtype is torch.float32:
        return scale
    word = layout.SCALES_PER_WORD
    if scale.stride(1) != 1 or scale.shape[1] % word or scale.stride(0) % word or scale.data_ptr() % word:
        return None
    return scale.view(torch.int32)


def ring_depth(out_size: int, blocks: int) -> int:
    """Return the ring buffers that fit for tiles of `blocks` blocks of rows and results of `out_size` bytes."""
    free = SM_SHARED_BYTES - CTA_RESERVED_BYTES - COMPILER_BYTES - TILE_TOKENS * TILE_ROWS * out_size
    return free // ((blocks * TILE_ROWS + TILE_TOKENS) * K_BLOCK_BYTES + 4 * TILE_TOKENS + 4 * blocks + 2 * 8)


def launch(operands: Operands, out: Tensor, gpu: Gpu) -> None:
    """Fill `out` `[T, G * N]` like `gemm.grouped_gemm`."""
    x, x_scale, weight, weight_scale = operands
    tokens, groups, size = x.shape
    block_k = K_BLOCK_BYTES // weight.element_size()
    rows, k_blocks = weight.shape[0] // groups, cdiv(size, block_k)
    inputs = tma_matrix(x, block_k)
    assert inputs is not None
    tiles = cdiv(tokens, TILE_TOKENS) * groups * (rows // TILE_ROWS)
    blocks = choose_blocks(gpu, tiles, rows)
    tiles //= blocks
    splits = choose_splits(gpu, tiles, k_blocks)
    partial_sums = arrived = None
    if splits > 1:
        shape = (splits, tiles, TILE_TOKENS * TILE_ROWS)
        partial_sums = torch.empty(shape, dtype=torch.float32, device=x.device)
        arrived = arrival_counters(2 * tiles, x.device)
    if weight_scale is not None:
        weight_scale = scale_words(weight_scale)
    launch_kernel(
        gemm_sm90_large_kernel,
        (min(tiles * splits, gpu.sms),),
        tma_descriptor(weight, TILE_ROWS, block_k),
        tma_descriptor(inputs.matrix, HALF_TOKENS, block_k),
        tma_descriptor(out, HALF_TOKENS, TILE_ROWS),
        partial_sums,
        arrived,
        x_scale,
        weight_scale,
        inputs.row,
        inputs.column,
        *((0, 0, 0) if x_scale is None else x_scale.stride()),
        *((0, 0) if weight_scale is None else weight_scale.stride()),
        tokens,
        rows,
        tiles,
        tiles * splits,
        SPLITS=splits,
        K_BLOCKS=k_blocks // splits,
        RING=ring_depth(out.element_size(), blocks),
        BLOCKS=blocks,
        CONSUMER_REGISTERS=CONSUMER_REGISTERS,
        PRODUCER_REGISTERS=PRODUCER_REGISTERS,
        num_warps=4,
        launch_pdl=True,
    )
