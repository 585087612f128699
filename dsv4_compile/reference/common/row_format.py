"""Rows of DeepSeek-V4.1's caches: rounding to the grids mxfp8, nvfp4 and mxfp4, and rows in caches.

A grid rounds all channels of a row, rotated ones included:

| grid | elements | scale |
|---|---|---|
| mxfp8 | e4m3 | UE8M0 for 32: 2^ceil(log2(max(amax, 1e-4) / 448)) |
| nvfp4 | e2m1 | e4m3 for 16: max(amax, 6 * 2^-9) / 6, no power of two |
| mxfp4 | e2m1 | UE8M0 for 32: 2^ceil(log2(max(amax, 6 * 2^-126) / 6)) |
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...layout import GRIDS, KV_AMAX_FLOOR, MX_TILE
from . import kv_format, paging
from .quant import (
    dequantize_mxfp4,
    dequantize_nvfp4,
    dequantize_tiles,
    quantize_mxfp4,
    quantize_nvfp4,
    quantize_tiles,
)


def quantize_rows(x: Tensor, grid: str) -> tuple[Tensor, Tensor]:
    """Return the data bytes and scale bytes, uint8, of float32 `x` `[..., D]` in a grid."""
    if grid == "mxfp4":
        return quantize_mxfp4(x)
    if grid == "nvfp4":
        packed, scale = quantize_nvfp4(x)
        return packed, scale.view(torch.uint8)
    values, byte = quantize_tiles(x, MX_TILE, KV_AMAX_FLOOR)
    return values.view(torch.uint8), byte.to(torch.uint8)


def dequantize_rows(data: Tensor, scale: Tensor, grid: str) -> Tensor:
    """Return float32 `[..., D]` from the bytes of `quantize_rows`."""
    if grid == "mxfp4":
        return dequantize_mxfp4(data, scale)
    if grid == "nvfp4":
        return dequantize_nvfp4(data, scale.view(torch.float8_e4m3fn))
    return dequantize_tiles(data.view(torch.float8_e4m3fn), scale, MX_TILE)


def round_to_grid(x: Tensor, grid: str) -> Tensor:
    """Return float32 `x` `[..., D]` rounded to a grid; "" rounds nothing."""
    return dequantize_rows(*quantize_rows(x, grid), grid) if grid else x


def store_rows(cache: Tensor, fmt: str, block_size: int, slots: Tensor, x: Tensor, grid: str = "") -> None:
    """Store float32 rows `x` `[N, D]` at `slots` `[N]`; slots outside the cache are skipped.

    Plain rows are rounded to `grid` first, and to the dtype of the cache. Other formats have their own rounding.
    """
    if fmt in GRIDS:
        paging.write_bytes(cache, fmt, block_size, slots, *quantize_rows(x, fmt), head_dim=x.shape[-1])
    else:
        kv_format.store_kv(cache, fmt, block_size, slots, round_to_grid(x, grid) if fmt == "plain" else x)


def load_rows(cache: Tensor, fmt: str, block_size: int, slots: Tensor, channels: int) -> Tensor:
    """Return float32 rows `[..., D]` of D `channels` at `slots`. Invalid slots give zeros."""
    if fmt in GRIDS:
        data, scale = paging.read_bytes(cache, fmt, block_size, slots, channels)
        return dequantize_rows(data, scale, fmt)
    return kv_format.load_kv(cache, fmt, block_size, slots).float()
