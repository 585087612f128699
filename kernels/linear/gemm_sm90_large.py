"""The matrix product of many tokens on Hopper, in Gluon: two warpgroups multiply what a warp brings.

A program takes items, tiles of 128 tokens and one or two blocks of 128 rows of the weight or parts of their strips, one
after another. A warp brings strips of both, and the scales of e4m3, into a ring of buffers, and does not stop where an
item ends. Two warpgroups multiply 64 tokens each, and free a buffer when both have. While one adds a product up in
float32, the matrix unit works for the other. Tokens are the first operand, so that a thread needs two of their scales,
not 32.

Shared memory bounds it before the matrix unit does: of a strip of e4m3, the copies write 32 KiB, and the warpgroups
read 16 of tokens and 32 of weights, 640 cycles of 128 bytes, where the products take 512. Of two blocks of rows tokens
are written once, which makes that 576 a block. A warpgroup has registers for the sums of both and for one product, so
the two take turns at the matrix unit, with a block each: 4096 tokens of V4-Flash's wo_b on 32 of an H200's processors,
which leaves it its clock, take 751 us, 792 without turns, and 850 in tiles of one block, where turns make it 895. On
all processors the clock falls to 1.6 GHz. What gained nothing for 512 tokens in tiles of one block, 32 us: two strips
in flight in each warpgroup (31); the weight as the first operand (36), with 32 scales of tokens for each thread to
load; that and 256 tokens (78).

The weight is nobody's result, so that its copies start before the kernel in front has ended, where that allows it.

How `grouped_matmul` launches its kernel for many tokens on Hopper.
"""

from __future__ import annotations

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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ... import layout
from ...layout import cdiv
from ..hopper.gluon import FLAT, thread_barrier
from ..hopper.quant import scale_value
from ..hopper.tma import copy_elements, copy_tile, store_tile
from ..host.gpu import Gpu
from ..host.launch import launch_kernel
from ..host.semaphores import arrival_counters
from .gemm_sm90_operands import WORD
from .gemm_sm90_small import (
    COPY_ALIGN,
    PROCESSOR_BYTES,
    RESERVED_BYTES,
    STRIP,
    STRIP_BYTES,
    operands_refused,
    rows_of,
    swizzled,
)

TILE_ROWS = 128
"""Rows of the weight in a block of a tile: they share their scales."""
HALF_TOKENS = 64
"""Tokens that a warpgroup multiplies."""

ROWS = gl.constexpr(TILE_ROWS)
HALF = gl.constexpr(HALF_TOKENS)
TOKENS = gl.constexpr(2 * HALF_TOKENS)
LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))  # of the warp that brings
ARRIVALS_OF_SCALES = gl.constexpr(32)


@gluon.jit
def half_of(half: gl.constexpr, first_token, tokens):
    """The first token of half `half` of the tile that starts at `first_token`.

    A copy fills in rows past the end at a fifth of the rate at which it brings others. What is last is rather
    multiplied twice, to the same sums.
    """
    return gl.minimum(first_token + half * HALF, gl.maximum(tokens - HALF, 0))


@gluon.jit
def tokens_of(o_m, first_token, tokens):
    """The tokens of a tile's rows `o_m`. Of fewer than HALF, the last stands in for what lies past the end."""
    token = o_m % HALF + gl.where(o_m < HALF, half_of(0, first_token, tokens), half_of(1, first_token, tokens))
    return gl.minimum(token, tokens - 1)


@gluon.jit
def word_of(p_scales, strip):
    """Which element of a row has the scale of a strip: words hold the UE8M0 bytes of four."""
    return strip // WORD if p_scales.dtype.element_ty == gl.int32 else strip


