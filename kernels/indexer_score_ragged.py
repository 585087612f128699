"""Scores of gathered indexer keys for blocks of queries: `indexer_score` where neighbouring tokens share their keys.

    logit[t, j] = scale[j] * sum_h weights[t, h] * relu(q[t, h] . k[j])

Queries are the rows of the matrix product and keys its columns, and the heads come one after the other: a tile of keys
is read once for all queries of the block and all of their heads. Each token sees a run of the keys, and its logits
begin at the first column. Products are exact and sums are float32, as in indexer_score.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..layout import INDEXER_FP8, INDEXER_MXFP4
from .indexer_format import dequantize_mxfp4
from .indexer_score import order_key

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
