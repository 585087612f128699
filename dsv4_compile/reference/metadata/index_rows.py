"""Rows of indices: narrowing slots, packing valid entries to the front, and rows as one flat ragged list.

A row is `[valid entries ..., -1 ...]`; an index list never holds anything else than -1 where it holds no index.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...layout import PAD_INDEX

_INT32_MAX = 2**31 - 1


def to_index(slots: Tensor) -> Tensor:
    """int32 of int64 slots; -1 for a slot that int32 cannot hold, which no cache has."""
    return torch.where(slots <= _INT32_MAX, slots, PAD_INDEX).to(torch.int32)


def write_prefix(out: Tensor, values: Tensor, pad: int | bool) -> None:
    """Write `values` to the first rows of `out` and `pad` to all that is left, in rows and in columns."""
    region = out[: values.shape[0]]
    if values.dim() == 2:
        region[:, values.shape[1] :].fill_(pad)
        region = region[:, : values.shape[1]]
    region.copy_(values)
    out[values.shape[0] :].fill_(pad)


def pack_rows(rows: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """Kept entries of each row `[T, K]` moved to its front in their order, -1 behind; and their count, int32 `[T]`."""
    counts = keep.sum(1, dtype=torch.int32)
    order = torch.argsort((~keep).to(torch.int8), dim=1, stable=True)
    columns = torch.arange(rows.shape[1], device=rows.device)
    return torch.where(columns < counts[:, None], rows.gather(1, order), PAD_INDEX), counts


def flatten_rows(rows: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
    """The first `lens[t]` entries of each row `[T, K]` as one list.

    Returns `flat` `[T * K]`, a capacity with an unused tail of -1, and `indptr` int32 `[T + 1]`: row t is
    `flat[indptr[t] : indptr[t + 1]]`. Lengths outside [0, K] are clamped.
    """
    tokens, width = rows.shape
    ends = lens.clamp(0, width).cumsum(0)
    indptr = torch.cat((ends.new_zeros(1), ends))
    position = torch.arange(tokens * width, device=rows.device)
    row = torch.searchsorted(ends, position, right=True)
    used = row < tokens
    row = torch.where(used, row, 0)
    flat = rows[row, torch.where(used, position - indptr[row], 0)]
    return torch.where(used, flat, PAD_INDEX), indptr.to(torch.int32)
