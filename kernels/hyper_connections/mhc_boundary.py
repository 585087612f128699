"""`mhc_boundary`, and the kernels of its siblings, which leave out its first or its last part.

With `peers` the output is this rank's part of a sum over ranks, which one launch adds up (device/exchange.py). In two
launches, of more tokens, an all-reduce before them is as fast.

A program takes a slice of the channels of a token, or of 16 tokens: it computes the new streams and the slice's share
of the mix, a product with `fn`, and of the sum of squares. What is left needs the sums of all slices: coefficients, the
mixed input and its norm.

Few tokens: one launch. The last program of a token to arrive at its counter finishes the token. Programs do not wait
for each other, so a launch cannot hang, whatever the order of its CTAs and whatever else runs on the GPU.

More tokens: a second launch finishes, a program for each token, or two. One program would have to finish 16 tokens, and
more could do that in one launch only if they waited for each other. bfloat16 streams are multiplied on tensor cores
with `fn` as a sum of three bfloat16, which is exact. Of few tokens, each program rounds its part of `fn`; of many, a
small launch does it before for all of them.

With `dsv4.batch_invariant="step"`, more tokens have the sums of one launch: a program keeps its columns of `fn` in
registers and takes token after token, and the second launch finishes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.common.invariance import STEP, TOKENS
from ...reference.hyper_connections.mhc_boundary import MhcBoundary
from ..device.exchange import ExchangeShape, Peers, received_sum, send
from ..device.norm import load_weight, rms_norm
from ..device.strided import Strided
from ..host.gpu import gpu_of
from ..host.launch import launch_kernel
from ..host.pdl import pdl_arguments
from ..host.semaphores import arrival_counters, arrive
from .coefficients import inverse_rms_of_streams, load_coefficient_inputs, logits4, store_coefficients
from .streams import (
    add_squares,
    load_and_return,
    load_coefficients,
    load_fn,
    load_output,
    load_streams,
    return_output,
    store_sums,
)

STREAMS = 4
"""Streams that the kernels are written for."""
MAX_DIM = 16384
"""Most channels of a stream: one program norms a row in its registers."""
MAX_ONE_LAUNCH = 8
"""Most tokens of one launch: each token's programs read all of `fn`."""
CHANNELS = 128
"""Channels of a slice for each 4 warps: a warp then adds up all slices of a token of up to 8192 channels."""
TILE_TOKENS = 16
"""Tokens of a program that uses tensor cores, the smallest side of their tiles."""
FEW_TOKENS = 256
"""Most tokens of a launch that leaves SMs idle: its programs take few and large steps, with more warps for more than
`FEW_TOKENS // 4` tokens, and others compute coefficients, whose Sinkhorn iteration takes as long as the rest."""
COEFFICIENTS_TOKENS = 32
"""Tokens per program that computes coefficients, unless they are few."""
FEW_CHANNELS = 128
"""Channels of a step of a program of so few tokens."""
MANY_TILE_TOKENS, MANY_STEP, MANY_STAGES = 64, 32, 2
"""Tokens, channels of a step, and stages of a program of many tokens; its registers hold the streams of a step."""
MANY_TOKENS, MANY_CHANNELS = 1024, 256
"""Most tokens with slices of MANY_CHANNELS, so that every SM has a program; slices of more are twice as large."""
FN_PARTS = 3
"""bfloat16 summands of a float32 of `fn`."""
FN_COLUMNS = 256
"""Columns of `fn` that a program rounds."""
MAILBOX_WORDS = 512
"""Words of a mailbox: twice the output of a program, CHANNELS elements for each 4 of 8 warps."""
EXCHANGE_CTAS = 512
"""CTAs that have mailboxes."""


class Mix(NamedTuple):
    """Arguments of a mix: `iterations` is 0 if the streams end, with 4 coefficients instead of 24."""

    fn: Tensor
    base: Tensor
    scale: Tensor
    norm_weight: Tensor
    norm_eps: float
    hc_eps: float
    iterations: int


