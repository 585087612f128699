"""Triton functions for the coefficients of hyper-connections of four streams, from sums over slices of the channels.

Every value is a [B] vector, an element for each of B tokens: 16 for `comb`, each in a register of its own, so that the
Sinkhorn iteration needs no exchange between threads.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _add4(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def slices_of(p_sums, o_t, row, ROWS: tl.constexpr, SLICES: tl.constexpr, S_BLOCK: tl.constexpr):
    """Load sum `row` of every slice, [B, S_BLOCK]. Not from the L1 cache: other programs may just have stored them."""
    o_s = tl.arange(0, S_BLOCK)
    p = p_sums + (o_t[:, None] * ROWS + row) * SLICES + o_s[None, :]
    return tl.load(p, mask=(o_t >= 0)[:, None] & (o_s < SLICES)[None, :], other=0.0, cache_modifier=".cg")


@triton.jit
def inverse_rms(p_sums, o_t, eps, D, MIX: tl.constexpr, SLICES: tl.constexpr, S_BLOCK: tl.constexpr):
    """Return 1 / RMS of all streams of each token. The sum of their squares follows those of the mix."""
    squares = tl.sum(slices_of(p_sums, o_t, MIX, MIX + 1, SLICES, S_BLOCK), 1)
    return tl.rsqrt(squares / (4 * D) + eps)


@triton.jit
def logits4(
    p_sums, p_base, base_stride, scale, o_t, row, MIX: tl.constexpr, SLICES: tl.constexpr, S_BLOCK: tl.constexpr
):
    """Return the logits of coefficients `row` to `row + 3`: `sum * scale + base`."""
    ROWS: tl.constexpr = MIX + 1
    parts = (
        slices_of(p_sums, o_t, row, ROWS, SLICES, S_BLOCK),
        slices_of(p_sums, o_t, row + 1, ROWS, SLICES, S_BLOCK),
        slices_of(p_sums, o_t, row + 2, ROWS, SLICES, S_BLOCK),
        slices_of(p_sums, o_t, row + 3, ROWS, SLICES, S_BLOCK),
    )
    a0, a1, a2, a3 = tl.reduce(parts, 1, _add4)
    p = p_base + row * base_stride
    b0, b1 = tl.load(p).to(tl.float32), tl.load(p + base_stride).to(tl.float32)
    b2, b3 = tl.load(p + 2 * base_stride).to(tl.float32), tl.load(p + 3 * base_stride).to(tl.float32)
    return a0 * scale + b0, a1 * scale + b1, a2 * scale + b2, a3 * scale + b3


@triton.jit
def _over_sum(a, b, c, d, eps):
    """Divide four values by their sum plus eps. A square of 1 / sqrt is one operation of the slow unit, 1 / x three."""
    root = tl.rsqrt((a + b) + (c + d) + eps)
    inverse = root * root
    return a * inverse, b * inverse, c * inverse, d * inverse


@triton.jit
def _softmax4(a, b, c, d, eps):
    """Softmax of four values, plus eps."""
    most = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a, b, c, d = tl.exp(a - most), tl.exp(b - most), tl.exp(c - most), tl.exp(d - most)
    inverse = 1.0 / ((a + b) + (c + d))
    return a * inverse + eps, b * inverse + eps, c * inverse + eps, d * inverse + eps


@triton.jit
def sinkhorn(a, b, c, d, eps, iterations):
    """Return the rows of comb, tuples of four, for the rows of its logits."""
    a0, a1, a2, a3 = _softmax4(a[0], a[1], a[2], a[3], eps)
    b0, b1, b2, b3 = _softmax4(b[0], b[1], b[2], b[3], eps)
    c0, c1, c2, c3 = _softmax4(c[0], c[1], c[2], c[3], eps)
    d0, d1, d2, d3 = _softmax4(d[0], d[1], d[2], d[3], eps)
    a0, b0, c0, d0 = _over_sum(a0, b0, c0, d0, eps)
    a1, b1, c1, d1 = _over_sum(a1, b1, c1, d1, eps)
    a2, b2, c2, d2 = _over_sum(a2, b2, c2, d2, eps)
    a3, b3, c3, d3 = _over_sum(a3, b3, c3, d3, eps)
    for _ in range(iterations - 1):
        a0, a1, a2, a3 = _over_sum(a0, a1, a2, a3, eps)
        b0, b1, b2, b3 = _over_sum(b0, b1, b2, b3, eps)
        c0, c1, c2, c3 = _over_sum(c0, c1, c2, c3, eps)
        d0, d1, d2, d3 = _over_sum(d0, d1, d2, d3, eps)
        a0, b0, c0, d0 = _over_sum(a0, b0, c0, d0, eps)
        a1, b1, c1, d1 = _over_sum(a1, b1, c1, d1, eps)
        a2, b2, c2, d2 = _over_sum(a2, b2, c2, d2, eps)
        a3, b3, c3, d3 = _over_sum(a3, b3, c3, d3, eps)
    return (a0, a1, a2, a3), (b0, b1, b2, b3), (c0, c1, c2, c3), (d0, d1, d2, d3)


@triton.jit
def load4(p, stride, mask):
    """Load four values of each token as float32."""
    return (
        tl.load(p, mask=mask, other=0.0).to(tl.float32),
        tl.load(p + stride, mask=mask, other=0.0).to(tl.float32),
        tl.load(p + 2 * stride, mask=mask, other=0.0).to(tl.float32),
        tl.load(p + 3 * stride, mask=mask, other=0.0).to(tl.float32),
    )


@triton.jit
def _store4(p, values, mask):
    tl.store(p, values[0], mask=mask)
    tl.store(p + 1, values[1], mask=mask)
    tl.store(p + 2, values[2], mask=mask)
    tl.store(p + 3, values[3], mask=mask)


@triton.jit
def store_coefficients(
    p_post, p_comb, p_sums, mix, o_t, eps, hc_eps, iterations, D, SLICES: tl.constexpr, S_BLOCK: tl.constexpr
):
    """Compute post [T, 4] and comb [T, 4, 4] of tokens o_t; a token below 0 is none.

    `mix` is `(p_base, p_scale, base_stride, scale_stride)`.
    """
    p_base, p_scale, base_stride, scale_stride = mix
    mask = o_t >= 0
    rms = inverse_rms(p_sums, o_t, eps, D, 24, SLICES, S_BLOCK)
    scale = tl.load(p_scale + scale_stride).to(tl.float32) * rms
    a = logits4(p_sums, p_base, base_stride, scale, o_t, 4, 24, SLICES, S_BLOCK)
    post = 2 * tl.sigmoid(a[0]), 2 * tl.sigmoid(a[1]), 2 * tl.sigmoid(a[2]), 2 * tl.sigmoid(a[3])
    _store4(p_post + o_t * 4, post, mask)
    scale = tl.load(p_scale + 2 * scale_stride).to(tl.float32) * rms
    a = logits4(p_sums, p_base, base_stride, scale, o_t, 8, 24, SLICES, S_BLOCK)
    b = logits4(p_sums, p_base, base_stride, scale, o_t, 12, 24, SLICES, S_BLOCK)
    c = logits4(p_sums, p_base, base_stride, scale, o_t, 16, 24, SLICES, S_BLOCK)
    d = logits4(p_sums, p_base, base_stride, scale, o_t, 20, 24, SLICES, S_BLOCK)
    a, b, c, d = sinkhorn(a, b, c, d, hc_eps, iterations)
    p = p_comb + o_t * 16
    _store4(p, a, mask)
    _store4(p + 4, b, mask)
    _store4(p + 8, c, mask)
    _store4(p + 12, d, mask)
