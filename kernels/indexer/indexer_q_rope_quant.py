"""`indexer_q_rope_quant`: a program rotates and quantises several heads of a token and folds their weights.

Every bit equals the reference, except for the order of sums in the Hadamard transform.
"""

from __future__ import annotations

from typing import NamedTuple

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
"""Registers of a thread without a Hadamard transform: enough to load the angles before the queries arrive."""
MXFP4_DATA, MXFP4_SCALE = tl.constexpr(INDEXER_MXFP4.data), tl.constexpr(INDEXER_MXFP4.scale)


class Shape(NamedTuple):
    """Compile-time sizes of a launch: `heads` of a program, dims of a head and of its rotated part, and options."""

    fmt: str
    hadamard: bool
    round_weights: bool
    heads: int
    dim: int
    rope: int


class Strides(NamedTuple):
    """Strides of the kernel's arguments."""

    q: tuple[int, ...]
    positions: int
    cos_sin: tuple[int, ...]
    weights: tuple[int, ...]


@triton.jit(do_not_specialize=["heads", "max_pos"], do_not_specialize_on_alignment=["p_positions"])
def indexer_q_rope_quant_kernel(
    tensors,  # stored queries [T, H, .], uint8 scales [T, H, D / 32] or none, float32 weights [T, H]; then q [T, H, D]
    p_positions,  # [>= T] int
    factors,  # angles [max_pos, rope] float32, and weights [T, H]
    strides,
    heads,
    max_pos,
    head_scale,  # H^-0.5
    SHAPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Prepare heads [h * heads, (h + 1) * heads) of token p in program (p, h)."""
    pdl_prologue(PDL)
    p_out, p_scale_out, p_weights_out, p_q = tensors
    p_cos_sin, p_weights = factors
    D: tl.constexpr = SHAPE.dim
    token = tl.program_id(0).to(tl.int64)
    o_h = tl.program_id(1) * SHAPE.heads + tl.arange(0, SHAPE.heads)
    o_d = tl.arange(0, D)[None, :].to(tl.int64)
    m_h = o_h < heads
    m_row = m_h[:, None]
    o_head = o_h.to(tl.int64)
    o_row = (token * heads + o_head)[:, None]

    p_x = p_q + token * strides.q[0] + o_head[:, None] * strides.q[1] + o_d * strides.q[2]
    # [heads, D]
    x = tl.load(p_x, mask=m_row, other=0.0).to(tl.float32)
    row = table_row(tl.load(p_positions + token * strides.positions), max_pos)
    cos, sin = load_cos_sin(p_cos_sin + row * strides.cos_sin[0], strides.cos_sin[1], True, D, SHAPE.rope)
    STORED: tl.constexpr = p_q.dtype.element_ty if SHAPE.fmt == "plain" else tl.bfloat16
    x = rotate(x, cos, sin, SHAPE.rope).to(STORED).to(tl.float32)
    if SHAPE.hadamard:
        x = rounded_hadamard(x, STORED)

    p_w = p_weights + token * strides.weights[0] + o_head * strides.weights[1]
    # [heads]
    weight = tl.load(p_w, mask=m_h, other=0.0)
    if SHAPE.round_weights:
        weight = weight.to(p_q.dtype.element_ty)
    weight = weight.to(tl.float32)
    if SHAPE.fmt == "indexer_fp8":
        values, scale = quantize_fp8(x)
        tl.store(p_out + o_row * D + o_d, values, mask=m_row)
        weight = weight * scale
    elif SHAPE.fmt == "indexer_mxfp4":
        values, scale_bytes = quantize_mxfp4(x)
        tl.store(p_out + o_row * MXFP4_DATA + tl.arange(0, MXFP4_DATA)[None, :], values, mask=m_row)
        tl.store(p_scale_out + o_row * MXFP4_SCALE + tl.arange(0, MXFP4_SCALE)[None, :], scale_bytes, mask=m_row)
    else:
        tl.store(p_out + o_row * D + o_d, x.to(STORED), mask=m_row)
    # One factor after the other, because the order changes the rounding.
    tl.store(p_weights_out + token * heads + o_head, weight * (D**-0.5) * head_scale, mask=m_h)


def why_unsupported_indexer_q_rope_quant(
    q: Tensor, positions: Tensor, cos_sin_cache: Tensor, weights: Tensor, cache_format: str, hadamard: bool = False,
    round_weights: bool = False,
) -> str:  # fmt: skip
    """Return why the kernel does not support a call, "" if it does."""
    dim = q.shape[2]
    if dim < 2 or dim & (dim - 1):
        return f"queries have a power of two of dims, at least 2, these have {dim}"
    if hadamard and dim not in HADAMARD_DIMS:
        return f"the Hadamard transform supports {HADAMARD_DIMS} dims, these are {dim}"
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
    """Launch `indexer_q_rope_quant`. `tile`: heads of a program, at least 16 with `hadamard`, and its warps."""
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
        (out.view(torch.uint8) if cache_format == "indexer_fp8" else out, scale, weights_out, q),
        positions,
        (cos_sin_cache, weights),
        Strides(q.stride(), positions.stride(0), cos_sin_cache.stride(), weights.stride()),
        heads,
        cos_sin_cache.shape[0],
        heads**-0.5,
        SHAPE=Shape(cache_format, hadamard, round_weights, rows, dim, cos_sin_cache.shape[1]),
        num_warps=warps,
        # A contracted multiply and add rounds once where the reference rounds twice.
        enable_fp_fusion=False,
        **register_limit(q.device, 0 if hadamard else REGISTERS),
        **pdl_arguments(q.device, tokens * cdiv(heads, rows)),
    )
    return out, scale, weights_out
