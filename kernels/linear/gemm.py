"""GEMM of `fp8_linear`, `fp8_grouped_einsum` and `grouped_linear`: a portable Triton kernel, and the choice of kernel.

    out[t, g * N + n] = sum over k of x[t, g, k] * weight[g * N + n, k]

A CTA computes a tile of BLOCK_N results for BLOCK_M tokens, K-block by K-block. With few tokens the weight is the first
operand of the MMA: its rows fill a tensor core however few tokens there are. Where the GPU has no e4m3 MMA, e4m3 is
multiplied as float16, which holds every value; scales are applied to the float32 sum of each K-block. If tiles are too
few to fill the GPU, CTAs split the K of a tile (split-K), and the last to arrive combines the partial sums in a fixed
order: the same call gives the same bits. sm_90 kernels: gemm_sm90_small.py for few tokens, gemm_sm90_cluster.py for
more tokens but few tiles, gemm_sm90_large.py for many.

`mx_linear` has scales of 32x32 blocks. Its weight is multiplied by them in registers, which is exact in bfloat16, and
its x is bfloat16 that has been rounded to e4m3, here or before.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...layout import ACT_AMAX_FLOOR as _ACT_AMAX_FLOOR
from ...layout import ACT_TILE, MX_TILE, SCALES_PER_WORD, cdiv
from ...layout import WEIGHT_TILE as _WEIGHT_TILE
from ...ops.common.invariance import STEP
from ..device.mx_values import rounded_mxfp8, scaled_blocks
from ..device.quant import FP8_MAX, e4m3, tile_byte, ue8m0_inverse, ue8m0_scale
from ..host.gpu import Gpu, gpu_of, shared_memory, sm90_module
from ..host.launch import DTYPES, launch_kernel
from ..host.semaphores import arrival_counters, arrive

ACT_AMAX_FLOOR = tl.constexpr(_ACT_AMAX_FLOOR)
WEIGHT_TILE = tl.constexpr(_WEIGHT_TILE)
BLOCK = tl.constexpr(MX_TILE)  # side of the blocks of `mx_linear` that share a scale
WORD = tl.constexpr(SCALES_PER_WORD)
BAND = tl.constexpr(8)  # tiles of tokens that share a pass over the weight, so that x stays in L2
SMALL, CLUSTER, LARGE = "linear.gemm_sm90_small", "linear.gemm_sm90_cluster", "linear.gemm_sm90_large"
PAIR = "linear.gemm_sm90_pair"
"""Modules of the sm_90 kernels: few tokens, clusters of CTAs, many tokens, and two GEMMs in one launch."""
FEW_TOKENS = 64
"""Most tokens of a GEMM that is bound by reading the weight."""
INVARIANT_TOKENS = 64
"""Tokens that batch-invariant calls of any size are tiled for: a tile that fills tensor cores, and a fixed split-K."""
INVARIANT_PASS = 2048
"""Most tokens of a launch of a batch-invariant call, which bounds its partial sums."""


class Operands(NamedTuple):
    """Operands of a GEMM: x `[T, G, K]`, weight `[G * N, K]`, and the scales of those that are e4m3.

    Scales are as in `fp8_grouped_einsum`, bytes of the weight as uint8.
    """

    x: Tensor
    x_scale: Tensor | None
    weight: Tensor
    weight_scale: Tensor | None


@triton.jit
def _weight_scale(p_scale, k_block, stride):
    """Load the scale of a K-block as float32, per row of the weight or one for all. Bytes are UE8M0."""
    scale = tl.load(p_scale + k_block * stride)
    return ue8m0_scale(scale.to(tl.int32)) if p_scale.dtype.element_ty == tl.uint8 else scale


@triton.jit
def _x_scale(p_scale, k_block, stride):
    """Load the scales of a K-block as float32 `[BLOCK_M]`. Words hold the UE8M0 bytes of four K-blocks."""
    if p_scale.dtype.element_ty == tl.int32:
        word = tl.load(p_scale + k_block // WORD * stride)
        scale = ue8m0_scale((word >> (8 * (k_block % WORD))) & 0xFF)
    else:
        scale = tl.load(p_scale + k_block * stride)
    return scale


@triton.jit
def _load_k_block(p_rows, stride, k_block, size, BLOCK_K: tl.constexpr, EVEN: tl.constexpr):
    """Load `[rows, BLOCK_K]` of the rows at `p_rows`, zeros past `size`."""
    o_k = k_block * BLOCK_K + tl.arange(0, BLOCK_K)
    p = p_rows[:, None] + (o_k * stride)[None, :]
    return tl.load(p) if EVEN else tl.load(p, mask=(o_k < size)[None, :], other=0.0)


@triton.jit
def _block_scales(p_scale, strides, first_row, k_block, rows, size, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load float32 scales `[BLOCK_N / 32, BLOCK_K / 32]` of the blocks of a tile, of blocks past the end any."""
    o_n = tl.minimum(tl.arange(0, BLOCK_N // BLOCK) + first_row // BLOCK, (rows - 1) // BLOCK)
    o_k = tl.minimum(tl.arange(0, BLOCK_K // BLOCK) + k_block * (BLOCK_K // BLOCK), (size - 1) // BLOCK)
    scale = tl.load(p_scale + (o_n.to(tl.int64) * strides[0])[:, None] + (o_k * strides[1])[None, :])
    return ue8m0_scale(scale.to(tl.int32)) if p_scale.dtype.element_ty == tl.uint8 else scale


@triton.jit
def _multiply(weight, x, acc, IMPRECISE: tl.constexpr, WEIGHT_FIRST: tl.constexpr):
    """Add the product of `weight` `[BLOCK_N, BLOCK_K]` and `x` `[BLOCK_M, BLOCK_K]` to `acc`."""
    first, second = (weight, x) if WEIGHT_FIRST else (x, weight)
    return tl.dot(first, tl.trans(second), acc, input_precision="ieee", max_num_imprecise_acc=IMPRECISE)


@triton.jit(
    do_not_specialize=[
        "x_scale_token_stride", "x_scale_group_stride", "x_scale_k_stride", "tokens", "groups", "k_blocks_each",
    ]
)  # fmt: skip
def gemm_kernel(
    p_out,  # [T, G * N], rows contiguous
    p_partial,  # [splits, tiles, BLOCK_N * BLOCK_M] float32, contiguous, or None
    p_arrived,  # [>= tiles] int32, zero before and after, or None
    p_x,  # [T, G, K]
    p_x_scale,  # [T, G, K-blocks] float32, [T, G, words] int32, or None
    p_weight,  # [G * N, K]
    p_weight_scale,  # [row blocks, K-blocks] float32 or uint8, or None; blocks are 32x32 with MX, else 128x128
    out_stride,  # of a token
    x_strides,
    # No tuple: these depend on the number of tokens, and do_not_specialize does not reach into tuples.
    x_scale_token_stride,
    x_scale_group_stride,
    x_scale_k_stride,
    weight_strides,
    weight_scale_strides,
    tokens,
    groups,
    rows,  # N
    size,  # K
    k_blocks_each,  # of a CTA
    QUANTIZE: tl.constexpr,  # x is quantized here
    DTYPE: tl.constexpr,  # of the operands
    SPLIT: tl.constexpr,
    EVEN: tl.constexpr,  # K is a multiple of BLOCK_K
    ONE_SCALE: tl.constexpr,  # the rows of a tile share their scales
    WEIGHT_FIRST: tl.constexpr,  # sums are [BLOCK_N, BLOCK_M], else the other way round
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    MX: tl.constexpr = False,  # of one group: scales of 32x32 blocks, and of 32 columns of an x that is quantized here
):
    """Compute tile p % tiles in program p, K-blocks from p // tiles * k_blocks_each on."""
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
    # Tokens and rows past the end repeat the last one and are not stored.
    token = tl.minimum(o_m, tokens - 1)
    row = group.to(tl.int64) * rows + tl.minimum(o_n, rows - 1)
    p_x += token * x_strides[0] + group.to(tl.int64) * x_strides[1]
    p_weight += row * weight_strides[0]
    if p_x_scale is not None:
        p_x_scale += token * x_scale_token_stride + group.to(tl.int64) * x_scale_group_stride

    N_AXIS: tl.constexpr = 0 if WEIGHT_FIRST else 1
    M_AXIS: tl.constexpr = 1 - N_AXIS
    acc = tl.zeros((BLOCK_N, BLOCK_M) if WEIGHT_FIRST else (BLOCK_M, BLOCK_N), tl.float32)
    begin = part * k_blocks_each
    end = tl.minimum(begin + k_blocks_each, tl.cdiv(size, BLOCK_K))
    if p_weight_scale is None:
        for k_block in tl.range(begin, end, num_stages=STAGES):
            weight = _load_k_block(p_weight, weight_strides[1], k_block, size, BLOCK_K, EVEN)
            x = _load_k_block(p_x, x_strides[2], k_block, size, BLOCK_K, EVEN)
            acc = _multiply(weight, x, acc, 0, WEIGHT_FIRST)
    elif MX:
        first_row = column * BLOCK_N
        for k_block in tl.range(begin, end, num_stages=STAGES):
            weight = _load_k_block(p_weight, weight_strides[1], k_block, size, BLOCK_K, EVEN)
            x = _load_k_block(p_x, x_strides[2], k_block, size, BLOCK_K, EVEN)
            scale = _block_scales(
                p_weight_scale, weight_scale_strides, first_row, k_block, rows, size, BLOCK_N, BLOCK_K
            )
            if QUANTIZE:
                by_scale = tl.reshape(x.to(tl.float32), (BLOCK_M, BLOCK_K // BLOCK, BLOCK))
                x = tl.reshape(rounded_mxfp8(by_scale), (BLOCK_M, BLOCK_K))
            acc = _multiply(scaled_blocks(weight, scale).to(DTYPE), x.to(DTYPE), acc, 0, WEIGHT_FIRST)
    else:
        first_row = group.to(tl.int64) * rows + column % blocks * BLOCK_N
        p_weight_scale += (first_row if ONE_SCALE else row) // WEIGHT_TILE * weight_scale_strides[0]
        # Scales are loaded a K-block ahead: nothing else hides their latency.
        weight_scale = _weight_scale(p_weight_scale, begin, weight_scale_strides[1])
        x_scale = tl.full((BLOCK_M,), 1.0, tl.float32)
        if p_x_scale is not None:
            x_scale = _x_scale(p_x_scale, begin, x_scale_k_stride)
        for k_block in tl.range(begin, end, num_stages=STAGES):
            weight = _load_k_block(p_weight, weight_strides[1], k_block, size, BLOCK_K, EVEN)
            x = _load_k_block(p_x, x_strides[2], k_block, size, BLOCK_K, EVEN)
            following = tl.minimum(k_block + 1, end - 1)
            next_weight_scale = _weight_scale(p_weight_scale, following, weight_scale_strides[1])
            next_x_scale = x_scale
            if p_x_scale is not None:
                next_x_scale = _x_scale(p_x_scale, following, x_scale_k_stride)
            if QUANTIZE:
                wide = x.to(tl.float32)
                byte = tile_byte(wide, ACT_AMAX_FLOOR, FP8_MAX)
                x_scale = ue8m0_scale(byte)
                x = e4m3(wide * ue8m0_inverse(byte)[:, None])
            # Hopper accumulates e4m3 products with 14 bits. If registers allow, sums move to float32 after 32 products.
            IMPRECISE: tl.constexpr = 32 if BLOCK_M <= 32 else BLOCK_K
            product = _multiply(weight.to(DTYPE), x.to(DTYPE), None, IMPRECISE, WEIGHT_FIRST)
            if ONE_SCALE:
                acc += product * tl.expand_dims(x_scale * weight_scale, N_AXIS)
            else:
                acc += product * (tl.expand_dims(x_scale, N_AXIS) * tl.expand_dims(weight_scale, M_AXIS))
            weight_scale, x_scale = next_weight_scale, next_x_scale

    p_out += tl.expand_dims(o_m * out_stride, N_AXIS) + tl.expand_dims(group.to(tl.int64) * rows + o_n, M_AXIS)
    mask = tl.expand_dims(o_m < tokens, N_AXIS) & tl.expand_dims(o_n < rows, M_AXIS)
    if SPLIT:
        o_row, o_column = tl.arange(0, acc.shape[0]), tl.arange(0, acc.shape[1])
        p_partial += tile.to(tl.int64) * (BLOCK_N * BLOCK_M) + (o_row[:, None] * acc.shape[1] + o_column[None, :])
        split_stride = tiles.to(tl.int64) * (BLOCK_N * BLOCK_M)
        tl.store(p_partial + part * split_stride, acc)
        parts = tl.num_programs(0) // tiles
        if arrive(p_arrived + tile) == parts - 1:
            acc = tl.zeros_like(acc)
            for other in range(parts):
                acc += tl.load(p_partial + other * split_stride, cache_modifier=".cg")
            tl.store(p_out, acc.to(p_out.dtype.element_ty), mask=mask)
            tl.store(p_arrived + tile, 0)
    else:
        tl.store(p_out, acc.to(p_out.dtype.element_ty), mask=mask)


class GemmTiling(NamedTuple):
    """Tiling of a launch: its tile, warps and pipeline stages of a CTA, and CTAs per tile."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    splits: int


def choose_tiling(gpu: Gpu, tokens: int, groups: int, rows: int, k_blocks: int) -> GemmTiling:
    """Return the tiling for `[tokens, groups * rows]` results of `k_blocks` K-blocks.

    x is quantized again for each block of rows, so more tokens take larger blocks. Few tokens take small ones: several
    CTAs per SM keep more of the weight in flight.
    """
    smallest = 8 if gpu.backend == "cuda" else 16
    block_m = max(smallest, triton.next_power_of_2(tokens)) if tokens <= FEW_TOKENS else 2 * FEW_TOKENS
    block_n, warps = {8: (64, 4), 16: (64, 4), 32: (128, 4), 64: (256, 8), 128: (128, 8)}[block_m]
    deep = gpu.backend == "cuda" and gpu.capability // 10 in (9, 10)
    if not deep:
        block_n = min(block_n, 128)
    tiles = cdiv(tokens, block_m) * groups * cdiv(rows, block_n)
    programs = gpu.sms * (2 if block_n == 64 else 1)
    splits = max(1, min(k_blocks, programs // tiles))
    # Tiles of 64 rows fit any GPU's shared memory with four stages; pipelines on AMD have two.
    stages = 4 if deep or (block_n == 64 and gpu.backend == "cuda") else 2
    return GemmTiling(block_m, block_n, warps, stages, cdiv(k_blocks, cdiv(k_blocks, splits)))


def shared_bytes(gpu: Gpu, tiling: GemmTiling, block_k: int, x_size: int, weight_size: int, operand_size: int) -> int:
    """Return the most shared memory that a CTA takes, with elements of these sizes in bytes.

    From Hopper on MMAs read the pipeline's buffers, other GPUs have one buffer less. Operands that are converted are in
    shared memory in both forms; AMD converts in registers.
    """
    buffers = tiling.stages - 1 if gpu.capability // 10 not in (9, 10) else tiling.stages

    def operand(rows: int, size: int) -> int:
        if gpu.backend == "hip" or size == operand_size:
            return buffers * rows * block_k * size
        return rows * block_k * ((tiling.stages - 1) * size + operand_size)

    # Results go through shared memory, too; blocks of more rows than share a scale have one scale per row.
    loop = operand(tiling.block_n, weight_size) + operand(tiling.block_m, x_size)
    return max(loop, 4 * tiling.block_n * tiling.block_m) + 4 * (tiling.block_n if tiling.block_n > ACT_TILE else 0)


def _fitting(gpu: Gpu, tiling: GemmTiling, *sizes: int) -> GemmTiling:
    """Return `tiling` with fewer stages, or else a smaller tile, if it exceeds shared memory (float32 inputs)."""
    while shared_bytes(gpu, tiling, *sizes) > shared_memory(gpu):
        if tiling.stages > 2:
            tiling = tiling._replace(stages=tiling.stages - 1)
        elif tiling.block_n > tiling.block_m:
            tiling = tiling._replace(block_n=tiling.block_n // 2)
        else:
            tiling = tiling._replace(block_m=tiling.block_m // 2)
    return tiling


def grouped_gemm(
    operands: Operands,
    out_dtype: torch.dtype,
    *,
    quantize: bool = False,
    out: Tensor | None = None,
    invariant: str = "",
) -> Tensor:
    """Return `[T, G * N]`.

    Args:
        quantize: quantize a floating x per 128 columns in the same launch.
        out: fill and return this tensor instead, with rows of any stride.
        invariant: a value of `dsv4.batch_invariant`, for rows that are summed in the same order in calls of any size.
    """
    x, x_scale, weight, weight_scale = operands
    if out is None:
        out = torch.empty((x.shape[0], weight.shape[0]), dtype=out_dtype, device=x.device)
    if out.numel() == 0:
        return out
    gpu = gpu_of(x.device)
    if weight_scale is not None and weight_scale.dtype is torch.float8_e8m0fnu:
        operands = operands._replace(weight_scale=weight_scale.view(torch.uint8))
    if invariant == STEP and _launch_few(operands, out, quantize, gpu):
        return out
    if invariant:
        for first in range(0, x.shape[0], INVARIANT_PASS):
            some = slice(first, first + INVARIANT_PASS)
            chunk = operands._replace(x=x[some], x_scale=None if x_scale is None else x_scale[some])
            _launch(chunk, out[some], quantize, gpu, invariant=True)
        return out
    small, cluster, large = (sm90_module(gpu, name) for name in (SMALL, CLUSTER, LARGE))
    if cluster is not None and not cluster.why_unsupported(operands, quantize, gpu):
        cluster.launch(operands, out, gpu)
    elif small is not None and not small.why_unsupported(x, weight, quantize, gpu):
        small.launch(operands, out, quantize, gpu)
    elif large is not None and not large.why_unsupported(operands, quantize, out):
        large.launch(operands, out, gpu)
    else:
        _launch(operands, out, quantize, gpu)
    return out


def _launch_few(operands: Operands, out: Tensor, quantize: bool, gpu: Gpu) -> bool:
    """Fill `out` with the kernel for few tokens, its sums the same for any number of them, if it takes the weight."""
    small = sm90_module(gpu, SMALL)
    if small is None or quantize:
        return False
    x, weight = operands.x, operands.weight
    if small.why_unsupported_operands(x, weight, False):
        # What is left to decide is the weight's, so that it is decided alike for all calls.
        x = x.contiguous()
    if small.why_unsupported_operands(x, weight, False):
        return False
    small.launch(operands._replace(x=x), out, False, gpu, pinned=True)
    return True


class Problem(NamedTuple):
    """Sizes and formats of a call of the Triton kernel, tokens apart.

    Attributes:
        groups, rows, size: G, N and K. x, weight: dtypes.
        quantize: whether the kernel quantizes x. scaled: whether x has scales.
        invariant: whether the tiling is the same for any number of tokens.
        mx: for scales of 32x32 blocks, how they are stored: "bytes" or "float32".
    """

    groups: int
    rows: int
    size: int
    x: torch.dtype
    weight: torch.dtype
    quantize: bool
    scaled: bool
    invariant: bool = False
    mx: str = ""


class GemmPlan(NamedTuple):
    """A launch: its tiling, K-block, dtype of the operands of MMAs, tiles, and K-blocks of a split.

    Attributes:
        even: whether K is a multiple of a K-block. one_scale: whether rows of a tile share a scale.
    """

    tiling: GemmTiling
    block_k: int
    operand: tl.dtype
    tiles: int
    k_blocks_each: int
    even: bool
    one_scale: bool

    @property
    def variant(self) -> GemmPlan:
        """The plan without its grid and the length of a split."""
        tiling = self.tiling._replace(splits=min(self.tiling.splits, 2))
        return self._replace(tiling=tiling, tiles=0, k_blocks_each=0)


def problem_of(operands: Operands, quantize: bool, invariant: bool = False, mx: bool = False) -> Problem:
    """Return the sizes and formats of a call."""
    x, x_scale, weight, weight_scale = operands
    _, groups, size = x.shape
    scaled = x_scale is not None
    form = "" if not mx else "bytes" if weight_scale is not None and weight_scale.dtype is torch.uint8 else "float32"
    return Problem(groups, weight.shape[0] // groups, size, x.dtype, weight.dtype, quantize, scaled, invariant, form)


@functools.lru_cache(1024)
def plan(problem: Problem, tokens: int, gpu: Gpu) -> GemmPlan:
    """Return the launch of a call of `tokens` tokens."""
    groups, rows, size = problem[:3]
    block_k = ACT_TILE // (1 if problem.weight.itemsize == 1 else 2)
    k_blocks = cdiv(size, block_k)
    operand = _operand(gpu) if problem.quantize or problem.scaled else DTYPES[problem.x]
    if problem.mx:
        exact = problem.mx == "bytes" and (problem.quantize or problem.x is torch.bfloat16)
        operand = tl.bfloat16 if exact else tl.float32
    tiling = choose_tiling(gpu, INVARIANT_TOKENS if problem.invariant else tokens, groups, rows, k_blocks)
    if operand is tl.float32:
        # float32 products are unrolled into single multiplications: a small tile compiles in one second, not ten.
        tiling = tiling._replace(block_m=min(tiling.block_m, 32), block_n=64, warps=4)
    sizes = problem.x.itemsize, problem.weight.itemsize, operand.primitive_bitwidth // 8
    tiling = _fitting(gpu, tiling, block_k, *sizes)
    return GemmPlan(
        tiling,
        block_k,
        operand,
        tiles=cdiv(tokens, tiling.block_m) * groups * cdiv(rows, tiling.block_n),
        k_blocks_each=cdiv(k_blocks, tiling.splits),
        even=size % block_k == 0,
        one_scale=_WEIGHT_TILE % tiling.block_n == 0 and (groups == 1 or rows % tiling.block_n == 0),
    )


def mx_gemm(operands: Operands, out: Tensor, quantize: bool) -> None:
    """Fill `out` `[T, N]`, of at least one element, with a weight that has scales of 32x32 blocks.

    Args:
        operands: x `[T, 1, K]` floating without scales; scales of the weight are float32 or uint8.
        quantize: round x per 32 columns to e4m3 in the same launch.
    """
    _launch(operands, out, quantize, gpu_of(out.device), mx=True)


def _launch(
    operands: Operands, out: Tensor, quantize: bool, gpu: Gpu, invariant: bool = False, mx: bool = False
) -> None:
    """Fill `out` with the Triton kernel."""
    x, x_scale, weight, weight_scale = operands
    problem, tokens = problem_of(operands, quantize, invariant, mx), x.shape[0]
    launch = plan(problem, tokens, gpu)
    tiling, tiles = launch.tiling, launch.tiles
    partial_sums = arrived = None
    if tiling.splits > 1:
        shape = (tiling.splits, tiles, tiling.block_n * tiling.block_m)
        partial_sums = torch.empty(shape, dtype=torch.float32, device=x.device)
        arrived = arrival_counters(tiles, x.device)
    launch_kernel(
        gemm_kernel,
        (tiles * tiling.splits,),
        out,
        partial_sums,
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
        *problem[:3],
        launch.k_blocks_each,
        QUANTIZE=quantize,
        DTYPE=launch.operand,
        SPLIT=tiling.splits > 1,
        EVEN=launch.even,
        ONE_SCALE=launch.one_scale,
        WEIGHT_FIRST=mx or tiling.block_m <= FEW_TOKENS,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_K=launch.block_k,
        STAGES=tiling.stages,
        MX=mx,
        num_warps=tiling.warps,
    )


def _operand(gpu: Gpu) -> tl.dtype:
    """Return the dtype that e4m3 operands are multiplied in: float16 on AMD, as gfx942 multiplies e4m3fnuz only."""
    return tl.float16 if gpu.backend == "hip" else tl.float8e4nv
