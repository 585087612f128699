"""Scores of compressed entries: logits of reference/indexer_logits_topk.py, or integers in their order.

    logit[t, j] = scale[j] * sum_h weights[t, h] * relu(q[t, h] . k[j])

Entries are the rows of the matrix product and heads its columns, so that the sum over heads stays within a few threads.
e4m3 values are exact in float16, scaled e2m1 values in bfloat16: products are exact and sums are float32.

Scores of gathered indexer keys for blocks of queries: `indexer_score` where neighbouring tokens share their keys.

    logit[t, j] = scale[j] * sum_h weights[t, h] * relu(q[t, h] . k[j])

Queries are the rows of the matrix product and keys its columns, and the heads come one after the other: a tile of keys
is read once for all queries of the block and all of their heads. Each token sees a run of the keys, and its logits
begin at the first column. Products are exact and sums are float32, as in indexer_score.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...layout import INDEXER_FP8, INDEXER_MXFP4
from ..device.quant import MAGNITUDE
from .indexer_format import dequantize_mxfp4

FP8_DATA = tl.constexpr(INDEXER_FP8.data)
FP8_WORDS = tl.constexpr(INDEXER_FP8.scale // 4)
MXFP4_DATA, MXFP4_SCALE = tl.constexpr(INDEXER_MXFP4.data), tl.constexpr(INDEXER_MXFP4.scale)

INVISIBLE = tl.constexpr(torch.iinfo(torch.int32).min)
NAN_KEY = tl.constexpr(torch.iinfo(torch.int32).min + 1)
"""Order keys below that of -inf. Every other key is the logit's: a larger logit has a larger key."""


@triton.jit
def visible_entries(p_requests, p_lens, token, token_strides, table_rows, reach):
    """The request of a token, int64 and legal, and how many entries it sees, int32: 0 where it has no request."""
    request = tl.load(p_requests + token * token_strides[0]).to(tl.int64)
    known = (request >= 0) & (request < table_rows)
    length = tl.load(p_lens + token * token_strides[1]).to(tl.int64)
    length = tl.minimum(tl.maximum(length, 0), reach).to(tl.int32)
    return tl.where(known, request, 0), tl.where(known, length, 0)


@triton.jit
def order_key(logit):
    """int32 in the order of float32 `logit`. Both zeros have one key; NaN comes before -inf."""
    bits = tl.where(logit == 0.0, 0.0, logit).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & MAGNITUDE)
    return tl.where(logit == logit, key, NAN_KEY)


