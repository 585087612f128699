"""Launchers of `indexer_logits` and `indexer_logits_topk`: a scoring kernel, and for the latter a selecting one.

Between them stands a workspace of order keys, int32 `[T, J]` with J = columns of the block table * block_size, for as
many tokens at a time as fit in WORKSPACE_BYTES, at least one. `indexer_topk_slots` has a selection that writes slots.

Launcher of `indexer_logits_topk_ragged`: scores for as many tokens at a time as it may hold, then a selection.

The workspace is order keys, int32 `[T, N]`: of what a token sees no bound is known before the kernels run but N, the
rows of `k`. A block of QUERIES tokens of one request shares every tile of keys; where a block holds several requests,
each of its tokens is scored against the keys of all of them.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ...layout import INDEXER_HEAD_DIM, PAGE_LAYOUTS, align_up, byte_pages, cdiv
from ...reference.indexer.indexer_logits import MAX_LOGITS_BYTES, tokens_that_fit
from ..device.quant import why_unsupported_fp8
from ..host.gpu import gpu_of, sm90_module
from ..host.launch import launch_kernel
from ..host.pdl import pdl_arguments
from .radix_select import ROW_ALIGN
from .score_triton import indexer_score_kernel, indexer_score_ragged_kernel
from .select_topk import SlotMap, select

WORKSPACE_BYTES = 256 << 20
KEY_BYTES = 4
PROGRAMS = 512
"""Scoring programs, of which an H200 runs 528 at a time: a token's context is split among several of them while there
are fewer tokens."""
SCORE_TILE = (64, 4, 5)
"""Entries of a tile at most, warps, and stages of the loop over tiles, of the kernel for any GPU."""
SMALLEST_TILE = 16
"""Entries and heads of a tile at least: the smallest tile of a matrix unit."""
SELECT_TILE = (4096, 8)
"""Keys of a program, and warps."""


def indexer_logits_refuses(
    q: Tensor,
    q_scale: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    token_to_req: Tensor,
    context_lens: Tensor,
    block_size: int,
    cache_format: str,
    max_context: int,
) -> str:
    """Why a call cannot use the kernel, or ""."""
    return _why_not(q, k_cache, cache_format)


def indexer_logits(
    q: Tensor,
    q_scale: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    token_to_req: Tensor,
    context_lens: Tensor,
    block_size: int,
    cache_format: str,
    max_context: int,
    *,
    score_tile: tuple[int, int, int] | None = None,
) -> Tensor:
    """See the reference. The sums are in another order; a result does not depend on the rest of the batch.

    `score_tile`: as for `indexer_logits_topk`.
    """
    logits = q.new_empty((q.shape[0], max_context), dtype=torch.float32)
    if _reach(k_cache, block_table, block_size) == 0:
        # Kernels read a page for what is not visible too.
        return logits.fill_(-torch.inf)
    _score(
        logits, q, q_scale, weights, k_cache, block_table, token_to_req, context_lens, block_size, cache_format,
        max_context, 0, PROGRAMS, score_tile, False,
    )  # fmt: skip
    return logits


def indexer_logits_topk_refuses(
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
) -> str:
    """Why a call cannot use the kernel, or ""."""
    return _why_not(q, k_cache, cache_format)


def indexer_logits_topk(
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
    *,
    programs: int = PROGRAMS,
    score_tile: tuple[int, int, int] | None = None,
    select_tile: tuple[int, int] = SELECT_TILE,
) -> Tensor:
    """See the reference. The selection is exact for logits whose sums are in another order than the reference's.

    Logits that come out equal go to the smaller index. A result does not depend on the rest of the batch, nor on the
    keyword arguments, which are as the constants above; with a `score_tile` the kernel for any GPU scores, otherwise
    that for Hopper where it can, which adds in another order.
    """
    selected = q.new_empty((q.shape[0], topk), dtype=torch.int32)
    score_and_select(
        selected, q, q_scale, weights, k_cache, block_table, token_to_req, context_lens, block_size, cache_format,
        None, programs, score_tile, select_tile,
    )  # fmt: skip
    return selected


def score_and_select(
    selected: Tensor,
    q: Tensor,
    q_scale: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    token_to_req: Tensor,
    context_lens: Tensor,
    block_size: int,
    cache_format: str,
    slots: SlotMap | None,
    programs: int,
    score_tile: tuple[int, int, int] | None,
    select_tile: tuple[int, int],
) -> None:
    """Fill `selected` `[T, K]` with entries, or with `slots` of them: two launches for tokens whose keys fit."""
    tokens, reach = q.shape[0], _reach(k_cache, block_table, block_size)
    stride = align_up(max(reach, 1), ROW_ALIGN)
    at_a_time = max(1, min(tokens, WORKSPACE_BYTES // (KEY_BYTES * stride)))
    keys = q.new_empty((at_a_time, stride), dtype=torch.int32)
    for start in range(0, tokens, at_a_time):
        rows = slice(start, min(start + at_a_time, tokens))
        # Without entries no kernel scores, and there is none to wait for.
        dependent = reach > 0 and pdl_arguments(q.device, rows.stop - start)["PDL"]
        requests, lens, out = token_to_req[rows], context_lens[rows], selected[rows]
        _score(
            keys, q[rows], q_scale[rows], weights[rows], k_cache, block_table, requests, lens, block_size,
            cache_format, reach, selected.shape[1], programs, score_tile, dependent,
        )  # fmt: skip
        part = slots and slots._replace(counts=slots.counts[rows], is_valid_token=slots.is_valid_token[rows])
        select(out, keys, requests, lens, block_table.shape[0], reach, select_tile, part, dependent=dependent)


def _why_not(q: Tensor, k_cache: Tensor, cache_format: str) -> str:
    if cache_format == "plain":
        dim = q.shape[2]
        if dim < 16 or dim > INDEXER_HEAD_DIM or dim & (dim - 1):
            return f"plain keys of {dim} dims, which is not a power of two from 16 to {INDEXER_HEAD_DIM}"
        return "" if q.dtype == k_cache.dtype else f"{q.dtype} queries with {k_cache.dtype} keys"
    if cache_format == "indexer_fp8":
        if k_cache.stride(0) % 4 or k_cache.storage_offset() % 4:
            return "pages whose float32 scales are not aligned"
        return why_unsupported_fp8(q.device)
    return ""


def _reach(k_cache: Tensor, block_table: Tensor, block_size: int) -> int:
    """Entries of a request that the block table can name."""
    return block_table.shape[1] * block_size if k_cache.shape[0] > 0 else 0


def _score(
    out: Tensor,
    q: Tensor,
    q_scale: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    token_to_req: Tensor,
    context_lens: Tensor,
    block_size: int,
    cache_format: str,
    width: int,
    topk: int,
    programs: int,
    tile: tuple[int, int, int] | None,
    dependent: bool,
) -> None:
    """Fill `out` with logits, or with order keys if it is int32. `dependent`: as for `select`."""
    tokens, heads, columns = q.shape
    if tokens == 0 or width == 0:
        return
    reach = _reach(k_cache, block_table, block_size)
    pages = byte_pages(k_cache, cache_format, block_size) if cache_format in PAGE_LAYOUTS else k_cache
    hopper = None if tile else sm90_module(gpu_of(q.device), "indexer.score_sm90")
    if hopper is not None and not hopper.refuses(q, pages, cache_format, block_size):
        hopper.score(
            out, q.view(torch.uint8), weights, pages, block_table, token_to_req, context_lens, block_size,
            min(width, reach), width, topk, min(cdiv(width, hopper.ENTRIES), cdiv(programs, tokens)), dependent,
        )  # fmt: skip
        return
    entries, warps, stages = tile or SCORE_TILE
    if q.element_size() == 4:
        # float32 rows are for small models; several tiles of them would not fit every GPU's shared memory.
        stages = 1
    # The largest power of two that divides a page, so that a tile has one block.
    entries = min(entries, max(SMALLEST_TILE, block_size & -block_size))
    splits = min(cdiv(width, entries), cdiv(programs, tokens))
    launch_kernel(
        indexer_score_kernel,
        (tokens, splits),
        out,
        q.view(torch.uint8) if cache_format == "indexer_fp8" else q,
        q_scale,
        weights,
        pages,
        block_table,
        token_to_req,
        context_lens,
        out.stride(0),
        q.stride(),
        q_scale.stride(),
        weights.stride(),
        pages.stride(),
        block_table.stride(),
        (token_to_req.stride(0), context_lens.stride(0)),
        pages.shape[0],
        block_table.shape[0],
        min(width, reach),
        width,
        topk,
        FORMAT=cache_format,
        BLOCK_SIZE=block_size,
        KEYS=out.dtype == torch.int32,
        HEADS=heads,
        PADDED_HEADS=max(SMALLEST_TILE, triton.next_power_of_2(heads)),
        ENTRIES=entries,
        D=columns if cache_format == "plain" else INDEXER_HEAD_DIM,
        DEPENDENT=dependent,
        num_warps=warps,
        num_stages=stages,
    )


RAGGED_PROGRAMS = 1024
"""Scoring programs that fill a GPU: the keys of a block of tokens are split among several while there are fewer."""
RAGGED_SCORE_TILE = (64, 128, 4, 3)
"""Tokens and keys of a tile, warps, and stages of the loop over heads, of the kernel for any GPU."""
RAGGED_SELECT_TILE = (4096, 4)
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
    return why_unsupported_fp8(q.device) if cache_format == "indexer_fp8" else ""


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
    programs: int = RAGGED_PROGRAMS,
    score_tile: tuple[int, int, int, int] | None = None,
    select_tile: tuple[int, int] = RAGGED_SELECT_TILE,
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
    programs: int = RAGGED_PROGRAMS,
    tile: tuple[int, int, int, int] | None = None,
) -> None:
    """Fill the first columns of `out` with logits, or with order keys if it is int32, and `lens` with their number."""
    tokens, heads, columns = q.shape
    hopper = None if tile else sm90_module(gpu_of(q.device), "indexer.score_ragged_sm90")
    if hopper is not None and not hopper.refuses(q, k, k_scale, cache_format):
        hopper.score(
            out, lens, q.view(torch.uint8), weights, k, k_scale, row_starts, row_ends, topk,
            splits_of(tokens, k.shape[0], hopper.QUERIES, hopper.ENTRIES, programs),
        )  # fmt: skip
        return
    queries, entries, warps, stages = tile or RAGGED_SCORE_TILE
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
