"""The matrix product behind `fp8_linear`, `fp8_grouped_einsum` and `grouped_linear`: one launch, whatever is quantised.

    out[t, g * N + n] = sum over k of x[t, g, k] * weight[g * N + n, k]

A program makes a tile of BLOCK_N outputs for BLOCK_M tokens, a strip of BLOCK_K at a time. With few tokens the weight
is the first operand of the product: its rows fill a matrix unit however few tokens there are. Operands that are e4m3
are multiplied as such where the GPU can, else as float16, which holds every e4m3 value; their scales meet the float32
sum of each strip. Where tiles are too few to fill the GPU, programs share the strips of a tile, and the last of them to
arrive adds the parts up, in their order: the same call gives the same bits. Hopper has kernels of its own, for few
tokens (grouped_matmul_hopper.py), for more of them and few tiles (grouped_matmul_clusters_hopper.py) and for many
(grouped_matmul_many_hopper.py).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...layout import ACT_AMAX_FLOOR as _ACT_AMAX_FLOOR
from ...layout import ACT_TILE, SCALES_PER_WORD, cdiv
from ...layout import WEIGHT_TILE as _WEIGHT_TILE
from ..device.quant import FP8_MAX, e4m3, tile_byte, ue8m0_inverse, ue8m0_scale
from ..host.gpu import Gpu, gpu_of, shared_memory, sm90_module
from ..host.launch import launch_kernel
from ..host.semaphores import arrival_counters, arrive

ACT_AMAX_FLOOR = tl.constexpr(_ACT_AMAX_FLOOR)
WEIGHT_TILE = tl.constexpr(_WEIGHT_TILE)
WORD = tl.constexpr(SCALES_PER_WORD)
BAND = tl.constexpr(8)  # blocks of tokens that share a pass over the weight, so that x stays in the cache
SMALL, CLUSTER, LARGE = "linear.gemm_sm90_small", "linear.gemm_sm90_cluster", "linear.gemm_sm90_large"
PAIR = "linear.gemm_sm90_pair"
"""Modules of the sm_90 kernels: few tokens, clusters of CTAs, many tokens, and two GEMMs in one launch."""
FEW_TOKENS = 64
"""Up to this many tokens, reading the weight is all that takes time."""


@triton.jit
def _weight_scale(p_scale, strip, stride):
    """float32 scale of a strip, for each row of the weight or for all of them. Bytes are UE8M0."""
    scale = tl.load(p_scale + strip * stride)
    return ue8m0_scale(scale.to(tl.int32)) if p_scale.dtype.element_ty == tl.uint8 else scale


@triton.jit
def _x_scale(p_scale, strip, stride):
    """float32 `[BLOCK_M]`: the scale of a strip of each token. Words hold the UE8M0 bytes of four strips."""
    if p_scale.dtype.element_ty == tl.int32:
        word = tl.load(p_scale + strip // WORD * stride)
        scale = ue8m0_scale((word >> (8 * (strip % WORD))) & 0xFF)
    else:
        scale = tl.load(p_scale + strip * stride)
    return scale


@triton.jit
def _load_strip(p_rows, stride, strip, size, BLOCK_K: tl.constexpr, EVEN: tl.constexpr):
    """`[rows, BLOCK_K]` of the rows at `p_rows`, zeros past `size`."""
    o_k = strip * BLOCK_K + tl.arange(0, BLOCK_K)
    p = p_rows[:, None] + (o_k * stride)[None, :]
    return tl.load(p) if EVEN else tl.load(p, mask=(o_k < size)[None, :], other=0.0)


@triton.jit
def _product(weight, x, acc, IMPRECISE: tl.constexpr, WEIGHT_FIRST: tl.constexpr):
    """`acc` plus the product of `weight` `[BLOCK_N, BLOCK_K]` and `x` `[BLOCK_M, BLOCK_K]`."""
    first, second = (weight, x) if WEIGHT_FIRST else (x, weight)
    return tl.dot(first, tl.trans(second), acc, input_precision="ieee", max_num_imprecise_acc=IMPRECISE)


@triton.jit(
    do_not_specialize=[
        "x_scale_token_stride", "x_scale_group_stride", "x_scale_strip_stride", "tokens", "groups", "strips_each",
    ]
)  # fmt: skip
def grouped_matmul_kernel(
    p_out,  # [T, G * N], rows contiguous
    p_part,  # [splits, tiles, BLOCK_N * BLOCK_M] float32, contiguous, or None
    p_arrived,  # [>= tiles] int32, zero before and after, or None
    p_x,  # [T, G, K]
    p_x_scale,  # [T, G, strips] float32, [T, G, words] int32, or None
    p_weight,  # [G * N, K]
    p_weight_scale,  # [blocks, strips] float32 or uint8, or None
    out_stride,  # of a token
    x_strides,
    # One by one, for they follow from the number of tokens: a tuple would be compiled again where one turns divisible.
    x_scale_token_stride,
    x_scale_group_stride,
    x_scale_strip_stride,
    weight_strides,
    weight_scale_strides,
    tokens,
    groups,
    rows,  # N
    size,  # K
    strips_each,  # of a program
    QUANTIZE: tl.constexpr,  # x is quantised here
    DTYPE: tl.constexpr,  # of the operands
    SPLIT: tl.constexpr,
    EVEN: tl.constexpr,  # K is whole strips
    ONE_SCALE: tl.constexpr,  # the rows of a tile share their scales
    WEIGHT_FIRST: tl.constexpr,  # sums are [BLOCK_N, BLOCK_M], else the other way round
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program p takes tile p % tiles and its strips from p // tiles * strips_each on."""
    blocks = tl.cdiv(rows, BLOCK_N)
    columns = groups * blocks
    token_blocks = tl.cdiv(tokens, BLOCK_M)
    tiles = token_blocks * columns
    tile, part = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    band = tile // (BAND * columns) * BAND
    height = tl.minimum(token_blocks - band, BAND)
    column = tile % (BAND * columns) // height
    group = column // blocks
    o_m = (band + tile % (BAND * columns) % height).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = column % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    # What lies past the end repeats the last row and is not stored.
    token = tl.minimum(o_m, tokens - 1)
    row = group.to(tl.int64) * rows + tl.minimum(o_n, rows - 1)
    p_x += token * x_strides[0] + group.to(tl.int64) * x_strides[1]
    p_weight += row * weight_strides[0]
    if p_x_scale is not None:
        p_x_scale += token * x_scale_token_stride + group.to(tl.int64) * x_scale_group_stride

    N_AXIS: tl.constexpr = 0 if WEIGHT_FIRST else 1
    M_AXIS: tl.constexpr = 1 - N_AXIS
    acc = tl.zeros((BLOCK_N, BLOCK_M) if WEIGHT_FIRST else (BLOCK_M, BLOCK_N), tl.float32)
    begin = part * strips_each
    end = tl.minimum(begin + strips_each, tl.cdiv(size, BLOCK_K))
    if p_weight_scale is None:
        for strip in tl.range(begin, end, num_stages=STAGES):
            weight = _load_strip(p_weight, weight_strides[1], strip, size, BLOCK_K, EVEN)
            x = _load_strip(p_x, x_strides[2], strip, size, BLOCK_K, EVEN)
            acc = _product(weight, x, acc, 0, WEIGHT_FIRST)
    else:
        first_row = group.to(tl.int64) * rows + column % blocks * BLOCK_N
        p_weight_scale += (first_row if ONE_SCALE else row) // WEIGHT_TILE * weight_scale_strides[0]
        # Scales are loaded a strip ahead: nothing else would hide that wait.
        weight_scale = _weight_scale(p_weight_scale, begin, weight_scale_strides[1])
        x_scale = tl.full((BLOCK_M,), 1.0, tl.float32)
        if p_x_scale is not None:
            x_scale = _x_scale(p_x_scale, begin, x_scale_strip_stride)
        for strip in tl.range(begin, end, num_stages=STAGES):
            weight = _load_strip(p_weight, weight_strides[1], strip, size, BLOCK_K, EVEN)
            x = _load_strip(p_x, x_strides[2], strip, size, BLOCK_K, EVEN)
            following = tl.minimum(strip + 1, end - 1)
            next_weight_scale = _weight_scale(p_weight_scale, following, weight_scale_strides[1])
            next_x_scale = x_scale
            if p_x_scale is not None:
                next_x_scale = _x_scale(p_x_scale, following, x_scale_strip_stride)
            if QUANTIZE:
                wide = x.to(tl.float32)
                byte = tile_byte(wide, ACT_AMAX_FLOOR, FP8_MAX)
                x_scale = ue8m0_scale(byte)
                x = e4m3(wide * ue8m0_inverse(byte)[:, None])
            # Hopper adds products of e4m3 with 14 bits. Where registers are left, a sum leaves its units after 32.
            IMPRECISE: tl.constexpr = 32 if BLOCK_M <= 32 else BLOCK_K
            product = _product(weight.to(DTYPE), x.to(DTYPE), None, IMPRECISE, WEIGHT_FIRST)
            if ONE_SCALE:
                acc += product * tl.expand_dims(x_scale * weight_scale, N_AXIS)
            else:
                acc += product * (tl.expand_dims(x_scale, N_AXIS) * tl.expand_dims(weight_scale, M_AXIS))
            weight_scale, x_scale = next_weight_scale, next_x_scale

    p_out += tl.expand_dims(o_m * out_stride, N_AXIS) + tl.expand_dims(group.to(tl.int64) * rows + o_n, M_AXIS)
    mask = tl.expand_dims(o_m < tokens, N_AXIS) & tl.expand_dims(o_n < rows, M_AXIS)
    if SPLIT:
        o_row, o_column = tl.arange(0, acc.shape[0]), tl.arange(0, acc.shape[1])
        p_part += tile.to(tl.int64) * (BLOCK_N * BLOCK_M) + (o_row[:, None] * acc.shape[1] + o_column[None, :])
        part_stride = tiles.to(tl.int64) * (BLOCK_N * BLOCK_M)
        tl.store(p_part + part * part_stride, acc)
        parts = tl.num_programs(0) // tiles
        if arrive(p_arrived + tile) == parts - 1:
            acc = tl.zeros_like(acc)
            for other in range(parts):
                acc += tl.load(p_part + other * part_stride, cache_modifier=".cg")
            tl.store(p_out, acc.to(p_out.dtype.element_ty), mask=mask)
            tl.store(p_arrived + tile, 0)
    else:
        tl.store(p_out, acc.to(p_out.dtype.element_ty), mask=mask)


