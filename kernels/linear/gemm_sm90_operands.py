"""Operands of the sm_90 GEMMs: how the TMA takes them, and how CTAs for few tokens load scales and quantize x."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ... import layout
from ..hopper.gluon import FLAT, reinterpret, scheduling_fence, thread_barrier
from ..hopper.quant import (
    ACT_AMAX_FLOOR_BITS,
    FP8_MAX,
    MANTISSA,
    MANTISSA_BITS,
    SUBNORMAL_HALF,
    UE8M0_BIAS,
    UE8M0_MAX_BYTE,
    quantize,
    scale_value,
)
from ..hopper.tma import copy_tile

TMA_ALIGN = 16
"""Alignment in bytes of the rows that the TMA reads and writes."""
K_BLOCK_BYTES = layout.ACT_TILE
"""Bytes of a row in a K-block: one swizzle span of the tensor core, and for e4m3 the elements that share a scale."""
SM_SHARED_BYTES, CTA_RESERVED_BYTES = 228 * 1024, 1024
"""Shared memory of an SM, and the bytes of it that the driver reserves for each CTA."""
TILE_ALIGN = 1024
"""Alignment of tiles in shared memory."""


class TmaMatrix(NamedTuple):
    """x as a matrix: the rows of group g start at row g * `row` and column g * `column`."""

    matrix: Tensor
    row: int
    column: int


def tma_matrix(x: Tensor, block_k: int) -> TmaMatrix | None:
    """Return x `[T, G, K]` as a matrix that the TMA can read, None if its strides do not allow it."""
    tokens, groups, size = x.shape
    token, group, element = x.stride()
    if tokens == 1:
        token = max(group * groups, size)
    if element != 1 or token * x.element_size() % TMA_ALIGN or x.data_ptr() % TMA_ALIGN:
        return None
    if groups == 1:
        return TmaMatrix(x.as_strided((tokens, size), (token, 1)), 0, 0)
    if group == tokens * token:
        return TmaMatrix(x.as_strided((groups * tokens, size), (token, 1)), tokens, 0)
    # A partial last K-block of a group would read into the next group.
    if group < size or size % block_k or token < groups * group:
        return None
    return TmaMatrix(x.as_strided((tokens, (groups - 1) * group + size), (token, 1)), 0, group)


def why_unsupported_operands(x: Tensor, weight: Tensor, quantize: bool) -> str:
    """Return why the TMA or the tensor core cannot take x `[T, G, K]` and `weight`, "" if they can."""
    if weight.element_size() > 2 or (x.dtype is not weight.dtype and not quantize):
        return f"x must have the weight's dtype, of one or two bytes; got {x.dtype} and {weight.dtype}"
    if quantize and x.dtype is torch.bfloat16 and x.shape[-1] % 2:
        return f"bfloat16 is quantized in pairs, K is {x.shape[-1]}"
    if weight.stride(1) != 1 or weight.stride(0) * weight.element_size() % TMA_ALIGN or weight.data_ptr() % TMA_ALIGN:
        return f"rows of the weight must start at multiples of {TMA_ALIGN} bytes, its strides are {weight.stride()}"
    if tma_matrix(x, K_BLOCK_BYTES // weight.element_size()) is None:
        return f"rows of x must start at multiples of {TMA_ALIGN} bytes, or be whole K-blocks; strides are {x.stride()}"
    return ""


# Making a layout takes the host as long as a launch: each is made once.
@functools.cache
def _swizzled(bits: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=2)


def tma_descriptor(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Return a TMA descriptor of a matrix in blocks of `rows` x `columns`, swizzled for the tensor core."""
    return TensorDescriptor.from_tensor(matrix, [rows, columns], _swizzled(8 * matrix.element_size()))


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


