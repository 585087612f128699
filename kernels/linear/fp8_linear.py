"""Products of one matrix in e4m3 by torch's own, cuBLAS's, where that is the faster one.

`fp8_linear`: few tokens in one launch that quantises on the way, more in two, the second torch's for very many.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...layout import ACT_AMAX_FLOOR as _ACT_AMAX_FLOOR
from ...layout import ACT_TILE as _ACT_TILE
from ...layout import WEIGHT_TILE, cdiv
from ..device.quant import FP8_MAX, e4m3, tile_byte, ue8m0_inverse, ue8m0_scale, why_unsupported_fp8
from ..host.gpu import SM90, Gpu, gpu_of, register_limit, sm90_module
from ..host.launch import launch_kernel
from ..host.pdl import pdl_option, pdl_prologue, supports_pdl
from .gemm import CLUSTER, FEW_TOKENS, PAIR, SMALL, grouped_matmul

FIRST = 1024
"""Tokens from which on it is, on an H200."""
FIRST_CUDA = (12, 9)
"""CUDA that torch must be built for: for an older one it raises at the call."""
TOKENS_ALIGN, STRIPS_ALIGN = 16, 4
"""What it takes multiples of. torch 2.11 has cuBLAS refuse 1027 tokens ("CUBLAS_STATUS_NOT_SUPPORTED"), and wants
columns of the weight's scales filled up to four."""


def torch_refuses(gpu: Gpu, tokens: int, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype) -> str:
    """Why the product is ours to make, or ""."""
    if gpu.capability != SM90:
        return "other GPUs take scales of another form"
    if _cuda() < FIRST_CUDA:
        return f"torch is built for CUDA {torch.version.cuda}, which has no such scales"
    if tokens < FIRST:
        return f"it is the faster one from {FIRST} tokens on"
    if tokens % TOKENS_ALIGN or weight.shape[1] % (STRIPS_ALIGN * WEIGHT_TILE):
        return f"it takes multiples of {TOKENS_ALIGN} tokens and of {STRIPS_ALIGN} strips"
    if dtype is not torch.bfloat16 or any(size % WEIGHT_TILE for size in weight.shape):
        return "it gives bfloat16, of whole blocks"
    return "" if weight.is_contiguous() and weight_scale.is_contiguous() else "it takes weights without gaps"


def quantised_refused(values: Tensor, scale: Tensor) -> str:
    """Why it does not take `values` `[T, G, K]` with these scales as they are, or ""."""
    tokens, groups, _ = values.shape
    if groups != 1:
        return "it multiplies one matrix"
    if scale.dtype is not torch.float32 or scale.stride(0) != 1 or scale.stride(2) != tokens:
        return "it takes float32 scales, those of neighbouring tokens side by side"
    return "" if values.is_contiguous() else "it takes values without gaps"


def widened(scale: Tensor) -> Tensor:
    """Scales of a weight in float32; of bytes, a launch."""
    return scale if scale.dtype is torch.float32 else scale.view(torch.float8_e8m0fnu).to(torch.float32)


def _cuda() -> tuple[int, ...]:
    """The CUDA that torch is built for, (0,) for none."""
    return tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])


