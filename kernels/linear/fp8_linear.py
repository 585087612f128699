"""`fp8_linear`: few tokens in one launch that quantizes x, more in two, the second by torch (cuBLAS) for very many."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...layout import ACT_AMAX_FLOOR as _ACT_AMAX_FLOOR
from ...layout import ACT_TILE as _ACT_TILE
from ...layout import WEIGHT_TILE, cdiv
from ...ops.common.invariance import TOKENS
from ..device.quant import FP8_MAX, e4m3, tile_byte, ue8m0_inverse, ue8m0_scale, why_unsupported_fp8
from ..host.gpu import SM90, Gpu, gpu_of, register_limit, sm90_module
from ..host.launch import launch_kernel
from ..host.pdl import pdl_option, pdl_prologue, supports_pdl
from .gemm import CLUSTER, FEW_TOKENS, PAIR, SMALL, Operands, grouped_gemm

TORCH_TOKENS = 1024
"""Fewest tokens with a faster GEMM of torch's."""
TORCH_CUDA = (12, 9)
"""First CUDA with block scales in torch's `scaled_mm`; with an older one the call raises."""
TORCH_TOKEN_ALIGN, TORCH_K_BLOCK_ALIGN = 16, 4
"""Multiples of tokens and of K-blocks that `scaled_mm` takes; cuBLAS of torch 2.11 raises for 1027 tokens
(CUBLAS_STATUS_NOT_SUPPORTED), and wants columns of the weight's scales padded to four."""


def why_unsupported_torch(gpu: Gpu, tokens: int, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype) -> str:
    """Return why torch's `scaled_mm` cannot or should not multiply by this weight, "" if it should."""
    if gpu.capability != SM90:
        return f"only sm_90 takes these scales, this is {gpu.backend} {gpu.capability}"
    if _cuda() < TORCH_CUDA:
        return f"torch is built for CUDA {torch.version.cuda}, block scales need 12.9"
    if tokens < TORCH_TOKENS:
        return f"scaled_mm is faster from {TORCH_TOKENS} tokens on, these are {tokens}"
    if tokens % TORCH_TOKEN_ALIGN or weight.shape[1] % (TORCH_K_BLOCK_ALIGN * WEIGHT_TILE):
        sizes = f"{TORCH_TOKEN_ALIGN} tokens and {TORCH_K_BLOCK_ALIGN * WEIGHT_TILE} columns"
        return f"scaled_mm takes multiples of {sizes}, not {tokens} and {weight.shape[1]}"
    if dtype is not torch.bfloat16 or any(size % WEIGHT_TILE for size in weight.shape):
        return f"scaled_mm gives bfloat16 of whole blocks of {WEIGHT_TILE}, not {dtype} of {tuple(weight.shape)}"
    contiguous = weight.is_contiguous() and weight_scale.is_contiguous()
    return "" if contiguous else "scaled_mm takes a contiguous weight with contiguous scales"


def why_unsupported_torch_input(values: Tensor, scale: Tensor) -> str:
    """Return why `scaled_mm` cannot read `values` `[T, G, K]` and their scales as they are, "" if it can."""
    tokens, groups, _ = values.shape
    if groups != 1:
        return f"scaled_mm multiplies one group, not {groups}"
    if scale.dtype is not torch.float32 or scale.stride(0) != 1 or scale.stride(2) != tokens:
        return f"scaled_mm takes float32 scales, contiguous by token, not {scale.dtype} of strides {scale.stride()}"
    return "" if values.is_contiguous() else f"scaled_mm takes contiguous values, not strides {values.stride()}"


def widened(scale: Tensor) -> Tensor:
    """Return the scales of a weight in float32; for bytes this is a launch."""
    return scale if scale.dtype is torch.float32 else scale.view(torch.float8_e8m0fnu).to(torch.float32)


def _cuda() -> tuple[int, ...]:
    """Return the CUDA version that torch is built for, (0,) for none."""
    return tuple(int(number) for number in (torch.version.cuda or "0").split(".")[:2])


