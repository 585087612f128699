"""`compress_pairs`: a program for each token pools its pair, norms it, and keeps the token's row in the state.

A program may read a row of state that a later token of its request overwrites, so a step of several tokens has two
launches: the first reads and pools, the second writes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ...reference.preprocess.compress_pairs import RATIO as _RATIO
from ..device.norm import load_weight, rms_norm
from ..device.strided import Strided
from ..host.launch import launch_kernel
from ..host.pdl import pdl_arguments, pdl_prologue

RATIO = tl.constexpr(_RATIO)
MAX_DIM = 8192
"""Most channels, because values and gates of both tokens stay in the registers of one program."""
MAX_ROWS = 1024
"""Most rows of a request in the state: so many tokens a program looks ahead."""
WARP_CHANNELS = 256
"""Channels for a warp: two loads of 16 bytes of each row in each thread."""


class Tokens(NamedTuple):
    """Positions and requests of the tokens of a step, and how many tokens and requests there are."""

    p_positions: Any
    p_requests: Any
    strides: Any
    count: Any
    requests: Any


class Shape(NamedTuple):
    """Compile-time sizes of a launch.

    Attributes:
        dim, block: channels, and the power of two that holds them.
        rows, ahead: rows of a request in the state, and the power of two that holds them.
        pools, keeps: whether the launch pools pairs, and whether it writes the state.
    """

    dim: int
    block: int
    rows: int
    ahead: int
    pools: bool
    keeps: bool


@triton.jit
def load_token(tokens, row):
    """Load position and request, int64, of the token `row`, and whether it is live; one of no row is not."""
    exists = (row >= 0) & (row < tokens.count)
    position = tl.load(tokens.p_positions + row * tokens.strides[0], mask=exists, other=-1).to(tl.int64)
    request = tl.load(tokens.p_requests + row * tokens.strides[1], mask=exists, other=-1).to(tl.int64)
    return position, request, (position >= 0) & (request >= 0) & (request < tokens.requests)


@triton.jit
def load_inputs(p_row, strides, mask, o_d):
    """Load values and gates of a row, float32 `[1, BLOCK]` each."""
    p_values, p_gates = p_row
    values = tl.load(p_values + o_d * strides[0], mask=mask, other=0.0)
    return values, tl.load(p_gates + o_d * strides[1], mask=mask, other=0.0)


@triton.jit
def pool(even, odd):
    """Return the mean of two rows of values and gates with the softmax of the gates as weights."""
    top = tl.maximum(even[1], odd[1])
    first, second = tl.exp(even[1] - top), tl.exp(odd[1] - top)
    total = first + second
    return first / total * even[0] + second / total * odd[0]


@triton.jit(
    do_not_specialize=["tokens", "requests"],
    do_not_specialize_on_alignment=["p_positions", "p_requests"],
)
def compress_pairs_kernel(
    p_out,  # [tokens, dim], contiguous
    p_state,  # [requests, rows, 2 * dim] float32
    inputs,  # values and gates [tokens, dim] float32, each `Strided`
    p_positions,  # [tokens] int
    p_requests,  # [tokens] int
    index_strides,  # of positions and requests
    state_strides,
    weight,  # [dim], `Strided`
    eps,
    tokens,
    requests,
    SHAPE: tl.constexpr,  # `Shape`
    PDL: tl.constexpr,
):
    """Compress token p in program p."""
    pdl_prologue(PDL)
    values, gates = inputs
    row = tl.program_id(0).to(tl.int64)
    step = Tokens(p_positions, p_requests, index_strides, tokens, requests)
    position, request, live = load_token(step, row)
    o_d = tl.arange(0, SHAPE.block)[None, :].to(tl.int64)
    m_d = o_d < SHAPE.dim
    dim_strides = values.strides[1], gates.strides[1]
    p_inputs = values.p + row * values.strides[0], gates.p + row * gates.strides[0]
    p_request = p_state + tl.where(live, request, 0) * state_strides[0]
    state_dims = state_strides[2], state_strides[2]
    # [1, BLOCK]
    odd = load_inputs(p_inputs, dim_strides, m_d & live, o_d)
    if SHAPE.pools:
        last_position, last_request, _ = load_token(step, row - 1)
        ends = live & (position % RATIO == RATIO - 1)
        # A token that ends a pair is live, and so is one before it of the same request.
        follows = (last_request == request) & (last_position == position - 1)
        p_last = p_inputs[0] - values.strides[0], p_inputs[1] - gates.strides[0]
        before = load_inputs(p_last, dim_strides, m_d & (ends & follows), o_d)
        p_noted = p_request + tl.where(ends, (position - 1) % SHAPE.rows, 0) * state_strides[1]
        p_noted = p_noted, p_noted + SHAPE.dim * state_strides[2]
        noted = load_inputs(p_noted, state_dims, m_d & (ends & (follows == 0)), o_d)
        even = tl.where(follows, before[0], noted[0]), tl.where(follows, before[1], noted[1])
        # Rounded to the dtype of the weight before the norm and after.
        ROUNDED: tl.constexpr = p_out.dtype.element_ty
        pooled = tl.where(m_d, pool(even, odd), 0.0).to(ROUNDED).to(tl.float32)
        scale = load_weight(weight.p, weight.strides[0], SHAPE.dim, SHAPE.block)
        latent = rms_norm(pooled, scale, eps, SHAPE.dim).to(ROUNDED)
        tl.store(p_out + row * SHAPE.dim + o_d, tl.where(ends, latent, 0.0), mask=m_d)
    if SHAPE.keeps:
        # The token is kept unless a later one of its request, in the rows after it, takes its row of the state.
        o_next = row + 1 + tl.arange(0, SHAPE.ahead)
        next_position, next_request, next_live = load_token(step, o_next)
        newer = next_live & (next_request == request) & (next_position >= position + SHAPE.rows)
        keep = live & (tl.max(newer.to(tl.int32), axis=0) == 0)
        p_kept = p_request + tl.where(live, position % SHAPE.rows, 0) * state_strides[1] + o_d * state_strides[2]
        tl.store(p_kept, odd[0], mask=m_d & keep)
        tl.store(p_kept + SHAPE.dim * state_strides[2], odd[1], mask=m_d & keep)


def compress_pairs(
    values: Tensor,
    gates: Tensor,
    state: Tensor,
    positions: Tensor,
    requests: Tensor,
    norm_weight: Tensor,
    norm_eps: float,
) -> Tensor:
    """Return the reference's latents, up to the rounding of exponentials and the order of sums; store its state."""
    tokens, dim = values.shape
    out = norm_weight.new_empty((tokens, dim))
    if out.numel() == 0:
        return out
    block, rows = triton.next_power_of_2(dim), state.shape[1]
    # The row that a single token reads is not the one that it writes.
    launches = [(True, True)] if tokens == 1 and rows > 1 else [(True, False), (False, True)]
    for pools, keeps in launches:
        launch_kernel(
            compress_pairs_kernel,
            (tokens,),
            out,
            state,
            (Strided(values, values.stride()), Strided(gates, gates.stride())),
            positions,
            requests,
            (positions.stride(0), requests.stride(0)),
            state.stride(),
            Strided(norm_weight, norm_weight.stride()),
            norm_eps,
            tokens,
            state.shape[0],
            SHAPE=Shape(dim, block, rows, triton.next_power_of_2(rows), pools, keeps),
            num_warps=max(1, min(8, block // WARP_CHANNELS)),
            # Rounded as the reference rounds: a contracted sum could move a pooled value to its neighbour.
            enable_fp_fusion=False,
            **pdl_arguments(values.device, tokens),
        )
    return out


def why_unsupported_compress_pairs(
    values: Tensor,
    gates: Tensor,
    state: Tensor | None,
    positions: Tensor,
    requests: Tensor,
    norm_weight: Tensor,
    norm_eps: float,
) -> str:
    """Return why the kernel does not support a call, "" if it does. A graph does not tell the state that it mutates."""
    dim, rows = values.shape[1], None if state is None else state.shape[1]
    if isinstance(dim, int) and not 0 < dim <= MAX_DIM:
        return f"there are {dim} channels, supported are 1 to {MAX_DIM}"
    if isinstance(rows, int) and rows > MAX_ROWS:
        return f"a request has {rows} rows of state, supported are 1 to {MAX_ROWS}"
    return ""
