"""`index_topk` and `index_topk_blocks`: a kernel that scores, then select_topk.py for each result.

    score[t, j] = sum_h weights[t, h] relu(q[t, h] . k[j]) (D H)^-0.5

A program scores every S-th tile of a token's columns, from its number on. It first rotates the token's queries and
rounds them to the grid, bit for bit as the reference does, so that they stay in registers. Columns are the entries, or
those of the candidate blocks, one block after the other; entries are the rows of the GEMM and heads its columns.
Operands are exact in the dtype of the GEMM: bfloat16 for mxfp4, that of plain rows, or float32 if two differ.

Order keys of columns lie in a workspace. Those of a block of entries are the maximum over a part of a tile. Selected
columns of candidates are mapped to entries as V4's entries to slots: the candidates are the block table.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...layout import INDEXER_HEAD_DIM, MX_TILE, PAD_INDEX, align_up, byte_pages, cdiv
from ...reference.indexer.index_topk import BlocksArguments, IndexArguments
from ..device.rope import load_cos_sin, rotate, table_row
from ..host.launch import DTYPES, launch_kernel
from ..host.pdl import pdl_arguments
from .indexer_format import dequantize_mxfp4, quantize_mxfp4
from .radix_select import ROW_ALIGN
from .score_triton import INVISIBLE, NAN_KEY, order_key, visible_entries
from .select_topk import KeyRows, SlotMap, select

WORKSPACE_BYTES = 256 << 20
KEY_BYTES = 4
PROGRAMS = 512
"""Scoring programs: about as many as an H200 runs at a time. With fewer tokens, columns are split."""
SELECT_TILE = (4096, 8)
"""Keys of a selecting program, and its warps."""
ENTRIES = 64
"""Columns of a tile, and the most entries of a candidate block."""
WARPS, STAGES = 4, 4
MIN_TILE = 16
"""Fewest heads of a tile and dims of a key: the smallest tile of a tensor core."""
FORMATS = ("mxfp4", "plain")
TILE = tl.constexpr(MX_TILE)
INFINITE_KEY = tl.constexpr(0x7F800000)
"""Order key of +inf."""


class Shape(NamedTuple):
    """Compile-time sizes of a launch.

    Attributes:
        fmt: format of the keys. grid: of the queries. dtype: of the operands of the GEMM.
        heads, padded_heads: of a token, and of a tile. dim, rope: of a query, and of its rotated part.
        entries: columns of a tile. page: keys of a page.
        candidates: blocks of a token padded to a power of two, 0 where columns are all entries.
        block: entries of a candidate block; blocks are scored if there are no candidates, unless it is 0.
        dependent: whether the next kernel may start while this one runs (PDL).
    """

    fmt: str
    grid: str
    dtype: tl.dtype
    heads: int
    padded_heads: int
    dim: int
    rope: int
    entries: int
    page: int
    candidates: int
    block: int
    dependent: bool


class Strides(NamedTuple):
    """Strides of the kernel's arguments; `tokens` are those of requests and visible counts."""

    out: int
    blocks: int
    q: tuple[int, ...]
    weights: tuple[int, ...]
    positions: int
    angles: tuple[int, ...]
    k: tuple[int, ...]
    table: tuple[int, ...]
    candidates: tuple[int, ...]
    tokens: tuple[int, int]


@triton.jit
def _load_queries(inputs, p_positions, token, strides, max_pos, SHAPE: tl.constexpr):
    """Return queries `[padded_heads, D]`, rotated, on the grid and in the dtype of the GEMM; 0 for padding heads."""
    p_q, _, p_angles = inputs
    o_h = tl.arange(0, SHAPE.padded_heads).to(tl.int64)[:, None]
    o_d = tl.arange(0, SHAPE.dim)[None, :].to(tl.int64)
    p_x = p_q + token * strides.q[0] + o_h * strides.q[1] + o_d * strides.q[2]
    x = tl.load(p_x, mask=o_h < SHAPE.heads, other=0.0).to(tl.float32)
    row = table_row(tl.load(p_positions + token * strides.positions), max_pos)
    cos, sin = load_cos_sin(p_angles + row * strides.angles[0], strides.angles[1], True, SHAPE.dim, SHAPE.rope)
    x = rotate(x, cos, sin, SHAPE.rope).to(p_q.dtype.element_ty).to(tl.float32)
    if SHAPE.grid == "mxfp4":
        packed, byte = quantize_mxfp4(x)
        x = dequantize_mxfp4(packed, byte)
    return x.to(SHAPE.dtype)


