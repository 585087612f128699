"""Rows of paged caches: those that have a slot, and reads and writes that copy whole rows."""

from __future__ import annotations

from torch import Tensor

from ...layout import KV_FORMATS
from ...reference.common import kv_format, paging


def with_slots(slots: Tensor, num_blocks: int, block_size: int, *rows: Tensor) -> tuple[Tensor, ...]:
    """Return the `slots` `[N]` that lie in the cache, and the same of the first N of each of `rows`."""
    tensors = slots, *(tensor[: slots.shape[0]] for tensor in rows)
    places = paging.valid_slots(slots, num_blocks, block_size).nonzero().view(-1)
    if places.shape[0] == slots.shape[0]:
        return tensors
    return tuple(tensor.index_select(0, places) for tensor in tensors)


def read_rows(cache: Tensor, fmt: str, block_size: int, slots: Tensor, kv_scale: Tensor | None = None) -> Tensor:
    """Return float32 `[N, D]`: the vectors at `slots` `[N]`, which all lie in the cache, of a KV or indexer format."""
    if fmt == "plain" and cache.is_contiguous():
        return cache.view(-1, cache.shape[-1]).index_select(0, slots).float()
    if fmt in KV_FORMATS:
        return kv_format.load_kv(cache, fmt, block_size, slots, kv_scale).float()
    return kv_format.load_indexer(cache, fmt, block_size, slots)


def write_rows(
    cache: Tensor, fmt: str, block_size: int, slots: Tensor, x: Tensor, kv_scale: Tensor | None = None
) -> None:
    """Store float32 vectors `x` `[N, D]` at `slots` `[N]`, which are distinct and all lie in the cache."""
    if fmt == "plain" and cache.is_contiguous():
        cache.view(-1, cache.shape[-1]).index_copy_(0, slots.long(), x.to(cache.dtype))
    elif fmt in KV_FORMATS:
        kv_format.store_kv(cache, fmt, block_size, slots, x, kv_scale)
    else:
        kv_format.store_indexer(cache, fmt, block_size, slots, x)