class Shape(NamedTuple):
    """Compile-time sizes of a launch.

    Attributes:
        dim, channels: channels of a stream, and of a slice.
        mix, mix_block: rows of `fn`, and them padded to the rows of a tile.
    """

    dim: int
    channels: int
    mix: int
    mix_block: int


class ManyShape(NamedTuple):
    """Compile-time sizes of a program of many tokens.

    Attributes:
        tokens, step: tokens of a tile, and channels of a step.
        parts: bfloat16 summands of a float32 of `fn`.
        ptx: whether PTX is compiled.
    """

    tokens: int
    step: int
    parts: int
    ptx: bool


class Results(NamedTuple):
    """Results of a launch; without a post of a previous sub-layer there are no new streams, at the end only y."""

    streams: Tensor | None
    y: Tensor
    post: Tensor | None
    comb: Tensor | None


@triton.jit
def _finish(results, p_sums, streams, mix, token, scalars, SHAPE: tl.constexpr):
    """Compute the mixed and normed input of the sub-layer, y [T, D], and the coefficients of `token`."""
    D: tl.constexpr = SHAPE.dim
    D_BLOCK: tl.constexpr = triton.next_power_of_2(D)
    MIX: tl.constexpr = SHAPE.mix
    SLICES: tl.constexpr = (D + SHAPE.channels - 1) // SHAPE.channels
    p_x, strides = streams
    eps, hc_eps, iterations = scalars
    p_y, p_post, p_comb = results
    p_base, p_scale, base_stride, _, p_norm, norm_stride = mix
    o_d = tl.arange(0, D_BLOCK).to(tl.int64)
    mask = (o_d < D)[None, :]
    x0, x1, x2, x3 = load_streams(p_x, strides, token, o_d, mask)
    weight = load_weight(p_norm, norm_stride, D, D_BLOCK)
    p_sums += token * ((MIX + 1) * SLICES)
    inputs = None
    if p_post is not None:  # loaded before y is computed and stored: one wait for all loads
        inputs = load_coefficient_inputs(p_sums, None, mix, SLICES)
    rms = inverse_rms_of_streams(p_sums, None, eps, D, MIX, SLICES)
    scale = tl.load(p_scale).to(tl.float32) * rms
    a0, a1, a2, a3 = logits4(p_sums, None, p_base, base_stride, scale, 0, SLICES)
    a0, a1, a2, a3 = tl.sigmoid(a0) + hc_eps, tl.sigmoid(a1) + hc_eps, tl.sigmoid(a2) + hc_eps, tl.sigmoid(a3) + hc_eps
    y = a0 * x0.to(tl.float32) + a1 * x1.to(tl.float32) + a2 * x2.to(tl.float32) + a3 * x3.to(tl.float32)
    y = rms_norm(y.to(p_y.dtype.element_ty).to(tl.float32), weight, eps, D)
    tl.store(p_y + token * D + o_d[None, :], y.to(p_y.dtype.element_ty), mask=mask)
    if p_post is not None:
        p_post, p_comb = p_post + token * 4, p_comb + token * 16
        store_coefficients(p_post, p_comb, inputs, None, rms, hc_eps, iterations)


@triton.jit
def _finish_coefficients(results, p_sums, mix, token, exists, scalars, SHAPE: tl.constexpr):
    """Compute post and comb of `token`, which `_finish` does otherwise, or of those of a block that exist."""
    MIX: tl.constexpr = SHAPE.mix
    SLICES: tl.constexpr = (SHAPE.dim + SHAPE.channels - 1) // SHAPE.channels
    eps, hc_eps, iterations = scalars
    p_post, p_comb = results[1] + token * 4, results[2] + token * 16
    first = token * ((MIX + 1) * SLICES)
    if exists is not None:
        first = first[:, None]
    p_sums += first
    rms = inverse_rms_of_streams(p_sums, exists, eps, SHAPE.dim, MIX, SLICES)
    inputs = load_coefficient_inputs(p_sums, exists, mix, SLICES)
    store_coefficients(p_post, p_comb, inputs, exists, rms, hc_eps, iterations)


