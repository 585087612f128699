"""`moe_route`: scores on tensor cores, then the choice, in one launch for one token and in two for more.

The last CTA chooses for one token; for more it would choose for a whole block alone, so that a second launch has a warp
for each token. CTAs share a block of BLOCK_T tokens out by experts and, for few tokens, by chunks of D. Logits are the
sum of eight chunks in a fixed order, whoever computes them, and a choice looks at one token alone: a token is routed by
the same bits in a batch of any size. A float32 gate is multiplied as three bfloat16 terms, which is exact.
`moe_route_images` differs in the choice alone: logits are divided by a temperature, and image tokens have their bias.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...layout import cdiv
from ...reference.moe.moe_route import NO_EXPERT as _NO_EXPERT
from ...reference.moe.moe_route import SMALLEST_SUM as _SMALLEST_SUM
from ..host.launch import launch_kernel
from ..host.pdl import pdl_arguments, pdl_prologue
from ..host.semaphores import arrival_counters, arrive

NO_EXPERT, SMALLEST_SUM = tl.constexpr(_NO_EXPERT), tl.constexpr(_SMALLEST_SUM)
CHUNKS = 8
"""Chunks of D that are summed separately, for one CTA each where tokens are few."""
BLOCK_D = 64
"""Elements of D per step; a tile of a float32 gate of 64 experts still fits any GPU's shared memory three times."""
FEW_TOKENS = 1024
"""Most tokens of CTAs that share D; more tokens have enough CTAs without, and partial sums would be read eight
times."""
MOST_EXPERTS, MOST_CHOSEN = 1024, 32
"""Bounds of a row of scores and of a row of ids, which one CTA holds in registers."""
LOWEST = tl.constexpr(-(2**31))
NAN_KEY = tl.constexpr(2**31 - 1)


@triton.jit
def _softplus(x):
    """Return log(1 + exp(x)) with a relative error of some float32 roundings also where exp(x) is tiny."""
    tiny = tl.exp(-tl.abs(x))
    sum_ = 1.0 + tiny
    # The rounding error of `sum_` cancels (Kahan).
    log1p = tl.where(sum_ == 1.0, tiny, tl.log(sum_) * (tiny / tl.where(sum_ == 1.0, 1.0, sum_ - 1.0)))
    return tl.where(x != x, x, tl.maximum(x, 0.0) + log1p)


