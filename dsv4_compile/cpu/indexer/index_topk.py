"""Two-level selection over no more pages than the longest request has."""

from __future__ import annotations

from torch import Tensor

from ...layout import cdiv
from ...reference.indexer import index_topk as reference
from ...reference.indexer.index_topk import BlocksArguments, IndexArguments


def _table(a: IndexArguments | BlocksArguments) -> Tensor:
    """Return the columns of the block table that a token sees."""
    longest = int(a.visible.max().clamp_min(0)) if a.visible.shape[0] else 0
    return a.block_table[:, : cdiv(longest, a.block_size)]


def index_topk(a: IndexArguments) -> Tensor:
    """Compute the op of this name as its reference does."""
    return reference.index_topk(a if a.candidates is not None else a._replace(block_table=_table(a)))


def index_topk_blocks(a: BlocksArguments) -> tuple[Tensor, Tensor]:
    """Compute the op of this name as its reference does."""
    return reference.index_topk_blocks(a._replace(block_table=_table(a)))
