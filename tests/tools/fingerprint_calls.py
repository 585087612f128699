"""Calls for fingerprints of kernels: the samples of each op, and sizes of the models that reach its other variants.

Nothing runs: only shapes, strides, dtypes and alignment count. Arguments are positional, in schema order. A change of
these calls, or of the samples, changes fingerprints as an edit of a kernel does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.testing.samples import op_samples

Args = tuple[Any, ...]
Calls = Iterator[tuple[str, Args]]
BF16, F8, F32, BYTES = torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.uint8
D, ROPE, KEY_D = layout.HEAD_DIM, layout.ROPE_DIM, layout.INDEXER_HEAD_DIM
PAGES, POSITIONS, RANK = 40, 8192, 1024
EPS, SCALE = 1e-6, D**-0.5
TOKENS = (1, 48, 3000)
LARGE = 1 << 20
"""Bytes that take longer to write than a call to be planned."""


class Model(NamedTuple):
    """Sizes of a model's attention layer."""

    hidden: int
    heads: int
    latent: int
    groups: int
    topk: int


FLASH, PRO = Model(4096, 64, 1024, 8, 512), Model(7168, 128, 1536, 16, 1024)
SIZES: dict[str, Callable[[], Calls]] = {}


def calls_of(op: str, target: int) -> dict[str, Args]:
    """Return the arguments of the calls of `op` by label: for target 0, sm_90, all; for others one sample, one size."""
    samples = [(f"sample {number}", args) for number, args in enumerate(op_samples(op))]
    sizes = list(SIZES[op]()) if op in SIZES else []
    if target > 0:
        samples, sizes = ([calls[target % len(calls)]] if calls else [] for calls in (samples, sizes))
    return dict(samples + sizes)


def register(calls: Callable[[], Calls]) -> Callable[[], Calls]:
    """Register the calls of the op that `calls` is named after."""
    SIZES[calls.__name__] = calls
    return calls