@triton.jit
def _load_queries(
    p_q, p_q_scale, token, q_strides, scale_strides,
    FORMAT: tl.constexpr, HEADS: tl.constexpr, PADDED_HEADS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """`[PADDED_HEADS, D]` in the dtype of the matrix product; heads that are not there are 0."""
    o_h = tl.arange(0, PADDED_HEADS)[:, None]
    m_h = o_h < HEADS
    p_row = p_q + token * q_strides[0] + o_h.to(tl.int64) * q_strides[1]
    if FORMAT == "indexer_mxfp4":
        o_byte, o_tile = tl.arange(0, MXFP4_DATA)[None, :], tl.arange(0, MXFP4_SCALE)[None, :]
        p_scale = p_q_scale + token * scale_strides[0] + o_h.to(tl.int64) * scale_strides[1]
        packed = tl.load(p_row + o_byte * q_strides[2], mask=m_h, other=0)
        q = dequantize_mxfp4(packed, tl.load(p_scale + o_tile * scale_strides[2], mask=m_h, other=0))
    else:
        q = tl.load(p_row + tl.arange(0, D)[None, :].to(tl.int64) * q_strides[2], mask=m_h, other=0)
        if FORMAT == "indexer_fp8":
            q = q.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return q


@triton.jit
def _load_keys(p_page, offset, mask, k_strides, FORMAT: tl.constexpr, BLOCK_SIZE: tl.constexpr, D: tl.constexpr):
    """Keys `[N, D]` in the dtype of the matrix product, without the scale of indexer_fp8; 0 where `mask` says no."""
    if FORMAT == "indexer_fp8":
        codes = tl.load((p_page + offset * FP8_DATA)[:, None] + tl.arange(0, D)[None, :], mask=mask, other=0)
        keys = codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    elif FORMAT == "indexer_mxfp4":
        p_data = (p_page + offset * MXFP4_DATA)[:, None]
        p_scale = (p_page + BLOCK_SIZE * MXFP4_DATA + offset * MXFP4_SCALE)[:, None]
        packed = tl.load(p_data + tl.arange(0, MXFP4_DATA)[None, :], mask=mask, other=0)
        keys = dequantize_mxfp4(packed, tl.load(p_scale + tl.arange(0, MXFP4_SCALE)[None, :], mask=mask, other=0))
    else:
        p_row = (p_page + offset * k_strides[1])[:, None]
        keys = tl.load(p_row + tl.arange(0, D)[None, :].to(tl.int64) * k_strides[2], mask=mask, other=0.0)
    return keys


@triton.jit
def _find_blocks(p_row, start, length, pages, table_stride, BLOCK_SIZE: tl.constexpr, ENTRIES: tl.constexpr):
    """For the entries of the tile at `start`: a legal int64 block, the offset in it, who is visible, who may be read.

    A tile that divides a page has one block, and may be read whole: the memory is there, visible or not.
    """
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
    do_not_specialize=["pages", "table_rows", "width", "topk"],
    do_not_specialize_on_alignment=["p_table", "p_requests", "p_lens"],
)
def indexer_score_kernel(
    p_out,  # [T, width] float32 logits, or int32 order keys with KEYS; contiguous columns
    p_q,  # [T, H, .] as indexer_q_rope_quant returns it; its bytes for indexer_fp8
    p_q_scale,  # [T, H, D / 32] uint8; indexer_mxfp4 only
    p_weights,  # [T, H] float32
    p_k,  # pages in FORMAT
    p_table,  # [table_rows, >= reach / BLOCK_SIZE] int32
    p_requests,  # [>= T] int
    p_lens,  # [>= T] int
    out_stride,
    q_strides,
    scale_strides,
    weight_strides,
    k_strides,
    table_strides,
    token_strides,  # of requests and lens
    pages,
    table_rows,
    reach,
    width,
    topk,
    FORMAT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    ENTRIES: tl.constexpr,
    D: tl.constexpr,
    DEPENDENT: tl.constexpr,  # lets the kernel that selects start early
):
    """Program (p, s) of (T, S) takes every S-th tile of ENTRIES entries of token p, from tile s on.

    Logits are written for the whole row, -inf where nothing is visible. Order keys are written for the entries of the
    context only, and a context of up to topk entries is not scored: which of them is visible is all that matters.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    request, length = visible_entries(p_requests, p_lens, token, token_strides, table_rows, reach)
    first, step = tl.program_id(1) * ENTRIES, tl.num_programs(1) * ENTRIES
    p_row = p_table + request * table_strides[0]
    p_entries = p_out + token * out_stride + tl.arange(0, ENTRIES)
    end = length if KEYS else width
    if KEYS and length <= topk:
        for start in range(first, length, step):
            _, _, seen, _ = _find_blocks(p_row, start, length, pages, table_strides[1], BLOCK_SIZE, ENTRIES)
            mask = start + tl.arange(0, ENTRIES) < length
            tl.store(p_entries + start, tl.where(seen, 0, INVISIBLE), mask=mask)
    elif first < end:
        o_h = tl.arange(0, PADDED_HEADS)
        p_w = p_weights + token * weight_strides[0] + o_h.to(tl.int64) * weight_strides[1]
        # [PADDED_HEADS], [D, PADDED_HEADS]
        weight = tl.load(p_w, mask=o_h < HEADS, other=0.0)
        q = tl.trans(_load_queries(p_q, p_q_scale, token, q_strides, scale_strides, FORMAT, HEADS, PADDED_HEADS, D))
        for start in range(first, end, step):
            # [ENTRIES]
            block, offset, seen, readable = _find_blocks(
                p_row, start, length, pages, table_strides[1], BLOCK_SIZE, ENTRIES
            )
            p_page = p_k + block * k_strides[0]
            # [ENTRIES, D], [ENTRIES, PADDED_HEADS]
            keys = _load_keys(p_page, offset, readable[:, None], k_strides, FORMAT, BLOCK_SIZE, D)
            dots = tl.dot(keys, q, input_precision="ieee")
            terms = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight[None, :]
            if PADDED_HEADS > HEADS:
                # A head that is not there has no weight, but 0 * inf would be NaN.
                terms = tl.where((o_h < HEADS)[None, :], terms, 0.0)
            logit = tl.sum(terms, axis=1)
            if FORMAT == "indexer_fp8":
                p_scale = (p_page + BLOCK_SIZE * FP8_DATA).to(tl.pointer_type(tl.float32))
                logit = logit * tl.load(p_scale + offset * FP8_WORDS, mask=readable, other=0.0)
            mask = start + tl.arange(0, ENTRIES) < end
            if KEYS:
                tl.store(p_entries + start, tl.where(seen, order_key(logit), INVISIBLE), mask=mask)
            else:
                tl.store(p_entries + start, tl.where(seen, logit, float("-inf")), mask=mask)


FP8_BYTES = tl.constexpr(INDEXER_FP8.scale)
MXFP4_DATA, MXFP4_SCALE = tl.constexpr(INDEXER_MXFP4.data), tl.constexpr(INDEXER_MXFP4.scale)


@triton.jit
def visible_rows(p_starts, p_ends, token, m_token, token_strides, rows):
    """First row that int64 `token` `[N]` sees and how many, int64: 0 behind the last token and for a negative start."""
    start = tl.load(p_starts + token * token_strides[0], mask=m_token, other=0).to(tl.int64)
    end = tl.load(p_ends + token * token_strides[1], mask=m_token, other=0).to(tl.int64)
    length = tl.maximum(tl.minimum(end, rows) - start, 0)
    live = m_token & (start >= 0)
    return tl.where(live, start, 0), tl.where(live, length, 0)


@triton.jit
def _load_vectors(p_row, p_scale, mask, stride, scale_stride, FORMAT: tl.constexpr, D: tl.constexpr):
    """`[N, D]` in the dtype of the matrix product from pointers to rows `[N]`; 0 where `mask` `[N]` says no.

    The scale of indexer_fp8 is left out: a query's is in its weights, a key's is applied to its logit.
    """
    m_row = mask[:, None]
    if FORMAT == "indexer_mxfp4":
        o_byte, o_tile = tl.arange(0, MXFP4_DATA)[None, :], tl.arange(0, MXFP4_SCALE)[None, :]
        packed = tl.load(p_row[:, None] + o_byte * stride, mask=m_row, other=0)
        scale = tl.load(p_scale[:, None] + o_tile * scale_stride, mask=m_row, other=0)
        x = dequantize_mxfp4(packed, scale)
    else:
        x = tl.load(p_row[:, None] + tl.arange(0, D)[None, :] * stride, mask=m_row, other=0)
        if FORMAT == "indexer_fp8":
            x = x.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return x


@triton.jit
def _load_float32(p_row, stride, mask):
    """float32 `[N]` from four bytes each, which may begin anywhere."""
    bits = tl.zeros(mask.shape, tl.int32)
    for i in tl.static_range(FP8_BYTES):
        bits |= tl.load(p_row + i * stride, mask=mask, other=0).to(tl.int32) << (8 * i)
    return bits.to(tl.float32, bitcast=True)


@triton.jit(
    do_not_specialize=["tokens", "rows", "topk"], do_not_specialize_on_alignment=["p_lens", "p_starts", "p_ends"]
)
def indexer_score_ragged_kernel(
    p_out,  # [T, >= rows] float32 logits, or int32 order keys with KEYS; contiguous columns
    p_lens,  # [T] int32, contiguous: how many rows a token sees
    p_q,  # [T, H, .] as indexer_q_rope_quant returns it; its bytes for indexer_fp8
    p_q_scale,  # [T, H, D / 32] uint8; indexer_mxfp4 only
    p_weights,  # [T, H] float32
    p_k,  # [rows, .] gathered keys
    p_k_scale,  # [rows, 4] uint8
    p_starts,  # [T] int
    p_ends,  # [T] int
    out_stride,
    q_strides,
    scale_strides,
    weight_strides,
    k_strides,
    k_scale_strides,
    token_strides,  # of starts and ends
    tokens,
    rows,
    topk,
    FORMAT: tl.constexpr,
    KEYS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    QUERIES: tl.constexpr,
    ENTRIES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program (p, s) of (P, S) takes tokens p * QUERIES and on, and every S-th tile of keys that any of them sees.

    A block of tokens that see up to topk rows each is not scored for order keys: all of its rows are selected.
    """
    token = tl.program_id(0).to(tl.int64) * QUERIES + tl.arange(0, QUERIES)
    m_token = token < tokens
    start, length = visible_rows(p_starts, p_ends, token, m_token, token_strides, rows)
    tl.store(p_lens + token, length.to(tl.int32), mask=m_token & (tl.program_id(1) == 0))
    first = tl.min(tl.where(length > 0, start, rows), axis=0)
    last = tl.max(tl.where(length > 0, start + length, 0), axis=0)
    scored = (tl.max(length, axis=0) > topk) | (not KEYS)
    step = tl.num_programs(1) * ENTRIES
    for begin in range(first + tl.program_id(1) * ENTRIES, last, step):
        row = tl.full((), begin, tl.int64) + tl.arange(0, ENTRIES)
        # [QUERIES, ENTRIES]
        logit = tl.zeros((QUERIES, ENTRIES), tl.float32)
        if scored:
            m_key = row < rows
            p_key, p_key_scale = p_k + row * k_strides[0], p_k_scale + row * k_scale_strides[0]
            # [D, ENTRIES]
            keys = tl.trans(_load_vectors(p_key, p_key_scale, m_key, k_strides[1], k_scale_strides[1], FORMAT, D))
            for head in tl.range(HEADS, num_stages=STAGES):
                p_query = p_q + token * q_strides[0] + head * q_strides[1]
                p_scale = p_q_scale + token * scale_strides[0] + head * scale_strides[1]
                q = _load_vectors(p_query, p_scale, m_token, q_strides[2], scale_strides[2], FORMAT, D)
                p_weight = p_weights + token * weight_strides[0] + head * weight_strides[1]
                weight = tl.load(p_weight, mask=m_token, other=0.0)
                dots = tl.dot(q, keys, input_precision="ieee")
                logit += tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight[:, None]
            if FORMAT == "indexer_fp8":
                logit *= _load_float32(p_key_scale, k_scale_strides[1], m_key)[None, :]
        column = (row[None, :] - start[:, None]).to(tl.int32)
        seen = (column >= 0) & (column < length[:, None])
        p_column = (p_out + token * out_stride)[:, None] + column
        if KEYS:
            tl.store(p_column, order_key(logit), mask=seen)
        else:
            tl.store(p_column, logit, mask=seen)
