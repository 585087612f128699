"""Paged addressing: slots, block tables and masked row writes, with every index checked before it is used.

slot = block * block_size + offset. Anything outside [0, P * block_size) is padding: it is neither read nor written.
No function here synchronises: invalid rows are selected away, not branched on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...layout import HEAD_DIM, PAD_INDEX, byte_pages, page_layout


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
        return logical.new_full(logical.shape, PAD_INDEX)
    block = block_table[torch.where(ok, requests, 0), torch.where(ok, column, 0)].long()
    slot = block * block_size + torch.where(ok, logical, 0) % block_size
    return torch.where(ok & (block >= 0), slot, PAD_INDEX)


def write_rows(target: Tensor, index: tuple[Tensor, ...], rows: Tensor, keep: Tensor) -> None:
    """`target[index[i]] = rows[i]` for the rows with `keep[i]`, in place; nothing else is touched.

    Args:
        target: any strided tensor.
        index: one int64 `[N]` tensor per leading dim of `target`.
        rows: `[N, ...]` values; keep: bool `[N]`. Kept rows must have distinct, legal targets.

    A dropped row repeats a kept one, or rewrites what is already there when none is kept, so that the write needs
    neither a trash row in the cache nor a synchronising boolean index.
    """
    if rows.shape[0] == 0 or target.numel() == 0:
        return
    # One element, not a scalar: indexing with a scalar tensor reads it back to the host.
    spare = keep.to(torch.int8).argmax(0, keepdim=True)

    def redirect(values: Tensor) -> Tensor:
        return torch.where(keep.view(-1, *(1,) * (values.dim() - 1)), values, values[spare])

    legal = keep[spare]
    index = tuple(torch.where(legal, redirect(i), 0) for i in index)
    legal = legal.view(1, *(1,) * (rows.dim() - 1))
    target.index_put_(index, torch.where(legal, redirect(rows), target[index]))


def _regions(cache: Tensor, fmt: str, block_size: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """The data rows `[P, S, data]` and the scale rows `[P, S, scale]` of a byte cache, as views."""
    layout = page_layout(fmt, head_dim)
    assert layout is not None
    pages = byte_pages(cache, fmt, block_size, head_dim=head_dim)
    data, scale = pages.split((block_size * layout.data, block_size * layout.scale), dim=1)
    return data.unflatten(1, (block_size, layout.data)), scale.unflatten(1, (block_size, layout.scale))


def read_bytes(
    cache: Tensor, fmt: str, block_size: int, slots: Tensor, head_dim: int = HEAD_DIM
) -> tuple[Tensor, Tensor]:
    """Data bytes `[..., data]` and scale bytes `[..., scale]` of tokens in a byte cache. Invalid slots give zeros."""
    data, scale = _regions(cache, fmt, block_size, head_dim)
    return read_rows(data, block_size, slots), read_rows(scale, block_size, slots)


def write_bytes(
    cache: Tensor,
    fmt: str,
    block_size: int,
    slots: Tensor,
    data: Tensor,
    scale: Tensor,
    head_dim: int = HEAD_DIM,
) -> None:
    """Store data bytes `[N, data]` and scale bytes `[N, scale]` at `slots` `[N]`; invalid slots are skipped."""
    data_rows, scale_rows = _regions(cache, fmt, block_size, head_dim)
    write_row_slots(data_rows, block_size, slots, data)
    write_row_slots(scale_rows, block_size, slots, scale)


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
