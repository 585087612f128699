"""Scores of indexer entries on any GPU that Triton supports: float32 logits, or int32 order keys.

    logit[t, j] = scale[j] * sum_h weights[t, h] * relu(q[t, h] . k[j])

`indexer_score_kernel` reads paged keys. Entries are the rows of its GEMM and heads the columns, so that the sum over
heads stays within a few threads; the tiles of a token are split among programs.

`indexer_score_ragged_kernel` reads gathered keys, and neighbouring tokens share most of them. Queries are the rows of
its GEMM and keys the columns, one head after the other: a tile of keys is loaded once for a block of queries and all of
their heads. A token sees a run of the keys, and its logits begin at the first column.

e4m3 values are exact in float16 and scaled e2m1 values in bfloat16, so products are exact; sums are float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...layout import INDEXER_FP8, INDEXER_HEAD_DIM, INDEXER_MXFP4, PAGE_LAYOUTS, byte_pages, cdiv
from ...reference.indexer.indexer_logits import PagedArguments, RaggedTopkArguments
from ..device.quant import MAGNITUDE
from ..host.launch import launch_kernel
from .indexer_format import dequantize_mxfp4

SCORE_TILE = (64, 4, 5)
"""Most entries of a tile, warps, and stages of the loop over tiles."""
RAGGED_SCORE_TILE = (64, 128, 4, 3)
"""Tokens and keys of a tile, warps, and stages of the loop over heads."""
MIN_TILE = 16
"""Fewest entries and heads of a tile: the smallest tile of a tensor core."""
FP8_DATA, FP8_SCALE = tl.constexpr(INDEXER_FP8.data), tl.constexpr(INDEXER_FP8.scale)
FP8_WORDS = tl.constexpr(INDEXER_FP8.scale // 4)
MXFP4_DATA, MXFP4_SCALE = tl.constexpr(INDEXER_MXFP4.data), tl.constexpr(INDEXER_MXFP4.scale)

INVISIBLE = tl.constexpr(torch.iinfo(torch.int32).min)
NAN_KEY = tl.constexpr(torch.iinfo(torch.int32).min + 1)
"""Order keys below that of -inf. Every other key is the logit's: a larger logit has a larger key."""


class ScoreCall(NamedTuple):
    """Scores of paged entries to write.

    Attributes:
        op: what to score; its `max_context` or `topk` is not used.
        out: `[T, >= width]` float32 logits, -inf where nothing is visible, or int32 order keys of the context.
        width: columns to write.
        topk: a context of up to so many entries needs no order keys, because all of it is selected.
        dependent: whether the next kernel may start while this one runs.
        best: int32 `[T, columns of out / group]`, contiguous, for order keys: the largest of each group of neighbouring
            columns, for contexts of more than `topk` entries; None writes none.
    """

    op: PagedArguments
    out: Tensor
    width: int
    topk: int = 0
    dependent: bool = False
    best: Tensor | None = None

    @property
    def group(self) -> int:
        """Columns of a group, 0 without `best`."""
        return 0 if self.best is None else self.out.stride(0) // self.best.stride(0)

    @property
    def order_keys(self) -> bool:
        """Whether order keys are written, not logits."""
        return not self.out.is_floating_point()

    @property
    def pages(self) -> Tensor:
        """The cache: bytes of pages, or rows."""
        op = self.op
        return byte_pages(op.k_cache, op.cache_format, op.block_size) if op.cache_format in PAGE_LAYOUTS else op.k_cache

    @property
    def visible_width(self) -> int:
        """Columns that hold entries of the block table."""
        return min(self.width, reach_of(self.op))