def multiply_by_torch(values: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """Return bfloat16 `[T, N]` of e4m3 `values` `[T, K]` and `weight` `[N, K]`.

    Args:
        scale, weight_scale: float32, per 1x128 and per 128x128; a column of `scale` is contiguous.
    """
    from torch.nn.functional import ScalingType, scaled_mm

    recipes = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    scale = scale.as_strided(scale.shape, (1, len(values)))  # a single column may have any stride
    return scaled_mm(values, weight.t(), scale, recipes[0], weight_scale.t(), recipes[1], output_dtype=torch.bfloat16)


ACT_AMAX_FLOOR = tl.constexpr(_ACT_AMAX_FLOOR)
ACT_TILE = tl.constexpr(_ACT_TILE)
BLOCK_T, BLOCK_S = 4, 8
"""Tokens and tiles of 128 columns per CTA: the scales of neighbouring tokens are contiguous."""
REGISTERS = 64
"""Registers per thread; 55 are used; without a limit the assembler takes 40, and loads the second half of a
CTA's tiles only after the first."""
FEW_TOKENS_SM90 = 16
"""Most tokens that the sm_90 GEMM quantizes itself: CTAs that share a K-block of x quantize it each. From 32 tokens on
that takes longer than a separate launch, which overlaps with copies of the weight."""
FEW_TOKENS_OF_PAIR = 32
"""Most tokens for two GEMMs of one x in one launch that quantizes it, if partial sums fit into clusters."""


@triton.jit(do_not_specialize=["tokens"])
def quantize_activation_kernel(
    results,  # values [T, K] e4m3; scales [K-blocks, T] float32; wide [blocks] float32, or None; contiguous
    p_x,  # [T, K]
    p_weight_scale,  # [blocks] UE8M0, contiguous, or None
    x_strides,
    tokens,
    sizes,  # K, blocks
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):
    """Quantize BLOCK_T tokens by BLOCK_S tiles of 128 columns per CTA; all CTAs together widen the weight's scales."""
    pdl_prologue(PDL)
    p_values, p_scale, p_wide = results
    size, blocks = sizes
    if p_wide is not None:
        for first in range(tl.program_id(0) * ACT_TILE, blocks, tl.num_programs(0) * ACT_TILE):
            o_block = first + tl.arange(0, ACT_TILE)
            byte = tl.load(p_weight_scale + o_block, mask=o_block < blocks, other=0)
            tl.store(p_wide + o_block, ue8m0_scale(byte.to(tl.int32)), mask=o_block < blocks)
    tiles = tl.cdiv(size, ACT_TILE)
    columns = tl.cdiv(tiles, BLOCK_S)
    o_row = tl.arange(0, BLOCK_T * BLOCK_S)
    token = (tl.program_id(0) // columns).to(tl.int64) * BLOCK_T + o_row // BLOCK_S
    tile = tl.program_id(0) % columns * BLOCK_S + o_row % BLOCK_S
    # [BLOCK_T * BLOCK_S, ACT_TILE]
    o_k = tile[:, None] * ACT_TILE + tl.arange(0, ACT_TILE)[None, :]
    mask = (token < tokens)[:, None] & (o_k < size)
    x = tl.load(p_x + (token * x_strides[0])[:, None] + o_k * x_strides[1], mask=mask, other=0.0).to(tl.float32)
    byte = tile_byte(x, ACT_AMAX_FLOOR, FP8_MAX)
    tl.store(p_values + (token * size)[:, None] + o_k, e4m3(x * ue8m0_inverse(byte)[:, None]), mask=mask)
    tl.store(p_scale + tile * tokens.to(tl.int64) + token, ue8m0_scale(byte), mask=(token < tokens) & (tile < tiles))


def quantize_activation(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize `x` `[T, K]` per 128 columns to e4m3; scales are float32 `[T, K / 128]` with contiguous columns."""
    return _quantize(x, None)[:2]


def _quantize(x: Tensor, weight_scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Quantize `x` like `quantize_activation`, and return contiguous bytes `weight_scale` in float32."""
    tokens, size = x.shape
    tiles = cdiv(size, _ACT_TILE)
    values = torch.empty((tokens, size), dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty((tiles, tokens), dtype=torch.float32, device=x.device)
    wide = None if weight_scale is None else torch.empty_like(weight_scale, dtype=torch.float32)
    programs = cdiv(tokens, BLOCK_T) * cdiv(tiles, BLOCK_S)
    pdl = supports_pdl(gpu_of(x.device))
    if programs > 0:
        launch_kernel(
            quantize_activation_kernel,
            (programs,),
            (values, scale, wide),
            x,
            weight_scale,
            x.stride(),
            tokens,
            (size, 0 if weight_scale is None else weight_scale.numel()),
            BLOCK_T=BLOCK_T,
            BLOCK_S=BLOCK_S,
            PDL=pdl,
            enable_fp_fusion=False,
            **register_limit(x.device, REGISTERS),
            **pdl_option(pdl),
        )
    return values, scale.t(), wide


def fp8_linear(
    x: Tensor, weight: Tensor, weight_scale: Tensor, quantize_input: bool = True, beside: Tensor | None = None
) -> Tensor:
    """Multiply `x` by the weight and, in float32, by the rows of a second one.

    Quantized inputs are those of the reference; sums are in a fixed order, not the reference's.
    """
    rows = x.reshape(-1, weight.shape[1])
    if beside is None:
        out = _multiply(rows, weight, weight_scale, quantize_input, x.dtype)
    else:
        out = _multiply_both(rows, weight, weight_scale, quantize_input, beside)
    return out.view(*x.shape[:-1], out.shape[1])


def invariant_fp8_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    quantize_input: bool = True,
    beside: Tensor | None = None,
    level: str = TOKENS,
) -> Tensor:
    """Run the op with one tiling for calls of any size; x is quantized in a separate launch."""
    rows = x.reshape(-1, weight.shape[1])
    operands = Operands(rows[:, None], None, weight, weight_scale)
    if quantize_input:
        operands = _quantized(rows, weight, weight_scale)
    if beside is None:
        out = grouped_gemm(operands, x.dtype, invariant=level)
    else:
        first = weight.shape[0]
        out = torch.empty((rows.shape[0], first + beside.shape[0]), dtype=torch.float32, device=rows.device)
        grouped_gemm(operands, torch.float32, out=out[:, :first], invariant=level)
        second = Operands(rows[:, None], None, beside.to(rows.dtype), None)
        grouped_gemm(second, torch.float32, out=out[:, first:], invariant=level)
    return out.view(*x.shape[:-1], out.shape[1])


def _multiply(
    rows: Tensor, weight: Tensor, weight_scale: Tensor, quantize: bool, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """Return `[T, N]`, in `out` if that is given."""
    gpu = gpu_of(rows.device)
    if quantize and out is None and not why_unsupported_torch(gpu, rows.shape[0], weight, weight_scale, dtype):
        bytes_ = weight_scale.dtype is not torch.float32
        values, scale, wide = _quantize(rows, weight_scale.view(torch.uint8) if bytes_ else None)
        return multiply_by_torch(values, scale, weight, weight_scale if wide is None else wide)
    operands = Operands(rows[:, None], None, weight, weight_scale)
    if quantize and not _quantizes_within(rows, weight, gpu):
        operands, quantize = _quantized(rows, weight, weight_scale), False
    return grouped_gemm(operands, dtype, quantize=quantize, out=out)


def _quantized(rows: Tensor, weight: Tensor, weight_scale: Tensor) -> Operands:
    """Quantize x in a separate launch."""
    values, scale = quantize_activation(rows)
    return Operands(values[:, None], scale[:, None], weight, weight_scale)


def _quantizes_within(rows: Tensor, weight: Tensor, gpu: Gpu) -> bool:
    """Return whether the GEMM quantizes x itself."""
    small = sm90_module(gpu, SMALL)
    if small is None:
        return rows.shape[0] <= FEW_TOKENS
    few = 0 < rows.shape[0] <= FEW_TOKENS_SM90
    return few and len(weight) > 0 and bool(small.quantizes_at_once(rows[:, None], weight, gpu))


def _multiply_both(rows: Tensor, weight: Tensor, weight_scale: Tensor, quantize: bool, beside: Tensor) -> Tensor:
    """Return float32 `[T, N + M]`: on sm_90 both GEMMs in one launch if a kernel supports it, else one by one."""
    first = weight.shape[0]
    out = torch.empty((rows.shape[0], first + beside.shape[0]), dtype=torch.float32, device=rows.device)
    if quantize and out.numel() > 0 and _launch_both(rows, weight, weight_scale, beside, out):
        return out
    _multiply(rows, weight, weight_scale, quantize, torch.float32, out[:, :first])
    if rows.is_cuda and rows.dtype is not torch.float32:
        torch.ops.aten.mm.dtype_out(rows, beside.t(), torch.float32, out=out[:, first:])
    else:
        torch.mm(rows.float(), beside.float().t(), out=out[:, first:])
    return out


def _launch_both(rows: Tensor, weight: Tensor, weight_scale: Tensor, beside: Tensor, out: Tensor) -> bool:
    """Fill `out` with both GEMMs in one launch; return whether an sm_90 kernel supports it."""
    gpu = gpu_of(rows.device)
    pair, cluster = (sm90_module(gpu, name) for name in (PAIR, CLUSTER))
    if pair is not None and pair.why_unsupported(rows, weight, beside, gpu):
        pair = None
    few = pair is not None and rows.shape[0] <= FEW_TOKENS_OF_PAIR and pair.uses_clusters(rows, weight, beside, gpu)
    if cluster is not None and not few and not cluster.why_unsupported_pair(rows, weight, weight_scale, beside, gpu):
        cluster.launch(_quantized(rows, weight, weight_scale), out, gpu, second=(rows, beside))
        return True
    if pair is not None:
        pair.launch(rows, weight, weight_scale, beside, out, gpu)
    return pair is not None


def why_unsupported_fp8_linear(
    x: Tensor, weight: Tensor, weight_scale: Tensor, quantize_input: bool = True, beside: Tensor | None = None
) -> str:
    """Return why a call cannot use the kernel, "" if it can."""
    return "K is 0, it must be at least 1" if weight.shape[1] == 0 else why_unsupported_fp8(x.device)
