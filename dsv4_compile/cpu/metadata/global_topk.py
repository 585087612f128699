"""From the indexer's choice to slots of the paged cache, an index after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from ...reference.metadata import global_topk as reference
from .. import native


def global_topk(
    topk_indices: Tensor, token_to_req: Tensor, block_table: Tensor, is_valid_token: Tensor, block_size: int
) -> tuple[Tensor, Tensor]:
    """Compute the op of this name as its reference does, bit for bit."""
    places = topk_indices, token_to_req, block_table
    if native.takes(int32=places) and is_valid_token.is_contiguous():
        rows = topk_indices.flatten(1)
        slots, counts = torch.empty(rows.shape, dtype=torch.int32), torch.empty(rows.shape[0], dtype=torch.int32)
        arguments = *places, is_valid_token, slots, counts, *rows.shape, *block_table.shape, block_size
        native.call("global_topk", *arguments)
        return slots, counts
    return reference.global_topk(topk_indices, token_to_req, block_table, is_valid_token, block_size)
