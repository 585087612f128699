"""Triton functions that load the streams of tokens, return a sub-layer's output to them, and store sums for a mix."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _load4(p, stride, mask):
    return (
        tl.load(p, mask=mask, other=0.0),
        tl.load(p + stride, mask=mask, other=0.0),
        tl.load(p + 2 * stride, mask=mask, other=0.0),
        tl.load(p + 3 * stride, mask=mask, other=0.0),
    )


@triton.jit
def _weighted(q, c0, c1, c2, c3, z, x):
    """Return a new stream, the same bits wherever it is computed: Triton computes an operand of a product again."""
    return tl.fma(c3, x[3], tl.fma(c2, x[2], tl.fma(c1, x[1], tl.fma(c0, x[0], q * z))))


@triton.jit
def load_coefficients(returned, row, exists):
    """Load post and the rows of comb, tuples of four. `returned` is `Strided`; `row` is a scalar, or [B, 1]."""
    _, p_post, p_comb = returned[0]
    _, post_strides, comb_strides = returned[1]
    q = _load4(p_post + row * post_strides[0], post_strides[1], exists)
    p = p_comb + row * comb_strides[0]
    c0, c1 = _load4(p, comb_strides[2], exists), _load4(p + comb_strides[1], comb_strides[2], exists)
    p += 2 * comb_strides[1]
    c2, c3 = _load4(p, comb_strides[2], exists), _load4(p + comb_strides[1], comb_strides[2], exists)
    return q, c0, c1, c2, c3


@triton.jit
def _new_streams(coefficients, z, x):
    """Return the new streams, float32 [B, C] each, for output z and streams x."""
    q, c0, c1, c2, c3 = coefficients
    return (
        _weighted(q[0], c0[0], c1[0], c2[0], c3[0], z, x),
        _weighted(q[1], c0[1], c1[1], c2[1], c3[1], z, x),
        _weighted(q[2], c0[2], c1[2], c2[2], c3[2], z, x),
        _weighted(q[3], c0[3], c1[3], c2[3], c3[3], z, x),
    )


@triton.jit
def load_streams(p, strides, row, o_c, mask):
    """Load the four streams [B, C]. Not from the L1 cache: other programs may just have stored them."""
    p += row * strides[0] + o_c[None, :] * strides[2]
    return (
        tl.load(p, mask=mask, other=0.0, cache_modifier=".cg"),
        tl.load(p + strides[1], mask=mask, other=0.0, cache_modifier=".cg"),
        tl.load(p + 2 * strides[1], mask=mask, other=0.0, cache_modifier=".cg"),
        tl.load(p + 3 * strides[1], mask=mask, other=0.0, cache_modifier=".cg"),
    )


@triton.jit
def load_and_return(p_streams_out, streams, returned, coefficients, row, o_c, mask, D: tl.constexpr):
    """Load the streams [B, C] of a slice; after a sub-layer, compute the new ones, store and return them.

    `streams` and `returned` are `Strided`. `row` is a scalar for one token, [B, 1] for more.
    """
    p_streams, streams_strides = streams
    x = load_streams(p_streams, streams_strides, row, o_c, mask)
    z = None
    if coefficients is not None:
        z = load_output(returned, row, o_c, mask).to(tl.float32)
    return return_output(p_streams_out, coefficients, z, x, row, o_c, mask, D)


@triton.jit
def load_output(returned, row, o_c, mask):
    """Load the output [B, C] of a sub-layer. `returned` is `Strided`; `row` is a scalar, or [B, 1]."""
    p_returned, returned_strides = returned
    p = p_returned[0] + row * returned_strides[0][0] + o_c[None, :] * returned_strides[0][1]
    return tl.load(p, mask=mask, other=0.0)


@triton.jit
def return_output(p_streams_out, coefficients, z, x, row, o_c, mask, D: tl.constexpr):
    """Return streams `x`, or with coefficients compute, store and return those after output `z`, float32 [B, C]."""
    if coefficients is not None:
        DTYPE: tl.constexpr = x[0].dtype
        x = x[0].to(tl.float32), x[1].to(tl.float32), x[2].to(tl.float32), x[3].to(tl.float32)
        x0, x1, x2, x3 = _new_streams(coefficients, z, x)
        x0, x1, x2, x3 = x0.to(DTYPE), x1.to(DTYPE), x2.to(DTYPE), x3.to(DTYPE)
        p = p_streams_out + row * (4 * D) + o_c[None, :]
        tl.store(p, x0, mask=mask)
        tl.store(p + D, x1, mask=mask)
        tl.store(p + 2 * D, x2, mask=mask)
        tl.store(p + 3 * D, x3, mask=mask)
        x = x0, x1, x2, x3
    return x


@triton.jit
def add_squares(sums, x):
    """Add the squares of four streams to float32 `sums`."""
    x0, x1, x2, x3 = x[0].to(tl.float32), x[1].to(tl.float32), x[2].to(tl.float32), x[3].to(tl.float32)
    return sums + (x0 * x0 + x1 * x1 + x2 * x2 + x3 * x3)


@triton.jit
def load_fn(p_fn, strides, o_m, o_c, m_c, SHAPE: tl.constexpr):
    """Load the columns of `fn` of a slice, float32 [MIX_BLOCK, C] for each stream."""
    D: tl.constexpr = SHAPE.dim
    p_f = p_fn + o_m.to(tl.int64)[:, None] * strides[0] + o_c[None, :] * strides[1]
    m_f = (o_m < SHAPE.mix)[:, None] & m_c[None, :]
    return (
        tl.load(p_f, mask=m_f, other=0.0).to(tl.float32),
        tl.load(p_f + D * strides[1], mask=m_f, other=0.0).to(tl.float32),
        tl.load(p_f + 2 * D * strides[1], mask=m_f, other=0.0).to(tl.float32),
        tl.load(p_f + 3 * D * strides[1], mask=m_f, other=0.0).to(tl.float32),
    )


@triton.jit
def store_sums(p_sums, token, slice_, f, x, o_m, MIX: tl.constexpr, SLICES: tl.constexpr):
    """Store the shares of a slice in a token's mix and sum of squares, for its `fn` and streams [1, C]."""
    x0, x1, x2, x3 = x[0].to(tl.float32), x[1].to(tl.float32), x[2].to(tl.float32), x[3].to(tl.float32)
    p = p_sums + token * ((MIX + 1) * SLICES) + slice_
    tl.store(p + o_m * SLICES, tl.sum(f[0] * x0 + f[1] * x1 + f[2] * x2 + f[3] * x3, 1), mask=o_m < MIX)
    tl.store(p + MIX * SLICES + tl.arange(0, 1), tl.sum(x0 * x0 + x1 * x1 + x2 * x2 + x3 * x3, 1))