def zeros(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Return zeros; large tensors have any values, in memory that is not touched, since only their shapes count."""
    tensor = torch.empty(shape, dtype=dtype)
    return tensor if tensor.nbytes > LARGE else tensor.zero_()


def ints(*shape: int) -> Tensor:
    """Return int32 zeros."""
    return zeros(*shape, dtype=torch.int32)


def longs(*shape: int) -> Tensor:
    """Return int64 zeros."""
    return zeros(*shape, dtype=torch.int64)


def flags(*shape: int) -> Tensor:
    """Return booleans."""
    return zeros(*shape, dtype=torch.bool)


def rope() -> Tensor:
    """Return a table of cosines and sines."""
    return zeros(POSITIONS, ROPE, dtype=F32)


def cache(fmt: str = "fp8_ds_mla", page: int = 64, dim: int = D) -> Tensor:
    """Return a cache with pages of `page` rows."""
    return layout.allocate_cache(fmt, PAGES, page, dim)


# Linear layers.


def _weight(rows: int, size: int, scale: torch.dtype = BYTES) -> tuple[Tensor, Tensor]:
    """Return an e4m3 weight `[N, K]` and its scales."""
    blocks = layout.cdiv(rows, layout.WEIGHT_TILE), layout.cdiv(size, layout.WEIGHT_TILE)
    return zeros(rows, size, dtype=F8), zeros(*blocks, dtype=scale)


@register
def fp8_linear() -> Calls:
    """Yield projections of both models, and two weights for one x as in layers with compressors."""
    down = FLASH.latent + D, FLASH.hidden
    projections = {
        "wq_a+wkv": (down, (1, 16, 32, 64, 128, 512)),
        "wq_b": ((FLASH.heads * D, FLASH.latent), (8, 32, 300, 1024)),
        "wo_b": ((FLASH.hidden, FLASH.groups * RANK), (1, 16, 64, 128)),
        "indexer wq_b": ((64 * KEY_D, FLASH.latent), (16, 64)),
        "pro wq_a+wkv": ((PRO.latent + D, PRO.hidden), (8, 256)),
    }
    for name, ((rows, size), sizes) in projections.items():
        for tokens in sizes:
            yield f"{name}, {tokens} tokens", (zeros(tokens, size), *_weight(rows, size))
    yield "float32 scales", (zeros(8, down[1]), *_weight(*down, F32))
    yield "not quantized", (zeros(8, down[1]), *_weight(*down, torch.float8_e8m0fnu), False)
    for others, sizes in ((RANK, (1, 16, 32, 64)), (2624, (1, 128, 300))):
        for tokens in sizes:
            second = zeros(others, down[1])
            yield f"beside {others} rows, {tokens} tokens", (zeros(tokens, down[1]), *_weight(*down), True, second)


@register
def fp8_grouped_einsum() -> Calls:
    """Yield wo_a of both models, with float32 scales and with packed words."""
    sizes = [(FLASH, tokens) for tokens in (1, 16, 64, 128, 512)] + [(PRO, 32)]
    for (model, tokens), packed in product(sizes, (False, True)):
        size = model.heads // model.groups * D
        columns = layout.cdiv(size, layout.ACT_TILE * (layout.SCALES_PER_WORD if packed else 1))
        rows = layout.align_up(tokens, layout.SCALE_ROW_ALIGN)
        a = zeros(model.groups, tokens, size, dtype=F8).transpose(0, 1)
        scale = zeros(model.groups, columns, rows, dtype=torch.int32 if packed else F32)[..., :tokens].permute(2, 0, 1)
        weight = _weight(model.groups * RANK, size, BYTES if packed else F32)
        yield f"{model.groups} groups, {tokens} tokens{', packed' if packed else ''}", (a, scale, *weight)


SIZES["fp8_grouped_einsum_quant"] = fp8_grouped_einsum


@register
def grouped_linear() -> Calls:
    """Yield wo_a and projections in bfloat16."""
    shapes = {"wo_a": (FLASH.groups, RANK, 4096), "wq_a+wkv": (1, 1536, 4096), "wq_b": (1, 32768, 1024)}
    for (name, (groups, rows, size)), tokens in product(shapes.items(), (1, 16, 64, 128)):
        yield f"{name}, {tokens} tokens", (zeros(tokens, groups, size), zeros(groups * rows, size), groups)
    yield "float32 results", (zeros(8, 1, 4096), zeros(2624, 4096), 1, True)


# Mixture of experts.


@register
def moe_experts() -> Calls:
    """Yield experts of V4-Flash in every format, with a shared expert and without, for few tokens and many."""
    experts, hidden, inner = 16, FLASH.hidden, 2048

    def mxfp4(*shape: int) -> tuple[Tensor, Tensor]:
        packed = zeros(*shape[:-1], shape[-1] // 2, dtype=BYTES)
        return packed, zeros(*shape[:-1], shape[-1] // layout.MX_TILE, dtype=BYTES)

    def pair(make: Callable[..., tuple[Tensor, Tensor | None]], *lead: int) -> Args:
        w13, w13_scale = make(*lead, 2 * inner, hidden)
        w2, w2_scale = make(*lead, hidden, inner)
        return w13, w2, w13_scale, w2_scale

    def e4m3(*shape: int) -> tuple[Tensor, Tensor]:
        blocks = *shape[:-2], *(layout.cdiv(size, layout.WEIGHT_TILE) for size in shape[-2:])
        return zeros(*shape, dtype=F8), zeros(*blocks, dtype=BYTES)

    routed = {
        "MXFP4": pair(mxfp4, experts),
        "e4m3": pair(e4m3, experts),
        "bfloat16": pair(lambda *shape: (zeros(*shape), None), experts),
    }
    shared = pair(e4m3)
    for (name, weights), tokens in product(routed.items(), (1, 32, 300, 2000)):
        tokens_args = zeros(tokens, hidden), ints(tokens, 6), zeros(tokens, 6, dtype=F32)
        yield f"{name}, {tokens} tokens", (*tokens_args, *weights)
        if name == "MXFP4":
            yield f"interleaved, {tokens} tokens", (*tokens_args, *weights, *shared, 10.0, 0, True)
    yield "bfloat16, shared expert", (*tokens_args, *routed["bfloat16"], *pair(lambda *shape: (zeros(*shape), None)))
    few, experts = (zeros(40, hidden), ints(40, 6), zeros(40, 6, dtype=F32)), 64
    yield "MXFP4 of few tokens an expert", (*few, *pair(mxfp4, experts))
    yield "MXFP4 of few tokens an expert, shared expert", (*few, *pair(mxfp4, experts), *shared)
    one = zeros(1, hidden), ints(1, 6), zeros(1, 6, dtype=F32)
    yield "MXFP4 of one token, shared expert", (*one, *pair(mxfp4, experts), *shared)


@register
def moe_route() -> Calls:
    """Yield the routers of both models, and one by hash with a float32 gate."""
    for experts, hidden, tokens in ((256, FLASH.hidden, 1), (256, FLASH.hidden, 128), (384, PRO.hidden, 5000)):
        yield f"{experts} experts, {tokens} tokens", (
            zeros(tokens, hidden), zeros(experts, hidden), zeros(experts, dtype=F32), None, None, 6, 1.5,
        )  # fmt: skip
    table = zeros(129280, 6, dtype=torch.int64)
    yield "by hash", (zeros(8, FLASH.hidden), zeros(256, FLASH.hidden, dtype=F32), None, longs(8), table)


# Drafts.

VOCABULARY = 129280


def _requests(requests: int) -> Args:
    return zeros(requests, 4, dtype=torch.float64), longs(requests), longs(requests)


@register
def accept_drafts() -> Calls:
    """Yield five drafts a request of the models, with their distribution and without."""
    logits, drafts = zeros(6 * 8, VOCABULARY, dtype=F32), zeros(8, 5, dtype=torch.int64)
    for name, proposal in (("with", zeros(8, 5, VOCABULARY, dtype=F32)), ("without", None)):
        yield f"{name} draft logits", (logits, drafts, proposal, *_requests(8))


@register
def markov_drafts() -> Calls:
    """Yield the heads of both models."""
    for rank in (256, 512):
        base, w1, w2 = zeros(8, 5, VOCABULARY, dtype=F32), zeros(VOCABULARY, rank), zeros(VOCABULARY, rank)
        yield f"rank {rank}", (base, longs(8), w1, w2, *_requests(8))


# Attention.


def _decode(
    tokens: int, heads: int, entries: int, fused: bool = False, *, page: int = 64, width: int = 128, sink: bool = True,
    invariant: bool = False, fmt: str = "fp8_ds_mla",
) -> Args:  # fmt: skip
    """Return arguments of `sparse_mla_decode`; rows of a second cache have so many `entries`."""
    queries: Args = (zeros(tokens, heads, D), cache(fmt), ints(tokens, width), ints(tokens), 64, fmt, SCALE)
    second: Args = (None, None, None, 0)
    if entries:
        second = cache(fmt, page=page), ints(tokens, entries), ints(tokens), page
    fusion = (longs(tokens), rope(), EPS, True) if fused else (None, None, None, False)
    return (*queries, zeros(heads, dtype=F32) if sink else None, *second, None, *fusion, invariant)


DECODES = (
    *((tokens, 64, 512) for tokens in (1, 6, 13, 16, 128, 512)),
    *((tokens, 64, 0) for tokens in (1, 32, 64)),
    *((tokens, 128, 1024) for tokens in (1, 64)),
    (1, 64, 8192),
    *((tokens, 8, 512) for tokens in (1, 200)),
    *((tokens, heads, 512) for tokens, heads in ((4, 16), (4, 32), (200, 32))),
)
"""Tokens, heads and entries of the second cache that reach each kernel, with splits and without."""


@register
def sparse_mla_decode() -> Calls:
    """Yield calls alone and with norm and RoPE fused; pages of HCA without a sink; batch invariance."""
    for size, fused in product(DECODES, (False, True)):
        yield f"{size}{', fused' if fused else ''}", _decode(*size, fused)
    for tokens in (1, 100):
        yield f"{tokens} tokens, no sink", _decode(tokens, 64, 100, page=2, width=100, sink=False)
        yield f"{tokens} tokens, batch invariant", _decode(tokens, 64, 512, True, invariant=True)
    for tokens, heads in ((1, 64), (4, 32), (128, 64), (600, 64)):
        size = tokens, heads, 512, True
        yield f"{size}, rows of bfloat16", _decode(*size, fmt="plain")


@register
def sparse_mla_decode_out() -> Calls:
    """Yield calls with slices of larger buffers as results."""
    for tokens, heads in ((1, 64), (128, 64), (600, 64), (4, 16)):
        out, lse = zeros(tokens, heads + 8, D)[:, :heads], zeros(tokens, heads + 8, dtype=F32)[:, :heads]
        yield f"{tokens} tokens, {heads} heads", (out, lse, *_decode(tokens, heads, 512, True))


@register
def sparse_mla_decode_quant() -> Calls:
    """Yield calls in groups of 8 heads, with packed scales and with float32."""
    for size in DECODES:
        yield f"{size}", (*_decode(*size, True), size[1] // 8, 8, True)
    for tokens in (1, 128):
        yield f"{tokens} tokens, float32 scales", (*_decode(tokens, 64, 512, True), 8, 8, False)


@register
def sparse_mla_decode_ragged() -> Calls:
    """Yield lists of up to 128 and 512 entries a token."""
    for tokens, heads in ((1, 64), (128, 128), (8, 16)):
        first = zeros(tokens, heads, D), cache(), ints(tokens * 128), ints(tokens + 1), 64, "fp8_ds_mla", SCALE
        second = cache(), ints(tokens * 512), ints(tokens + 1), 64, None, 128, 512
        yield f"{tokens} tokens, {heads} heads", (*first, zeros(heads, dtype=F32), *second)


@register
def sparse_mla_decode_latent() -> Calls:
    """Yield queries of DeepSeek-V3.2 over rows of 2,048 entries."""
    for tokens, heads in ((1, 128), (128, 128), (8, 16)):
        keys = cache("plain", dim=layout.V32_HEAD_DIM), ints(tokens, 2048), ints(tokens), 64
        queries = zeros(tokens, heads, layout.V32_HEAD_DIM)
        yield f"{tokens} tokens, {heads} heads", (queries, *keys, SCALE, layout.V32_LATENT_DIM)


@register
def sparse_mla_prefill() -> Calls:
    """Yield queries over a workspace of bfloat16 rows, with lengths and a sink and without."""
    for heads, lens, sink in ((64, True, True), (128, False, False), (100, True, False)):
        args = zeros(300, heads, D), zeros(5000, D), ints(300, 640), ints(300) if lens else None, SCALE
        yield f"{heads} heads", (*args, zeros(heads, dtype=F32) if sink else None)


@register
def sparse_mla_prefill_ragged() -> Calls:
    """Yield the same workspace with lists."""
    for heads, sink in ((64, True), (128, False)):
        args = zeros(300, heads, D), zeros(5000, D), ints(300 * 600), ints(301), SCALE
        yield f"{heads} heads", (*args, zeros(heads, dtype=F32) if sink else None, 640)


# The indexer.


def _queries(tokens: int, fmt: str = "indexer_fp8") -> Args:
    """Return 64 heads of queries, their scales and weights."""
    if fmt == "indexer_mxfp4":
        q, scale = zeros(tokens, 64, KEY_D // 2, dtype=BYTES), zeros(tokens, 64, 4, dtype=BYTES)
    else:
        q, scale = zeros(tokens, 64, KEY_D, dtype=F8), zeros(tokens, 64, 0, dtype=F32)
    return q, scale, zeros(tokens, 64, dtype=F32)


def _paged_keys(tokens: int, columns: int, fmt: str = "indexer_fp8") -> Args:
    """Return the arguments that the ops over paged keys share; block tables have so many `columns`."""
    places = ints(4, columns), ints(tokens), ints(tokens), 64, fmt
    return (*_queries(tokens, fmt), cache(fmt, dim=KEY_D), *places)


PAGED_KEYS = ((1, 64), (8, 1024), (300, 64), (3000, 16), (8, 64, "indexer_mxfp4"))


@register
def indexer_logits() -> Calls:
    """Yield calls for 4,096 logits."""
    for size in PAGED_KEYS:
        yield f"{size}", (*_paged_keys(*size), 4096)


@register
def indexer_logits_topk() -> Calls:
    """Yield calls for the best 512 entries, and 1,024."""
    for size in PAGED_KEYS:
        yield f"{size}", (*_paged_keys(*size), FLASH.topk)
    yield "top 1024", (*_paged_keys(8, 64), PRO.topk)


@register
def indexer_topk_slots() -> Calls:
    """Yield calls for the slots of the best 512 entries."""
    for size in PAGED_KEYS:
        yield f"{size}", (*_paged_keys(*size), FLASH.topk, ints(4, 64), flags(size[0]), 64)


@register
def indexer_logits_topk_ragged() -> Calls:
    """Yield queries over gathered keys."""
    for tokens, rows in ((100, 4096), (2048, 20000)):
        keys = zeros(rows, KEY_D, dtype=BYTES), zeros(rows, 4, dtype=BYTES), ints(tokens), ints(tokens), "indexer_fp8"
        yield f"{tokens} tokens, {rows} keys", (*_queries(tokens), *keys, FLASH.topk)


@register
def indexer_q_rope_quant() -> Calls:
    """Yield 64 heads, the transform of mxfp4 queries included."""
    for tokens, fmt in product(TOKENS, ("indexer_fp8", "indexer_mxfp4")):
        args = zeros(tokens, 64, KEY_D), longs(tokens), rope(), zeros(tokens, 64), fmt, fmt == "indexer_mxfp4", True
        yield f"{tokens} tokens, {fmt}", args
