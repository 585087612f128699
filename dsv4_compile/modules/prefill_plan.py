"""Host-side plan of a prefill: the requests that are in the workspace at a time, see `prefill`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from ..errors import check
from ..metadata import BatchSplit, get_prefill_chunk_plan


class PrefillStep(NamedTuple):
    """Requests that share the workspace.

    Attributes:
        requests: slice of the batch's requests.
        tokens: slice of the batch's prefill tokens.
        n: workspace rows of a request for compressed entries.
        m: workspace rows of a request in total.
        entries: number of compressed entries of all requests.
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
    """Return steps that cover the prefills of a batch, in order.

    Args:
        query_start_loc: R + 1 host integers.
        seq_lens: R host integers, this step's query included.
        split: result of `metadata.split_decodes_and_prefills` for the batch.
        window: tokens a token attends directly, itself included.
        ratio: compress ratio of the layer, 1 for none.
        max_rows: rows of the workspace, see `metadata.prefill_workspace_rows`.
    Returns:
        Steps of at most `max_rows` rows each; padding tokens belong to the last one. E204 if a request does not fit.
    """
    check(
        len(query_start_loc) == len(seq_lens) + 1 == split.num_decodes + split.num_prefills + 1,
        "E201",
        got=f"{len(query_start_loc)} query_start_loc, {len(seq_lens)} seq_lens, {split}",
        rule="query_start_loc has one element more than seq_lens, and both cover the batch that was split",
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
