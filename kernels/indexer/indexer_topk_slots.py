"""Launcher of `indexer_topk_slots`: the kernels of `indexer_logits_topk`, of which the selecting one writes slots.

On an H200 at 16k tokens of context and top-k 512, 1, 32, 128 and 512 tokens take 5.6, 12.8, 28.5 and 91 us, and with
keys out of the cache 6.6, 14.9 and 31.8 (`dsv4 bench indexer --only op=indexer_topk_slots`;
examples/results/indexer_topk_h200_2026-11-22.json). Alone the selection is 4.3, 4.9, 5.7 and 14 of that and the score
2.5, 7.6, 21.8 and 77; their ends overlap.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .indexer_logits import PROGRAMS, SELECT_TILE, indexer_logits_topk_refuses, score_and_select
from .select_topk import SlotMap


def indexer_topk_slots_refuses(
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
) -> str:
    """Why a call cannot use the kernel, or ""."""
    return indexer_logits_topk_refuses(
        q, q_scale, weights, k_cache, block_table, token_to_req, context_lens, block_size, cache_format, topk
    )


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
    *,
    programs: int = PROGRAMS,
    score_tile: tuple[int, int, int] | None = None,
    select_tile: tuple[int, int] = SELECT_TILE,
) -> tuple[Tensor, Tensor]:
    """See the reference. The entries are those of the launcher `indexer_logits_topk`, as are the keyword arguments."""
    slots = q.new_empty((q.shape[0], topk), dtype=torch.int32)
    counts = q.new_empty((q.shape[0],), dtype=torch.int32)
    score_and_select(
        slots, q, q_scale, weights, k_cache, block_table, token_to_req, context_lens, block_size, cache_format,
        SlotMap(counts, main_block_table, is_valid_token, main_block_size), programs, score_tile, select_tile,
    )  # fmt: skip
    return slots, counts
