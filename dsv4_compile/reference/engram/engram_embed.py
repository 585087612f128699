"""Embeddings of the engram: rows of a quantised table, side by side."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.quant import dequantize_tiles


def engram_embed(rows: Tensor, table: Tensor, scale: Tensor | None = None) -> Tensor:
    """Return the rows of a table for each token, dequantised.

    Args:
        rows: int `[T, K]`; a row outside the table gives zeros.
        table: `[N, C]` floating, or e4m3 with `scale`, UE8M0 bytes (uint8 or float8_e8m0fnu) `[N, C/32]`.
    Returns:
        float32 `[T, K * C]`, contiguous.
    """
    valid = (rows >= 0) & (rows < table.shape[0])
    if table.shape[0] == 0:
        return table.new_zeros((rows.shape[0], rows.shape[1] * table.shape[1]), dtype=torch.float32)
    index = torch.where(valid, rows, 0).long()
    if scale is None:
        values = table[index].float()
    else:
        # torch indexes bytes where it does not index 8-bit floats.
        data, byte = table.view(torch.uint8)[index], scale.view(torch.uint8)[index]
        values = dequantize_tiles(data.view(torch.float8_e4m3fn), byte, table.shape[1] // byte.shape[-1])
    return torch.where(valid[..., None], values, 0.0).flatten(1)