@dataclass(frozen=True)
class Config:
    """Compile-time constants of a GEMM for few tokens.

    Attributes:
        block_m, block_n, block_k: tokens and rows of the weight in a tile, elements in a K-block.
        splits: CTAs per tile (split-K).
        cluster: the CTAs of a tile form a cluster.
        combine_tokens: tokens of a tile whose partial sums one CTA of a cluster combines.
        mailbox_bytes: size of a CTA's mailbox for partial sums; 0 if they are fetched.
        k_blocks: most K-blocks of a CTA, rounded up to a power of two.
        chunk: K-blocks of x that are quantized together.
        chunks: number of chunks that hold all K-blocks of a CTA.
        ragged: the last K-block of x has fewer than 128 elements.
        ring: weight buffers.
        resident: the ring holds all K-blocks of a CTA.
        one_scale: the rows of a tile share their scales.
        mmas: MMAs issued before the result of the first is scaled.
        pace: K-blocks of the weight in flight at a time at first; 0 for the whole ring.
    """

    block_m: int
    block_n: int
    block_k: int
    splits: int
    cluster: bool
    combine_tokens: int
    mailbox_bytes: int
    k_blocks: int
    chunk: int
    chunks: int
    ragged: bool
    ring: int
    resident: bool
    one_scale: bool = True
    mmas: int = 1
    pace: int = 0


K_BLOCK = gl.constexpr(K_BLOCK_BYTES)
SCALES_PER_WORD = gl.constexpr(layout.SCALES_PER_WORD)
WEIGHT_TILE = gl.constexpr(layout.WEIGHT_TILE)


