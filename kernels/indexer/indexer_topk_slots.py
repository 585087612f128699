"""Launcher of `indexer_topk_slots`: the kernels of `indexer_logits_topk`; the selection writes slots."""

from __future__ import annotations

import torch
from torch import Tensor

from ...reference.indexer.indexer_topk_slots import TopkSlotsArguments
from .indexer_logits import PROGRAMS, score_and_select, why_unsupported_indexer_logits_topk
from .select_topk import SlotMap

GROUPS: tuple[int, int] | None = None
"""Columns of a group and warps; (0, 0) selects from parts, None as the launcher `indexer_logits_topk` does."""


def why_unsupported_indexer_topk_slots(op: TopkSlotsArguments) -> str:
    """Return why the kernels do not support a call, "" if they do."""
    return why_unsupported_indexer_logits_topk(op.selection())


def indexer_topk_slots(
    op: TopkSlotsArguments,
    *,
    programs: int = PROGRAMS,
    score_tile: tuple[int, int, int] | None = None,
    select_tile: tuple[int, int] | None = None,
    groups: tuple[int, int] | None = GROUPS,
) -> tuple[Tensor, Tensor]:
    """Launch `indexer_topk_slots`. Entries and keyword arguments are those of the launcher `indexer_logits_topk`."""
    slots = op.q.new_empty((op.q.shape[0], op.topk), dtype=torch.int32)
    counts = op.q.new_empty((op.q.shape[0],), dtype=torch.int32)
    to_slots = SlotMap(counts, op.extra_block_table, op.is_valid_token, op.extra_block_size)
    score_and_select(slots, op.selection(), to_slots, programs, score_tile, select_tile, groups)
    return slots, counts
