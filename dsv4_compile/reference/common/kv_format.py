"""Encode and decode one key/value vector in each cache format. What a stored row means is defined here, once.

KV formats hold vectors of D = nope + rope dims, already rotated; indexer formats hold 128-dim indexer keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import check, fail
from ...layout import (
    FP8_DS_MLA,
    FP8_DS_MLA_TILES,
    HEAD_DIM,
    INDEXER_FORMATS,
    INDEXER_HEAD_DIM,
    KV_AMAX_FLOOR,
    KV_FORMATS,
    KV_TILE,
    NOPE_DIM,
)
from . import paging
from .quant import dequantize_mxfp4, dequantize_tiles, quantize_mxfp4, quantize_tiles, to_e4m3


def _bytes(x: Tensor) -> Tensor:
    if x.dtype is torch.float32:
        # By shifts: Inductor cannot view a dtype of a different size if it chose the stride of a dim of one element.
        shifts = torch.arange(0, 32, 8, device=x.device)
        return ((x.view(torch.int32)[..., None] >> shifts) & 0xFF).to(torch.uint8).flatten(-2)
    return x.contiguous().view(torch.uint8)


def store_kv(
    cache: Tensor, fmt: str, block_size: int, slots: Tensor, x: Tensor, kv_scale: Tensor | None = None
) -> None:
    """Store float32 vectors `x` `[N, D]` at `slots` `[N]`; slots outside the cache are skipped.

    `fp8_ds_mla` rounds to bfloat16 first, then quantises 448 dims in tiles of 64 and keeps the last 64 as bfloat16.
    `fp8` quantises all dims straight from float32 by the per-tensor `kv_scale` (1-element, None = 1).
    `plain` rounds to the cache's dtype.
    """
    check(fmt in KV_FORMATS, "E202", got=repr(fmt), fix=f"one of {KV_FORMATS}")
    if fmt == "plain":
        paging.write_row_slots(cache, block_size, slots, x)
    elif fmt == "fp8":
        inverse = 1.0 if kv_scale is None else 1.0 / kv_scale.float()
        paging.write_row_slots(cache.view(torch.uint8), block_size, slots, _bytes(to_e4m3(x * inverse)))
    else:
        got = f"vectors of {x.shape[-1]} dims"
        check(x.shape[-1] == HEAD_DIM, "E201", got=got, why=f"fp8_ds_mla rows hold {HEAD_DIM}")
        rounded = x.to(torch.bfloat16)
        values, byte = quantize_tiles(rounded[:, :NOPE_DIM].float(), KV_TILE, KV_AMAX_FLOOR)
        data = torch.cat((_bytes(values), _bytes(rounded[:, NOPE_DIM:])), dim=1)
        scale = torch.nn.functional.pad(byte.to(torch.uint8), (0, FP8_DS_MLA.scale - FP8_DS_MLA_TILES))
        paging.write_bytes(cache, fmt, block_size, slots, data, scale)


def load_kv(cache: Tensor, fmt: str, block_size: int, slots: Tensor, kv_scale: Tensor | None = None) -> Tensor:
    """Vectors `[..., D]` stored at `slots`: bfloat16, or the cache's dtype for `plain`. Invalid slots give zeros."""
    check(fmt in KV_FORMATS, "E202", got=repr(fmt), fix=f"one of {KV_FORMATS}")
    if fmt == "plain":
        return paging.read_rows(cache, block_size, slots)
    if fmt == "fp8":
        rows = paging.read_rows(cache.view(torch.uint8), block_size, slots).view(torch.float8_e4m3fn).float()
        return (rows if kv_scale is None else rows * kv_scale.float()).to(torch.bfloat16)
    data, scale = paging.read_bytes(cache, fmt, block_size, slots)
    nope = dequantize_tiles(data[..., :NOPE_DIM].view(torch.float8_e4m3fn), scale[..., :FP8_DS_MLA_TILES], KV_TILE)
    return torch.cat((nope.to(torch.bfloat16), data[..., NOPE_DIM:].view(torch.bfloat16)), dim=-1)


def quantize_indexer(x: Tensor, fmt: str) -> tuple[Tensor, Tensor]:
    """Quantise indexer vectors: values and one scale per vector (fp8) or per 32 dims (mxfp4).

    Args:
        x: float32 `[..., 128]`, already rounded to bfloat16.
    Returns:
        `indexer_fp8`: e4m3 `[..., 128]`, float32 `[..., 1]`; `indexer_mxfp4`: uint8 `[..., 64]`, uint8 `[..., 4]`.
    """
    if fmt == "indexer_fp8":
        values, byte = quantize_tiles(x, x.shape[-1], KV_AMAX_FLOOR)
        return values, (byte << 23).view(torch.float32)
    if fmt == "indexer_mxfp4":
        return quantize_mxfp4(x)
    fail("E202", got=repr(fmt), fix=f"one of {INDEXER_FORMATS}")


def store_indexer(cache: Tensor, fmt: str, block_size: int, slots: Tensor, x: Tensor) -> None:
    """Store indexer keys `x` float32 `[N, D]` at `slots`; quantised formats round to bfloat16 first, and D is 128."""
    if fmt == "plain":
        paging.write_row_slots(cache, block_size, slots, x)
        return
    check(x.shape[-1] == INDEXER_HEAD_DIM, "E201", got=f"indexer keys of {x.shape[-1]} dims", fix='use "plain" rows')
    values, scale = quantize_indexer(x.to(torch.bfloat16).float(), fmt)
    paging.write_bytes(cache, fmt, block_size, slots, _bytes(values), _bytes(scale))


def load_indexer(cache: Tensor, fmt: str, block_size: int, slots: Tensor) -> Tensor:
    """Indexer keys float32 `[..., D]` at `slots`, scales applied. Invalid slots give zeros."""
    if fmt == "plain":
        return paging.read_rows(cache, block_size, slots).float()
    data, scale = paging.read_bytes(cache, fmt, block_size, slots)
    return dequantize_indexer(data, scale, fmt)


def dequantize_indexer(data: Tensor, scale: Tensor, fmt: str) -> Tensor:
    """float32 indexer vectors from stored data bytes `[..., data]` and scale bytes `[..., 4]`."""
    if fmt == "indexer_fp8":
        return data.view(torch.float8_e4m3fn).float() * scale.view(torch.float32)
    if fmt == "indexer_mxfp4":
        return dequantize_mxfp4(data, scale)
    fail("E202", got=repr(fmt), fix=f"one of {INDEXER_FORMATS}")