@triton.jit
def _order_key(x):
    """Return int32 keys that order float32 `x`, NaN as the largest."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x != x, NAN_KEY, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def _add_gate(x, gate, acc):
    """Add x @ gate.T; a float32 gate is the sum of three bfloat16 terms."""
    if gate.dtype.is_fp32():
        high = gate.to(tl.bfloat16)
        rest = gate - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        acc = tl.dot(x, tl.trans(low), acc)
        acc = tl.dot(x, tl.trans(middle), acc)
        acc = tl.dot(x, tl.trans(high), acc)
    else:
        acc = tl.dot(x, tl.trans(gate), acc)
    return acc


class Shape(NamedTuple):
    """Compile-time sizes of a choice: experts, how many of them are chosen, and parts of the logits."""

    experts: int
    chosen: int
    parts: int


class Images(NamedTuple):
    """Bias of image tokens `[E]` float32 in a kernel, strides of it and of the flags, and divisor of all logits."""

    p_bias: Any
    bias_stride: Any
    flag_stride: Any
    temperature: Any


@triton.jit(do_not_specialize=["tokens", "rows"], do_not_specialize_on_alignment=["p_token_ids", "p_is_image"])
def moe_route_kernel(
    results,  # ids [T, K] int32 and weights [T, K] float32, contiguous
    p_logits,  # [parts, T, E] float32, contiguous
    p_arrived,  # [blocks of tokens]
    p_x,  # [T, D] bfloat16
    p_gate,  # [E, D] bfloat16 or float32
    p_bias,  # [E] float32 or None
    p_token_ids,  # [T] int or None
    p_tid2eid,  # [V, K] int or None
    p_is_image,  # [T] bool or None
    x_strides,
    gate_strides,
    strides,  # of the bias, the token ids, and rows and columns of the table, in one flat tuple
    images,  # `Images` or None
    tokens,
    rows,
    scale,
    D: tl.constexpr,
    SHAPE: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHOOSES: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the logits of BLOCK_T tokens, BLOCK_E experts and a part of D; with CHOOSES, the last CTA chooses."""
    pdl_prologue(PDL)
    E: tl.constexpr = SHAPE.experts
    PARTS: tl.constexpr = SHAPE.parts
    TILES: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    STEPS: tl.constexpr = (D + BLOCK_D * CHUNKS - 1) // (BLOCK_D * CHUNKS)
    block, tile, part = tl.program_id(0) // (TILES * PARTS), tl.program_id(0) // PARTS % TILES, tl.program_id(0) % PARTS
    o_t = block.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    o_e, o_d = tile * BLOCK_E + tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_D)
    p_x_rows = p_x + (o_t * x_strides[0])[:, None]
    p_gate_rows = p_gate + (o_e.to(tl.int64) * gate_strides[0])[:, None]
    logits = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    for chunk in range(part * (CHUNKS // PARTS), (part + 1) * (CHUNKS // PARTS)):
        acc = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
        for step in tl.range(chunk * STEPS, (chunk + 1) * STEPS, num_stages=STAGES):
            d = step * BLOCK_D + o_d
            x = tl.load(p_x_rows + d[None, :] * x_strides[1], (o_t < tokens)[:, None] & (d < D)[None, :], 0.0)
            mask = (o_e < E)[:, None] & (d < D)[None, :]
            gate = tl.load(p_gate_rows + d[None, :] * gate_strides[1], mask, 0.0)
            acc = _add_gate(x, gate, acc)
        logits += acc
    p_logits_rows = p_logits + (part * tokens.to(tl.int64) + o_t)[:, None] * E + o_e[None, :]
    tl.store(p_logits_rows, logits, (o_t < tokens)[:, None] & (o_e < E)[None, :])
    if CHOOSES:
        last = arrive(p_arrived) == TILES * PARTS - 1
        if last:
            chosen_by = p_bias, p_token_ids, p_tid2eid, p_is_image
            _choose(results, p_logits, chosen_by, strides, images, block, tokens, rows, scale, SHAPE)
            tl.store(p_arrived, 0)


@triton.jit(do_not_specialize=["tokens", "rows"], do_not_specialize_on_alignment=["p_token_ids", "p_is_image"])
def moe_choose_kernel(
    tensors,  # ids, weights, logits and bias, as for moe_route_kernel
    p_token_ids,
    p_tid2eid,
    p_is_image,
    strides,
    images,
    tokens,
    rows,
    scale,
    SHAPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Choose and weigh the experts of one token."""
    pdl_prologue(PDL)
    p_ids, p_weights, p_logits, p_bias = tensors
    chosen_by = p_bias, p_token_ids, p_tid2eid, p_is_image
    _choose((p_ids, p_weights), p_logits, chosen_by, strides, images, tl.program_id(0), tokens, rows, scale, SHAPE)


@triton.jit
def _bias(p_bias, stride, p_is_image, images, token, o_e, E: tl.constexpr):
    """Load the bias of a token, or of an image token."""
    inside = o_e < E
    if p_is_image is None:
        bias = tl.load(p_bias + o_e * stride, inside, 0.0)
    else:
        is_image = tl.load(p_is_image + token * images.flag_stride) != 0
        bias = tl.load(p_bias + o_e * stride, inside & (is_image == 0), 0.0)
        bias += tl.load(images.p_bias + o_e * images.bias_stride, inside & is_image, 0.0)
    return bias


@triton.jit
def _choose(results, p_logits, chosen_by, strides, images, token, tokens, rows, scale, SHAPE: tl.constexpr):
    """Choose and weigh the experts of one token.

    `chosen_by`: the bias, or the token ids and the table, or the bias and the flags of image tokens; `strides` are
    those of the first three, `rows` the rows of the table.
    """
    p_ids, p_weights = results
    p_bias, p_token_ids, p_tid2eid, p_is_image = chosen_by
    bias_stride, token_stride, row_stride, column_stride = strides
    E: tl.constexpr = SHAPE.experts
    K: tl.constexpr = SHAPE.chosen
    PARTS: tl.constexpr = SHAPE.parts
    E_POW2: tl.constexpr = triton.next_power_of_2(E)
    K_POW2: tl.constexpr = triton.next_power_of_2(K)
    o_e, o_k = tl.arange(0, E_POW2), tl.arange(0, K_POW2)
    token = token.to(tl.int64)
    logits = tl.zeros((E_POW2,), tl.float32)
    for part in tl.static_range(PARTS):
        p_row = p_logits + (part * tokens.to(tl.int64) + token) * E
        logits += tl.load(p_row + o_e, o_e < E, 0.0, cache_modifier=".cg")
    if images is not None:
        logits = tl.div_rn(logits, images.temperature)
    scores = tl.sqrt_rn(_softplus(logits))
    if p_tid2eid is None:
        order = scores
        if p_bias is not None:
            order += _bias(p_bias, bias_stride, p_is_image, images, token, o_e, E)
        keys = tl.where(o_e < E, _order_key(order), LOWEST)
    else:
        id_ = tl.load(p_token_ids + token * token_stride).to(tl.int64)
        known = (id_ >= 0) & (id_ < rows)
        p_entries = p_tid2eid + tl.where(known, id_, 0) * row_stride
    ids = tl.full((K_POW2,), NO_EXPERT, tl.int32)
    chosen = tl.zeros((K_POW2,), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for k in tl.static_range(K):
        if p_tid2eid is None:
            best = tl.argmax(keys, 0)
            keys = tl.where(o_e == best, LOWEST, keys)
        else:
            entry = tl.load(p_entries + k * column_stride, known, NO_EXPERT).to(tl.int64)
            best = tl.where((entry >= 0) & (entry < E), entry, NO_EXPERT).to(tl.int32)
        score = tl.sum(tl.where(o_e == best, scores, 0.0), 0)
        total += score
        ids = tl.where(o_k == k, best, ids)
        chosen = tl.where(o_k == k, score, chosen)
    weights = chosen / (total + SMALLEST_SUM) * scale
    tl.store(p_ids + token * K + o_k, ids, o_k < K)
    tl.store(p_weights + token * K + o_k, weights, o_k < K)


class RouteTiling(NamedTuple):
    """Tokens and experts per CTA, and CTAs that share D."""

    block_t: int
    block_e: int
    parts: int


def choose_tiling(tokens: int) -> RouteTiling:
    """Return the tiling for `tokens` tokens.

    All tiles have fewer than 64 tokens: larger ones would be multiplied by other instructions, with other roundings.
    """
    return RouteTiling(16, 32, CHUNKS) if tokens <= FEW_TOKENS else RouteTiling(32, 64, 1)


def moe_route(
    x: Tensor,
    gate: Tensor,
    bias: Tensor | None = None,
    token_ids: Tensor | None = None,
    tid2eid: Tensor | None = None,
    top_k: int = 6,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Choose and weigh experts. Ids are the reference's where scores differ by more than float32 sums may."""
    return _route(x, gate, bias, (token_ids, tid2eid), None, top_k, scale)


def moe_route_images(
    x: Tensor,
    gate: Tensor,
    bias: Tensor,
    image_bias: Tensor,
    is_image: Tensor,
    top_k: int = 6,
    scale: float = 1.0,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Choose and weigh experts as `moe_route` does, with a bias of image tokens and a temperature."""
    strides = image_bias.stride(0), is_image.stride(0)
    images = Images(image_bias, *strides, float(temperature))
    return _route(x, gate, bias, (None, None), (is_image, images), top_k, scale)


def _route(
    x: Tensor,
    gate: Tensor,
    bias: Tensor | None,
    table: tuple[Tensor | None, Tensor | None],
    flagged: tuple[Tensor, Images] | None,
    top_k: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Launch the kernels, with the token ids of a table and its rows, or with `Images` and flags of image tokens."""
    token_ids, tid2eid = table
    is_image, images = flagged or (None, None)
    (tokens, size), experts = x.shape, gate.shape[0]
    ids = torch.empty((tokens, top_k), dtype=torch.int32, device=x.device)
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=x.device)
    if tokens == 0:
        return ids, weights
    tiling = choose_tiling(tokens)
    programs = cdiv(tokens, tiling.block_t) * cdiv(experts, tiling.block_e) * tiling.parts
    logits = torch.empty((tiling.parts, tokens, experts), dtype=torch.float32, device=x.device)
    strides = (
        1 if bias is None else bias.stride(0),
        1 if token_ids is None else token_ids.stride(0),
        *((1, 1) if tid2eid is None else tid2eid.stride()),
    )
    sizes = (tokens, 0 if tid2eid is None else tid2eid.shape[0], float(scale))
    shape = Shape(experts, top_k, tiling.parts)
    launch_kernel(
        moe_route_kernel,
        (programs,),
        (ids, weights),
        logits,
        arrival_counters(1, x.device) if tokens == 1 else None,
        x,
        gate,
        bias,
        token_ids,
        tid2eid,
        is_image,
        x.stride(),
        gate.stride(),
        strides,
        images,
        *sizes,
        D=size,
        SHAPE=shape,
        CHUNKS=CHUNKS,
        BLOCK_T=tiling.block_t,
        BLOCK_E=tiling.block_e,
        BLOCK_D=BLOCK_D,
        CHOOSES=tokens == 1,
        STAGES=3,
        num_warps=4,
        **pdl_arguments(x.device, programs),
    )
    if tokens > 1:
        launch_kernel(
            moe_choose_kernel,
            (tokens,),
            (ids, weights, logits, bias),
            token_ids,
            tid2eid,
            is_image,
            strides,
            images,
            *sizes,
            SHAPE=shape,
            num_warps=1,
            **pdl_arguments(x.device, tokens),
        )
    return ids, weights


def why_unsupported_moe_route(
    x: Tensor,
    gate: Tensor,
    bias: Tensor | None = None,
    token_ids: Tensor | None = None,
    tid2eid: Tensor | None = None,
    top_k: int = 6,
    scale: float = 1.0,
) -> str:
    """Return why a call cannot use the kernel, "" if it can."""
    if x.dtype is not torch.bfloat16:
        return f"the kernel multiplies bfloat16, x is {x.dtype}"
    if gate.dtype not in (torch.bfloat16, torch.float32):
        return f"the kernel takes a gate in bfloat16 or float32, not in {gate.dtype}"
    if gate.shape[0] > MOST_EXPERTS or top_k > MOST_CHOSEN:
        return f"the kernel chooses up to {MOST_CHOSEN} of {MOST_EXPERTS} experts, not {top_k} of {gate.shape[0]}"
    return "D is 0, it must be at least 1" if gate.shape[1] == 0 else ""


def why_unsupported_moe_route_images(
    x: Tensor,
    gate: Tensor,
    bias: Tensor,
    image_bias: Tensor,
    is_image: Tensor,
    top_k: int = 6,
    scale: float = 1.0,
    temperature: float = 1.0,
) -> str:
    """Return why a call cannot use the kernel, "" if it can."""
    return why_unsupported_moe_route(x, gate, bias, None, None, top_k)
