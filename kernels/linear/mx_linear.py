"""`mx_linear`: one launch for few tokens, which rounds x in the GEMM; more tokens are rounded in a launch before.

Few CTAs share a K-block of a few tokens, and round it each. x that is rounded to e4m3 with scales of powers of two is
exact in bfloat16, and so is the weight times its scales: the GEMM (gemm.py) multiplies bfloat16 and adds in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...layout import MX_TILE as _MX_TILE
from ...layout import cdiv
from ..device.mx_values import rounded_mxfp8
from ..device.quant import why_unsupported_fp8
from ..host.launch import launch_kernel
from ..host.pdl import pdl_arguments, pdl_prologue
from .gemm import Operands, mx_gemm

MX_TILE = tl.constexpr(_MX_TILE)
ROUNDED_COLUMNS = 1024
"""Columns of x that a CTA rounds."""
FEW_TOKENS = 16
"""Most tokens that the GEMM rounds itself: each of its CTAs rounds all of them again."""


@triton.jit
def round_input_kernel(p_out, p_x, x_strides, size, COLUMNS: tl.constexpr, PDL: tl.constexpr):
    """Round COLUMNS columns of a token of x `[T, K]` to mxfp8, into contiguous bfloat16."""
    pdl_prologue(PDL)
    blocks = tl.cdiv(size, COLUMNS)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    o = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    x = tl.load(p_x + token * x_strides[0] + o * x_strides[1], o < size, 0.0).to(tl.float32)
    rounded = tl.reshape(rounded_mxfp8(tl.reshape(x, (COLUMNS // MX_TILE, MX_TILE))), (COLUMNS,))
    tl.store(p_out + token * size + o, rounded.to(tl.bfloat16), o < size)


def round_input(x: Tensor) -> Tensor:
    """Return `x` `[T, K]`, K a multiple of 32, rounded to mxfp8, as contiguous bfloat16, which holds it exactly."""
    tokens, size = x.shape
    out = torch.empty((tokens, size), dtype=torch.bfloat16, device=x.device)
    programs = tokens * cdiv(size, ROUNDED_COLUMNS)
    if programs > 0:
        pdl = pdl_arguments(x.device, programs)
        grid = (programs,)
        launch_kernel(
            round_input_kernel, grid, out, x, x.stride(), size, COLUMNS=ROUNDED_COLUMNS, num_warps=4, **pdl
        )  # fmt: skip
    return out


def mx_linear(x: Tensor, weight: Tensor, weight_scale: Tensor, quantize_input: bool = True) -> Tensor:
    """Multiply `x` by the weight. Rounded inputs are those of the reference; sums are in a fixed order, not its."""
    rows = x.reshape(-1, weight.shape[1])
    out = torch.empty((rows.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    if out.numel() > 0:
        if quantize_input and rows.shape[0] > FEW_TOKENS:
            rows, quantize_input = round_input(rows), False
        if weight_scale.dtype is torch.float8_e8m0fnu:
            weight_scale = weight_scale.view(torch.uint8)
        mx_gemm(Operands(rows[:, None], None, weight, weight_scale), out, quantize_input)
    return out.view(*x.shape[:-1], out.shape[1])


def why_unsupported_mx_linear(x: Tensor, weight: Tensor, weight_scale: Tensor, quantize_input: bool = True) -> str:
    """Return why a call cannot use the kernel, "" if it can."""
    return "K is 0, it must be at least 1" if weight.shape[1] == 0 else why_unsupported_fp8(x.device)
