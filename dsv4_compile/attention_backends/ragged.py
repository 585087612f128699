"""Rows of indices as lists (CSR) in buffers that a captured graph reads."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import ops  # noqa: F401  (registers torch.ops.dsv4)


def copy_ragged_to_graph_buffers(
    ragged_indices: Tensor,
    ragged_indptr: Tensor,
    ragged_indices_buffer: Tensor,
    ragged_indptr_buffer: Tensor,
    num_rows: int,
    max_entries_per_row: int,
) -> tuple[Tensor, Tensor]:
    """Copy a step's lists and return views whose address and size follow from the number of rows alone.

    Args:
        ragged_indices: int `[N]`; ragged_indptr: int `[num_rows + 1]`: row r is `indices[indptr[r] : indptr[r + 1]]`.
        ragged_indices_buffer: int32 `[M]`; ragged_indptr_buffer: int32 `[Q + 1]`, allocated for the largest step.
        num_rows: rows of this step. max_entries_per_row: bound of the length of each.

    Returns:
        `ragged_indices_buffer[: max(num_rows * max_entries_per_row, 1)]`, -1 behind the last index, and
        `ragged_indptr_buffer[: num_rows + 1]`. The first is written to its end, the buffer behind the second as well.
    """
    indices = ragged_indices_buffer[: max(num_rows * max_entries_per_row, 1)]
    torch.ops.dsv4.copy_ragged_to_graph_buffers(ragged_indices, ragged_indptr, indices, ragged_indptr_buffer)
    return indices, ragged_indptr_buffer[: num_rows + 1]
