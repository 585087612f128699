"""A linear layer of DeepSeek-V4.1: an e4m3 weight with one scale per 32x32 block, and inputs in mxfp8."""

from __future__ import annotations

from torch import Tensor

from ...layout import KV_AMAX_FLOOR, MX_TILE
from ..common.block_scale import dequantize_weight
from ..common.quant import dequantize_tiles, quantize_tiles


def mx_linear(x: Tensor, weight: Tensor, weight_scale: Tensor, quantize_input: bool = True) -> Tensor:
    """Return `x @ weight.T` with the weight dequantised to float32, float32 sums in any order, and one rounding.

    Args:
        x: `[..., K]` bfloat16, float16 or float32, any strides; K is a multiple of 32.
        weight: e4m3 `[N, K]`.
        weight_scale: float32, float8_e8m0fnu or uint8 UE8M0 `[ceil(N/32), K/32]`.
        quantize_input: first round x to e4m3 with a UE8M0 scale for each row and 32 columns, of
            2^ceil(log2(max(amax, 1e-4) / 448)). False keeps x exact.
    Returns:
        Contiguous `[..., N]` in x's dtype.
    """
    matrix = dequantize_weight(weight, weight_scale, MX_TILE)
    return (rounded_input(x.float(), quantize_input) @ matrix.t()).to(x.dtype).contiguous()


def rounded_input(x: Tensor, quantize: bool) -> Tensor:
    """Return float32 `x` `[..., K]`, rounded to mxfp8 if `quantize`."""
    return dequantize_tiles(*quantize_tiles(x, MX_TILE, KV_AMAX_FLOOR), MX_TILE) if quantize else x
