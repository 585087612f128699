"""Group prefills into chunks so that gathered keys and values fit one workspace, from host numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..errors import check
from ..layout import cdiv

WORKSPACE_REQUESTS = 4
"""Requests of maximal length that fit one workspace."""


class PrefillChunk(NamedTuple):
    """Requests `[start, end)` and their workspace: `m` rows per request, the first `n` of them compressed entries."""

    start: int
    end: int
    n: int
    m: int


def prefill_workspace_rows(ratio: int, *, max_model_len: int, window: int, max_num_batched_tokens: int) -> int:
    """Return the rows of a workspace that fits every step. Reserve it once, before caches are allocated."""
    entries = cdiv(max_model_len, ratio) if ratio > 1 else 0
    return WORKSPACE_REQUESTS * (entries + window + max_num_batched_tokens)


def get_prefill_chunk_plan(
    seq_lens: Sequence[int], gather_lens: Sequence[int], ratio: int, max_rows: int
) -> list[PrefillChunk]:
    """Split a step's prefills, in order, into the fewest chunks that fit a workspace of `max_rows` rows.

    Args:
        seq_lens: tokens of each request, this step's query included.
        gather_lens: raw tokens that each request gathers, see `torch.ops.dsv4.prefill_gather_lens`.
        ratio: compress ratio of the layer; 0 or 1 gathers no compressed entries.
        max_rows: rows of the workspace, see `prefill_workspace_rows`.

    Returns:
        Chunks that cover all requests, with `(end - start) * m <= max_rows`; `n` and `m - n` are the maxima over the
        requests of the chunk. E204 if a single request does not fit.
    """
    check(len(seq_lens) == len(gather_lens), "E201", got=f"{len(seq_lens)} seq_lens, {len(gather_lens)} gather_lens")
    chunks: list[PrefillChunk] = []
    start = entries = gathered = 0
    for request, (seq_len, gather_len) in enumerate(zip(seq_lens, gather_lens, strict=True)):
        compressed = seq_len // ratio if ratio > 1 else 0
        check(
            compressed + gather_len <= max_rows,
            "E204",
            got=f"request {request} needs {compressed + gather_len} rows of a prefill workspace of {max_rows}",
        )
        more = max(entries, compressed) + max(gathered, gather_len)
        if (request + 1 - start) * more > max_rows:
            chunks.append(PrefillChunk(start, request, entries, entries + gathered))
            start, entries, gathered = request, 0, 0
        entries, gathered = max(entries, compressed), max(gathered, gather_len)
    if len(seq_lens) > 0:
        chunks.append(PrefillChunk(start, len(seq_lens), entries, entries + gathered))
    return chunks