def multiply_by_torch(values: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """bfloat16 `[T, N]` of e4m3 `values` `[T, K]` and `weight` `[N, K]`.

    Args:
        scale, weight_scale: float32, of strips of 128 and of blocks of 128x128; a column of `scale` is contiguous.
    """
    from torch.nn.functional import ScalingType, scaled_mm

    recipes = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    scale = scale.as_strided(scale.shape, (1, len(values)))  # of a single strip too
    return scaled_mm(values, weight.t(), scale, recipes[0], weight_scale.t(), recipes[1], output_dtype=torch.bfloat16)


ACT_AMAX_FLOOR = tl.constexpr(_ACT_AMAX_FLOOR)
ACT_TILE = tl.constexpr(_ACT_TILE)
BLOCK_T, BLOCK_S = 4, 8
"""Tokens and strips of a program that quantises: scales of neighbouring tokens lie side by side."""
REGISTERS = 64
"""Of a thread, which 55 are enough for; left to itself the assembler takes 40, and loads one half of a program's strips
behind the other."""
FEW_TOKENS_HOPPER = 16
"""Programs that share a strip of x quantise it each for itself. On an H200 that takes longer, from 32 tokens on, than a
launch of its own, whose time the copies of the weight use."""

FEW_TOKENS_OF_A_PAIR = 32
"""Up to so many, two products of one x are one launch that quantises it, if its programs have room in clusters: 32
tokens of V4-Flash beside HCA's rows take an H200 5.3 us, 64 behind a quantisation 8.5."""


@triton.jit(do_not_specialize=["tokens"])
def quantize_activation_kernel(
    p_values,  # [T, K] e4m3, contiguous
    p_scale,  # [strips, T] float32, contiguous
    p_wide,  # [blocks] float32, contiguous, or None
    p_x,  # [T, K]
    p_weight_scale,  # [blocks] UE8M0, contiguous, or None
    x_strides,
    tokens,
    size,
    blocks,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,  # see gpu.supports_pdl
):
    """Program p takes BLOCK_T tokens and BLOCK_S strips; strips vary first. All together widen the weight's scales."""
    pdl_prologue(PDL)
    if p_wide is not None:
        for first in range(tl.program_id(0) * ACT_TILE, blocks, tl.num_programs(0) * ACT_TILE):
            o_block = first + tl.arange(0, ACT_TILE)
            byte = tl.load(p_weight_scale + o_block, mask=o_block < blocks, other=0)
            tl.store(p_wide + o_block, ue8m0_scale(byte.to(tl.int32)), mask=o_block < blocks)
    strips = tl.cdiv(size, ACT_TILE)
    shares = tl.cdiv(strips, BLOCK_S)
    o_row = tl.arange(0, BLOCK_T * BLOCK_S)
    token = (tl.program_id(0) // shares).to(tl.int64) * BLOCK_T + o_row // BLOCK_S
    strip = tl.program_id(0) % shares * BLOCK_S + o_row % BLOCK_S
    # [BLOCK_T * BLOCK_S, ACT_TILE]
    o_k = strip[:, None] * ACT_TILE + tl.arange(0, ACT_TILE)[None, :]
    mask = (token < tokens)[:, None] & (o_k < size)
    x = tl.load(p_x + (token * x_strides[0])[:, None] + o_k * x_strides[1], mask=mask, other=0.0).to(tl.float32)
    byte = tile_byte(x, ACT_AMAX_FLOOR, FP8_MAX)
    tl.store(p_values + (token * size)[:, None] + o_k, e4m3(x * ue8m0_inverse(byte)[:, None]), mask=mask)
    tl.store(p_scale + strip * tokens.to(tl.int64) + token, ue8m0_scale(byte), mask=(token < tokens) & (strip < strips))


def quantize_activation(x: Tensor) -> tuple[Tensor, Tensor]:
    """As `block_scale.quantize_activation`, of `x` `[T, K]`; scales are float32 `[T, strips]`, a column contiguous."""
    return _quantize(x, None)[:2]


def _quantize(x: Tensor, weight_scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """`quantize_activation`, and `weight_scale`, contiguous bytes, in float32."""
    tokens, size = x.shape
    strips = cdiv(size, _ACT_TILE)
    values = torch.empty((tokens, size), dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty((strips, tokens), dtype=torch.float32, device=x.device)
    wide = None if weight_scale is None else torch.empty_like(weight_scale, dtype=torch.float32)
    programs = cdiv(tokens, BLOCK_T) * cdiv(strips, BLOCK_S)
    early = supports_pdl(gpu_of(x.device))
    if programs > 0:
        launch_kernel(
            quantize_activation_kernel,
            (programs,),
            values,
            scale,
            wide,
            x,
            weight_scale,
            x.stride(),
            tokens,
            size,
            0 if weight_scale is None else weight_scale.numel(),
            BLOCK_T=BLOCK_T,
            BLOCK_S=BLOCK_S,
            PDL=early,
            enable_fp_fusion=False,
            **register_limit(x.device, REGISTERS),
            **pdl_option(early),
        )
    return values, scale.t(), wide


def fp8_linear(
    x: Tensor, weight: Tensor, weight_scale: Tensor, quantize_input: bool = True, beside: Tensor | None = None
) -> Tensor:
    """See the reference. Quantised inputs are equal; sums are in another order, the same one for the same call."""
    rows = x.reshape(-1, weight.shape[1])
    if beside is None:
        out = _product(rows, weight, weight_scale, quantize_input, x.dtype)
    else:
        out = _both(rows, weight, weight_scale, quantize_input, beside)
    return out.view(*x.shape[:-1], out.shape[1])


def _product(
    rows: Tensor, weight: Tensor, weight_scale: Tensor, quantize: bool, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """`[T, N]`, into `out` where that is given."""
    gpu = gpu_of(rows.device)
    if quantize and out is None and not torch_refuses(gpu, rows.shape[0], weight, weight_scale, dtype):
        widened = weight_scale.dtype is not torch.float32
        values, scale, wide = _quantize(rows, weight_scale.view(torch.uint8) if widened else None)
        return multiply_by_torch(values, scale, weight, weight_scale if wide is None else wide)
    if quantize and not _within(rows, weight, gpu):
        values, scale = quantize_activation(rows)
        return grouped_matmul(values[:, None], scale[:, None], weight, weight_scale, dtype, out=out)
    return grouped_matmul(rows[:, None], None, weight, weight_scale, dtype, quantize=quantize, out=out)


def _within(rows: Tensor, weight: Tensor, gpu: Gpu) -> bool:
    """Whether the product quantises rows itself."""
    hopper = sm90_module(gpu, SMALL)
    if hopper is None:
        return rows.shape[0] <= FEW_TOKENS
    few = 0 < rows.shape[0] <= FEW_TOKENS_HOPPER
    return few and len(weight) > 0 and bool(hopper.quantised_at_once(rows[:, None], weight, gpu))


def _both(rows: Tensor, weight: Tensor, weight_scale: Tensor, quantize: bool, beside: Tensor) -> Tensor:
    """float32 `[T, N + M]`: on Hopper in one launch for few tokens, for more behind the one that quantises them; else
    one product after the other."""
    first = weight.shape[0]
    out = torch.empty((rows.shape[0], first + beside.shape[0]), dtype=torch.float32, device=rows.device)
    if quantize and out.numel() > 0 and _side_by_side(rows, weight, weight_scale, beside, out):
        return out
    _product(rows, weight, weight_scale, quantize, torch.float32, out[:, :first])
    if rows.is_cuda and rows.dtype is not torch.float32:
        torch.ops.aten.mm.dtype_out(rows, beside.t(), torch.float32, out=out[:, first:])
    else:
        torch.mm(rows.float(), beside.float().t(), out=out[:, first:])
    return out


def _side_by_side(rows: Tensor, weight: Tensor, weight_scale: Tensor, beside: Tensor, out: Tensor) -> bool:
    """Whether a kernel of Hopper's has filled `out` with both products."""
    gpu = gpu_of(rows.device)
    pair, both = (sm90_module(gpu, stem) for stem in (PAIR, CLUSTER))
    if pair is not None and pair.pair_refuses(rows, weight, beside, gpu):
        pair = None
    few = pair is not None and rows.shape[0] <= FEW_TOKENS_OF_A_PAIR and pair.in_clusters(rows, weight, beside, gpu)
    if both is not None and not few and not both.both_refuse(rows, weight, weight_scale, beside, gpu):
        values, scale = quantize_activation(rows)
        inputs = values[:, None], scale[:, None]
        both.launch_clusters_of_tiles(*inputs, weight, weight_scale, out, gpu, beside=(rows, beside))
        return True
    if pair is not None:
        pair.launch_pair(rows, weight, weight_scale, beside, out, gpu)
    return pair is not None


def fp8_linear_refuses(
    x: Tensor, weight: Tensor, weight_scale: Tensor, quantize_input: bool = True, beside: Tensor | None = None
) -> str:
    """Why a call cannot use the kernel, or ""."""
    if weight.shape[1] == 0:
        return "a sum of nothing"
    return why_unsupported_fp8(x.device)