@gluon.jit
def _place(item, shape, BLOCKS: gl.constexpr):
    """Which tile an item is of, which part, and where that tile starts. Neighbours share a tile of the weight."""
    tokens, rows, tiles = shape
    tile, part = item % tiles, item // tiles
    token_blocks = (tokens + TOKENS - 1) // TOKENS
    column = tile // token_blocks
    columns = rows // (BLOCKS * ROWS)
    group = column // columns
    return tile, part, tile % token_blocks * TOKENS, group, group * rows + column % columns * (BLOCKS * ROWS)


@gluon.jit
def _bring_rows(weights, row, o_k, slot, ready, w_ring, BYTES: gl.constexpr, BLOCKS: gl.constexpr):
    """A strip of a tile's rows, with which the BYTES of a buffer begin."""
    mbarrier.expect(ready.index(slot), BYTES)
    for block in gl.static_range(BLOCKS):
        copy_tile(weights, [row + block * ROWS, o_k], ready.index(slot), w_ring.index(BLOCKS * slot + block))


@gluon.jit
def _bring(
    weights, inputs, p_x_scale, p_weight_scale, strides, shape, items, rings, ready, free,
    BLOCK_K: gl.constexpr, EACH: gl.constexpr, RING: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """The strips of all items, one after another. What follows from an item is not computed again for each strip."""
    w_ring, x_ring, x_scales, w_scales = rings
    x_group_row, x_group_column, x_token, x_group, x_strip, w_row, w_strip = strides
    tokens = shape[0]
    BYTES: gl.constexpr = (BLOCKS * ROWS + TOKENS) * STRIP
    first = gl.program_id(0)
    programs = gl.num_programs(0)
    for early in gl.static_range(RING):
        if early % EACH == 0:
            _, part, _, _, row = _place(first + early // EACH * programs, shape, BLOCKS)
        if first + early // EACH * programs < items:
            o_k = (part * EACH + early % EACH) * BLOCK_K
            _bring_rows(weights, row, o_k, early, ready, w_ring, BYTES, BLOCKS)
    gdc_launch_dependents()
    gdc_wait()
    o_m = gl.arange(0, TOKENS, LANES)
    one = gl.arange(0, 1, LANES)
    base = 0
    for item in range(first, items, programs):
        _, part, first_token, group, row = _place(item, shape, BLOCKS)
        x_row, x_column = group * x_group_row, group * x_group_column
        if p_x_scale is not None:
            token = tokens_of(o_m, first_token, tokens).to(gl.int64)
            p_scales = p_x_scale + group.to(gl.int64) * x_group + token * x_token
            p_scale = p_weight_scale + (row // ROWS * w_row + one)
        for i in range(EACH):
            number = base + i
            slot = number % RING
            strip = part * EACH + i
            o_k = strip * BLOCK_K
            if number >= RING:
                mbarrier.wait(free.index(slot), ((number // RING) & 1) ^ 1)
                _bring_rows(weights, row, o_k, slot, ready, w_ring, BYTES, BLOCKS)
            for half in gl.static_range(2):
                at = [x_row + half_of(half, first_token, tokens), x_column + o_k]
                copy_tile(inputs, at, ready.index(slot), x_ring.index(2 * slot + half))
            if p_x_scale is not None:
                x_word, w_word = word_of(p_scales, strip), word_of(p_scale, strip)
                copy_elements(x_scales.index(slot), p_scales + x_word * x_strip)
                for block in gl.static_range(BLOCKS):
                    copy_elements(w_scales.index(BLOCKS * slot + block), p_scale + (block * w_row + w_word * w_strip))
                async_copy.mbarrier_arrive(ready.index(slot), increment_count=False)
        base += EACH


@gluon.jit
def _scale(scales, strip, LAYOUT: gl.constexpr):
    """float32 of float32, or of words that hold the UE8M0 bytes of four strips."""
    scale = scales.load(LAYOUT)
    if scales.dtype == gl.int32:
        scale = scale_value((scale >> (8 * (strip % WORD))) & 255)
    return scale


@gluon.jit
def _start(
    number, rings, turns, half: gl.constexpr, block: gl.constexpr, acc, ADD: gl.constexpr, RING: gl.constexpr
):  # fmt: skip
    """Start the product of a strip that is there with a block of rows, when it is this half's turn."""
    HALVES: gl.constexpr = rings[1].shape[0] // RING
    BLOCKS: gl.constexpr = rings[0].shape[0] // RING
    slot = number % RING
    rows = rings[0].index(BLOCKS * slot + block).permute((1, 0))
    if turns is not None:
        mbarrier.wait(turns.index(half), (BLOCKS * number + block) & 1)
    acc = warpgroup_mma(rings[1].index(HALVES * slot + half), rows, acc, use_acc=ADD, is_async=True)
    if turns is not None:
        mbarrier.arrive(turns.index(1 - half), count=1)
    return acc


@gluon.jit
def _scales(
    number, strip, rings, half: gl.constexpr, block: gl.constexpr, ACC: gl.constexpr, RING: gl.constexpr
):  # fmt: skip
    """Of a strip, by token, `[HALF, 1]`."""
    BLOCKS: gl.constexpr = rings[0].shape[0] // RING
    slot = number % RING
    x_scale = _scale(rings[2].index(slot).slice(half * HALF, HALF, 0), strip, gl.SliceLayout(1, ACC))
    w_scale = _scale(rings[3].index(BLOCKS * slot + block), strip, gl.SliceLayout(1, ACC))
    return gl.expand_dims(x_scale * w_scale, 1)


@gluon.jit
def _release(number, free, RING: gl.constexpr):
    """Free the buffer of a strip: all have read what was there."""
    thread_barrier()
    mbarrier.arrive(free.index(number % RING), count=1)


@gluon.jit
def sums_of(
    rings, barriers, half: gl.constexpr, base, strip, count, BLOCK_K: gl.constexpr, RING: gl.constexpr
):  # fmt: skip
    """Two float32 `[HALF, ROWS]`: the sums of one half of the tokens with either block of rows, of `count` strips from
    `strip` on; the first is number `base` of all that the program has. Of one block, the second are zeros.

    `barriers`: `ready` and `free` of the ring, and turns, which the other half gives, or None.
    """
    ready, free, turns = barriers
    BLOCKS: gl.constexpr = rings[0].shape[0] // RING
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, BLOCK_K // 4]
    )
    zero = gl.zeros([HALF, ROWS], gl.float32, ACC)
    acc, beside = zero, zero
    for i in range(count):
        number = base + i
        mbarrier.wait(ready.index(number % RING), (number // RING) & 1)
        if rings[2] is None:
            acc = _start(number, rings, None, half, 0, acc, True, RING)
            if BLOCKS == 2:
                beside = _start(number, rings, None, half, 1, beside, True, RING)
                acc, beside = warpgroup_mma_wait(0, deps=[acc, beside])
            else:
                acc = warpgroup_mma_wait(0, deps=[acc])
            _release(number, free, RING)
        else:
            product = _start(number, rings, turns, half, 0, zero, False, RING)
            scales = _scales(number, strip + i, rings, half, 0, ACC, RING)
            product = warpgroup_mma_wait(0, deps=[product])
            if BLOCKS == 2:
                # The second product gets the registers of the first: what needs that is done in front of this.
                acc = warpgroup_mma_wait(0, deps=[acc + product * scales])
                product = _start(number, rings, turns, half, 1, product, False, RING)
                scales = _scales(number, strip + i, rings, half, 1, ACC, RING)
                product = warpgroup_mma_wait(0, deps=[product])
                _release(number, free, RING)
                beside += product * scales
            else:
                _release(number, free, RING)
                acc += product * scales
    return acc, beside


@gluon.jit
def _store_sums(out, sums, token, row, out_tile):
    """Have the copy engine store a block of a tile, once it has read the one before."""
    tma.store_wait(0)
    thread_barrier()
    out_tile.store(sums.to(out.dtype))
    fence_async_shared()
    thread_barrier()
    store_tile(out, [token, row], out_tile)


@gluon.jit
def _multiply(
    out, p_part, p_arrived, shape, items, rings, out_tiles, barriers, half: gl.constexpr,
    SPLITS: gl.constexpr, BLOCK_K: gl.constexpr, EACH: gl.constexpr, RING: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """One half of the tokens of all items."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, BLOCK_K // 4]
    )
    tiles = shape[2]
    out_tile = out_tiles.index(half)
    o_m = gl.expand_dims(gl.arange(0, HALF, gl.SliceLayout(1, ACC)), 1)
    o_n = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(0, ACC)), 0)
    base = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        tile, part, first_token, _, row = _place(item, shape, BLOCKS)
        acc, beside = sums_of(rings, barriers, half, base, part * EACH, EACH, BLOCK_K, RING)
        base += EACH
        last = True
        if SPLITS > 1:
            # Eight rows at a time: what a warp stores together lies together.
            tile_half = tile * 2 + half
            p_tile = p_part + tile_half.to(gl.int64) * (HALF * ROWS) + ((o_n // 8 * HALF + o_m) * 8 + o_n % 8)
            part_stride = tiles.to(gl.int64) * (TOKENS * ROWS)
            gl.store(p_tile + part * part_stride, acc)
            # Every thread has stored before one announces it.
            thread_barrier()
            last = gl.atomic_add(p_arrived + tile_half, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
            if last:
                acc = gl.zeros([HALF, ROWS], gl.float32, ACC)
                for other in gl.static_range(SPLITS):
                    acc += gl.load(p_tile + other * part_stride, cache_modifier=".cg")
                gl.store(p_arrived + tile_half, 0)
        if last:
            token = half_of(half, first_token, shape[0])
            _store_sums(out, acc, token, row, out_tile)
            if BLOCKS == 2:
                _store_sums(out, beside, token, row + ROWS, out_tile)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "x_group_row", "x_group_column", "x_scale_token_stride", "x_scale_group_stride", "x_scale_strip_stride",
        "tokens", "items", "tiles",
    ]
)  # fmt: skip
def grouped_matmul_many_hopper_kernel(
    weights,  # descriptor of [G * N, K] in blocks of [128, BLOCK_K]
    inputs,  # descriptor of rows of x in blocks of [64, BLOCK_K]
    out,  # descriptor of [T, G * N] in blocks of [64, 128]
    p_part,  # [SPLITS, tiles, 128 * 128] float32, contiguous, or None
    p_arrived,  # [>= 2 * tiles] int32, zero before and after, or None
    p_x_scale,  # [T, G, strips] float32, [T, G, words] int32, or None
    p_weight_scale,  # [blocks, strips] float32, [blocks, words] int32, or None
    x_group_row,  # where a group's part of `inputs` starts, in units of the group
    x_group_column,
    x_scale_token_stride,
    x_scale_group_stride,
    x_scale_strip_stride,
    weight_scale_row_stride,
    weight_scale_strip_stride,
    tokens,
    rows,  # N, a multiple of the rows of a tile
    tiles,
    items,  # SPLITS for each tile; item i is part i // tiles of tile i % tiles
    SPLITS: gl.constexpr,  # 1 where a tile has two blocks
    BLOCK_K: gl.constexpr,
    EACH: gl.constexpr,  # strips of an item
    RING: gl.constexpr,
    BLOCKS: gl.constexpr,  # of 128 rows in a tile, one or two
    TILE: gl.constexpr,  # layouts in shared memory: of operands, of results
    OUT_TILE: gl.constexpr,
    MULTIPLIER_REGISTERS: gl.constexpr,
    BRINGER_REGISTERS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Program p takes every num_programs-th item from item p on."""
    w_ring = gl.allocate_shared_memory(weights.dtype, [BLOCKS * RING, ROWS, BLOCK_K], TILE)
    x_ring = gl.allocate_shared_memory(inputs.dtype, [2 * RING, HALF, BLOCK_K], TILE)
    out_tiles = gl.allocate_shared_memory(out.dtype, [2, HALF, ROWS], OUT_TILE)
    ready = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    if p_x_scale is not None:
        x_scales = gl.allocate_shared_memory(p_x_scale.dtype.element_ty, [RING, TOKENS], FLAT)
        w_scales = gl.allocate_shared_memory(p_weight_scale.dtype.element_ty, [BLOCKS * RING, 1], FLAT)
        rings = w_ring, x_ring, x_scales, w_scales
    else:
        rings = w_ring, x_ring, None, None
    ARRIVALS: gl.constexpr = 1 if p_x_scale is None else 1 + ARRIVALS_OF_SCALES
    for i in gl.static_range(RING):
        mbarrier.init(ready.index(i), count=ARRIVALS)
        mbarrier.init(free.index(i), count=2)
    if BLOCKS == 2 and p_x_scale is not None:
        turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for half in gl.static_range(2):
            mbarrier.init(turns.index(half), count=1)
        mbarrier.arrive(turns.index(0), count=1)
        barriers = ready, free, turns
    else:
        barriers = ready, free, None
    fence_async_shared()
    thread_barrier()
    shape = tokens, rows, tiles
    strides = (
        x_group_row, x_group_column, x_scale_token_stride, x_scale_group_stride, x_scale_strip_stride,
        weight_scale_row_stride, weight_scale_strip_stride,
    )  # fmt: skip
    gl.warp_specialize([
        (_multiply, (out, p_part, p_arrived, shape, items, rings, out_tiles, barriers, 0,
                     SPLITS, BLOCK_K, EACH, RING, BLOCKS)),
        (_multiply, (out, p_part, p_arrived, shape, items, rings, out_tiles, barriers, 1,
                     SPLITS, BLOCK_K, EACH, RING, BLOCKS)),
        (_bring, (weights, inputs, p_x_scale, p_weight_scale, strides, shape, items, rings, ready, free,
                  BLOCK_K, EACH, RING, BLOCKS)),
    ], [4, 1], [MULTIPLIER_REGISTERS, BRINGER_REGISTERS])  # fmt: skip


TILE_TOKENS = 2 * HALF_TOKENS
MULTIPLIER_REGISTERS, BRINGER_REGISTERS = 232, 32
COMPILER_BYTES = 512
"""Shared memory for what the compiler puts there: arguments of the warpgroups, gaps that align barriers, turns."""


def choose_splits(gpu: Gpu, tiles: int, strips: int) -> int:
    """Parts of each tile: twice as many as long as every processor has an item at most, of four strips at least.

    Measured on an H200 with the layers of V4-Flash, for 128 to 512 tokens: twice as many are slower each time.
    """
    splits = 1
    while strips % (2 * splits) == 0 and 2 * splits * tiles <= gpu.sms and strips // (2 * splits) >= 4:
        splits *= 2
    return splits


def choose_blocks(gpu: Gpu, tiles: int, rows: int) -> int:
    """Blocks of 128 rows of a tile: two where that leaves no processor more work, of `tiles` of one.

    Measured on an H200 with the layers of V4-Flash: 512 tokens of wq_b take 34.4 us instead of 36.6, of wo_a 31.9
    instead of 34.4, and 1024 of wo_b 58 instead of 63; in bfloat16 51, 48 and 87 instead of 52, 52 and 91.
    """
    if rows % (2 * TILE_ROWS):
        return 1
    return 2 if 2 * cdiv(tiles // 2, gpu.sms) <= cdiv(tiles, gpu.sms) else 1


def many_refuses(x: Tensor, weight: Tensor, weight_scale: Tensor | None, quantize: bool, out: Tensor) -> str:
    """Why this kernel cannot take a call that the portable one can, "" if it can."""
    if out.stride(0) * out.element_size() % COPY_ALIGN or out.data_ptr() % COPY_ALIGN:
        return f"it gives rows that start at multiples of {COPY_ALIGN} bytes"
    return tiles_refused(x, weight, weight_scale, quantize)


def tiles_refused(x: Tensor, weight: Tensor, weight_scale: Tensor | None, quantize: bool) -> str:
    """Why operands cannot be multiplied in tiles of 128 tokens and rows, or ""."""
    if quantize:
        return "it takes what is quantised"
    if weight.shape[0] // x.shape[1] % TILE_ROWS:
        return f"it takes weights of a multiple of {TILE_ROWS} rows"
    if weight_scale is not None and words_of_scales(weight_scale) is None:
        return "it takes scales of the weight that are float32, or bytes in words of four"
    return operands_refused(x, weight, quantize)


def words_of_scales(scale: Tensor) -> Tensor | None:
    """Scales as 32-bit words, UE8M0 bytes four at a time; None where they do not lie like that."""
    if scale.dtype is torch.float32:
        return scale
    word = layout.SCALES_PER_WORD
    if scale.stride(1) != 1 or scale.shape[1] % word or scale.stride(0) % word or scale.data_ptr() % word:
        return None
    return scale.view(torch.int32)


def deepest_ring(out_size: int, blocks: int) -> int:
    """Buffers that there is room for, of tiles of so many blocks of rows, beside tiles of outputs of so many bytes."""
    room = PROCESSOR_BYTES - RESERVED_BYTES - COMPILER_BYTES - TILE_TOKENS * TILE_ROWS * out_size
    return room // ((blocks * TILE_ROWS + TILE_TOKENS) * STRIP_BYTES + 4 * TILE_TOKENS + 4 * blocks + 2 * 8)


def launch_many(
    x: Tensor,
    x_scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor | None,
    out: Tensor,
    quantize: bool,
    gpu: Gpu,
) -> None:
    """Fill `out`, as the portable launcher does."""
    tokens, groups, size = x.shape
    block_k = STRIP_BYTES // weight.element_size()
    rows, strips = weight.shape[0] // groups, cdiv(size, block_k)
    inputs = rows_of(x, block_k)
    assert inputs is not None and not quantize
    tiles = cdiv(tokens, TILE_TOKENS) * groups * (rows // TILE_ROWS)
    blocks = choose_blocks(gpu, tiles, rows)
    tiles //= blocks
    splits = choose_splits(gpu, tiles, strips)
    part = arrived = None
    if splits > 1:
        shape = (splits, tiles, TILE_TOKENS * TILE_ROWS)
        part = torch.empty(shape, dtype=torch.float32, device=x.device)
        arrived = arrival_counters(2 * tiles, x.device)
    if weight_scale is not None:
        weight_scale = words_of_scales(weight_scale)
    launch_kernel(
        grouped_matmul_many_hopper_kernel,
        (min(tiles * splits, gpu.sms),),
        TensorDescriptor.from_tensor(weight, [TILE_ROWS, block_k], swizzled(weight)),
        TensorDescriptor.from_tensor(inputs.matrix, [HALF_TOKENS, block_k], swizzled(x)),
        TensorDescriptor.from_tensor(out, [HALF_TOKENS, TILE_ROWS], swizzled(out)),
        part,
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
        BLOCK_K=block_k,
        EACH=strips // splits,
        RING=deepest_ring(out.element_size(), blocks),
        BLOCKS=blocks,
        TILE=swizzled(weight),
        OUT_TILE=swizzled(out),
        MULTIPLIER_REGISTERS=MULTIPLIER_REGISTERS,
        BRINGER_REGISTERS=BRINGER_REGISTERS,
        num_warps=4,
        launch_pdl=True,
    )
