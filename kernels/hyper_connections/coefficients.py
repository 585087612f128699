"""Triton functions for the coefficients of hyper-connections of four streams, from sums over slices of the channels.

A program computes those of one token, or of a block of tokens. A coefficient is a scalar that every thread holds in a
register, or `[B]`, where a thread holds the elements of its tokens: the Sinkhorn iteration exchanges nothing between
threads. `p_sums` is the first sum of the token, or `[B, 1]`, and `exists` None, or which tokens exist.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _add4(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def slices_of(p_sums, exists, row, SLICES: tl.constexpr):
    """Load sum `row` of every slice, [SLICES] or [B, SLICES], and zeros up to a power of two.

    Not from the L1 cache: other programs may just have stored them.
    """
    o_s = tl.arange(0, triton.next_power_of_2(SLICES))
    if exists is not None:
        o_s = o_s[None, :]
    mask = o_s < SLICES
    if exists is not None:
        mask = mask & exists[:, None]
    return tl.load(p_sums + row * SLICES + o_s, mask=mask, other=0.0, cache_modifier=".cg")


@triton.jit
def inverse_rms_of_streams(p_sums, exists, eps, D, MIX: tl.constexpr, SLICES: tl.constexpr):
    """Return 1 / RMS of all streams. The sum of their squares follows those of the mix."""
    squares = slices_of(p_sums, exists, MIX, SLICES)
    return tl.rsqrt(tl.sum(squares, 0 if exists is None else 1) / (4 * D) + eps)


@triton.jit
def load4(p, stride):
    """Load four scalars as float32."""
    return (
        tl.load(p).to(tl.float32),
        tl.load(p + stride).to(tl.float32),
        tl.load(p + 2 * stride).to(tl.float32),
        tl.load(p + 3 * stride).to(tl.float32),
    )


@triton.jit
def _load_logits4(p_sums, exists, p_base, base_stride, row, SLICES: tl.constexpr):
    """Load the sums of slices and the biases of coefficients `row` to `row + 3`."""
    parts = (
        slices_of(p_sums, exists, row, SLICES),
        slices_of(p_sums, exists, row + 1, SLICES),
        slices_of(p_sums, exists, row + 2, SLICES),
        slices_of(p_sums, exists, row + 3, SLICES),
    )
    return parts, load4(p_base + row * base_stride, base_stride)


@triton.jit
def _logits4(loaded, exists, scale):
    """Return four logits, `sum * scale + base`, from the result of `_load_logits4`."""
    parts, b = loaded
    a0, a1, a2, a3 = tl.reduce(parts, 0 if exists is None else 1, _add4)
    return a0 * scale + b[0], a1 * scale + b[1], a2 * scale + b[2], a3 * scale + b[3]


@triton.jit
def logits4(p_sums, exists, p_base, base_stride, scale, row, SLICES: tl.constexpr):
    """Return the logits of coefficients `row` to `row + 3`."""
    return _logits4(_load_logits4(p_sums, exists, p_base, base_stride, row, SLICES), exists, scale)


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
def _store4(p, exists, values):
    tl.store(p, values[0], mask=exists)
    tl.store(p + 1, values[1], mask=exists)
    tl.store(p + 2, values[2], mask=exists)
    tl.store(p + 3, values[3], mask=exists)


@triton.jit
def load_coefficient_inputs(p_sums, exists, mix, SLICES: tl.constexpr):
    """Load the inputs of post and comb but the RMS. `mix` begins with `p_base, p_scale, base_stride, scale_stride`."""
    p_base, p_scale, base_stride, scale_stride = mix[0], mix[1], mix[2], mix[3]
    logits = (
        _load_logits4(p_sums, exists, p_base, base_stride, 4, SLICES),
        _load_logits4(p_sums, exists, p_base, base_stride, 8, SLICES),
        _load_logits4(p_sums, exists, p_base, base_stride, 12, SLICES),
        _load_logits4(p_sums, exists, p_base, base_stride, 16, SLICES),
        _load_logits4(p_sums, exists, p_base, base_stride, 20, SLICES),
    )
    return logits, tl.load(p_scale + scale_stride).to(tl.float32), tl.load(p_scale + 2 * scale_stride).to(tl.float32)


@triton.jit
def store_coefficients(p_post, p_comb, inputs, exists, rms, hc_eps, iterations):
    """Compute post [4] and comb [4, 4] of tokens from the result of `load_coefficient_inputs`."""
    logits, post_scale, comb_scale = inputs
    a = _logits4(logits[0], exists, post_scale * rms)
    post = 2 * tl.sigmoid(a[0]), 2 * tl.sigmoid(a[1]), 2 * tl.sigmoid(a[2]), 2 * tl.sigmoid(a[3])
    _store4(p_post, exists, post)
    a, b = _logits4(logits[1], exists, comb_scale * rms), _logits4(logits[2], exists, comb_scale * rms)
    c, d = _logits4(logits[3], exists, comb_scale * rms), _logits4(logits[4], exists, comb_scale * rms)
    a, b, c, d = sinkhorn(a, b, c, d, hc_eps, iterations)
    _store4(p_comb, exists, a)
    _store4(p_comb + 4, exists, b)
    _store4(p_comb + 8, exists, c)
    _store4(p_comb + 12, exists, d)
