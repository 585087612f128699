"""Launchers of `indexer_logits` and its variants: a scoring kernel, then for a selection a selecting one.

Between the two lies a workspace of int32 order keys, a row for each token. Paged keys need as many columns as the block
table can name, gathered keys as many as there are rows; tokens are processed as many at a time as fit in the workspace.
Scores run on score_sm90.py or score_ragged_sm90.py where these support the call, otherwise on score_triton.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...layout import INDEXER_HEAD_DIM, align_up, cdiv
from ...reference.indexer.indexer_logits import (
    LogitsArguments,
    PagedArguments,
    RaggedTopkArguments,
    TopkArguments,
    tokens_that_fit,
)
from ..device.quant import why_unsupported_fp8
from ..host.addresses import first_byte
from ..host.gpu import gpu_of, sm90_module
from ..host.pdl import pdl_arguments
from . import score_triton
from .radix_select import ROW_ALIGN
from .score_triton import RaggedScoreCall, ScoreCall, reach_of
from .select_groups import fits, select_from_groups
from .select_topk import KeyRows, SlotMap, select

WORKSPACE_BYTES = 256 << 20
KEY_BYTES = 4
PROGRAMS = 512
"""Scoring programs for paged keys: about as many as an H200 runs at a time. With fewer tokens, contexts are split."""
RAGGED_PROGRAMS = 1024
"""Scoring programs for gathered keys; on sm_90 an SM runs two at a time."""
SELECT_TILE = (4096, 8)
"""Keys of a selecting program, and its warps."""
RAGGED_SELECT_TILE = (4096, 4)
"""Keys of a selecting program and its warps, for the many tokens of a prompt: fewer warps each waste less."""
GROUP_WARPS = 16
SMALL_GROUPS = 65536
"""Longest rows with groups of 8 columns. Longer ones have groups of 16, and so no more groups than a tile up to 262,144
columns."""
MIN_PLAIN_DIM = 16
ANY_REQUEST = 2**31 - 1


def why_unsupported_indexer_logits(op: PagedArguments) -> str:
    """Return why the kernels do not support a call, "" if they do."""
    if op.cache_format == "plain":
        return _why_unsupported_plain(op.q, op.k_cache)
    if op.cache_format == "indexer_fp8":
        offset, stride = first_byte(op.k_cache), op.k_cache.stride(0)
        if offset % 4 or stride % 4:
            return f"pages start at multiples of 4 bytes, these start at byte {offset}, {stride} bytes apart"
        return why_unsupported_fp8(op.q.device)
    return ""


why_unsupported_indexer_logits_topk = why_unsupported_indexer_logits


def why_unsupported_indexer_logits_topk_ragged(op: RaggedTopkArguments) -> str:
    """Return why the kernels do not support a call, "" if they do."""
    if op.cache_format == "plain":
        return _why_unsupported_plain(op.q, op.k)
    return why_unsupported_fp8(op.q.device) if op.cache_format == "indexer_fp8" else ""


def _why_unsupported_plain(q: Tensor, keys: Tensor) -> str:
    dim = q.shape[2]
    if dim < MIN_PLAIN_DIM or dim > INDEXER_HEAD_DIM or dim & (dim - 1):
        return f"plain keys have a power of two of dims from {MIN_PLAIN_DIM} to {INDEXER_HEAD_DIM}, these have {dim}"
    return "" if q.dtype == keys.dtype else f"queries and plain keys have one dtype, these are {q.dtype}, {keys.dtype}"


def indexer_logits(op: LogitsArguments, *, score_tile: tuple[int, int, int] | None = None) -> Tensor:
    """Launch `indexer_logits`. The order of sums differs from the reference; results do not depend on the batch.

    `score_tile`: see `indexer_logits_topk`.
    """
    logits = op.q.new_empty((op.q.shape[0], op.max_context), dtype=torch.float32)
    if reach_of(op) == 0:
        # Kernels read a page for invisible entries too.
        return logits.fill_(-torch.inf)
    _score(ScoreCall(op, logits, op.max_context), PROGRAMS, score_tile)
    return logits


def indexer_logits_topk(
    op: TopkArguments,
    *,
    programs: int = PROGRAMS,
    score_tile: tuple[int, int, int] | None = None,
    select_tile: tuple[int, int] | None = None,
    groups: tuple[int, int] | None = None,
) -> Tensor:
    """Launch `indexer_logits_topk`.

    Args:
        programs: about how many programs score.
        score_tile: as SCORE_TILE; selects the Triton kernel, whose order of sums differs from that of the sm_90 kernel.
        select_tile: as SELECT_TILE; selects from parts, unless `groups` are given too.
        groups: columns of a group, 4, 8 or 16, and warps of a program that selects from groups, in place of
            `groups_of`; 0 columns select from parts.
    Notes:
        - The selection is exact for logits whose order of sums differs from the reference's.
        - A result depends neither on the rest of the batch, nor on `programs`, `select_tile` and `groups`.
    """
    selected = op.q.new_empty((op.q.shape[0], op.topk), dtype=torch.int32)
    score_and_select(selected, op, None, programs, score_tile, select_tile, groups)
    return selected


def groups_of(reach: int) -> tuple[int, int]:
    """Return the columns of a group for rows of `reach` keys, and the warps of a program that selects from groups."""
    return 8 if reach <= SMALL_GROUPS else 16, GROUP_WARPS


def score_and_select(
    selected: Tensor,
    op: TopkArguments,
    slots: SlotMap | None,
    programs: int,
    score_tile: tuple[int, int, int] | None,
    select_tile: tuple[int, int] | None,
    groups: tuple[int, int] | None,
) -> None:
    """Fill `selected` `[T, K]` with entries, or with `slots` of them: two launches if the keys of all tokens fit."""
    tokens, reach = op.q.shape[0], reach_of(op)
    group, warps = groups or (groups_of(reach) if select_tile is None else (0, 0))
    select_tile = select_tile or SELECT_TILE
    grouped = group > 0 and reach > select_tile[0] and fits(op.topk, group)
    stride = align_up(max(reach, 1), ROW_ALIGN * group if grouped else ROW_ALIGN)
    at_a_time = max(1, min(tokens, WORKSPACE_BYTES // (KEY_BYTES * stride)))
    keys = op.q.new_empty((at_a_time, stride), dtype=torch.int32)
    best = op.q.new_empty((at_a_time, stride // group), dtype=torch.int32) if grouped else None
    for start in range(0, tokens, at_a_time):
        rows = slice(start, min(start + at_a_time, tokens))
        # Without entries there is no scoring kernel to wait for.
        dependent = reach > 0 and pdl_arguments(op.q.device, rows.stop - start)["PDL"]
        chunk = op._replace(
            q=op.q[rows], q_scale=op.q_scale[rows], weights=op.weights[rows],
            token_to_req=op.token_to_req[rows], context_lens=op.context_lens[rows],
        )  # fmt: skip
        _score(ScoreCall(chunk, keys, reach, op.topk, dependent, best), programs, score_tile)
        entries = KeyRows(keys, chunk.token_to_req, chunk.context_lens, op.block_table.shape[0], reach)
        where = slots and slots._replace(counts=slots.counts[rows], is_valid_token=slots.is_valid_token[rows])
        if best is None:
            select(selected[rows], entries, select_tile, where, dependent=dependent)
        else:
            select_from_groups(selected[rows], entries, best, warps, where, dependent=dependent)


def _score(call: ScoreCall, programs: int, tile: tuple[int, int, int] | None) -> None:
    """Launch the best kernel for paged keys, or the Triton kernel with `tile`."""
    tokens = call.op.q.shape[0]
    if tokens == 0 or call.width == 0:
        return
    sm90 = None if tile else sm90_module(gpu_of(call.op.q.device), "indexer.score_sm90")
    if sm90 is not None and not sm90.why_unsupported(call):
        sm90.score(call, min(cdiv(call.width, sm90.ENTRIES), cdiv(programs, tokens)))
    else:
        score_triton.score(call, programs, tile or score_triton.SCORE_TILE)


def indexer_logits_topk_ragged(
    op: RaggedTopkArguments,
    *,
    programs: int = RAGGED_PROGRAMS,
    score_tile: tuple[int, int, int, int] | None = None,
    select_tile: tuple[int, int] = RAGGED_SELECT_TILE,
) -> Tensor:
    """Launch `indexer_logits_topk_ragged`.

    Args:
        programs, select_tile: see `indexer_logits_topk`.
        score_tile: as RAGGED_SCORE_TILE; selects the Triton kernel, whose sums have a different order.
    Notes:
        - The selection is exact for logits whose order of sums differs from the reference's.
        - A result depends neither on the rest of the batch, nor on `max_logits_bytes`, `programs` and `select_tile`.
    """
    tokens, rows = op.q.shape[0], op.k.shape[0]
    selected = op.q.new_empty((tokens, op.topk), dtype=torch.int32)
    stride = align_up(max(rows, 1), ROW_ALIGN)
    at_a_time = max(1, min(tokens, tokens_that_fit(stride, op.max_logits_bytes)))
    keys = op.q.new_empty((at_a_time, stride), dtype=torch.int32)
    lens = op.q.new_empty((at_a_time,), dtype=torch.int32)
    for start in range(0, tokens, at_a_time):
        rows_of_chunk = slice(start, min(start + at_a_time, tokens))
        out = selected[rows_of_chunk]
        some = op._replace(
            q=op.q[rows_of_chunk], q_scale=op.q_scale[rows_of_chunk], weights=op.weights[rows_of_chunk],
            row_starts=op.row_starts[rows_of_chunk], row_ends=op.row_ends[rows_of_chunk],
        )  # fmt: skip
        score_ragged(RaggedScoreCall(some, keys, lens, op.topk), programs, score_tile)
        # Every token is a separate request, also one numbered -1: lengths are never negative.
        select(out, KeyRows(keys, lens, lens, ANY_REQUEST, rows), select_tile)
    return selected


def score_ragged(
    call: RaggedScoreCall, programs: int = RAGGED_PROGRAMS, tile: tuple[int, int, int, int] | None = None
) -> None:
    """Launch the best kernel for gathered keys, or the Triton kernel with `tile`."""
    sm90 = None if tile else sm90_module(gpu_of(call.op.q.device), "indexer.score_ragged_sm90")
    if sm90 is not None and not sm90.why_unsupported(call):
        sm90.score(call, call.splits(sm90.QUERIES, sm90.ENTRIES, programs))
    else:
        score_triton.score_ragged(call, programs, tile or score_triton.RAGGED_SCORE_TILE)