class RaggedScoreCall(NamedTuple):
    """Scores of gathered keys to write.

    Attributes:
        op: what to score; its `topk` and `max_logits_bytes` are not used.
        out: `[T, >= N]` float32 logits, or int32 order keys, of the rows that a token sees.
        lens: int32 `[T]`, contiguous; their number is written there.
        topk: a block of tokens that see up to so many rows each needs no order keys.
    """

    op: RaggedTopkArguments
    out: Tensor
    lens: Tensor
    topk: int = 0

    @property
    def order_keys(self) -> bool:
        """Whether order keys are written, not logits."""
        return not self.out.is_floating_point()

    def splits(self, queries: int, entries: int, programs: int) -> int:
        """Return the number of programs among which the keys of a block of `queries` are split."""
        blocks = cdiv(self.op.q.shape[0], queries)
        return max(1, min(cdiv(self.op.k.shape[0], entries), cdiv(programs, blocks)))


def reach_of(op: PagedArguments) -> int:
    """Return the number of entries of a request that the block table can name."""
    return op.block_table.shape[1] * op.block_size if op.k_cache.shape[0] > 0 else 0


class Shape(NamedTuple):
    """Compile-time sizes of a launch.

    Attributes:
        fmt: format of the keys. order_keys: what is written. heads, dim: of a query.
        padded_heads, block_size, dependent: heads of a tile, entries of a page and PDL; paged keys alone.
        queries, stages: tokens of a tile and stages of the loop over heads; gathered keys alone.
        entries: keys of a tile. group: columns of a group, 0 if their largest keys are not written; paged keys alone.
    """

    fmt: str
    order_keys: bool
    heads: int
    dim: int
    entries: int
    padded_heads: int = 0
    block_size: int = 0
    dependent: bool = False
    queries: int = 0
    stages: int = 0
    group: int = 0


class Strides(NamedTuple):
    """Strides of the arguments of the paged kernel."""

    out: int
    q: tuple[int, ...]
    q_scale: tuple[int, ...]
    weights: tuple[int, ...]
    k: tuple[int, ...]
    table: tuple[int, ...]
    tokens: tuple[int, int]


class RaggedStrides(NamedTuple):
    """Strides of the arguments of the ragged kernel."""

    out: int
    q: tuple[int, ...]
    q_scale: tuple[int, ...]
    weights: tuple[int, ...]
    k: tuple[int, ...]
    k_scale: tuple[int, ...]
    tokens: tuple[int, int]


@triton.jit
def visible_entries(p_requests, p_lens, token, token_strides, table_rows, reach):
    """Return a token's request, int64 and legal, and how many entries it sees, int32: 0 where it has no request."""
    request = tl.load(p_requests + token * token_strides[0]).to(tl.int64)
    known = (request >= 0) & (request < table_rows)
    length = tl.load(p_lens + token * token_strides[1]).to(tl.int64)
    length = tl.minimum(tl.maximum(length, 0), reach).to(tl.int32)
    return tl.where(known, request, 0), tl.where(known, length, 0)


@triton.jit
def order_key(logit):
    """Return int32 in the order of float32 `logit`. Both zeros have one key; NaN comes before -inf."""
    bits = tl.where(logit == 0.0, 0.0, logit).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & MAGNITUDE)
    return tl.where(logit == logit, key, NAN_KEY)


@triton.jit
def _load_queries(p_q, p_q_scale, token, strides, SHAPE: tl.constexpr):
    """Load `[padded_heads, D]` in the dtype of the GEMM, 0 for padding heads."""
    o_h = tl.arange(0, SHAPE.padded_heads)[:, None]
    m_h = o_h < SHAPE.heads
    p_row = p_q + token * strides.q[0] + o_h.to(tl.int64) * strides.q[1]
    if SHAPE.fmt == "indexer_mxfp4":
        o_byte, o_tile = tl.arange(0, MXFP4_DATA)[None, :], tl.arange(0, MXFP4_SCALE)[None, :]
        p_scale = p_q_scale + token * strides.q_scale[0] + o_h.to(tl.int64) * strides.q_scale[1]
        packed = tl.load(p_row + o_byte * strides.q[2], mask=m_h, other=0)
        q = dequantize_mxfp4(packed, tl.load(p_scale + o_tile * strides.q_scale[2], mask=m_h, other=0))
    else:
        q = tl.load(p_row + tl.arange(0, SHAPE.dim)[None, :].to(tl.int64) * strides.q[2], mask=m_h, other=0)
        if SHAPE.fmt == "indexer_fp8":
            q = q.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return q


