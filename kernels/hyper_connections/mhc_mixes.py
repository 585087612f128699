"""`mhc_mixes`: sums over slices of the channels, by kernels of `mhc_boundary`, then the coefficients of each token.

Few tokens, and streams that are not bfloat16: a program takes a slice of a token, its share of the mix with `fn` and of
the sum of squares. Up to 8 tokens are one launch: the last program of a token to arrive at its counter computes the
coefficients. More bfloat16 tokens are multiplied on tensor cores with `fn` as a sum of three bfloat16, which is exact.
After these and after 8 tokens a second launch computes the coefficients, of one token or of 32 in a program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..host.gpu import gpu_of
from ..host.launch import launch_kernel
from ..host.pdl import pdl_arguments
from ..host.semaphores import arrival_counters, arrive
from . import mhc_boundary as boundary
from .coefficients import inverse_rms_of_streams, load_coefficient_inputs, logits4, store_coefficients
from .mhc_boundary import ManyShape, Shape

Results = tuple[Tensor, Tensor, Tensor]


@triton.jit
def _coefficients(results, p_sums, mix, token, exists, scalars, SHAPE: tl.constexpr):
    """Compute pre, post and comb of `token`, or of those of a block of tokens `[B]` that exist."""
    MIX: tl.constexpr = SHAPE.mix
    SLICES: tl.constexpr = (SHAPE.dim + SHAPE.channels - 1) // SHAPE.channels
    eps, hc_eps, iterations = scalars
    p_pre, p_post, p_comb = results
    first = token * ((MIX + 1) * SLICES)
    if exists is not None:
        first = first[:, None]
    p_sums += first
    rms = inverse_rms_of_streams(p_sums, exists, eps, SHAPE.dim, MIX, SLICES)
    scale = tl.load(mix[1]).to(tl.float32) * rms
    pre = logits4(p_sums, exists, mix[0], mix[2], scale, 0, SLICES)
    for n in tl.static_range(4):
        tl.store(p_pre + token * 4 + n, tl.sigmoid(pre[n]) + hc_eps, mask=exists)
    inputs = load_coefficient_inputs(p_sums, exists, mix, SLICES)
    store_coefficients(p_post + token * 4, p_comb + token * 16, inputs, exists, rms, hc_eps, iterations)


@triton.jit
def mhc_mixes_kernel(
    results,  # pre [T, 4], post [T, 4] and comb [T, 4, 4], float32, contiguous
    p_sums,  # [T, MIX + 1, SLICES] float32, contiguous: shares of the mix, and of the sum of squares
    p_counters,  # [T] int32 zeros: slices that have arrived; None if a second launch finishes
    p_streams,  # [T, 4, D]
    p_fn,  # [MIX, 4 * D]
    mix,  # base, scale and their strides
    strides,  # of streams and fn
    scalars,  # eps of the statistic; eps and iterations of the coefficients
    SHAPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program p takes slice p % SLICES of token p // SLICES."""
    streams_strides, fn_strides = strides
    D: tl.constexpr = SHAPE.dim
    C: tl.constexpr = SHAPE.channels
    MIX: tl.constexpr = SHAPE.mix
    SLICES: tl.constexpr = (D + C - 1) // C
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    token = (program // SLICES).to(tl.int64)
    o_c = (program % SLICES * C + tl.arange(0, C)).to(tl.int64)[None, :]
    o_m = tl.arange(0, SHAPE.mix_block).to(tl.int64)
    p_f = p_fn + o_m[:, None] * fn_strides[0] + o_c * fn_strides[1]
    m_f = (o_m < MIX)[:, None] & (o_c < D)
    # No kernel of this step writes fn, so its loads may start before the previous kernel ends.
    f0 = tl.load(p_f, mask=m_f, other=0.0).to(tl.float32)
    f1 = tl.load(p_f + D * fn_strides[1], mask=m_f, other=0.0).to(tl.float32)
    f2 = tl.load(p_f + 2 * D * fn_strides[1], mask=m_f, other=0.0).to(tl.float32)
    f3 = tl.load(p_f + 3 * D * fn_strides[1], mask=m_f, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    p_x = p_streams + token * streams_strides[0] + o_c * streams_strides[2]
    x0 = tl.load(p_x, mask=o_c < D, other=0.0).to(tl.float32)
    x1 = tl.load(p_x + streams_strides[1], mask=o_c < D, other=0.0).to(tl.float32)
    x2 = tl.load(p_x + 2 * streams_strides[1], mask=o_c < D, other=0.0).to(tl.float32)
    x3 = tl.load(p_x + 3 * streams_strides[1], mask=o_c < D, other=0.0).to(tl.float32)
    p = p_sums + token * ((MIX + 1) * SLICES) + program % SLICES
    tl.store(p + o_m * SLICES, tl.sum(f0 * x0 + f1 * x1 + f2 * x2 + f3 * x3, 1), mask=o_m < MIX)
    tl.store(p + MIX * SLICES + tl.arange(0, 1), tl.sum(x0 * x0 + x1 * x1 + x2 * x2 + x3 * x3, 1))
    if p_counters is not None:
        p_counter = p_counters + token
        if arrive(p_counter) == SLICES - 1:
            tl.store(p_counter, 0)
            _coefficients(results, p_sums, mix, token, None, scalars, SHAPE)


@triton.jit(do_not_specialize=["tokens"])
def mhc_coefficients_kernel(
    results,  # pre [T, 4], post [T, 4] and comb [T, 4, 4], float32, contiguous
    p_sums,  # [T, MIX + 1, SLICES] float32, contiguous
    mix,  # base, scale and their strides
    scalars,  # eps of the statistic; eps and iterations of the coefficients
    tokens,
    SHAPE: tl.constexpr,
    TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the coefficients of tokens [p * TOKENS, (p + 1) * TOKENS) in program p."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    first = tl.program_id(0).to(tl.int64) * TOKENS
    if TOKENS == 1:
        _coefficients(results, p_sums, mix, first, None, scalars, SHAPE)
    else:
        o_t = first + tl.arange(0, TOKENS)
        _coefficients(results, p_sums, mix, o_t, o_t < tokens, scalars, SHAPE)


def mhc_mixes(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_eps: float, hc_eps: float, iterations: int = 20
) -> Results:
    """Run the op. The order of sums is not the reference's, which moves coefficients by a rounding."""
    tokens, count, dim = streams.shape
    pre = streams.new_empty((tokens, count), dtype=torch.float32)
    results = pre, torch.empty_like(pre), streams.new_empty((tokens, count, count), dtype=torch.float32)
    if tokens == 0:
        return results
    one_launch = tokens <= boundary.MAX_ONE_LAUNCH
    tiles = streams.dtype is torch.bfloat16 and not one_launch
    many = tiles and tokens > boundary.FEW_TOKENS
    channels = _slice_of_many(tokens, dim) if many else _slice(dim)
    rows, slices = fn.shape[0], triton.cdiv(dim, channels)
    sums = streams.new_empty((tokens, rows + 1, slices), dtype=torch.float32)
    shape = Shape(dim, channels, rows, triton.next_power_of_2(rows))
    mix, scalars = (base, scale, base.stride(0), scale.stride(0)), (norm_eps, hc_eps, iterations)
    if many:
        _sum_many(streams, fn, sums, shape)
    elif tiles:
        programs = triton.cdiv(tokens, boundary.TILE_TOKENS) * slices
        launch_kernel(
            boundary.mhc_tokens_kernel, (programs,), None, sums, (streams, None, fn),
            (streams.stride(), None, fn.stride()), tokens, SHAPE=shape, TOKENS=boundary.TILE_TOKENS,
            STEP=min(boundary.FEW_CHANNELS, channels), num_warps=4 if tokens <= boundary.FEW_TOKENS // 4 else 8,
            num_stages=1, **pdl_arguments(streams.device, programs),
        )  # fmt: skip
    else:
        programs = tokens * slices
        counters = arrival_counters(tokens, streams.device) if one_launch else None
        launch_kernel(
            mhc_mixes_kernel, (programs,), results, sums, counters, streams, fn, mix, (streams.stride(), fn.stride()),
            scalars, SHAPE=shape, num_warps=_warps(dim), **pdl_arguments(streams.device, programs),
        )  # fmt: skip
    if not one_launch:
        block = 1 if tokens <= boundary.FEW_TOKENS else boundary.COEFFICIENTS_TOKENS
        programs = triton.cdiv(tokens, block)
        launch_kernel(
            mhc_coefficients_kernel, (programs,), results, sums, mix, scalars, tokens, SHAPE=shape, TOKENS=block,
            num_warps=1 if block == 1 else 4, **pdl_arguments(streams.device, programs),
        )  # fmt: skip
    return results


def _sum_many(streams: Tensor, fn: Tensor, sums: Tensor, shape: Shape) -> None:
    """Write the sums of slices of many tokens, after a launch that rounds all of `fn`."""
    (tokens, _, dim), device = streams.shape, streams.device
    columns, parts = boundary.FN_COLUMNS, boundary.FN_PARTS
    rounded, programs = streams.new_empty((parts, shape.mix_block, 4 * dim)), triton.cdiv(4 * dim, columns)
    launch_kernel(
        boundary.mhc_fn_kernel, (programs,), rounded, fn, fn.stride(), SHAPE=shape, COLUMNS=columns, PARTS=parts,
        num_warps=4, **pdl_arguments(device, programs),
    )  # fmt: skip
    programs = triton.cdiv(tokens, boundary.MANY_TILE_TOKENS) * triton.cdiv(dim, shape.channels)
    step = min(boundary.MANY_STEP, shape.channels)
    launch_kernel(
        boundary.mhc_many_tokens_kernel, (programs,), None, sums, rounded, (streams, None), (streams.stride(), None),
        tokens, SHAPE=shape, MANY=ManyShape(boundary.MANY_TILE_TOKENS, step, parts, gpu_of(device).backend == "cuda"),
        num_warps=4, num_stages=boundary.MANY_STAGES, **pdl_arguments(device, programs),
    )  # fmt: skip


def _warps(dim: int) -> int:
    """Return the warps of a program that sums a slice."""
    return 4 if dim <= 4096 else 8


def _slice(dim: int) -> int:
    """Return the channels of a slice of few tokens."""
    return int(min(boundary.CHANNELS * _warps(dim) // 4, max(16, triton.next_power_of_2(dim))))


def _slice_of_many(tokens: int, dim: int) -> int:
    """Return the channels of a slice of many tokens."""
    channels = boundary.MANY_CHANNELS if tokens <= boundary.MANY_TOKENS else 2 * boundary.MANY_CHANNELS
    return int(min(channels, max(boundary.MANY_STEP, triton.next_power_of_2(dim))))


def why_unsupported_mhc_mixes(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_eps: float, hc_eps: float, iterations: int = 20
) -> str:
    """Return why a call cannot use the kernels, "" if it can."""
    return boundary.why_unsupported(streams)
