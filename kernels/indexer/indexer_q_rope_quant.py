"""`indexer_q_rope_quant`: one program rotates and quantises HEADS heads of a token and folds its head weights.

reference/indexer_q_rope_quant.py defines it. Every bit is equal, but for the order of sums in the Hadamard transform.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...layout import INDEXER_MXFP4, MX_TILE, cdiv
from ..device.hadamard import HADAMARD_DIMS, HADAMARD_ROWS, rounded_hadamard
from ..device.quant import why_unsupported_fp8
from ..device.rope import load_cos_sin, rotate, table_row
from ..host.gpu import register_limit
from ..host.launch import launch_kernel
from ..host.pdl import pdl_arguments, pdl_prologue
from .indexer_format import quantize_fp8, quantize_mxfp4

REGISTERS = 64
"""Of a thread without a Hadamard transform, which takes more. Left to itself the assembler takes 40, and asks for the
angles behind what waits for the queries."""
MXFP4_DATA, MXFP4_SCALE = tl.constexpr(INDEXER_MXFP4.data), tl.constexpr(INDEXER_MXFP4.scale)


@triton.jit(
    do_not_specialize=["heads", "max_pos"],
    do_not_specialize_on_alignment=["p_positions"],
)
def indexer_q_rope_quant_kernel(
    p_out,  # [T, H, D] in q's dtype, its bytes for indexer_fp8, uint8 [T, H, D / 2] for indexer_mxfp4; contiguous
    p_scale_out,  # [T, H, D / 32] uint8, contiguous; indexer_mxfp4 only
    p_weights_out,  # [T, H] float32, contiguous
    p_q,  # [T, H, D]
    p_positions,  # [>= T] int
    p_cos_sin,  # [max_pos, ROPE] float32
    p_weights,  # [T, H]
    q_strides,
    position_stride,
    cos_sin_strides,
    weight_strides,
    heads,
    max_pos,
    head_scale,
    FORMAT: tl.constexpr,
    HADAMARD: tl.constexpr,
    ROUND_WEIGHTS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    ROPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (p, h) takes heads [h * HEADS, (h + 1) * HEADS) of token p."""
    pdl_prologue(PDL)
    token = tl.program_id(0).to(tl.int64)
    o_h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    o_d = tl.arange(0, D)[None, :].to(tl.int64)
    m_h = o_h < heads
    m_row = m_h[:, None]
    o_head = o_h.to(tl.int64)
    o_row = (token * heads + o_head)[:, None]

    p_x = p_q + token * q_strides[0] + o_head[:, None] * q_strides[1] + o_d * q_strides[2]
    # [HEADS, D]
    x = tl.load(p_x, mask=m_row, other=0.0).to(tl.float32)
    row = table_row(tl.load(p_positions + token * position_stride), max_pos)
    cos, sin = load_cos_sin(p_cos_sin + row * cos_sin_strides[0], cos_sin_strides[1], True, D, ROPE)
    STORED: tl.constexpr = p_q.dtype.element_ty if FORMAT == "plain" else tl.bfloat16
    x = rotate(x, cos, sin, ROPE).to(STORED).to(tl.float32)
    if HADAMARD:
        x = rounded_hadamard(x, STORED)

    p_w = p_weights + token * weight_strides[0] + o_head * weight_strides[1]
    # [HEADS]
    weight = tl.load(p_w, mask=m_h, other=0.0)
    if ROUND_WEIGHTS:
        weight = weight.to(p_q.dtype.element_ty)
    weight = weight.to(tl.float32)
    if FORMAT == "indexer_fp8":
        values, scale = quantize_fp8(x)
        tl.store(p_out + o_row * D + o_d, values, mask=m_row)
        weight = weight * scale
    elif FORMAT == "indexer_mxfp4":
        values, scale_bytes = quantize_mxfp4(x)
        tl.store(p_out + o_row * MXFP4_DATA + tl.arange(0, MXFP4_DATA)[None, :], values, mask=m_row)
        tl.store(p_scale_out + o_row * MXFP4_SCALE + tl.arange(0, MXFP4_SCALE)[None, :], scale_bytes, mask=m_row)
    else:
        tl.store(p_out + o_row * D + o_d, x.to(STORED), mask=m_row)
    # One factor after the other: their product would round differently.
    tl.store(p_weights_out + token * heads + o_head, weight * (D**-0.5) * head_scale, mask=m_h)


def indexer_q_rope_quant_refuses(
    q: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    weights: Tensor,
    cache_format: str,
    hadamard: bool = False,
    round_weights: bool = False,
) -> str:
    """Why a call cannot use the kernel, or ""."""
    dim = q.shape[2]
    if dim < 2 or dim & (dim - 1):
        return f"queries of {dim} dims, which is not a power of two"
    if hadamard and dim not in HADAMARD_DIMS:
        return f"a Hadamard transform of {dim} dims, built for {HADAMARD_DIMS}"
    return why_unsupported_fp8(q.device) if cache_format == "indexer_fp8" else ""


def indexer_q_rope_quant(
    q: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    weights: Tensor,
    cache_format: str,
    hadamard: bool = False,
    round_weights: bool = False,
    *,
    tile: tuple[int, int] = (HADAMARD_ROWS, 4),
) -> tuple[Tensor, Tensor, Tensor]:
    """See the reference. `tile` is the number of heads of a program, at least 16 with `hadamard`, and its warps."""
    tokens, heads, dim = q.shape
    rows, warps = tile
    is_mxfp4 = cache_format == "indexer_mxfp4"
    kinds = {"indexer_fp8": torch.float8_e4m3fn, "indexer_mxfp4": torch.uint8}
    out = q.new_empty((tokens, heads, dim // 2 if is_mxfp4 else dim), dtype=kinds.get(cache_format, q.dtype))
    scale = q.new_empty(
        (tokens, heads, dim // MX_TILE if is_mxfp4 else 0), dtype=torch.uint8 if is_mxfp4 else torch.float32
    )
    weights_out = q.new_empty((tokens, heads), dtype=torch.float32)
    if tokens == 0 or heads == 0:
        return out, scale, weights_out
    launch_kernel(
        indexer_q_rope_quant_kernel,
        (tokens, cdiv(heads, rows)),
        out.view(torch.uint8) if cache_format == "indexer_fp8" else out,
        scale,
        weights_out,
        q,
        positions,
        cos_sin_cache,
        weights,
        q.stride(),
        positions.stride(0),
        cos_sin_cache.stride(),
        weights.stride(),
        heads,
        cos_sin_cache.shape[0],
        heads**-0.5,
        FORMAT=cache_format,
        HADAMARD=hadamard,
        ROUND_WEIGHTS=round_weights,
        HEADS=rows,
        D=dim,
        ROPE=cos_sin_cache.shape[1],
        num_warps=warps,
        # A contracted multiply and add rounds once where the reference rounds twice.
        enable_fp_fusion=False,
        **register_limit(q.device, 0 if hadamard else REGISTERS),
        **pdl_arguments(q.device, tokens * cdiv(heads, rows)),
    )
    return out, scale, weights_out
