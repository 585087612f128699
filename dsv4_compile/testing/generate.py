"""Inputs that go wrong when code does: hostile indices, gaps between rows, and caches with NaN in unused bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import layout
from ..errors import check
from ..reference.common import kv_format

_INT32_MIN, _INT32_MAX = -(2**31), 2**31 - 1
_POISON_BYTE = 0xFF  # NaN as e4m3, as UE8M0, and, repeated, as bfloat16, float32 and float64


def hostile_values(bound: int) -> tuple[int, ...]:
    """Indices outside [0, bound) that have broken kernels: sentinels, off by one, far away, and the ends of int32."""
    values = (_INT32_MIN, -123456, -2, -1, bound, bound + 1, 2**30, _INT32_MAX)
    return tuple(value for value in values if (value < 0 or value >= bound) and value <= _INT32_MAX)


def hostile_indices(
    shape: tuple[int, ...],
    bound: int,
    *,
    fraction: float = 0.5,
    dtype: torch.dtype = torch.int32,
    device: torch.device | str | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Random indices of `shape`: about `fraction` of them are `hostile_values(bound)`, the rest lie in [0, bound).

    Duplicates occur. With `bound` 0 every index is hostile.
    """
    hostile = torch.tensor(hostile_values(bound), dtype=torch.int64)
    picked = hostile[torch.randint(len(hostile), shape, generator=generator)]
    legal = torch.randint(max(bound, 1), shape, generator=generator)
    use_hostile = (torch.rand(shape, generator=generator) < fraction) | (bound <= 0)
    return torch.where(use_hostile, picked, legal).to(dtype).to(device)


def poison_(x: Tensor) -> Tensor:
    """Fill `x` in place with values that an unmasked read would notice, and return it.

    NaN in floats of every width, 0xFF in bytes, True in bool, and in integers the smallest value, illegal as an index
    and as a length.
    """
    if x.dtype is torch.bool:
        return x.fill_(True)
    if x.dtype is torch.uint8:
        return x.fill_(_POISON_BYTE)
    if x.element_size() == 1 and x.dtype is not torch.int8:
        x.view(torch.uint8).fill_(_POISON_BYTE)
        return x
    return x.fill_(torch.nan if x.dtype.is_floating_point else torch.iinfo(x.dtype).min)


def padded(x: Tensor) -> Tensor:
    """Copy with gaps between rows: the last dim stays contiguous, others have poisoned gaps, the offset is not 0."""
    return _spread(x, step=1)


def strided(x: Tensor) -> Tensor:
    """Copy with no dim contiguous: poisoned gaps between all elements, and a storage offset."""
    return _spread(x, step=2)


def _spread(x: Tensor, step: int) -> Tensor:
    """Copy `x` into a poisoned buffer: `step` elements per last-dim element, spare room around each dim."""
    if x.dim() == 0:
        return x.clone()
    shape = [size + 2 for size in x.shape[:-1]] + [x.shape[-1] * step + 2 * layout.cdiv(16, x.element_size())]
    view = poison_(torch.empty(shape, dtype=x.dtype, device=x.device))
    for dim, size in enumerate(x.shape[:-1]):
        view = view.narrow(dim, 1, size)
    start = layout.cdiv(16, x.element_size())  # keeps the 16-byte alignment of rows that have it
    view = view[..., start : start + x.shape[-1] * step : step]
    view.view(_storable(x)).copy_(x.view(_storable(x)))
    return view


def _storable(x: Tensor) -> torch.dtype:
    """A dtype of x's width that every device can copy with strides."""
    return torch.uint8 if x.element_size() == 1 else x.dtype


@dataclass(frozen=True, slots=True)
class RandomCache:
    """A paged cache with values only in `slots`; every other byte of its storage is NaN.

    Attributes:
        cache: byte pages or rows, as `layout.cache_shape`; pages are further apart than they are long.
        slots: int64 `[live]`, distinct physical slots in random order; `slots[i]` holds `values[i]`.
        values: float32 `[live, D]` before rounding to the format. Read back with `reference.kv_format` what is stored.
        block_size, fmt, kv_scale: as the ops take them; `kv_scale` is float32 `[1]` for `fp8`, else None.
    """

    cache: Tensor
    slots: Tensor
    values: Tensor
    block_size: int
    fmt: str
    kv_scale: Tensor | None = None


def random_cache(
    fmt: str,
    num_blocks: int,
    block_size: int,
    *,
    live: int | None = None,
    head_dim: int = layout.HEAD_DIM,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    generator: torch.Generator | None = None,
) -> RandomCache:
    """A cache with `live` (default: half of all) slots of standard normal vectors and poison everywhere else.

    Args:
        fmt: any KV or indexer format; compressor state is `plain` with dtype float32 and its row width as `head_dim`.
        num_blocks, block_size: pages and tokens per page.
        head_dim: D; fixed by the byte formats. dtype: of `plain` rows.
    """
    check(fmt in (*layout.KV_FORMATS, *layout.INDEXER_FORMATS), "E202", got=repr(fmt))
    if fmt.startswith("indexer"):
        head_dim = layout.INDEXER_HEAD_DIM
    cache = _poisoned_pages(fmt, num_blocks, block_size, head_dim, dtype)
    live = num_blocks * block_size // 2 if live is None else live
    slots = torch.randperm(num_blocks * block_size, generator=generator)[:live]
    values = torch.randn(live, head_dim, generator=generator)
    kv_scale = torch.tensor([0.03125 * 1.25]) if fmt == "fp8" else None
    if fmt.startswith("indexer"):
        kv_format.store_indexer(cache, fmt, block_size, slots, values)
    else:
        kv_format.store_kv(cache, fmt, block_size, slots, values, kv_scale)
    return RandomCache(
        cache=to_device(cache, device),
        slots=slots.to(device),
        values=values.to(device),
        block_size=block_size,
        fmt=fmt,
        kv_scale=None if kv_scale is None else kv_scale.to(device),
    )


def _poisoned_pages(fmt: str, num_blocks: int, block_size: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    shape = layout.cache_shape(fmt, num_blocks, block_size, head_dim)
    page = math.prod(shape[1:])
    if fmt in layout.PAGE_LAYOUTS:
        dtype, stride = torch.uint8, layout.PAGE_LAYOUTS[fmt].page_stride(block_size)
    else:
        dtype, stride = dtype if fmt == "plain" else torch.uint8, page + head_dim
    backing = poison_(torch.empty(num_blocks, stride, dtype=dtype))
    return backing[:, :page].unflatten(1, shape[1:])


def to_device(x: Tensor, device: torch.device | str | None) -> Tensor:
    """Move `x` with its strides and the memory between its elements, which `.to` would drop."""
    if device is None or torch.device(device) == x.device:
        return x
    backing = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).to(device)
    return backing.as_strided(x.shape, x.stride(), x.storage_offset())