@triton.jit
def _load_keys(p_page, offset, mask, k_strides, SHAPE: tl.constexpr):
    """Load keys `[N, D]` in the dtype of the GEMM, 0 where `mask` is False."""
    D: tl.constexpr = SHAPE.dim
    if SHAPE.fmt == "mxfp4":
        p_data = (p_page + offset * (D // 2))[:, None] + tl.arange(0, D // 2)[None, :]
        p_scale = (p_page + SHAPE.page * (D // 2) + offset * (D // TILE))[:, None] + tl.arange(0, D // TILE)[None, :]
        packed = tl.load(p_data, mask=mask[:, None], other=0)
        keys = dequantize_mxfp4(packed, tl.load(p_scale, mask=mask[:, None], other=0))
    else:
        p_row = (p_page + offset * k_strides[1])[:, None]
        keys = tl.load(p_row + tl.arange(0, D)[None, :].to(tl.int64) * k_strides[2], mask=mask[:, None], other=0.0)
    return keys.to(SHAPE.dtype)


@triton.jit
def _find_keys(p_row, p_blocks, start, end, length, pages, strides, SHAPE: tl.constexpr):
    """Return, for the columns of the tile at `start`: page (int64, legal), offset in it, visible, readable.

    A tile of all entries that divides a page has one page, and may be read whole, visible or not.
    """
    PAGE: tl.constexpr = SHAPE.page
    N: tl.constexpr = SHAPE.entries
    column = start + tl.arange(0, N)
    if SHAPE.candidates == 0 and PAGE % N == 0:
        seen = column < length
        page = tl.load(p_row + tl.full((), start // PAGE, tl.int64) * strides.table[1], mask=start < length, other=-1)
        offset = start % PAGE + tl.arange(0, N)
    else:
        entry = column.to(tl.int64)
        seen = column < end
        if SHAPE.candidates > 0:
            p_block = p_blocks + (column // SHAPE.block).to(tl.int64) * strides.candidates[1]
            block = tl.load(p_block, mask=seen, other=-1).to(tl.int64)
            seen &= block >= 0
            entry = block * SHAPE.block + column % SHAPE.block
        seen &= entry < length
        entry = tl.where(seen, entry, 0)
        page = tl.load(p_row + entry // PAGE * strides.table[1], mask=seen, other=-1)
        offset = (entry % PAGE).to(tl.int32)
    legal = (page >= 0) & (page < pages)
    seen &= legal
    readable = seen
    if SHAPE.candidates == 0 and PAGE % N == 0:
        readable = tl.full((N,), True, tl.int1)
    return tl.where(legal, page, 0).to(tl.int64), offset, seen, readable


@triton.jit
def _live_columns(p_blocks, count, length, stride, SHAPE: tl.constexpr):
    """Return how many columns of candidates there are up to the last block with an entry below `length`."""
    o_c = tl.arange(0, SHAPE.candidates)
    block = tl.load(p_blocks + o_c.to(tl.int64) * stride, mask=o_c < count, other=-1).to(tl.int64)
    live = (block >= 0) & (block * SHAPE.block < length)
    return tl.max(tl.where(live, o_c + 1, 0)) * SHAPE.block


@triton.jit
def _store_blocks(p_blocks, key, start, length, newest, SHAPE: tl.constexpr):
    """Store the order key of each block of a tile: the largest of its entries, NaN if one is, +inf for the newest."""
    BLOCKS: tl.constexpr = SHAPE.entries // SHAPE.block
    parts = tl.reshape(key, (BLOCKS, SHAPE.block))
    best = tl.max(parts, axis=1)
    best = tl.where(tl.max((parts == NAN_KEY).to(tl.int32), axis=1) > 0, NAN_KEY, best)
    block = start // SHAPE.block + tl.arange(0, BLOCKS)
    best = tl.where((block == newest) & (best != INVISIBLE), INFINITE_KEY, best)
    tl.store(p_blocks + block, best, mask=block * SHAPE.block < length)


@triton.jit(
    do_not_specialize=["max_pos", "pages", "table_rows", "reach", "count", "all_fit"],
    do_not_specialize_on_alignment=["p_positions", "p_table", "p_candidates", "p_requests", "p_visible"],
)
def index_score_kernel(
    p_out,  # [T, >= columns] int32 order keys of the columns
    p_blocks_out,  # [T, >= blocks] int32 order keys of blocks, if they are scored
    of_rows,  # int32 [T]: columns or blocks of a token, and the token; bool [T], all True
    inputs,  # q [T, H, D], weights [T, H], angles float32 [max_pos, rope]
    p_positions,  # [T] int
    p_k,  # pages of keys
    p_table,  # [table_rows, >= reach / page] int
    p_candidates,  # [T, count] int32, if there are candidates
    p_requests,  # [T] int
    p_visible,  # [T] int
    strides,
    max_pos,
    pages,
    table_rows,
    reach,  # entries of a request that the table can name
    count,  # candidate blocks of a token
    all_fit,  # up to so many entries, all that are visible are selected, and not scored
    scale,
    SHAPE: tl.constexpr,
):
    """Score every S-th tile of columns of token p, from tile s on, in program (p, s) of (T, S)."""
    if SHAPE.dependent:
        tl.extra.cuda.gdc_launch_dependents()
    # Triton 3.6 loses the constants of tuples within a tuple at a loop or branch, unless the outer one is built here.
    strides = Strides(*strides)
    p_lens, p_rows, p_valid = of_rows
    N: tl.constexpr = SHAPE.entries
    HAS_CANDIDATES: tl.constexpr = SHAPE.candidates > 0
    SCORES_BLOCKS: tl.constexpr = SHAPE.block > 0 and not HAS_CANDIDATES
    token = tl.program_id(0).to(tl.int64)
    request, length = visible_entries(p_requests, p_visible, token, strides.tokens, table_rows, reach)
    first, step = tl.program_id(1) * N, tl.num_programs(1) * N
    p_row, p_blocks = p_table + request * strides.table[0], p_candidates
    end, newest = length, tl.zeros((), tl.int64)
    if HAS_CANDIDATES:
        p_blocks = p_candidates + token * strides.candidates[0]
        end = _live_columns(p_blocks, count, length, strides.candidates[1], SHAPE)
        if first == 0:
            tl.store(p_lens + token, end)
            tl.store(p_rows + token, token.to(tl.int32))
            tl.store(p_valid + token, True)
    elif SCORES_BLOCKS:
        # By the count that the caller gives, which may be beyond the table.
        newest = (tl.maximum(tl.load(p_visible + token * strides.tokens[1]).to(tl.int64), 1) - 1) // SHAPE.block
        if first == 0:
            tl.store(p_lens + token, tl.cdiv(length, SHAPE.block))
    p_columns = p_out + token * strides.out + tl.arange(0, N)
    p_best = p_blocks_out + token * strides.blocks
    if end <= all_fit:
        for start in range(first, end, step):
            _, _, seen, _ = _find_keys(p_row, p_blocks, start, end, length, pages, strides, SHAPE)
            key = tl.where(seen, 0, INVISIBLE)
            tl.store(p_columns + start, key, mask=start + tl.arange(0, N) < end)
            if SCORES_BLOCKS:
                _store_blocks(p_best, key, start, length, newest, SHAPE)
    elif first < end:
        o_h = tl.arange(0, SHAPE.padded_heads)
        p_w = inputs[1] + token * strides.weights[0] + o_h.to(tl.int64) * strides.weights[1]
        # [PADDED_HEADS], [D, PADDED_HEADS]
        weight = tl.load(p_w, mask=o_h < SHAPE.heads, other=0.0).to(tl.float32) * scale
        q = tl.trans(_load_queries(inputs, p_positions, token, strides, max_pos, SHAPE))
        for start in range(first, end, step):
            page, offset, seen, readable = _find_keys(p_row, p_blocks, start, end, length, pages, strides, SHAPE)
            # [N, D], [N, PADDED_HEADS]
            keys = _load_keys(p_k + page * strides.k[0], offset, readable, strides.k, SHAPE)
            dots = tl.dot(keys, q, input_precision="ieee")
            terms = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight[None, :]
            if SHAPE.padded_heads > SHAPE.heads:
                # The weight of a padding head is 0, but 0 * inf would be NaN.
                terms = tl.where((o_h < SHAPE.heads)[None, :], terms, 0.0)
            key = tl.where(seen, order_key(tl.sum(terms, axis=1)), INVISIBLE)
            tl.store(p_columns + start, key, mask=start + tl.arange(0, N) < end)
            if SCORES_BLOCKS:
                _store_blocks(p_best, key, start, length, newest, SHAPE)


class _Workspace(NamedTuple):
    """Results of the score for up to `tokens` tokens; tensors that a call does not need have no row.

    Attributes:
        keys, blocks: order keys int32 of columns and of blocks. lens, rows: int32. valid: bool. counts: int32, unused.
    """

    keys: Tensor
    blocks: Tensor
    lens: Tensor
    rows: Tensor
    valid: Tensor
    counts: Tensor

    @staticmethod
    def allocate(q: Tensor, tokens: int, columns: int, blocks: int, candidates: bool) -> _Workspace:
        """Allocate for `columns` and `blocks` of a token, 0 if blocks are not scored."""

        def rows(count: int, width: int = 1, dtype: torch.dtype = torch.int32) -> Tensor:
            return q.new_empty((count, width), dtype=dtype)

        mapped = tokens if candidates else 0
        return _Workspace(
            rows(tokens, columns),
            rows(tokens if blocks else 0, max(blocks, ROW_ALIGN)),
            rows(tokens if blocks or candidates else 0)[:, 0],
            rows(mapped)[:, 0],
            rows(mapped, dtype=torch.bool)[:, 0],
            rows(mapped)[:, 0],
        )


def index_topk(a: IndexArguments, *, programs: int = PROGRAMS, select_tile: tuple[int, int] = SELECT_TILE) -> Tensor:
    """Launch `index_topk`.

    Args:
        programs: about how many programs score.
        select_tile: keys of a selecting program, and its warps.
    Notes:
        - The selection is exact for the kernel's scores; the order of their sums is not the reference's.
        - A result depends neither on the rest of the batch, nor on `programs` and `select_tile`.
    """
    picks = a.q.new_empty((a.q.shape[0], a.topk), dtype=torch.int32)
    _run(a, picks, None, programs, select_tile)
    return picks


def index_topk_blocks(
    a: BlocksArguments, *, programs: int = PROGRAMS, select_tile: tuple[int, int] = SELECT_TILE
) -> tuple[Tensor, Tensor]:
    """Launch `index_topk_blocks`; see `index_topk`."""
    picks = a.q.new_empty((a.q.shape[0], a.topk), dtype=torch.int32)
    blocks = a.q.new_empty((a.q.shape[0], a.blocks), dtype=torch.int32)
    _run(IndexArguments(*a[:-1]), picks, blocks, programs, select_tile)
    return picks, blocks


def _run(a: IndexArguments, picks: Tensor, blocks: Tensor | None, programs: int, select_tile: tuple[int, int]) -> None:
    """Fill `picks` and `blocks`: a score and a selection for each, if the keys of all tokens fit in the workspace."""
    tokens = a.q.shape[0]
    reach = a.block_table.shape[1] * a.block_size if a.keys.shape[0] > 0 else 0
    width = reach if a.candidates is None else a.candidates.shape[1] * a.candidate_block
    if tokens == 0:
        return
    if reach == 0 or width == 0:
        for out in (picks, blocks):
            if out is not None:
                out.fill_(PAD_INDEX)
        return
    columns = align_up(width, ROW_ALIGN)
    block_columns = align_up(cdiv(reach, a.candidate_block), ROW_ALIGN) if blocks is not None else 0
    at_a_time = max(1, min(tokens, WORKSPACE_BYTES // (KEY_BYTES * (columns + block_columns))))
    space = _Workspace.allocate(a.q, at_a_time, columns, block_columns, a.candidates is not None)
    requests = a.block_table.shape[0]
    for start in range(0, tokens, at_a_time):
        rows = slice(start, min(start + at_a_time, tokens))
        some = a._replace(
            q=a.q[rows], weights=a.weights[rows], positions=a.positions[rows], requests=a.requests[rows],
            visible=a.visible[rows], candidates=None if a.candidates is None else a.candidates[rows],
        )  # fmt: skip
        # Rows of candidates are numbered by the score, so the selection reads what the score writes.
        dependent = a.candidates is None and pdl_arguments(a.q.device, rows.stop - start)["PDL"]
        most_blocks = None if blocks is None else blocks.shape[1]
        _score(some, space, reach, width, most_blocks, programs, dependent)
        if some.candidates is None:
            entries = KeyRows(space.keys, some.requests, some.visible, requests, reach)
            select(picks[rows], entries, select_tile, dependent=dependent)
        else:
            entries = KeyRows(space.keys, space.rows, space.lens, rows.stop - start, width)
            to_entries = SlotMap(space.counts, some.candidates, space.valid, a.candidate_block)
            select(picks[rows], entries, select_tile, to_entries)
        if blocks is not None:
            scored = KeyRows(space.blocks, some.requests, space.lens, requests, cdiv(reach, a.candidate_block))
            select(blocks[rows], scored, select_tile)


def _score(
    a: IndexArguments, space: _Workspace, reach: int, width: int, blocks: int | None, programs: int, dependent: bool
) -> None:
    """Launch `index_score_kernel`; `blocks` is the most candidates to publish, None for none."""
    (tokens, heads, dim), candidates = a.q.shape, a.candidates
    keys = a.keys if a.cache_format == "plain" else byte_pages(a.keys, a.cache_format, a.block_size, head_dim=dim)
    dtypes = {
        torch.bfloat16 if a.grid else a.q.dtype,
        keys.dtype if a.cache_format == "plain" else torch.bfloat16,
    }
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    all_fit = a.topk if candidates is None else 0
    if blocks is not None:
        all_fit = min(all_fit, blocks * a.candidate_block)
    stand_in = space.keys
    launch_kernel(
        index_score_kernel,
        (tokens, min(cdiv(width, ENTRIES), cdiv(programs, tokens))),
        space.keys,
        space.blocks if blocks is not None else stand_in,
        (space.lens, space.rows, space.valid),
        (a.q, a.weights, a.cos_sin_cache),
        a.positions,
        keys,
        a.block_table,
        stand_in if candidates is None else candidates,
        a.requests,
        a.visible,
        Strides(
            space.keys.stride(0), space.blocks.stride(0), a.q.stride(), a.weights.stride(), a.positions.stride(0),
            a.cos_sin_cache.stride(), keys.stride(), a.block_table.stride(),
            (0, 0) if candidates is None else candidates.stride(), (a.requests.stride(0), a.visible.stride(0)),
        ),
        a.cos_sin_cache.shape[0],
        keys.shape[0],
        a.block_table.shape[0],
        reach,
        0 if candidates is None else candidates.shape[1],
        all_fit,
        (dim * heads) ** -0.5,
        SHAPE=Shape(
            fmt=a.cache_format,
            grid=a.grid,
            dtype=DTYPES[dtype],
            heads=heads,
            padded_heads=max(MIN_TILE, triton.next_power_of_2(heads)),
            dim=dim,
            rope=a.cos_sin_cache.shape[1],
            entries=ENTRIES,
            page=a.block_size,
            candidates=0 if candidates is None else triton.next_power_of_2(candidates.shape[1]),
            block=a.candidate_block if candidates is not None or blocks is not None else 0,
            dependent=dependent,
        ),
        num_warps=WARPS,
        # float32 rows are for small models; several tiles of them would not fit every GPU's shared memory.
        num_stages=1 if dtype is torch.float32 else STAGES,
        # A contracted multiply and add rounds once where the reference's rotation rounds twice.
        enable_fp_fusion=False,
    )  # fmt: skip


def why_unsupported_index_topk(a: IndexArguments | BlocksArguments) -> str:
    """Return why the kernels do not support a call, "" if they do."""
    heads, dim = a.q.shape[1:]
    if a.cache_format not in FORMATS or a.grid not in ("", "mxfp4"):
        return (
            f"keys are mxfp4 or plain and queries on the grid of mxfp4, these are {a.cache_format}, {a.grid or 'off'}"
        )
    if dim < MIN_TILE or dim > INDEXER_HEAD_DIM or dim & (dim - 1):
        return f"keys have a power of two of dims from {MIN_TILE} to {INDEXER_HEAD_DIM}, these have {dim}"
    return "" if heads else "without heads there is no GEMM"


def why_unsupported_index_topk_blocks(a: BlocksArguments) -> str:
    """Return why the kernels do not support a call, "" if they do."""
    size = a.candidate_block
    if size > ENTRIES or size & (size - 1):
        return f"a candidate block holds a power of two of entries up to {ENTRIES}, this one {size}"
    return why_unsupported_index_topk(a)
