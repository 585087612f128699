"""The indexer's choice as slots of the main cache, which is how attention wants it."""

from __future__ import annotations

from torch import Tensor

from ..metadata.global_topk import global_topk
from .indexer_logits import indexer_logits_topk


def indexer_topk_slots(
    q: Tensor,
    q_scale: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    token_to_req: Tensor,
    context_lens: Tensor,
    block_size: int,
    cache_format: str,
    topk: int,
    main_block_table: Tensor,
    is_valid_token: Tensor,
    main_block_size: int,
) -> tuple[Tensor, Tensor]:
    """`global_topk` of `indexer_logits_topk`: the entries of largest logit, as slots of the main cache.

    Args:
        q to topk: as for `indexer_logits_topk`, of the indexer's cache.
        main_block_table: int `[R, B]` of the main cache, in blocks of `main_block_size` entries.
        is_valid_token: bool `[>= T]`.
    Returns:
        Slots int32 `[T, topk]`, contiguous, and int32 `[T]`: how many are not -1, 0 for an invalid token. Slots are in
        the order of their entries; an entry that the main block table does not reach leaves -1 in its column.
    """
    entries = indexer_logits_topk(
        q, q_scale, weights, k_cache, block_table, token_to_req, context_lens, block_size, cache_format, topk
    )
    return global_topk(entries, token_to_req, main_block_table, is_valid_token, main_block_size)