class Cut(NamedTuple):
    """How a launch is cut up: its tile, the warps and stages of a program, and how many programs share a tile."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    splits: int


def choose_cut(gpu: Gpu, tokens: int, groups: int, rows: int, strips: int) -> Cut:
    """Tiles for `[tokens, groups * rows]` outputs of `strips` strips.

    A program quantises what it reads of x again for each block of rows, so more tokens want larger blocks. Few tokens
    want small ones, of which a processor holds several: together they keep more of the weight on its way.
    """
    smallest = 8 if gpu.backend == "cuda" else 16
    block_m = max(smallest, triton.next_power_of_2(tokens)) if tokens <= FEW_TOKENS else 2 * FEW_TOKENS
    block_n, warps = {8: (64, 4), 16: (64, 4), 32: (128, 4), 64: (256, 8), 128: (128, 8)}[block_m]
    deep = gpu.backend == "cuda" and gpu.capability // 10 in (9, 10)
    if not deep:
        block_n = min(block_n, 128)
    tiles = cdiv(tokens, block_m) * groups * cdiv(rows, block_n)
    programs = gpu.sms * (2 if block_n == 64 else 1)
    splits = max(1, min(strips, programs // tiles))
    # Tiles of 64 rows are small enough for anyone's shared memory, but pipelines on AMD take two.
    stages = 4 if deep or (block_n == 64 and gpu.backend == "cuda") else 2
    return Cut(block_m, block_n, warps, stages, cdiv(strips, cdiv(strips, splits)))


def shared_bytes(gpu: Gpu, cut: Cut, block_k: int, x_size: int, weight_size: int, operand_size: int) -> int:
    """Most bytes of shared memory that a program of `cut` takes, with elements of these sizes in bytes.

    Hopper and its successors multiply out of the buffers of the pipeline, others have one less. What is converted on
    the way is there in both forms; AMD converts in registers.
    """
    buffers = cut.stages - 1 if gpu.capability // 10 not in (9, 10) else cut.stages

    def operand(rows: int, size: int) -> int:
        if gpu.backend == "hip" or size == operand_size:
            return buffers * rows * block_k * size
        return rows * block_k * ((cut.stages - 1) * size + operand_size)

    # Results pass through it on their way out; blocks of more rows than share a scale have one for each.
    loop = operand(cut.block_n, weight_size) + operand(cut.block_m, x_size)
    return max(loop, 4 * cut.block_n * cut.block_m) + 4 * (cut.block_n if cut.block_n > ACT_TILE else 0)


def _fitting(gpu: Gpu, cut: Cut, *sizes: int) -> Cut:
    """`cut` with fewer stages, or else a smaller tile, where it takes more than there is: that of float32 inputs."""
    while shared_bytes(gpu, cut, *sizes) > shared_memory(gpu):
        if cut.stages > 2:
            cut = cut._replace(stages=cut.stages - 1)
        elif cut.block_n > cut.block_m:
            cut = cut._replace(block_n=cut.block_n // 2)
        else:
            cut = cut._replace(block_m=cut.block_m // 2)
    return cut


def grouped_matmul(
    x: Tensor,
    x_scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor | None,
    out_dtype: torch.dtype,
    *,
    quantize: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """`[T, G * N]` of `x` `[T, G, K]` and `weight` `[G * N, K]`.

    Args:
        x_scale, weight_scale: of operands that are e4m3, as `fp8_grouped_einsum` takes them.
        quantize: quantise a floating x in strips of 128, in the same launch.
        out: what to fill and return, with rows of any stride.
    """
    if out is None:
        out = torch.empty((x.shape[0], weight.shape[0]), dtype=out_dtype, device=x.device)
    if out.numel() == 0:
        return out
    gpu = gpu_of(x.device)
    if weight_scale is not None and weight_scale.dtype is torch.float8_e8m0fnu:
        weight_scale = weight_scale.view(torch.uint8)
    few, clusters, many = (sm90_module(gpu, stem) for stem in (SMALL, CLUSTER, LARGE))
    if clusters is not None and not clusters.clusters_refuse(x, weight, weight_scale, quantize, gpu):
        clusters.launch_clusters_of_tiles(x, x_scale, weight, weight_scale, out, gpu)
    elif few is not None and not few.hopper_refuses(x, weight, quantize, gpu):
        few.launch_hopper(x, x_scale, weight, weight_scale, out, quantize, gpu)
    elif many is not None and not many.many_refuses(x, weight, weight_scale, quantize, out):
        many.launch_many(x, x_scale, weight, weight_scale, out, quantize, gpu)
    else:
        _launch(x, x_scale, weight, weight_scale, out, quantize, gpu)
    return out


def _launch(
    x: Tensor,
    x_scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor | None,
    out: Tensor,
    quantize: bool,
    gpu: Gpu,
) -> None:
    """Fill `out`."""
    tokens, groups, size = x.shape
    rows, block_k = weight.shape[0] // groups, ACT_TILE // (1 if weight.element_size() == 1 else 2)
    strips = cdiv(size, block_k)
    operand = _operand(gpu) if quantize or x_scale is not None else _DTYPES[x.dtype]
    cut = choose_cut(gpu, tokens, groups, rows, strips)
    if operand is tl.float32:
        # Its products are single multiplications, all of them unrolled: a small tile compiles in a second, not in ten.
        cut = cut._replace(block_m=min(cut.block_m, 32), block_n=64, warps=4)
    cut = _fitting(gpu, cut, block_k, x.element_size(), weight.element_size(), operand.primitive_bitwidth // 8)
    tiles = cdiv(tokens, cut.block_m) * groups * cdiv(rows, cut.block_n)
    part = arrived = None
    if cut.splits > 1:
        shape = (cut.splits, tiles, cut.block_n * cut.block_m)
        part = torch.empty(shape, dtype=torch.float32, device=x.device)
        arrived = arrival_counters(tiles, x.device)
    launch_kernel(
        grouped_matmul_kernel,
        (tiles * cut.splits,),
        out,
        part,
        arrived,
        x,
        x_scale,
        weight,
        weight_scale,
        out.stride(0),
        x.stride(),
        *((0, 0, 0) if x_scale is None else x_scale.stride()),
        weight.stride(),
        (0, 0) if weight_scale is None else weight_scale.stride(),
        tokens,
        groups,
        rows,
        size,
        cdiv(strips, cut.splits),
        QUANTIZE=quantize,
        DTYPE=operand,
        SPLIT=cut.splits > 1,
        EVEN=size % block_k == 0,
        ONE_SCALE=_WEIGHT_TILE % cut.block_n == 0 and (groups == 1 or rows % cut.block_n == 0),
        WEIGHT_FIRST=cut.block_m <= FEW_TOKENS,
        BLOCK_M=cut.block_m,
        BLOCK_N=cut.block_n,
        BLOCK_K=block_k,
        STAGES=cut.stages,
        num_warps=cut.warps,
    )


_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def _operand(gpu: Gpu) -> tl.dtype:
    """What e4m3 operands are multiplied as. AMD's matrix units before gfx950 know another e4m3."""
    return tl.float16 if gpu.backend == "hip" else tl.float8e4nv
