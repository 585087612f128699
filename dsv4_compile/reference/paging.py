"""Paged addressing: slots, block tables and masked row writes, with every index checked before it is used.

slot = block * block_size + offset. Anything outside [0, P * block_size) is padding: it is neither read nor written.
No function here synchronises: invalid rows are selected away, not branched on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout import PAD_INDEX, PAGE_LAYOUTS, byte_pages


def valid_slots(slots: Tensor, num_blocks: int, block_size: int) -> Tensor:
    """bool, True where a slot lies inside the cache."""
    return (slots >= 0) & (slots < num_blocks * block_size)


def lookup_slots(block_table: Tensor, requests: Tensor, logical: Tensor, block_size: int) -> Tensor:
    """int64 physical slots of logical token (or entry) indices; -1 where request, column or block is out of range.

    Args:
        block_table: int32 `[R, B]`.
        requests: int `[...]`, broadcastable with `logical`.
        logical: int `[...]`, index within the request; negative means padding.
    """
    rows, columns = block_table.shape
    requests, logical = torch.broadcast_tensors(requests.long(), logical.long())
    ok = (requests >= 0) & (requests < rows) & (logical >= 0)
    column = torch.where(ok, logical, 0) // block_size
    ok = ok & (column < columns)
    if rows == 0 or columns == 0:
        return torch.full_like(logical, PAD_INDEX)
    block = block_table[torch.where(ok, requests, 0), torch.where(ok, column, 0)].long()
    slot = block * block_size + torch.where(ok, logical, 0) % block_size
    return torch.where(ok & (block >= 0), slot, PAD_INDEX)


def write_rows(target: Tensor, index: tuple[Tensor, ...], rows: Tensor, keep: Tensor) -> None:
    """`target[index[i]] = rows[i]` for the rows with `keep[i]`, in place; nothing else is touched.

    Args:
        target: any strided tensor.
        index: one int64 tensor per leading dim of `target`; each `[N]`, or `[N, 1]` / `[N, n]` to address columns.
        rows: `[N, ...]` values; keep: bool `[N]`. Kept rows must have distinct, legal targets.

    A dropped row repeats a kept one, or rewrites what is already there when none is kept, so that the write needs
    neither a trash row in the cache nor a synchronising boolean index.
    """
    if rows.shape[0] == 0 or target.numel() == 0:
        return
    spare = keep.to(torch.int8).argmax()

    def redirect(values: Tensor) -> Tensor:
        mask = keep.view(-1, *(1,) * (values.dim() - 1))
        return torch.where(mask, values, values[spare])

    legal = keep[spare]
    index = tuple(torch.where(legal, redirect(i), _column_or_zero(i)) for i in index)
    target.index_put_(index, torch.where(legal, redirect(rows), target[index]))


def _column_or_zero(index: Tensor) -> Tensor:
    """Legal stand-in for an index tensor when no row is kept: row 0, columns as they are relative to the first."""
    if index.dim() > 1 and index.shape[1] > 1:
        return torch.arange(index.shape[1], device=index.device).expand_as(index)
    return torch.zeros_like(index)


def read_bytes(cache: Tensor, fmt: str, block_size: int, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Data bytes `[..., data]` and scale bytes `[..., scale]` of tokens in a byte cache. Invalid slots give zeros."""
    layout = PAGE_LAYOUTS[fmt]
    pages = byte_pages(cache, fmt, block_size)
    ok = valid_slots(slots, pages.shape[0], block_size)
    if pages.shape[0] == 0:
        return (
            pages.new_zeros(*slots.shape, layout.data),
            pages.new_zeros(*slots.shape, layout.scale),
        )
    safe = torch.where(ok, slots, 0).long()
    block, offset = (safe // block_size)[..., None], (safe % block_size)[..., None]
    data = pages[block, layout.data_offset(offset) + torch.arange(layout.data, device=cache.device)]
    scale = pages[block, layout.scale_offset(offset, block_size) + torch.arange(layout.scale, device=cache.device)]
    zero = torch.zeros((), dtype=torch.uint8, device=cache.device)
    return torch.where(ok[..., None], data, zero), torch.where(ok[..., None], scale, zero)


def write_bytes(cache: Tensor, fmt: str, block_size: int, slots: Tensor, data: Tensor, scale: Tensor) -> None:
    """Store data bytes `[N, data]` and scale bytes `[N, scale]` at `slots` `[N]`; invalid slots are skipped."""
    layout = PAGE_LAYOUTS[fmt]
    pages = byte_pages(cache, fmt, block_size)
    ok = valid_slots(slots, pages.shape[0], block_size)
    safe = torch.where(ok, slots, 0).long()
    block, offset = (safe // block_size)[:, None], (safe % block_size)[:, None]
    columns = torch.cat(
        (
            layout.data_offset(offset) + torch.arange(layout.data, device=cache.device),
            layout.scale_offset(offset, block_size) + torch.arange(layout.scale, device=cache.device),
        ),
        dim=1,
    )
    write_rows(pages, (block, columns), torch.cat((data, scale), dim=1), ok)


def read_rows(cache: Tensor, block_size: int, slots: Tensor) -> Tensor:
    """Rows `[..., D]` of a row cache `[P, S, D]`; invalid slots give zeros."""
    ok = valid_slots(slots, cache.shape[0], block_size)
    if cache.shape[0] == 0:
        return cache.new_zeros(*slots.shape, cache.shape[-1])
    safe = torch.where(ok, slots, 0).long()
    rows = cache[safe // block_size, safe % block_size]
    return torch.where(ok[..., None], rows, torch.zeros((), dtype=cache.dtype, device=cache.device))


def write_row_slots(cache: Tensor, block_size: int, slots: Tensor, rows: Tensor) -> None:
    """Store `rows` `[N, D]` at `slots` `[N]` of a row cache `[P, S, D]`; invalid slots are skipped."""
    ok = valid_slots(slots, cache.shape[0], block_size)
    safe = torch.where(ok, slots, 0).long()
    write_rows(cache, (safe // block_size, safe % block_size), rows.to(cache.dtype), ok)
