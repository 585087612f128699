"""A linear layer whose weight is stored in e4m3 with one scale per 128x128 block."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.block_scale import dequantize_activation, dequantize_weight, quantize_activation


def fp8_linear(
    x: Tensor, weight: Tensor, weight_scale: Tensor, quantize_input: bool = True, beside: Tensor | None = None
) -> Tensor:
    """`x @ weight.T` with the weight dequantised to float32, float32 sums in any order, and one rounding to x's dtype.

    Args:
        x: `[..., K]` bfloat16, float16 or float32, any strides.
        weight: e4m3 `[N, K]`. Never a result of the same step, no more than `beside`: Hopper's kernels may read them
            before those in front of them have ended.
        weight_scale: float32, float8_e8m0fnu or uint8 UE8M0 `[ceil(N/128), ceil(K/128)]`.
        quantize_input: first quantise x in strips of 128, as `block_scale.quantize_activation`, which is what fp8
            kernels and the published evaluation of the model do. False keeps x exact.
        beside: `[M, K]` in x's dtype, the weight of another layer with the same input, which is not quantised for it.
    Returns:
        Contiguous `[..., N]` in x's dtype. With `beside`, contiguous float32 `[..., N + M]`, not rounded, the results
        of the other layer behind those of this one.
    """
    operand = dequantize_activation(*quantize_activation(x)) if quantize_input else x.float()
    out = operand @ dequantize_weight(weight, weight_scale).t()
    return out.to(x.dtype) if beside is None else torch.cat([out, x.float() @ beside.float().t()], -1)