@triton.jit
def mhc_token_kernel(
    p_streams_out,  # [T, 4, D] contiguous; None if the streams are as they were
    results,  # y [T, D]; post [T, 4] and comb [T, 4, 4], or None; contiguous
    p_sums,  # [T, MIX + 1, SLICES] float32, contiguous: shares of the mix, and of the sum of squares
    p_counters,  # [T] int32 zeros: slices that have arrived; None if a second launch finishes
    p_streams,  # [T, 4, D]
    returned,  # output [T, D], post [T, 4], comb [T, 4, 4] of the sub-layer, or None
    p_fn,  # [MIX, 4 * D]
    mix,  # base, scale and their strides, norm_weight and its stride
    streams_strides,
    returned_strides,
    fn_strides,
    scalars,  # eps of the norms; eps and iterations of the coefficients
    peers,  # `Peers`, or None
    SHAPE: tl.constexpr,
    EXCHANGE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program p takes slice p % SLICES of token p // SLICES."""
    D: tl.constexpr = SHAPE.dim
    C: tl.constexpr = SHAPE.channels
    MIX: tl.constexpr = SHAPE.mix
    MIX_BLOCK: tl.constexpr = SHAPE.mix_block
    SLICES: tl.constexpr = (D + C - 1) // C
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    token = (program // SLICES).to(tl.int64)
    o_c = (program % SLICES * C + tl.arange(0, C)).to(tl.int64)
    m_c, o_m = o_c < D, tl.arange(0, MIX_BLOCK)
    # No kernel of this step writes fn, so its loads may start before the previous kernel ends.
    f = load_fn(p_fn, fn_strides, o_m, o_c, m_c, SHAPE)
    if PDL:
        tl.extra.cuda.gdc_wait()
    after, coefficients, z, mask = Strided(returned, returned_strides), None, None, m_c[None, :]
    part, count = None, None
    if peers is not None:
        part = load_output(after, token, o_c, mask)
        count = send(peers, program, part, EXCHANGE)
    if returned is not None:
        coefficients = load_coefficients(after, token, token >= 0)
    x = load_streams(p_streams, streams_strides, token, o_c, mask)
    if peers is not None:
        z = received_sum(peers, count, program, part, EXCHANGE)
    elif returned is not None:
        z = load_output(after, token, o_c, mask).to(tl.float32)
    x = return_output(p_streams_out, coefficients, z, x, token, o_c, mask, D)
    store_sums(p_sums, token, program % SLICES, f, x, o_m, MIX, SLICES)
    if p_counters is not None:
        p_counter = p_counters + token
        if arrive(p_counter) == SLICES - 1:
            tl.store(p_counter, 0)
            if p_streams_out is None:
                _finish(results, p_sums, Strided(p_streams, streams_strides), mix, token, scalars, SHAPE)
            else:
                _finish(results, p_sums, Strided(p_streams_out, (4 * D, D, 1)), mix, token, scalars, SHAPE)


@triton.jit(do_not_specialize=["tokens", "tokens_each"])
def mhc_slices_kernel(
    p_streams_out,  # [T, 4, D] contiguous; None if the streams are as they were
    p_sums,  # [T, MIX + 1, SLICES] float32, contiguous
    p_streams,  # [T, 4, D]
    returned,  # as in mhc_token_kernel, or None
    p_fn,  # [MIX, 4 * D]
    streams_strides,
    returned_strides,
    fn_strides,
    tokens,
    tokens_each,  # of a program
    SHAPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program p takes slice p % SLICES of tokens p // SLICES * tokens_each and on, with the sums of mhc_token_kernel.

    Columns of `fn` stay in registers from token to token.
    """
    D: tl.constexpr = SHAPE.dim
    C: tl.constexpr = SHAPE.channels
    MIX: tl.constexpr = SHAPE.mix
    SLICES: tl.constexpr = (D + C - 1) // C
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    o_c = (program % SLICES * C + tl.arange(0, C)).to(tl.int64)
    m_c, o_m = o_c < D, tl.arange(0, SHAPE.mix_block)
    f = load_fn(p_fn, fn_strides, o_m, o_c, m_c, SHAPE)
    if PDL:
        tl.extra.cuda.gdc_wait()
    streams, after = Strided(p_streams, streams_strides), Strided(returned, returned_strides)
    first = (program // SLICES * tokens_each).to(tl.int64)
    for i in range(tl.minimum(tokens_each, tokens - first)):
        token = first + i
        coefficients = None
        if returned is not None:
            coefficients = load_coefficients(after, token, token >= 0)
        x = load_and_return(p_streams_out, streams, after, coefficients, token, o_c, m_c[None, :], D)
        store_sums(p_sums, token, program % SLICES, f, x, o_m, MIX, SLICES)


@triton.jit
def _round(f):
    """Return bfloat16 of float32, and the exact rest. By bits: conversions go through a slow unit."""
    bits = f.to(tl.int32, bitcast=True) + 0x8000
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), f - (bits & -65536).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["tokens"])
def mhc_tokens_kernel(
    p_streams_out,  # [T, 4, D] bfloat16, contiguous; None if the streams are as they were
    p_sums,  # [T, MIX + 1, SLICES] float32, contiguous
    inputs,  # streams [T, 4, D] bfloat16; `returned` as above, or None; fn [MIX, 4 * D]
    strides,  # of the inputs
    tokens,
    SHAPE: tl.constexpr,
    STEP: tl.constexpr,
    TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program p takes slice p % SLICES of tokens p // SLICES * TOKENS and on."""
    p_streams, returned, p_fn = inputs
    streams_strides, returned_strides, fn_strides = strides
    D: tl.constexpr = SHAPE.dim
    C: tl.constexpr = SHAPE.channels
    MIX: tl.constexpr = SHAPE.mix
    MIX_BLOCK: tl.constexpr = SHAPE.mix_block
    SLICES: tl.constexpr = (D + C - 1) // C
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    program = tl.program_id(0)
    o_t = (program // SLICES).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    m_t = o_t < tokens
    first, o_b, o_m = program % SLICES * C, tl.arange(0, STEP), tl.arange(0, MIX_BLOCK)
    squares = tl.zeros((TOKENS, STEP), tl.float32)
    if p_streams_out is not None:
        streams, after = Strided(p_streams, streams_strides), Strided(returned, returned_strides)
        coefficients = load_coefficients(after, o_t[:, None], m_t[:, None])
        for c in range(0, C, STEP):
            o_c = (first + c + o_b).to(tl.int64)
            m_x = m_t[:, None] & (o_c < D)[None, :]
            x = load_and_return(p_streams_out, streams, after, coefficients, o_t[:, None], o_c, m_x, D)
            squares = add_squares(squares, x)
        # Loaded again below: as an operand that is computed, every warp would compute all of it.
        tl.debug_barrier()
    sums = tl.zeros((TOKENS, MIX_BLOCK), tl.float32)
    for k in range(0, 4 * C, STEP):
        o_c = (first + k % C + o_b).to(tl.int64)
        m_x, m_f = m_t[:, None] & (o_c < D)[None, :], (o_c < D)[:, None] & (o_m < MIX)[None, :]
        if p_streams_out is None:
            p = p_streams + o_t[:, None] * streams_strides[0] + k // C * streams_strides[1]
            x = tl.load(p + o_c[None, :] * streams_strides[2], mask=m_x, other=0.0)
            squares += x.to(tl.float32) * x.to(tl.float32)
        else:
            x = tl.load(p_streams_out + o_t[:, None] * (4 * D) + k // C * D + o_c[None, :], mask=m_x, other=0.0)
        p = p_fn + (k // C * D + o_c)[:, None] * fn_strides[1] + o_m.to(tl.int64)[None, :] * fn_strides[0]
        f0, rest = _round(tl.load(p, mask=m_f, other=0.0).to(tl.float32))
        f1, rest = _round(rest)
        f2, rest = _round(rest)
        sums = tl.dot(x, f2, tl.dot(x, f1, tl.dot(x, f0, sums)))
    p = p_sums + o_t * ((MIX + 1) * SLICES) + program % SLICES
    tl.store(p[:, None] + o_m[None, :] * SLICES, sums, mask=m_t[:, None] & (o_m < MIX)[None, :])
    tl.store(p + MIX * SLICES, tl.sum(squares, 1), mask=m_t)


@triton.jit
def mhc_fn_kernel(
    p_parts,  # [FN_PARTS, MIX_BLOCK, 4 * D] bfloat16, contiguous
    p_fn,  # [MIX, 4 * D]
    fn_strides,
    SHAPE: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write COLUMNS columns of `fn` as a sum of bfloat16, with rows of zeros up to MIX_BLOCK."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    K: tl.constexpr = 4 * SHAPE.dim
    MIX_BLOCK: tl.constexpr = SHAPE.mix_block
    o_m, o_k = tl.arange(0, MIX_BLOCK), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    p = p_fn + o_m.to(tl.int64)[:, None] * fn_strides[0] + o_k.to(tl.int64)[None, :] * fn_strides[1]
    rest = tl.load(p, mask=(o_m < SHAPE.mix)[:, None] & (o_k < K)[None, :], other=0.0).to(tl.float32)
    for part in tl.static_range(PARTS):
        f, rest = _round(rest)
        tl.store(p_parts + (part * MIX_BLOCK + o_m)[:, None] * K + o_k[None, :], f, mask=(o_k < K)[None, :])


@triton.jit
def _add_products(sums, x, p_parts, m_c, PARTS: tl.constexpr, SIZE: tl.constexpr):
    """Add the product of streams [T, C] and `fn` [C, MIX_BLOCK], whose parts have SIZE elements; small parts first."""
    for part in tl.static_range(PARTS - 1, -1, -1):
        sums = tl.dot(x, tl.load(p_parts + part * SIZE, mask=m_c, other=0.0), sums)
    return sums


@triton.jit
def _once(x):
    """Return bfloat16 `x` through a move with side effects, so that Triton does not compute it again as an operand."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.bfloat16, is_pure=False, pack=2)


@triton.jit(do_not_specialize=["tokens"])
def mhc_many_tokens_kernel(
    p_streams_out,  # [T, 4, D] bfloat16, contiguous; None if the streams are as they were
    p_sums,  # [T, MIX + 1, SLICES] float32, contiguous
    p_parts,  # [FN_PARTS, MIX_BLOCK, 4 * D] bfloat16, contiguous
    inputs,  # streams [T, 4, D] bfloat16; `returned` as above, or None
    strides,  # of the inputs
    tokens,
    SHAPE: tl.constexpr,
    MANY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program p takes slice p % SLICES of tokens p // SLICES * TOKENS and on; new streams are operands as they are."""
    streams, after = Strided(inputs[0], strides[0]), Strided(inputs[1], strides[1])
    TOKENS: tl.constexpr = MANY.tokens
    STEP: tl.constexpr = MANY.step
    D: tl.constexpr = SHAPE.dim
    C: tl.constexpr = SHAPE.channels
    MIX: tl.constexpr = SHAPE.mix
    MIX_BLOCK: tl.constexpr = SHAPE.mix_block
    SLICES: tl.constexpr = (D + C - 1) // C
    SIZE: tl.constexpr = MIX_BLOCK * 4 * D
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    program = tl.program_id(0)
    o_t = (program // SLICES).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    m_t = o_t < tokens
    first, o_b, o_m = program % SLICES * C, tl.arange(0, STEP), tl.arange(0, MIX_BLOCK)
    coefficients = None
    if inputs[1] is not None:
        coefficients = load_coefficients(after, o_t[:, None], m_t[:, None])
    squares, sums = tl.zeros((TOKENS, STEP), tl.float32), tl.zeros((TOKENS, MIX_BLOCK), tl.float32)
    for c in range(0, C, STEP):
        o_c = (first + c + o_b).to(tl.int64)
        m_c = o_c < D
        if D % C == 0:
            m_c = tl.full((STEP,), True, tl.int1)
        x = load_and_return(
            p_streams_out, streams, after, coefficients, o_t[:, None], o_c, m_t[:, None] & m_c[None, :], D
        )
        squares = add_squares(squares, x)
        if MANY.ptx and inputs[1] is not None:
            x = _once(x[0]), _once(x[1]), _once(x[2]), _once(x[3])
        p = p_parts + o_m[None, :] * (4 * D) + o_c[:, None]
        # Tensor cores round sums towards zero: those of a step are added to the others as float32.
        part = tl.zeros((TOKENS, MIX_BLOCK), tl.float32)
        part = _add_products(part, x[0], p, m_c[:, None], MANY.parts, SIZE)
        part = _add_products(part, x[1], p + D, m_c[:, None], MANY.parts, SIZE)
        part = _add_products(part, x[2], p + 2 * D, m_c[:, None], MANY.parts, SIZE)
        sums += _add_products(part, x[3], p + 3 * D, m_c[:, None], MANY.parts, SIZE)
    p = p_sums + o_t * ((MIX + 1) * SLICES) + program % SLICES
    tl.store(p[:, None] + o_m[None, :] * SLICES, sums, mask=m_t[:, None] & (o_m < MIX)[None, :])
    tl.store(p + MIX * SLICES, tl.sum(squares, 1), mask=m_t)


@triton.jit(do_not_specialize=["tokens"])
def mhc_finish_kernel(
    results,  # y [T, D]; post [T, 4] and comb [T, 4, 4], or None; contiguous
    p_sums,  # [T, MIX + 1, SLICES] float32, contiguous
    streams,  # `Strided` [T, 4, D], the new ones
    mix,  # base, scale and their strides, norm_weight and its stride
    scalars,  # eps of the norms; eps and iterations of the coefficients
    tokens,
    SHAPE: tl.constexpr,
    APART: tl.constexpr,
    PDL: tl.constexpr,
):
    """Finish a token with each program; with APART, coefficients of APART tokens with each of the first ones."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    if APART > 0:
        token -= tl.cdiv(tokens, APART)
        if token < 0:
            block = tl.program_id(0).to(tl.int64) * APART
            if APART == 1:
                _finish_coefficients(results, p_sums, mix, block, None, scalars, SHAPE)
            else:
                o_t = block + tl.arange(0, APART)
                _finish_coefficients(results, p_sums, mix, o_t, o_t < tokens, scalars, SHAPE)
        else:
            _finish((results[0], None, None), p_sums, streams, mix, token, scalars, SHAPE)
    else:
        _finish(results, p_sums, streams, mix, token, scalars, SHAPE)


def launch(
    streams: Tensor,
    returned: tuple[Tensor, Tensor, Tensor] | None,
    mix: Mix,
    peers: Peers | None = None,
    rank: int = 0,
    invariant: str = "",
) -> Results:
    """Compute the streams after `returned`, the output, post and comb of a sub-layer, and `mix` them.

    With `peers`, the output is the summand of `rank` in a sum over ranks. `invariant` is a value of
    `dsv4.batch_invariant`: with "step", calls of any size have the sums of one launch, with "tokens" those of 9 to 64
    tokens.
    """
    tokens, count, dim = streams.shape
    ends = mix.iterations == 0
    results = Results(
        None if returned is None else streams.new_empty(streams.shape),
        streams.new_empty((tokens, dim)),
        None if ends else streams.new_empty((tokens, count), dtype=torch.float32),
        None if ends else streams.new_empty((tokens, count, count), dtype=torch.float32),
    )
    if tokens == 0:
        return results
    rows = mix.fn.shape[0]
    one_launch = tokens <= MAX_ONE_LAUNCH and invariant != TOKENS
    tiles = streams.dtype is torch.bfloat16 and not one_launch and invariant != STEP
    many = tiles and tokens > FEW_TOKENS and not invariant
    channels, slices = _slices_of_many(tokens, dim) if many else _slices(dim)
    sums = streams.new_empty((tokens, rows + 1, slices), dtype=torch.float32)
    of_mix = mix.base, mix.scale, mix.base.stride(0), mix.scale.stride(0), mix.norm_weight, mix.norm_weight.stride(0)
    strides = None if returned is None else tuple(tensor.stride() for tensor in returned)
    scalars = mix.norm_eps, mix.hc_eps, mix.iterations
    shape = Shape(dim, channels, rows, triton.next_power_of_2(rows))
    counters = arrival_counters(tokens, streams.device) if one_launch else None
    exchange = None if peers is None else ExchangeShape(rank, len(peers.mailboxes), EXCHANGE_CTAS, MAILBOX_WORDS)
    if many:
        _launch_many(
            streams, returned, mix.fn, shape._replace(mix_block=max(16, shape.mix_block)), results.streams, sums
        )
    elif tiles:
        programs = triton.cdiv(tokens, TILE_TOKENS) * slices
        launch_kernel(
            mhc_tokens_kernel, (programs,), results.streams, sums, (streams, returned, mix.fn),
            (streams.stride(), strides, mix.fn.stride()), tokens,
            SHAPE=shape._replace(mix_block=max(16, shape.mix_block)), TOKENS=TILE_TOKENS,
            **_tile(1 if invariant else tokens, channels),
            **pdl_arguments(streams.device, programs),
        )  # fmt: skip
    elif invariant == STEP and not one_launch:
        groups = max(1, ctas_per_sm(streams) * gpu_of(streams.device).sms // slices)
        each = triton.cdiv(tokens, groups)
        programs = triton.cdiv(tokens, each) * slices
        launch_kernel(
            mhc_slices_kernel, (programs,), results.streams, sums, streams, returned, mix.fn, streams.stride(), strides,
            mix.fn.stride(), tokens, each, SHAPE=shape, num_warps=_warps(dim), num_stages=1,
            **pdl_arguments(streams.device, programs),
        )  # fmt: skip
    else:
        programs = tokens * slices
        launch_kernel(
            mhc_token_kernel, (programs,), results.streams, tuple(results[1:]), sums, counters, streams, returned,
            mix.fn, of_mix, streams.stride(), strides, mix.fn.stride(), scalars, peers, SHAPE=shape,
            EXCHANGE=exchange, num_warps=_warps(dim), **pdl_arguments(streams.device, programs),
        )  # fmt: skip
    if counters is None:
        new = streams if results.streams is None else results.streams
        apart = 0 if ends else 1 if invariant or tokens <= FEW_TOKENS else COEFFICIENTS_TOKENS
        programs = tokens + (triton.cdiv(tokens, apart) if apart else 0)
        launch_kernel(
            mhc_finish_kernel, (programs,), tuple(results[1:]), sums, Strided(new, new.stride()), of_mix, scalars,
            tokens, SHAPE=shape, APART=apart, num_warps=_warps(dim), **pdl_arguments(streams.device, programs),
        )  # fmt: skip
    return results


def _launch_many(
    streams: Tensor,
    returned: tuple[Tensor, Tensor, Tensor] | None,
    fn: Tensor,
    shape: Shape,
    new: Tensor | None,
    sums: Tensor,
) -> None:
    """Compute the new streams and the sums of slices of many tokens."""
    (tokens, _, dim), device = streams.shape, streams.device
    parts, programs = streams.new_empty((FN_PARTS, shape.mix_block, 4 * dim)), triton.cdiv(4 * dim, FN_COLUMNS)
    launch_kernel(
        mhc_fn_kernel, (programs,), parts, fn, fn.stride(), SHAPE=shape, COLUMNS=FN_COLUMNS, PARTS=FN_PARTS,
        num_warps=4, **pdl_arguments(device, programs),
    )  # fmt: skip
    programs = triton.cdiv(tokens, MANY_TILE_TOKENS) * triton.cdiv(dim, shape.channels)
    strides = streams.stride(), None if returned is None else tuple(tensor.stride() for tensor in returned)
    ptx = gpu_of(device).backend == "cuda"
    launch_kernel(
        mhc_many_tokens_kernel, (programs,), new, sums, parts, (streams, returned), strides, tokens, SHAPE=shape,
        MANY=ManyShape(MANY_TILE_TOKENS, min(MANY_STEP, shape.channels), FN_PARTS, ptx), num_warps=4,
        num_stages=MANY_STAGES, **pdl_arguments(device, programs),
    )  # fmt: skip


def _warps(dim: int) -> int:
    """Return the warps of a program that norms a row of `dim` in its registers."""
    return 4 if dim <= 4096 else 8


def _tile(tokens: int, channels: int) -> dict[str, int]:
    """Return channels of a step, warps and stages of a program of few tokens."""
    return {"STEP": min(FEW_CHANNELS, channels), "num_warps": 4 if tokens <= FEW_TOKENS // 4 else 8, "num_stages": 1}


def _slices(dim: int) -> tuple[int, int]:
    """Return the channels of a slice, and the slices of a row."""
    channels = min(CHANNELS * _warps(dim) // 4, max(16, triton.next_power_of_2(dim)))
    return channels, triton.cdiv(dim, channels)


def _slices_of_many(tokens: int, dim: int) -> tuple[int, int]:
    """Return the channels of a slice, and the slices of a row, of a launch of many tokens."""
    channels = MANY_CHANNELS if tokens <= MANY_TOKENS else 2 * MANY_CHANNELS
    channels = min(channels, max(MANY_STEP, triton.next_power_of_2(dim)))
    return channels, triton.cdiv(dim, channels)


def ctas_per_sm(streams: Tensor) -> int:
    """Return how many CTAs of the first launch find registers on an SM at once."""
    return 2 if _warps(streams.shape[2]) == 4 else 1


def why_unsupported(streams: Tensor) -> str:
    """Return why the kernels cannot take `streams` `[T, N, D]`, "" if they can."""
    count, dim = streams.shape[1:]
    if isinstance(count, int) and count != STREAMS:
        return f"{count} streams, the kernels are written for {STREAMS}"
    if isinstance(dim, int) and not 0 < dim <= MAX_DIM:
        return f"{dim} channels, the kernels take 1 to {MAX_DIM}"
    return ""


def mhc_boundary(a: MhcBoundary) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the op. The order of sums is not the reference's, which moves results by a rounding."""
    return _returned(launch(a.streams, (a.output, a.post, a.comb), Mix(*a[4:])))


def invariant_mhc_boundary(a: MhcBoundary, level: str = TOKENS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the op with the sums of one launch for calls of any size."""
    return _returned(launch(a.streams, (a.output, a.post, a.comb), Mix(*a[4:]), invariant=level))


def _returned(results: Results) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert results.streams is not None and results.post is not None and results.comb is not None
    return results.streams, results.y, results.post, results.comb


def why_unsupported_mhc_boundary(a: MhcBoundary) -> str:
    """Return why a call cannot use the kernels, "" if it can."""
    return why_unsupported(a.streams)


def all_reduce_mhc_boundary(a: MhcBoundary, peers: Peers, rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run `mhc_boundary` on the sum of `a.output` over ranks, for calls that `why_unsupported_over_ranks` takes."""
    return _returned(launch(a.streams, (a.output, a.post, a.comb), Mix(*a[4:]), peers, rank))


def why_unsupported_over_ranks(a: MhcBoundary) -> str:
    """Return why a call cannot exchange its output with other ranks, "" if it can."""
    most = min(EXCHANGE_CTAS, ctas_per_sm(a.streams) * gpu_of(a.streams.device).sms)
    if a.output.dtype is not a.streams.dtype:
        return f"the output is {a.output.dtype}, the streams are {a.streams.dtype}"
    if a.output.element_size() != 2:
        return f"the output is {a.output.dtype}, ranks exchange 16-bit elements"
    tokens, _, dim = a.streams.shape
    if tokens > MAX_ONE_LAUNCH:
        return f"{tokens} tokens, one launch takes {MAX_ONE_LAUNCH}"
    if tokens * _slices(dim)[1] > most:
        return f"{tokens * _slices(dim)[1]} CTAs may not be resident at once, {most} are"
    return why_unsupported(a.streams)
