"""Split a batch into decodes and prefills by query lengths, from host numbers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from ..errors import check


class BatchSplit(NamedTuple):
    """Requests and tokens of the decodes and of the prefills of a batch; decodes come first."""

    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int


def split_decodes_and_prefills(
    query_start_loc: Sequence[int],
    *,
    decode_threshold: int = 1,
    num_tokens: int | None = None,
    require_uniform: bool = False,
    treat_short_extends_as_decodes: bool = True,
    is_prefilling: Sequence[bool] | None = None,
) -> BatchSplit:
    """Split a batch that is ordered as decodes, short extends, long extends, prefills.

    Args:
        query_start_loc: R + 1 host integers, first token of each request and the end of the last. Zero-length queries
            are graph padding.
        decode_threshold: longest query that is a decode: 1 + the number of speculative tokens.
        num_tokens: tokens of the batch, padding included; by default the end of the last request.
        require_uniform: all decodes are as long as the first or empty, which a captured graph requires.
        treat_short_extends_as_decodes: if False, a request that `is_prefilling` is a prefill however short its query.
        is_prefilling: R flags, needed in that case.

    Returns:
        The counts. Every request from the first prefill on counts as a prefill, so that both parts are slices.
    """
    check(len(query_start_loc) > 0, "E201", got="an empty query_start_loc", rule="query_start_loc has R + 1 elements")
    lens = [end - start for start, end in pairwise(query_start_loc)]
    check(min(lens, default=0) >= 0, "E201", got=f"query lengths {lens}", rule="query_start_loc does not decrease")
    check(
        treat_short_extends_as_decodes or (is_prefilling is not None and len(is_prefilling) == len(lens)),
        "E201",
        got=f"is_prefilling={is_prefilling}",
        rule="treat_short_extends_as_decodes=False comes with is_prefilling, one flag per request",
    )
    total = query_start_loc[-1] if num_tokens is None else num_tokens
    everything = BatchSplit(len(lens), 0, total, 0)
    uniform = require_uniform and decode_threshold > 1
    if treat_short_extends_as_decodes and not uniform and max(lens, default=0) <= decode_threshold:
        return everything
    if lens and lens[0] > decode_threshold:
        return BatchSplit(0, len(lens), 0, total)

    if require_uniform:
        prefill = [length not in (lens[0], 0) for length in lens]
    else:
        prefill = [length > decode_threshold for length in lens]
    if not treat_short_extends_as_decodes and is_prefilling is not None:
        prefill = [a or b for a, b in zip(prefill, is_prefilling, strict=True)]
    if True not in prefill:
        return everything
    boundary = prefill.index(True)
    tokens = query_start_loc[boundary]
    return BatchSplit(boundary, len(lens) - boundary, tokens, total - tokens)