@gluon.jit
def load_weight_scales(weight_scale, first_row, block, rows, begin, count, config: gl.constexpr, WARPS: gl.constexpr):
    """Load the scales of a CTA's weight tile as float32 `[k_blocks, 1 or block_n]`.

    `weight_scale` is a pointer to float32 or UE8M0 bytes and its strides by row block and K-block. The tile is number
    `block` of the `rows` rows that start at `first_row`. Past the end, the last K-block and row are repeated.
    """
    p_scale, row_stride, k_stride = weight_scale
    WIDE: gl.constexpr = 1 if config.one_scale else config.block_n
    LANES: gl.constexpr = 1 if config.one_scale else 32
    SCALES: gl.constexpr = gl.BlockedLayout([1, 1], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    k_block = begin + gl.minimum(gl.arange(0, config.k_blocks, gl.SliceLayout(1, SCALES)), count - 1)
    o_n = gl.arange(0, WIDE, gl.SliceLayout(0, SCALES))
    row = first_row + gl.minimum(block * config.block_n + o_n, rows - 1)
    p_scale += gl.expand_dims(row // WEIGHT_TILE * row_stride, 0)
    p_scale += gl.expand_dims(k_block * k_stride, 1)
    scale = gl.load(p_scale)
    if p_scale.dtype.element_ty == gl.uint8:
        scale = scale_value(scale.to(gl.int32))
    return scale


@gluon.jit
def load_x_scales(
    p_scale, token_stride, k_stride, tokens, first_token, begin, count, config: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """Load the scales of a CTA's K-blocks of x as float32 `[k_blocks, block_m]`.

    Scales are float32, or UE8M0 bytes in int32 words of four K-blocks. Past the end, the last K-block and token are
    repeated.
    """
    TOKENS: gl.constexpr = config.block_m if config.block_m < 32 else 32
    SCALES: gl.constexpr = gl.BlockedLayout([1, 1], [32 // TOKENS, TOKENS], [WARPS, 1], [1, 0])
    token = gl.minimum(first_token + gl.arange(0, config.block_m, gl.SliceLayout(0, SCALES)), tokens - 1).to(gl.int64)
    k_block = begin + gl.minimum(gl.arange(0, config.k_blocks, gl.SliceLayout(1, SCALES)), count - 1)
    p_scale += gl.expand_dims(token * token_stride, 0)
    if p_scale.dtype.element_ty == gl.int32:
        words = gl.load(p_scale + gl.expand_dims(k_block // SCALES_PER_WORD * k_stride, 1))
        known = scale_value((words >> gl.expand_dims(8 * (k_block % SCALES_PER_WORD), 1)) & 255)
    else:
        known = gl.load(p_scale + gl.expand_dims(k_block * k_stride, 1))
    return known


@gluon.jit
def store_rows(x):
    """Store float32 `x` `[n, width]` in new shared memory, where rows can be loaded one by one."""
    ROWS: gl.constexpr = x.shape[0]
    WIDTH: gl.constexpr = x.shape[1]
    flat = gl.allocate_shared_memory(gl.float32, [ROWS * WIDTH], FLAT)
    flat.store(gl.reshape(x, [ROWS * WIDTH]))
    return reinterpret(flat, gl.float32, [ROWS, WIDTH], FLAT)


@gluon.jit
def add_scaled(acc, products, x_scales, w_scales, first, count, MMAS: gl.constexpr):
    """Wait for the MMAS products of the K-blocks from `first` on, one by one, and add them to `acc` with their scales.

    Products of K-blocks past `count` are ignored.
    """
    ACC: gl.constexpr = acc.type.layout
    for ahead in gl.static_range(MMAS):
        k_block = gl.minimum(first + ahead, count - 1)
        x_scale = x_scales.index(k_block).load(gl.SliceLayout(0, ACC))
        row_scale = w_scales.index(k_block).load(gl.SliceLayout(1, ACC))
        if MMAS > 1:
            x_scale = gl.where(first + ahead < count, x_scale, 0.0)
            row_scale = gl.where(first + ahead < count, row_scale, 0.0)
        product = warpgroup_mma_wait(MMAS - 1 - ahead, deps=[products[ahead]])
        acc += product * (gl.expand_dims(x_scale, 0) * gl.expand_dims(row_scale, 1))
    return acc


@gluon.jit
def load_paced(weights, w_ring, row, begin, filled, PACE: gl.constexpr):
    """Load the first `filled` K-blocks of the weight, PACE in flight at a time; return barriers for `wait_paced`.

    Loads that other kernels issue meanwhile then wait for PACE loads, not for the whole ring.
    """
    BLOCK_N: gl.constexpr = w_ring.shape[1]
    BLOCK_K: gl.constexpr = w_ring.shape[2]
    pace = gl.allocate_shared_memory(gl.int64, [PACE, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(PACE):
        mbarrier.init(pace.index(i), count=1)
    fence_async_shared()
    thread_barrier()
    for i in range(filled):
        own = pace.index(i % PACE)
        if i >= PACE:
            mbarrier.wait(own, (i // PACE - 1) & 1)
        mbarrier.expect(own, BLOCK_N * K_BLOCK)
        copy_tile(weights, [row, (begin + i) * BLOCK_K], own, w_ring.index(i))
    return pace


@gluon.jit
def wait_paced(pace, filled, PACE: gl.constexpr):
    """Wait for the last PACE K-blocks of `load_paced`; it has waited for the others."""
    for i in gl.static_range(PACE):
        last = filled - 1 - i
        if last >= 0:
            mbarrier.wait(pace.index(last % PACE), (last // PACE) & 1)


WORD_ALIGN = gl.constexpr(4)  # rows of x start at multiples of so many 4-byte words
FENCED_TOKENS = gl.constexpr(16)
"""Largest tile of tokens that issues all loads of x before it waits for one. Larger tiles issue all loads before their
first store to shared memory."""
PAIR_MAGNITUDES = gl.constexpr(0x7FFF7FFF)
HALF_BITS = gl.constexpr(16)
PAIRS_TILE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
"""Layout of a tile of e4m3 as pairs, elements of 16 bits."""


@triton.constexpr_function
def _x_layout(rows: int, warps: int, pairs: bool) -> gl.BlockedLayout:
    """Return the register layout of `rows` rows of x, in pairs or elements.

    Every thread gets elements if there are enough, and as long a piece of a row as possible.
    """
    each = max(K_BLOCK_BYTES // 32, min(16, rows * K_BLOCK_BYTES // (32 * warps)))
    lanes = K_BLOCK_BYTES // each
    return gl.BlockedLayout([1, each // 2 if pairs else each], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.jit
def _pair_maximum(a, b):
    """Return the unsigned maximum of each 16-bit half."""
    return gl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _e4m3_of_pairs(pairs, factor):
    """Multiply pairs of bfloat16 by pairs of factors, and convert to pairs of e4m3 in int16."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, low, high;
        .reg .b16 c, d;
        mul.rn.bf16x2 a, $1, $3;
        mul.rn.bf16x2 b, $2, $4;
        shl.b32 low, a, 16;
        and.b32 high, a, 0xffff0000;
        cvt.rn.satfinite.e4m3x2.f32 c, high, low;
        shl.b32 low, b, 16;
        and.b32 high, b, 0xffff0000;
        cvt.rn.satfinite.e4m3x2.f32 d, high, low;
        mov.b32 $0, {c, d};
        }""",
        "=r,r,r,r,r",
        [pairs, factor],
        dtype=gl.int16,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def quantize_pairs(pairs):
    """Quantize rows of 64 pairs of bfloat16, int32 `[n, 64]`: pairs of e4m3 in int16, and float32 scales `[n]`.

    Bit-identical to `quantize` along axis 1, with two elements per instruction and register until the conversion. The
    factor is a power of two, so that a product has the bits of x unless it is nearer to 0 than to any other e4m3.
    """
    largest = gl.reduce(pairs & PAIR_MAGNITUDES, 1, _pair_maximum)
    # Keep the larger half, in the upper bits.
    largest = gl.maximum(largest << HALF_BITS, largest) >> HALF_BITS << HALF_BITS
    amax = gl.maximum(largest, ACT_AMAX_FLOOR_BITS).to(gl.float32, bitcast=True)
    bits = (amax * (1.0 / FP8_MAX)).to(gl.int32, bitcast=True)
    # Round up to a power of two; the floor keeps it from being zero or subnormal.
    scale = (gl.minimum(bits, UE8M0_MAX_BYTE << MANTISSA_BITS) + MANTISSA) & ~MANTISSA
    inverse = gl.maximum((2 * UE8M0_BIAS << MANTISSA_BITS) - scale, SUBNORMAL_HALF)
    twice = (inverse >> HALF_BITS) * ((1 << HALF_BITS) + 1)
    pairs, twice = gl.broadcast(pairs, gl.expand_dims(twice, 1))
    return _e4m3_of_pairs(pairs, twice), scale.to(gl.float32, bitcast=True)


@gluon.jit
def quantize_x(p_x, x_stride, rows, columns, values, scales, config: gl.constexpr, WARPS: gl.constexpr):
    """Quantize a CTA's K-blocks of x into shared memory, a chunk at a time.

    `rows` are the number of tokens and the first one, `columns` the first K-block, their number and K. Past the end,
    the last token and K-block are repeated. `values` is e4m3 `[chunks, chunk * block_m, 128]`, `scales` float32
    `[chunks, chunk * block_m]`.
    """
    tokens, first_token = rows
    begin, count, size = columns
    PAIRS: gl.constexpr = p_x.dtype.element_ty == gl.bfloat16
    WORDS: gl.constexpr = K_BLOCK // 2 if PAIRS else K_BLOCK  # of a K-block
    ROWS: gl.constexpr = config.chunk * config.block_m
    X: gl.constexpr = _x_layout(ROWS, WARPS, PAIRS)
    o_row = gl.arange(0, ROWS, gl.SliceLayout(1, X))
    o_k = gl.expand_dims(gl.arange(0, WORDS, gl.SliceLayout(0, X)), 0)
    token = gl.minimum(first_token + o_row % config.block_m, tokens - 1).to(gl.int64)
    ALIGN: gl.constexpr = WORD_ALIGN if p_x.dtype.element_ty == gl.float32 else 2 * WORD_ALIGN
    p_token = p_x + gl.expand_dims(token * gl.multiple_of(x_stride, ALIGN), 1)
    if PAIRS:
        p_token = p_token.to(gl.pointer_type(gl.int32), bitcast=True)
    # One chunk needs no loop: in a loop, its first load would wait for all earlier loads in flight.
    for chunk in range(1 if values.shape[0] == 1 else (count + config.chunk - 1) // config.chunk):
        k_block = begin + gl.minimum(chunk * config.chunk + o_row // config.block_m, count - 1)
        column = gl.expand_dims(k_block * WORDS, 1) + o_k
        if config.ragged:
            x = gl.load(p_token + column, mask=column < size // (K_BLOCK // WORDS), other=0)
        else:
            x = gl.load(p_token + column)
        if config.block_m <= FENCED_TOKENS:
            scheduling_fence(tokens)
        if PAIRS:
            codes, scale = quantize_pairs(x)
            if config.block_m > FENCED_TOKENS:
                # Keeps stores after all loads: mixed by the assembler, the last loads wait for the first.
                thread_barrier()
            reinterpret(values.index(chunk), gl.int16, [ROWS, WORDS], PAIRS_TILE).store(codes)
        else:
            codes, scale = quantize(x.to(gl.float32), 1)
            values.index(chunk).store(codes)
        scales.index(chunk).store(scale)
    # The tensor core reads through the async proxy, after a barrier, what was stored through the generic one.
    fence_async_shared()