@triton.jit
def _load_keys(p_page, offset, mask, k_strides, SHAPE: tl.constexpr):
    """Load `[N, D]` in the dtype of the GEMM, without the scale of indexer_fp8, 0 where `mask` is False."""
    if SHAPE.fmt == "indexer_fp8":
        codes = tl.load((p_page + offset * FP8_DATA)[:, None] + tl.arange(0, SHAPE.dim)[None, :], mask=mask, other=0)
        keys = codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    elif SHAPE.fmt == "indexer_mxfp4":
        p_data = (p_page + offset * MXFP4_DATA)[:, None]
        p_scale = (p_page + SHAPE.block_size * MXFP4_DATA + offset * MXFP4_SCALE)[:, None]
        packed = tl.load(p_data + tl.arange(0, MXFP4_DATA)[None, :], mask=mask, other=0)
        keys = dequantize_mxfp4(packed, tl.load(p_scale + tl.arange(0, MXFP4_SCALE)[None, :], mask=mask, other=0))
    else:
        p_row = (p_page + offset * k_strides[1])[:, None]
        keys = tl.load(p_row + tl.arange(0, SHAPE.dim)[None, :].to(tl.int64) * k_strides[2], mask=mask, other=0.0)
    return keys


@triton.jit
def _find_entries(p_row, start, length, pages, table_stride, SHAPE: tl.constexpr):
    """Return, for the entries of the tile at `start`: block (int64, legal), offset in it, visible, readable.

    A tile that divides a page has one block, and may be read whole: the memory is there, visible or not.
    """
    BLOCK_SIZE: tl.constexpr = SHAPE.block_size
    ENTRIES: tl.constexpr = SHAPE.entries
    o_entry = tl.arange(0, ENTRIES)
    seen = start + o_entry < length
    if BLOCK_SIZE % ENTRIES == 0:
        p_block = p_row + tl.full((), start // BLOCK_SIZE, tl.int64) * table_stride
        block = tl.load(p_block, mask=start < length, other=-1)
        offset = start % BLOCK_SIZE + o_entry
    else:
        p_block = p_row + ((start + o_entry) // BLOCK_SIZE).to(tl.int64) * table_stride
        block = tl.load(p_block, mask=seen, other=-1)
        offset = (start + o_entry) % BLOCK_SIZE
    legal = (block >= 0) & (block < pages)
    seen &= legal
    readable = tl.full((ENTRIES,), True, tl.int1) if BLOCK_SIZE % ENTRIES == 0 else seen
    return tl.where(legal, block, 0).to(tl.int64), offset, seen, readable


@triton.jit(
    # Elements of tuples are always specialised, so these are not in one.
    do_not_specialize=["pages", "table_rows", "width", "topk"],
    do_not_specialize_on_alignment=["p_table", "p_requests", "p_lens"],
)
def indexer_score_kernel(
    p_out,  # [T, width] float32 logits, or int32 order keys; contiguous columns
    queries,  # [T, H, .] as indexer_q_rope_quant returns it, scales uint8 [T, H, D / 32], weights float32 [T, H]
    p_k,  # pages in SHAPE.fmt
    p_table,  # [table_rows, >= reach / block_size] int32
    p_requests,  # [>= T] int
    p_lens,  # [>= T] int
    strides,
    pages,
    table_rows,
    reach,
    width,
    topk,
    p_best,  # [T, columns of p_out / SHAPE.group] int32, contiguous; None without groups
    SHAPE: tl.constexpr,
):
    """Score every S-th tile of entries of token p, from tile s on, in program (p, s) of (T, S).

    Logits are written for the whole row, -inf where nothing is visible. Order keys are written for the entries of the
    context only, and a context of up to topk entries is not scored: which of them is visible is all that matters.
    """
    if SHAPE.dependent:
        tl.extra.cuda.gdc_launch_dependents()
    p_q, p_q_scale, p_weights = queries
    ORDER_KEYS: tl.constexpr = SHAPE.order_keys
    HEADS: tl.constexpr = SHAPE.heads
    PADDED_HEADS: tl.constexpr = SHAPE.padded_heads
    ENTRIES: tl.constexpr = SHAPE.entries
    token = tl.program_id(0).to(tl.int64)
    request, length = visible_entries(p_requests, p_lens, token, strides.tokens, table_rows, reach)
    first, step = tl.program_id(1) * ENTRIES, tl.num_programs(1) * ENTRIES
    p_row = p_table + request * strides.table[0]
    p_entries = p_out + token * strides.out + tl.arange(0, ENTRIES)
    end = length if ORDER_KEYS else width
    if ORDER_KEYS and length <= topk:
        for start in range(first, length, step):
            _, _, seen, _ = _find_entries(p_row, start, length, pages, strides.table[1], SHAPE)
            mask = start + tl.arange(0, ENTRIES) < length
            tl.store(p_entries + start, tl.where(seen, 0, INVISIBLE), mask=mask)
    elif first < end:
        o_h = tl.arange(0, PADDED_HEADS)
        p_w = p_weights + token * strides.weights[0] + o_h.to(tl.int64) * strides.weights[1]
        # [PADDED_HEADS], [D, PADDED_HEADS]
        weight = tl.load(p_w, mask=o_h < HEADS, other=0.0)
        q = tl.trans(_load_queries(p_q, p_q_scale, token, strides, SHAPE))
        for start in range(first, end, step):
            # [ENTRIES]
            block, offset, seen, readable = _find_entries(p_row, start, length, pages, strides.table[1], SHAPE)
            p_page = p_k + block * strides.k[0]
            # [ENTRIES, D], [ENTRIES, PADDED_HEADS]
            keys = _load_keys(p_page, offset, readable[:, None], strides.k, SHAPE)
            dots = tl.dot(keys, q, input_precision="ieee")
            terms = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight[None, :]
            if PADDED_HEADS > HEADS:
                # The weight of a padding head is 0, but 0 * inf would be NaN.
                terms = tl.where((o_h < HEADS)[None, :], terms, 0.0)
            logit = tl.sum(terms, axis=1)
            if SHAPE.fmt == "indexer_fp8":
                p_scale = (p_page + SHAPE.block_size * FP8_DATA).to(tl.pointer_type(tl.float32))
                logit = logit * tl.load(p_scale + offset * FP8_WORDS, mask=readable, other=0.0)
            mask = start + tl.arange(0, ENTRIES) < end
            if ORDER_KEYS:
                tl.store(p_entries + start, tl.where(seen, order_key(logit), INVISIBLE), mask=mask)
                if SHAPE.group > 0:
                    key = tl.where(seen, order_key(logit), INVISIBLE)
                    group = start // SHAPE.group + tl.arange(0, ENTRIES // SHAPE.group)
                    largest = tl.max(tl.reshape(key, (ENTRIES // SHAPE.group, SHAPE.group)), axis=1)
                    p_groups = p_best + token * (strides.out // SHAPE.group)
                    tl.store(p_groups + group, largest, mask=group * SHAPE.group < end)
            else:
                tl.store(p_entries + start, tl.where(seen, logit, float("-inf")), mask=mask)


@triton.jit
def visible_rows(p_starts, p_ends, token, m_token, token_strides, rows):
    """Return the first row that int64 `token` `[N]` sees, and how many, int64; 0 without a token or a valid start."""
    start = tl.load(p_starts + token * token_strides[0], mask=m_token, other=0).to(tl.int64)
    end = tl.load(p_ends + token * token_strides[1], mask=m_token, other=0).to(tl.int64)
    length = tl.maximum(tl.minimum(end, rows) - start, 0)
    live = m_token & (start >= 0)
    return tl.where(live, start, 0), tl.where(live, length, 0)


@triton.jit
def _load_vectors(p_row, p_scale, mask, stride, scale_stride, SHAPE: tl.constexpr):
    """Load `[N, D]` in the dtype of the GEMM from pointers to rows `[N]`, 0 where `mask` `[N]` is False.

    The scale of indexer_fp8 is left out: a query's is in its weights, a key's is applied to its logit.
    """
    m_row = mask[:, None]
    if SHAPE.fmt == "indexer_mxfp4":
        o_byte, o_tile = tl.arange(0, MXFP4_DATA)[None, :], tl.arange(0, MXFP4_SCALE)[None, :]
        packed = tl.load(p_row[:, None] + o_byte * stride, mask=m_row, other=0)
        scale = tl.load(p_scale[:, None] + o_tile * scale_stride, mask=m_row, other=0)
        x = dequantize_mxfp4(packed, scale)
    else:
        x = tl.load(p_row[:, None] + tl.arange(0, SHAPE.dim)[None, :] * stride, mask=m_row, other=0)
        if SHAPE.fmt == "indexer_fp8":
            x = x.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return x


@triton.jit
def _load_float32(p_row, stride, mask):
    """Load float32 `[N]` from four bytes each, of any alignment."""
    bits = tl.zeros(mask.shape, tl.int32)
    for i in tl.static_range(FP8_SCALE):
        bits |= tl.load(p_row + i * stride, mask=mask, other=0).to(tl.int32) << (8 * i)
    return bits.to(tl.float32, bitcast=True)


@triton.jit(
    do_not_specialize=["tokens", "rows", "topk"], do_not_specialize_on_alignment=["p_lens", "p_starts", "p_ends"]
)
def indexer_score_ragged_kernel(
    p_out,  # [T, >= rows] float32 logits, or int32 order keys; contiguous columns
    p_lens,  # [T] int32, contiguous: number of rows that a token sees
    queries,  # [T, H, .] as indexer_q_rope_quant returns it, scales uint8 [T, H, D / 32], weights float32 [T, H]
    keys,  # [rows, .] gathered keys, and their scales [rows, 4] uint8
    p_starts,  # [T] int
    p_ends,  # [T] int
    strides,
    tokens,
    rows,
    topk,
    SHAPE: tl.constexpr,
):
    """Score, for a block of tokens, every S-th tile of keys that any of them sees, in program (p, s) of (P, S).

    A block of tokens that see up to topk rows each is not scored for order keys: all of its rows are selected.
    """
    p_q, p_q_scale, p_weights = queries
    p_k, p_k_scale = keys
    ORDER_KEYS: tl.constexpr = SHAPE.order_keys
    QUERIES: tl.constexpr = SHAPE.queries
    ENTRIES: tl.constexpr = SHAPE.entries
    token = tl.program_id(0).to(tl.int64) * QUERIES + tl.arange(0, QUERIES)
    m_token = token < tokens
    start, length = visible_rows(p_starts, p_ends, token, m_token, strides.tokens, rows)
    tl.store(p_lens + token, length.to(tl.int32), mask=m_token & (tl.program_id(1) == 0))
    first = tl.min(tl.where(length > 0, start, rows), axis=0)
    last = tl.max(tl.where(length > 0, start + length, 0), axis=0)
    scored = (tl.max(length, axis=0) > topk) | (not ORDER_KEYS)
    step = tl.num_programs(1) * ENTRIES
    for begin in range(first + tl.program_id(1) * ENTRIES, last, step):
        row = tl.full((), begin, tl.int64) + tl.arange(0, ENTRIES)
        # [QUERIES, ENTRIES]
        logit = tl.zeros((QUERIES, ENTRIES), tl.float32)
        if scored:
            m_key = row < rows
            p_key, p_key_scale = p_k + row * strides.k[0], p_k_scale + row * strides.k_scale[0]
            # [D, ENTRIES]
            k = tl.trans(_load_vectors(p_key, p_key_scale, m_key, strides.k[1], strides.k_scale[1], SHAPE))
            for head in tl.range(SHAPE.heads, num_stages=SHAPE.stages):
                p_query = p_q + token * strides.q[0] + head * strides.q[1]
                p_scale = p_q_scale + token * strides.q_scale[0] + head * strides.q_scale[1]
                q = _load_vectors(p_query, p_scale, m_token, strides.q[2], strides.q_scale[2], SHAPE)
                p_weight = p_weights + token * strides.weights[0] + head * strides.weights[1]
                weight = tl.load(p_weight, mask=m_token, other=0.0)
                dots = tl.dot(q, k, input_precision="ieee")
                logit += tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight[:, None]
            if SHAPE.fmt == "indexer_fp8":
                logit *= _load_float32(p_key_scale, strides.k_scale[1], m_key)[None, :]
        column = (row[None, :] - start[:, None]).to(tl.int32)
        seen = (column >= 0) & (column < length[:, None])
        p_column = (p_out + token * strides.out)[:, None] + column
        if ORDER_KEYS:
            tl.store(p_column, order_key(logit), mask=seen)
        else:
            tl.store(p_column, logit, mask=seen)


def score(call: ScoreCall, programs: int, tile: tuple[int, int, int] = SCORE_TILE) -> None:
    """Launch `indexer_score_kernel` with `tile` as in SCORE_TILE and about `programs` programs."""
    op, out, pages = call.op, call.out, call.pages
    tokens, heads, columns = op.q.shape
    entries, warps, stages = tile
    if op.q.element_size() == 4:
        # float32 rows are for small models; several tiles of them would not fit every GPU's shared memory.
        stages = 1
    # The largest power of two that divides a page, so that a tile has one block.
    entries = min(entries, max(MIN_TILE, op.block_size & -op.block_size))
    launch_kernel(
        indexer_score_kernel,
        (tokens, min(cdiv(call.width, entries), cdiv(programs, tokens))),
        out,
        (op.q.view(torch.uint8) if op.cache_format == "indexer_fp8" else op.q, op.q_scale, op.weights),
        pages,
        op.block_table,
        op.token_to_req,
        op.context_lens,
        Strides(
            out.stride(0), op.q.stride(), op.q_scale.stride(), op.weights.stride(), pages.stride(),
            op.block_table.stride(), (op.token_to_req.stride(0), op.context_lens.stride(0)),
        ),
        pages.shape[0],
        op.block_table.shape[0],
        call.visible_width,
        call.width,
        call.topk,
        call.best,
        SHAPE=Shape(
            op.cache_format, call.order_keys, heads, columns if op.cache_format == "plain" else INDEXER_HEAD_DIM,
            entries, max(MIN_TILE, triton.next_power_of_2(heads)), op.block_size, call.dependent, group=call.group,
        ),
        num_warps=warps,
        num_stages=stages,
    )  # fmt: skip


def score_ragged(call: RaggedScoreCall, programs: int, tile: tuple[int, int, int, int] = RAGGED_SCORE_TILE) -> None:
    """Launch `indexer_score_ragged_kernel` with `tile` as in RAGGED_SCORE_TILE and about `programs` programs."""
    op, out = call.op, call.out
    tokens, heads, columns = op.q.shape
    queries, entries, warps, stages = tile
    if op.q.element_size() == 4:
        # float32 rows are for small models; several tiles of them would not fit every GPU's shared memory.
        queries, entries, stages = min(queries, 32), min(entries, 32), 1
    launch_kernel(
        indexer_score_ragged_kernel,
        (cdiv(tokens, queries), call.splits(queries, entries, programs)),
        out,
        call.lens,
        (op.q.view(torch.uint8) if op.cache_format == "indexer_fp8" else op.q, op.q_scale, op.weights),
        (op.k, op.k_scale),
        op.row_starts,
        op.row_ends,
        RaggedStrides(
            out.stride(0), op.q.stride(), op.q_scale.stride(), op.weights.stride(), op.k.stride(),
            op.k_scale.stride(), (op.row_starts.stride(0), op.row_ends.stride(0)),
        ),
        tokens,
        op.k.shape[0],
        call.topk,
        SHAPE=Shape(
            op.cache_format, call.order_keys, heads, columns if op.cache_format == "plain" else INDEXER_HEAD_DIM,
            entries, queries=queries, stages=stages,
        ),
        num_warps=warps,
    )  # fmt: skip
