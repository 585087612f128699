"""`mhc_collapse`: a program per token weights its streams, rounds their sum, and norms it in its registers."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..device.norm import load_weight, rms_norm
from ..host.launch import launch_kernel
from ..host.pdl import pdl_arguments

MAX_DIM = 16384
"""Most channels of a stream: one program norms a row in its registers."""
MAX_STREAMS = 16
"""Most streams: their loads are unrolled."""
FEW_CHANNELS = 4096
"""Most channels of a program of 4 warps; with more it has 8."""


class Shape(NamedTuple):
    """Compile-time sizes of a launch."""

    streams: int
    dim: int
    block: int


@triton.jit
def mhc_collapse_kernel(
    p_out,  # [T, D] contiguous
    p_streams,  # [T, N, D]
    p_pre,  # [T, N] float32
    p_weight,  # [D]
    strides,  # of streams, pre and weight
    eps,
    SHAPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the row of token p in program p."""
    streams_strides, pre_strides, weight_strides = strides
    D: tl.constexpr = SHAPE.dim
    BLOCK: tl.constexpr = SHAPE.block
    STREAMS: tl.constexpr = SHAPE.streams
    token = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BLOCK)[None, :].to(tl.int64)
    mask = o_d < D
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # No kernel of this step writes the weight, so its loads may start before the previous kernel ends.
    weight = load_weight(p_weight, weight_strides[0], D, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
    y = tl.zeros((1, BLOCK), tl.float32)
    for n in tl.static_range(STREAMS):
        p_x = p_streams + token * streams_strides[0] + n * streams_strides[1] + o_d * streams_strides[2]
        x = tl.load(p_x, mask=mask, other=0.0).to(tl.float32)
        y += tl.load(p_pre + token * pre_strides[0] + n * pre_strides[1]) * x
    y = rms_norm(y.to(p_out.dtype.element_ty).to(tl.float32), weight, eps, D)
    tl.store(p_out + token * D + o_d, y.to(p_out.dtype.element_ty), mask=mask)


def mhc_collapse(streams: Tensor, pre: Tensor, norm_weight: Tensor, norm_eps: float) -> Tensor:
    """Launch `mhc_collapse`; results are the reference's, or their neighbours after each rounding."""
    tokens, count, dim = streams.shape
    out = streams.new_empty((tokens, dim))
    if tokens == 0:
        return out
    launch_kernel(
        mhc_collapse_kernel,
        (tokens,),
        out,
        streams,
        pre,
        norm_weight,
        (streams.stride(), pre.stride(), norm_weight.stride()),
        norm_eps,
        SHAPE=Shape(count, dim, triton.next_power_of_2(dim)),
        num_warps=4 if dim <= FEW_CHANNELS else 8,
        **pdl_arguments(streams.device, tokens),
    )
    return out


def why_unsupported_mhc_collapse(streams: Tensor, pre: Tensor, norm_weight: Tensor, norm_eps: float) -> str:
    """Return why the kernel does not support a call, "" if it does."""
    count, dim = streams.shape[1:]
    if isinstance(count, int) and count > MAX_STREAMS:
        return f"{count} streams, the kernel takes up to {MAX_STREAMS}"
    if isinstance(dim, int) and not 0 < dim <= MAX_DIM:
        return f"{dim} channels, the kernel takes 1 to {MAX_DIM}"
    return ""
