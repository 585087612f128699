"""Checks that a call of a converted model continues its cache: rows, mask, positions and lengths."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import check, fail
from .cache import RESIZE, PagedCache
from .token_inputs import kept


class Call(NamedTuple):
    """Inputs of the entry: the arguments of a forward, and the cache that a handle stands for."""

    input_ids: Tensor
    attention_mask: Tensor | None
    position_ids: Tensor | None
    cache: PagedCache


def check_batch(call: Call, *, in_chunks: bool = False) -> None:
    """Raise E208 or E204 unless the batch continues its cache: rows, mask, positions and lengths.

    Args:
        call: a call of a model.
        in_chunks: whether more columns than a step may have run in several.
    """
    (rows, columns), cache = call.input_ids.shape, call.cache
    check(
        not cache.interrupted,
        "E208",
        got="a cache whose last forward failed",
        why="some of its layers may hold that forward's tokens",
        fix="call its reset() and prefill again",
    )
    # Without `check`, which would format its message in every call.
    if cache.rows not in (0, rows):
        fail(
            "E208",
            got=f"{rows} rows with a cache of {cache.rows} sequences",
            why="a row continues the sequence of its index",
            fix="continue with as many rows, or pass an empty cache",
        )
    mask = call.attention_mask
    if mask is not None:
        widths = (columns, cache.appended + columns)
        if mask.shape[0] != rows or mask.shape[1] not in widths:
            fail(
                "E208",
                got=f"attention_mask of shape {tuple(mask.shape)}",
                why=f"input_ids are {rows} x {columns}, after {cache.appended} columns in the cache",
                fix=f"pass {rows} x {columns}" + (f" or {rows} x {widths[1]}" if cache.appended else ""),
            )
        if mask.shape[1] > columns:
            past_tokens = (mask[:, : cache.appended] != 0).sum(dim=1)
            check(
                bool((past_tokens == cache.seq_lens[:rows]).all()),
                "E208",
                got="an attention_mask with other tokens in past columns than the cache holds",
                fix="keep the mask of earlier calls and append the new columns",
            )
    if call.position_ids is not None:
        _check_positions(call)
    paged = cache.paged
    fits = rows <= paged.max_batch_size and (in_chunks or columns <= paged.max_step_tokens)
    if fits and cache.appended + columns > paged.max_seq_len:
        fits = bool((cache.seq_lens[:rows] + _keep(call).sum(dim=1) <= paged.max_seq_len).all())
    if not fits:
        fail(
            "E204",
            got=f"input_ids of shape ({rows}, {columns}) after {cache.appended} columns",
            why=f"the cache takes {paged.max_batch_size} sequences of {paged.max_seq_len} tokens, "
            f"{paged.max_step_tokens} in a step",
            fix=f"prefill in chunks; {RESIZE}",
        )


def _keep(call: Call) -> Tensor:
    """Return which of the new columns hold a token, `[B, S]` bool."""
    columns = call.input_ids.shape[1]
    if call.attention_mask is None:
        return torch.ones_like(call.input_ids, dtype=torch.bool)
    return kept(call.attention_mask, columns)


def _check_positions(call: Call) -> None:
    """Raise E208 unless `position_ids` are those that follow from the cache and the mask."""
    positions = call.position_ids
    assert positions is not None
    keep = _keep(call)
    follow = call.cache.seq_lens[: keep.shape[0], None] + keep.cumsum(dim=1) - 1
    same = (
        isinstance(positions, Tensor)
        and positions.dim() == 2
        and positions.shape[1] == follow.shape[1]
        and positions.shape[0] in (1, follow.shape[0])
    )
    check(
        same and bool(((positions == follow) | ~keep).all()),
        "E208",
        got="position_ids other than the tokens' places in their sequences",
        why="positions follow from the cache and the mask; packed documents would attend to each other",
        fix="leave position_ids out, and pass one document a row",
    )
