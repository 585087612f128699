"""A linear layer with an e4m3 weight and one scale per 128x128 block."""

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
        weight: e4m3 `[N, K]`. Not a result of the same step, and neither is the second weight: Hopper's kernels may
            read both before the preceding kernels have ended.
        weight_scale: float32, float8_e8m0fnu or uint8 UE8M0 `[ceil(N/128), ceil(K/128)]`.
        quantize_input: first quantise x in strips of 128, as `block_scale.quantize_activation`, fp8 kernels and the
            published evaluation of the model do. False keeps x exact.
        beside: `[M, K]` in x's dtype, the weight of a second layer with the same input, which is not quantised for it.
    Returns:
        Contiguous `[..., N]` in x's dtype. With a second layer, contiguous float32 `[..., N + M]`, not rounded: the
        results of this layer, then those of the second.
    """
    operand = dequantize_activation(*quantize_activation(x)) if quantize_input else x.float()
    out = operand @ dequantize_weight(weight, weight_scale).t()
    return out.to(x.dtype) if beside is None else torch.cat([out, x.float() @ beside.float().t()], -1)
