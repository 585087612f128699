"""Dense rows of indices as one ragged list."""

from __future__ import annotations

import torch
from torch import Tensor

from .index_rows import flatten_rows, pack_rows


def ragged_from_dense(indices: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
    """The first `lens[t]` entries of each row as one list, -1 entries dropped.

    Args:
        indices: int32 `[T, W]` or `[T, 1, W]`; lens: int `[N]`, N >= T, clamped to [0, W].

    Returns `flat` int32 `[T * W]` with a -1 tail and `indptr` int32 `[T + 1]`, which counts what was not dropped.
    """
    rows = indices.flatten(1)
    columns = torch.arange(rows.shape[1], device=rows.device)
    packed, counts = pack_rows(rows, (columns < lens[: rows.shape[0], None]) & (rows >= 0))
    return flatten_rows(packed, counts)
