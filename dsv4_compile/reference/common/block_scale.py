"""Scales shared by 1x128 tiles of an activation and by 128x128 blocks of a weight.

The last tile or block of a dim may be partial: n elements have ceil(n / 128) scales.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...layout import ACT_AMAX_FLOOR, ACT_TILE, SCALES_PER_WORD, WEIGHT_TILE, align_up, cdiv
from .quant import quantize_tiles, ue8m0_scale


def scale_value(scale: Tensor) -> Tensor:
    """float32 scales from float32, float8_e8m0fnu, or uint8 UE8M0 bytes."""
    if scale.dtype is torch.float32:
        return scale
    return ue8m0_scale(scale.view(torch.uint8))


def _per_element(scale: Tensor, tile: int, size: int) -> Tensor:
    """Repeat each scale of the last dim for the `tile` elements that share it; `size` elements in all."""
    return scale[..., None].expand(*scale.shape, tile).flatten(-2)[..., :size]


def dequantize_weight(weight: Tensor, scale: Tensor, tile: int = WEIGHT_TILE) -> Tensor:
    """float32 `[N, K]` from e4m3 `[N, K]` and `[ceil(N/tile), ceil(K/tile)]` scales in any form `scale_value` takes."""
    rows, columns = weight.shape
    per_column = _per_element(scale_value(scale), tile, columns)
    return weight.float() * _per_element(per_column.t(), tile, rows).t()


def quantize_activation(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise the last dim of `x`, widened to float32 and not rounded, in tiles of 128 that share a UE8M0 scale.

    The scale is 2^ceil(log2(max(amax, 1e-10) / 448)), exact for every float32 (see `quant.ue8m0_byte`).

    Returns e4m3 `[..., K]` and uint8 `[..., ceil(K/128)]`.
    """
    size = x.shape[-1]
    padded = torch.nn.functional.pad(x.float(), (0, align_up(size, ACT_TILE) - size))
    values, byte = quantize_tiles(padded, ACT_TILE, ACT_AMAX_FLOOR)
    return values[..., :size], byte.to(torch.uint8)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """`quantize_activation` of `x` `[T, K]`, as the first operand of a `fp8_grouped_einsum` of one group.

    Returns e4m3 `[T, 1, K]`, contiguous, and float32 scales `[T, 1, n]`, n = ceil(K/128), of `scale_strides`.
    """
    values, byte = quantize_activation(x)
    out, scale = new_rows(x, *x.shape)
    return out.copy_(values[:, None]), scale.copy_(ue8m0_scale(byte)[:, None])


def new_rows(like: Tensor, tokens: int, size: int) -> tuple[Tensor, Tensor]:
    """Return unwritten results of `quantize_rows` for `[T, K]` on the device of `like`."""
    count = cdiv(size, ACT_TILE)
    scale = like.new_empty_strided((tokens, 1, count), scale_strides(tokens, count), dtype=torch.float32)
    return like.new_empty((tokens, 1, size), dtype=torch.float8_e4m3fn), scale


def scale_strides(tokens: int, count: int) -> tuple[int, int, int]:
    """Strides of `[T, 1, n]` scales stored as contiguous `[n, T]`."""
    return 1, count * tokens, tokens


def dequantize_activation(values: Tensor, scale: Tensor) -> Tensor:
    """float32 `[..., K]` from e4m3 `[..., K]` and `[..., ceil(K/128)]` scales in any form `scale_value` takes."""
    return values.float() * _per_element(scale_value(scale), ACT_TILE, values.shape[-1])


def pack_scales(byte: Tensor) -> Tensor:
    """int32 `[..., ceil(n/4)]` from UE8M0 bytes uint8 `[..., n]`: four to a word, lowest byte first, missing ones 0."""
    missing = align_up(byte.shape[-1], SCALES_PER_WORD) - byte.shape[-1]
    return torch.nn.functional.pad(byte, (0, missing)).view(torch.int32)


def unpack_scales(words: Tensor, count: int) -> Tensor:
    """UE8M0 bytes uint8 `[..., count]` from the int32 `[..., ceil(count/4)]` of `pack_scales`, any strides."""
    # Not .contiguous(), which keeps odd strides of single elements.
    return words.clone(memory_format=torch.contiguous_format).view(torch.uint8)[..., :count]
