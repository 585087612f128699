"""Launcher of `indexer_logits_topk_ragged`: scores for as many tokens at a time as it may hold, then a selection.

The workspace is order keys, int32 `[T, N]`: of what a token sees no bound is known before the kernels run but N, the
rows of `k`. A block of QUERIES tokens of one request shares every tile of keys; where a block holds several requests,
each of its tokens is scored against the keys of all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout import INDEXER_HEAD_DIM, align_up, cdiv
from ..reference.indexer_logits_topk import MAX_LOGITS_BYTES, tokens_that_fit
from .gpu import gpu_of, hopper_kernel
from .indexer_score_ragged import indexer_score_ragged_kernel
from .launch import launch_kernel
from .quant import refuses_fp8
from .select_topk import select
from .topk_boundary import ROW_ALIGN

PROGRAMS = 1024
"""Scoring programs that fill a GPU: the keys of a block of tokens are split among several while there are fewer."""
SCORE_TILE = (64, 128, 4, 3)
"""Tokens and keys of a tile, warps, and stages of the loop over heads, of the kernel for any GPU."""
SELECT_TILE = (4096, 4)
"""Keys of a program of the selection, and warps. There are many tokens: few warps of each waste the least."""
ANY_REQUEST = 2**31 - 1


def indexer_logits_topk_ragged_refuses(
    q: Tensor,
    q_scale: Tensor,
    weights: Tensor,
    k: Tensor,
    k_scale: Tensor,
    row_starts: Tensor,
    row_ends: Tensor,
    cache_format: str,
    topk: int,
    max_logits_bytes: int = MAX_LOGITS_BYTES,
) -> str:
    """Why a call cannot use the kernel, or ""."""
    if cache_format == "plain":
        dim = q.shape[2]
        if dim < 16 or dim > INDEXER_HEAD_DIM or dim & (dim - 1):
            return f"plain keys of {dim} dims, which is not a power of two from 16 to {INDEXER_HEAD_DIM}"
        return "" if q.dtype == k.dtype else f"{q.dtype} queries with {k.dtype} keys"
    return refuses_fp8(q.device) if cache_format == "indexer_fp8" else ""


def indexer_logits_topk_ragged(
    q: Tensor,
    q_scale: Tensor,
    weights: Tensor,
    k: Tensor,
    k_scale: Tensor,
    row_starts: Tensor,
    row_ends: Tensor,
    cache_format: str,
    topk: int,
    max_logits_bytes: int = MAX_LOGITS_BYTES,
    *,
    programs: int = PROGRAMS,
    score_tile: tuple[int, int, int, int] | None = None,
    select_tile: tuple[int, int] = SELECT_TILE,
) -> Tensor:
    """See the reference. The selection is exact for logits whose sums are in another order than the reference's.

    Logits that come out equal go to the smaller index. A result does not depend on the rest of the batch, nor on
    `max_logits_bytes`; the keyword arguments, which are as the constants above, change the order of sums at most. With
    a `score_tile` the kernel for any GPU scores, otherwise that for Hopper where it can.
    """
    tokens, rows = q.shape[0], k.shape[0]
    selected = q.new_empty((tokens, topk), dtype=torch.int32)
    stride = align_up(max(rows, 1), ROW_ALIGN)
    at_a_time = max(1, min(tokens, tokens_that_fit(stride, max_logits_bytes)))
    keys = q.new_empty((at_a_time, stride), dtype=torch.int32)
    lens = q.new_empty((at_a_time,), dtype=torch.int32)
    for start in range(0, tokens, at_a_time):
        part = slice(start, min(start + at_a_time, tokens))
        out = selected[part]
        score_rows(
            keys, lens, q[part], q_scale[part], weights[part], k, k_scale, row_starts[part], row_ends[part],
            cache_format, topk, programs, score_tile,
        )  # fmt: skip
        # Each token is a request of its own, whatever its number: lengths are never negative.
        select(out, keys, lens, lens, ANY_REQUEST, rows, select_tile)
    return selected


def splits_of(tokens: int, rows: int, queries: int, entries: int, programs: int) -> int:
    """Among how many programs the keys of a block of `queries` are split."""
    return max(1, min(cdiv(rows, entries), cdiv(programs, cdiv(tokens, queries))))


def score_rows(
    out: Tensor,
    lens: Tensor,
    q: Tensor,
    q_scale: Tensor,
    weights: Tensor,
    k: Tensor,
    k_scale: Tensor,
    row_starts: Tensor,
    row_ends: Tensor,
    cache_format: str,
    topk: int,
    programs: int = PROGRAMS,
    tile: tuple[int, int, int, int] | None = None,
) -> None:
    """Fill the first columns of `out` with logits, or with order keys if it is int32, and `lens` with their number."""
    tokens, heads, columns = q.shape
    hopper = None if tile else hopper_kernel(gpu_of(q.device), "indexer_score_ragged_hopper")
    if hopper is not None and not hopper.refuses(q, k, k_scale, cache_format):
        hopper.score(
            out, lens, q.view(torch.uint8), weights, k, k_scale, row_starts, row_ends, topk,
            splits_of(tokens, k.shape[0], hopper.QUERIES, hopper.ENTRIES, programs),
        )  # fmt: skip
        return
    queries, entries, warps, stages = tile or SCORE_TILE
    if q.element_size() == 4:
        # float32 rows are for small models; several tiles of them would not fit every GPU's shared memory.
        queries, entries, stages = min(queries, 32), min(entries, 32), 1
    splits = splits_of(tokens, k.shape[0], queries, entries, programs)
    launch_kernel(
        indexer_score_ragged_kernel,
        (cdiv(tokens, queries), splits),
        out,
        lens,
        q.view(torch.uint8) if cache_format == "indexer_fp8" else q,
        q_scale,
        weights,
        k,
        k_scale,
        row_starts,
        row_ends,
        out.stride(0),
        q.stride(),
        q_scale.stride(),
        weights.stride(),
        k.stride(),
        k_scale.stride(),
        (row_starts.stride(0), row_ends.stride(0)),
        tokens,
        k.shape[0],
        topk,
        FORMAT=cache_format,
        KEYS=out.dtype == torch.int32,
        HEADS=heads,
        D=columns if cache_format == "plain" else INDEXER_HEAD_DIM,
        QUERIES=queries,
        ENTRIES=entries,
        STAGES=stages,
        num_warps=warps,
    )
