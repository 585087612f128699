"""Move lists of indices to the fixed addresses that a captured graph reads."""

from __future__ import annotations

import torch
from torch import Tensor

from ...layout import PAD_INDEX
from .index_rows import write_prefix


def copy_ragged_to_graph_buffers(
    ragged_indices: Tensor, ragged_indptr: Tensor, indices_buffer: Tensor, indptr_buffer: Tensor
) -> None:
    """Copy rows given as a list, row r being `ragged_indices[ragged_indptr[r] : ragged_indptr[r + 1]]`.

    Args:
        ragged_indices: int `[N]`, any capacity; what lies at or behind `ragged_indptr[-1]` is not read as an index.
        ragged_indptr: int `[R + 1]`, not decreasing, within [0, N].
        indices_buffer: int32 `[M]`, indptr_buffer: int32 `[Q + 1]`, Q >= R, both written completely: -1 behind the last
            index, and the last end repeated, so that rows behind R are empty.

    Ends beyond M are cut to M: a row that does not fit loses its tail, and no row reads memory of other rows.
    """
    rows, room = ragged_indptr.shape[0], indices_buffer.shape[0]
    ends = ragged_indptr.clamp(0, min(room, ragged_indices.shape[0]))
    indptr_buffer[:rows].copy_(ends)
    indptr_buffer[rows:].copy_(ends[-1:].expand(indptr_buffer.shape[0] - rows))
    copied = min(room, ragged_indices.shape[0])
    used = torch.arange(copied, device=ends.device) < ends[-1]
    write_prefix(indices_buffer, torch.where(used, ragged_indices[:copied], PAD_INDEX), PAD_INDEX)
