"""Selection of the indexer's best entries as slots of the extra cache, the one that attention reads them from."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ..metadata.global_topk import global_topk
from .indexer_logits import TopkArguments, indexer_logits_topk


class TopkSlotsArguments(NamedTuple):
    """Arguments of `indexer_topk_slots`, in schema order.

    Attributes:
        q to topk: as in `TopkArguments`, of the indexer's cache.
        extra_block_table: int `[R, B]` of the extra cache, in blocks of `extra_block_size` entries.
        is_valid_token: bool `[>= T]`.
    """

    q: Tensor
    q_scale: Tensor
    weights: Tensor
    k_cache: Tensor
    block_table: Tensor
    token_to_req: Tensor
    context_lens: Tensor
    block_size: int
    cache_format: str
    topk: int
    extra_block_table: Tensor
    is_valid_token: Tensor
    extra_block_size: int

    def selection(self) -> TopkArguments:
        """Return the arguments of the selection that is mapped to slots."""
        return TopkArguments(*self[:10])


def indexer_topk_slots(
    op: TopkSlotsArguments, select: Callable[[TopkArguments], Tensor] = indexer_logits_topk
) -> tuple[Tensor, Tensor]:
    """Map the entries of `indexer_logits_topk` to slots of the extra cache by `global_topk`.

    Returns:
        Slots int32 `[T, topk]`, contiguous, and int32 `[T]`: how many are not -1, 0 for an invalid token. Slots are in
        the order of their entries; an entry that the extra block table does not reach leaves -1 in its column.
    """
    entries = select(op.selection())
    return global_topk(entries, op.token_to_req, op.extra_block_table, op.is_valid_token, op.extra_block_size)
