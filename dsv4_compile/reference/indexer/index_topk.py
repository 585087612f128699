"""Two-level selection of compressed entries by the indexer of DeepSeek-V4.1.

    score[t, j] = sum_h weights[t, h] relu(q[t, h] . k[j]) (D H)^-0.5,   entry j visible if j < visible[t]

in float32, q rotated and rounded to a grid as the keys were. Of equal scores the smaller index wins. A source of
candidates scores all visible entries, selects among all of them, and publishes the blocks of entries with the largest
scores, the token's newest block always among them. Later layers select inside the candidates alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...layout import PAD_INDEX, PAD_SLOT, cdiv
from ..common import paging
from ..common.rope import apply_rope
from ..common.row_format import load_rows, round_to_grid
from .indexer_logits import ENTRIES_AT_A_TIME, TOKENS_AT_A_TIME, select_topk


class IndexArguments(NamedTuple):
    """Arguments of `index_topk`, in schema order.

    Attributes:
        q: `[T, H, D]` bfloat16, float16 or float32, not rotated, any strides.
        weights: `[T, H]`, of any of these dtypes, not scaled.
        positions: int `[T]`, that queries are rotated to by `cos_sin_cache`.
        keys: cache of `cache_format` with a row of D channels for each entry; block_table: int32 `[R, B]`.
        requests, visible: int `[T]`, a token's request and how many entries it sees, counted for the token, not for
            its request. A request out of range or a count below 1 sees none.
        block_size: keys of a page.
        topk: K, at least 1.
        grid: of `layout.GRIDS`, that queries are rounded to, or "".
        candidates: int32 `[T, C]`, blocks of `candidate_block` entries, -1 for none; None for all entries.
    """

    q: Tensor
    weights: Tensor
    positions: Tensor
    cos_sin_cache: Tensor
    keys: Tensor
    block_table: Tensor
    requests: Tensor
    visible: Tensor
    block_size: int
    cache_format: str
    topk: int
    grid: str = ""
    candidates: Tensor | None = None
    candidate_block: int = 8


class BlocksArguments(NamedTuple):
    """Arguments of `index_topk_blocks`, in schema order: those of `index_topk`, then `blocks`, most candidates."""

    q: Tensor
    weights: Tensor
    positions: Tensor
    cos_sin_cache: Tensor
    keys: Tensor
    block_table: Tensor
    requests: Tensor
    visible: Tensor
    block_size: int
    cache_format: str
    topk: int
    grid: str = ""
    candidates: Tensor | None = None
    candidate_block: int = 8
    blocks: int = 2048


def index_topk(a: IndexArguments) -> Tensor:
    """Select the `topk` visible entries of largest score, inside the candidates if there are some.

    Returns:
        int32 `[T, topk]`, contiguous: indices within the request, ascending, then -1.
    """
    picks = a.q.new_empty((a.q.shape[0], a.topk), dtype=torch.int32)
    for rows in _tiles(a.q.shape[0]):
        scores, seen, entries = _score(a, rows)
        chosen = select_topk(scores, seen, a.topk)
        if entries is not None:
            chosen = _entries_at(entries, chosen)
        picks[rows] = chosen
    return picks


def index_topk_blocks(a: BlocksArguments) -> tuple[Tensor, Tensor]:
    """Select as `index_topk` among all visible entries, and the blocks that later layers select from.

    The score of a block is the largest of its visible entries; the block of the token's newest entry comes first.

    Returns:
        int32 `[T, topk]` entries and int32 `[T, blocks]` blocks, contiguous, ascending, then -1.
    """
    tokens = a.q.shape[0]
    picks = a.q.new_empty((tokens, a.topk), dtype=torch.int32)
    candidates = a.q.new_empty((tokens, a.blocks), dtype=torch.int32)
    for rows in _tiles(tokens):
        scores, seen, _ = _score(IndexArguments(*a[:-1]), rows)
        picks[rows] = select_topk(scores, seen, a.topk)
        best, any_seen = block_scores(scores, seen, a.visible[rows], a.candidate_block)
        candidates[rows] = select_topk(best, any_seen, a.blocks)
    return picks, candidates


def block_scores(scores: Tensor, seen: Tensor, visible: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the score of each block of `size` entries and whether one of them is visible, both `[n, blocks]`."""
    missing = cdiv(scores.shape[1], size) * size - scores.shape[1]
    hidden = torch.where(seen, scores, -torch.inf)
    best = torch.nn.functional.pad(hidden, (0, missing), value=-torch.inf).unflatten(1, (-1, size)).amax(2)
    any_seen = torch.nn.functional.pad(seen, (0, missing)).unflatten(1, (-1, size)).any(2)
    block = torch.arange(best.shape[1], device=best.device)
    newest = block == ((visible.clamp_min(1) - 1) // size)[:, None]
    return torch.where(newest, torch.inf, best), any_seen


def queries(a: IndexArguments, rows: slice) -> tuple[Tensor, Tensor]:
    """Return float32 queries `[n, H, D]`, rotated and on the grid, and weights `[n, H]`, scaled."""
    q = apply_rope(a.q[rows], a.positions[rows], a.cos_sin_cache).to(a.q.dtype).float()
    scale = (a.q.shape[2] * a.q.shape[1]) ** -0.5
    return round_to_grid(q, a.grid), a.weights[rows].float() * scale


def _score(a: IndexArguments, rows: slice) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return scores float32 and visibility bool `[n, J]`, and the entries of columns, None where they are 0, 1, 2..."""
    q, weights = queries(a, rows)
    requests, visible = a.requests[rows, None], a.visible[rows, None]
    if a.candidates is None:
        width = a.block_table.shape[1] * a.block_size
        columns = torch.arange(width, device=q.device)
        scores, seen = _score_columns(a, q, weights, requests, visible, columns)
        return scores, seen, None
    blocks, size = a.candidates[rows].long(), a.candidate_block
    entries = blocks[..., None] * size + torch.arange(size, device=q.device)
    entries = torch.where(blocks[..., None] >= 0, entries, PAD_INDEX).flatten(1)
    scores, seen = _score_columns(a, q, weights, requests, visible, entries)
    return scores, seen, entries


def _score_columns(
    a: IndexArguments, q: Tensor, weights: Tensor, requests: Tensor, visible: Tensor, entries: Tensor
) -> tuple[Tensor, Tensor]:
    """Return scores and visibility `[n, J]` of `entries` `[J]` or `[n, J]`."""
    scores, visibility = [], []
    for columns in entries.split(ENTRIES_AT_A_TIME, dim=-1):
        slots = paging.lookup_slots(a.block_table, requests, columns, a.block_size)
        seen = paging.valid_slots(slots, a.keys.shape[0], a.block_size) & (columns < visible)
        keys = load_rows(a.keys, a.cache_format, a.block_size, torch.where(seen, slots, PAD_SLOT), q.shape[2])
        dots = torch.matmul(q, keys.transpose(-1, -2)).relu()
        scores.append(torch.matmul(weights[:, None], dots)[:, 0])
        visibility.append(seen)
    if not scores:
        return q.new_empty((q.shape[0], 0)), torch.empty((q.shape[0], 0), dtype=torch.bool, device=q.device)
    return torch.cat(scores, 1), torch.cat(visibility, 1)


def _entries_at(entries: Tensor, columns: Tensor) -> Tensor:
    """Return int32 entries of the chosen `columns`, ascending, -1 for -1. Candidates are ascending, so entries are."""
    after = entries.shape[1]  # a column of padding, which exists where there are no candidates too
    entries = torch.nn.functional.pad(entries, (0, 1), value=PAD_INDEX)
    return entries.gather(1, torch.where(columns >= 0, columns, after).long()).int()


def _tiles(tokens: int) -> list[slice]:
    return [slice(i, min(i + TOKENS_AT_A_TIME, tokens)) for i in range(0, tokens, TOKENS_AT_A_TIME)]
