"""Which requests of a batch share the prefill workspace at a time, decided by the host; see `prefill`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from ..errors import check
from ..metadata import BatchSplit, get_prefill_chunk_plan


class PrefillStep(NamedTuple):
    """Requests that share the workspace, and their tokens.

    requests: of the batch. tokens: of the batch's prefill tokens. n, m: rows of a request for compressed entries, and
        all of them. entries: how many compressed entries the requests have together.
    """

    requests: slice
    tokens: slice
    n: int
    m: int
    entries: int


def plan_prefill(
    query_start_loc: Sequence[int],
    seq_lens: Sequence[int],
    split: BatchSplit,
    *,
    window: int,
    ratio: int,
    max_rows: int,
) -> list[PrefillStep]:
    """Steps that cover the prefills of a batch, in their order.

    Args:
        query_start_loc: R + 1 host integers; seq_lens: R host integers, this step's query included.
        split: of the batch, see `metadata.split_decodes_and_prefills`.
        window: tokens a token attends directly, itself included; ratio: compress ratio of the layer, 1 for none.
        max_rows: rows of the workspace, see `metadata.prefill_workspace_rows`.
    Returns:
        Steps of at most `max_rows` rows each; padding tokens belong to the last one. E204 if a request does not fit.
    """
    check(
        len(query_start_loc) == len(seq_lens) + 1 == split.num_decodes + split.num_prefills + 1,
        "E201",
        got=f"{len(query_start_loc)} query_start_loc, {len(seq_lens)} seq_lens, {split}",
        rule="query_start_loc has one element more than seq_lens, and both are of the batch that was split",
        fix="pass the whole batch, decodes included",
    )
    first = split.num_decodes
    lens = list(seq_lens[first:])
    queries = [end - start for start, end in pairwise(query_start_loc[first:])]
    gathered = [max(q + min(length - q, window - 1), 0) for q, length in zip(queries, lens, strict=True)]
    steps = []
    for chunk in get_prefill_chunk_plan(lens, gathered, ratio, max_rows):
        begin, end = (query_start_loc[first + r] - split.num_decode_tokens for r in (chunk.start, chunk.end))
        if chunk.end == split.num_prefills:
            end = split.num_prefill_tokens
        requests = slice(first + chunk.start, first + chunk.end)
        entries = sum(length // ratio for length in seq_lens[requests]) if ratio > 1 else 0
        steps.append(PrefillStep(requests, slice(begin, end), chunk.n, chunk.m, entries))
    return steps
