"""`engram_gate`: a program per token and stream holds the rows of its stream, its key and the value in registers."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ...reference.engram.engram_gate import SMALLEST_DOT as _SMALLEST_DOT
from ..device.norm import inverse_rms, load_weight
from ..device.quant import MAGNITUDE
from ..host.launch import launch_kernel
from ..host.pdl import pdl_arguments

MAX_DIM = 16384
"""Most channels of a stream: one program holds a row in its registers."""
FEW_CHANNELS = 4096
"""Most channels of a program of 4 warps; with more it has 8."""
SMALLEST_DOT = tl.constexpr(_SMALLEST_DOT)
ALL = tl.constexpr(tl.PropagateNan.ALL)


class Shape(NamedTuple):
    """Compile-time sizes of a launch."""

    streams: int
    dim: int
    block: int


@triton.jit(do_not_specialize_on_alignment=["p_is_image"])
def engram_gate_kernel(
    p_out,  # [T, N, D] contiguous
    inputs,  # streams [T, N, D], keys_value [T, (N + 1) * D], q_weight and k_weight [N, D]
    p_is_image,  # [T] bool
    strides,  # of the inputs and of is_image
    eps,
    SHAPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write stream n of token t in program t * N + n."""
    p_streams, p_keys, p_q, p_k = inputs
    x_strides, key_strides, q_strides, k_strides, image_strides = strides
    D: tl.constexpr = SHAPE.dim
    N: tl.constexpr = SHAPE.streams
    BLOCK: tl.constexpr = SHAPE.block
    program = tl.program_id(0).to(tl.int64)
    token, n = program // N, program % N
    o_d = tl.arange(0, BLOCK)[None, :].to(tl.int64)
    mask = o_d < D
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # No kernel of this step writes the weights, so their loads may start before the previous kernel ends.
    weight = load_weight(p_q + n * q_strides[0], q_strides[1], D, BLOCK)
    weight *= load_weight(p_k + n * k_strides[0], k_strides[1], D, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(p_streams + token * x_strides[0] + n * x_strides[1] + o_d * x_strides[2], mask=mask, other=0.0)
    p_key = p_keys + token * key_strides[0]
    key = tl.load(p_key + (n * D + o_d) * key_strides[1], mask=mask, other=0.0).to(tl.float32)
    value = tl.load(p_key + (N * D + o_d) * key_strides[1], mask=mask, other=0.0).to(tl.float32)
    x = x.to(tl.float32)
    # A sum of zeros is 0.0, not -0.0: its sign is that of the gate's root.
    dot = tl.sum(x * weight * key, axis=1) + 0.0
    dot = dot * (inverse_rms(x, eps, D) * inverse_rms(key, eps, D)) * (D**-0.5)
    root = tl.sqrt_rn(tl.maximum(tl.abs(dot), SMALLEST_DOT, propagate_nan=ALL))
    bits = root.to(tl.int32, bitcast=True) | (dot.to(tl.int32, bitcast=True) & ~MAGNITUDE)
    gate = tl.sigmoid(bits.to(tl.float32, bitcast=True))
    gate = tl.where(tl.load(p_is_image + token * image_strides[0]), 0.0, gate)
    y = x + gate[:, None] * value
    tl.store(p_out + program * D + o_d, y.to(p_out.dtype.element_ty), mask=mask)


def engram_gate(
    streams: Tensor, keys_value: Tensor, q_weight: Tensor, k_weight: Tensor, is_image: Tensor, norm_eps: float
) -> Tensor:
    """Launch `engram_gate`. The order of sums is not the reference's, which moves results by a rounding."""
    tokens, count, dim = streams.shape
    out = streams.new_empty(streams.shape)
    if out.numel() == 0:
        return out
    inputs = streams, keys_value, q_weight, k_weight
    launch_kernel(
        engram_gate_kernel,
        (tokens * count,),
        out,
        inputs,
        is_image,
        tuple(x.stride() for x in (*inputs, is_image)),
        norm_eps,
        SHAPE=Shape(count, dim, triton.next_power_of_2(dim)),
        num_warps=4 if dim <= FEW_CHANNELS else 8,
        **pdl_arguments(streams.device, tokens * count),
    )
    return out


def why_unsupported_engram_gate(
    streams: Tensor, keys_value: Tensor, q_weight: Tensor, k_weight: Tensor, is_image: Tensor, norm_eps: float
) -> str:
    """Return why the kernel does not support a call, "" if it does."""
    dim = streams.shape[2]
    if isinstance(dim, int) and dim > MAX_DIM:
        return f"{dim} channels, the kernel takes up to {MAX_DIM}"
    return ""
