"""Calls for fingerprints of kernels, continued: before and after attention, and hyper-connections."""

from __future__ import annotations

from itertools import product

import torch

from dsv4_compile import layout
from dsv4_compile.reference.preprocess.preprocess_insert import PreprocessArguments
from tests.tools.fingerprint_calls import (
    EPS,
    F32,
    FLASH,
    KEY_D,
    PAGES,
    PRO,
    SIZES,
    TOKENS,
    Args,
    Calls,
    D,
    cache,
    flags,
    ints,
    longs,
    register,
    rope,
    zeros,
)

# Before and after attention.


@register
def fused_q_kv_rmsnorm() -> Calls:
    """Yield slices of one projection."""
    for tokens in TOKENS:
        qr, kv = zeros(tokens, FLASH.latent + D).split((FLASH.latent, D), dim=1)
        yield f"{tokens} tokens", (qr, kv, zeros(FLASH.latent), zeros(D), EPS)


HEADS = ((1, 64), (48, 128), (3000, 64))


@register
def q_norm_rope() -> Calls:
    """Yield queries of both models."""
    for tokens, heads in HEADS:
        yield f"{tokens} tokens, {heads} heads", (zeros(tokens, heads, D), longs(tokens), rope(), EPS)


@register
def inv_rope() -> Calls:
    """Yield outputs of both models."""
    for tokens, heads in HEADS:
        yield f"{tokens} tokens, {heads} heads", (zeros(tokens, heads, D), longs(tokens), rope())


@register
def inv_rope_fp8_quant() -> Calls:
    """Yield outputs in groups of 8 heads."""
    for tokens, packed in zip(TOKENS, (True, False, True), strict=True):
        yield f"{tokens} tokens", (zeros(tokens, 64, D), longs(tokens), rope(), 8, 8, packed)


@register
def kv_rope_insert() -> Calls:
    """Yield rows of the window cache."""
    for tokens in TOKENS:
        args = zeros(tokens, D), cache(), longs(tokens), longs(tokens), rope(), 64, "fp8_ds_mla"
        yield f"{tokens} tokens", args


@register
def q_norm_rope_kv_insert() -> Calls:
    """Yield queries and rows of the window cache."""
    for tokens in TOKENS:
        places = cache(), longs(tokens), longs(tokens), rope(), EPS, 64, "fp8_ds_mla"
        yield f"{tokens} tokens", (zeros(tokens, 64, D), zeros(tokens, D), *places)


def _compressor(tokens: int, ratio: int, dim: int, fmt: str) -> Args:
    """Return the eight arguments of a compressor."""
    state, width = layout.state_block_size(ratio), layout.state_width(ratio, dim)
    scores: Args = (zeros(tokens, width, dtype=F32), zeros(ratio, width // 2, dtype=F32), zeros(dim))
    states: Args = (zeros(PAGES, state, width, dtype=F32), longs(tokens), ints(4, 100))
    return (*scores, *states, cache(fmt, layout.storage_block_size(ratio), dim), longs(tokens))


@register
def save_partial_states() -> Calls:
    """Yield scores of both compressors."""
    for tokens, ratio in ((1, 4), (48, 128), (3000, 4)):
        score, ape, _, state, slots, *_ = _compressor(tokens, ratio, D, "fp8_ds_mla")
        yield f"{tokens} tokens, ratio {ratio}", (score, ape, state, slots, longs(tokens), state.shape[1])


@register
def compress_norm_rope_insert() -> Calls:
    """Yield both compressors and the indexer's."""
    kinds = (4, D, "fp8_ds_mla"), (128, D, "fp8_ds_mla"), (4, KEY_D, "indexer_fp8"), (4, KEY_D, "indexer_mxfp4")
    for tokens, (ratio, dim, fmt) in product(TOKENS, kinds):
        _, _, weight, state, slots, blocks, entries, places = _compressor(tokens, ratio, dim, fmt)
        read = state, slots, blocks, ints(tokens), longs(tokens), places, weight, rope(), entries, EPS, ratio
        write = state.shape[1], layout.storage_block_size(ratio), fmt, fmt == "indexer_mxfp4"
        yield f"{tokens} tokens, {fmt}, ratio {ratio}", (*read, *write)


def _preprocess(tokens: int, ratio: int = 0, keys: str = "", latent: int = FLASH.latent) -> Args:
    """Return a layer's preprocessing, with a compressor and with an indexer with keys of the format `keys`."""
    qr, kv = zeros(tokens, latent + D, dtype=F32).split((latent, D), dim=1)
    args: Args = (qr, kv, zeros(latent), zeros(D), longs(tokens), rope(), ints(tokens), EPS, "fp8_ds_mla")
    args += cache(), longs(tokens), 64
    if ratio:
        args += *_compressor(tokens, ratio, D, "fp8_ds_mla"), ratio
    if keys:
        args += *_compressor(tokens, ratio, KEY_D, keys), keys, keys == "indexer_mxfp4"
    return args


@register
def preprocess_insert() -> Calls:
    """Yield every kind of layer for few tokens, and two for many."""
    kinds: list[Args] = [(1,), (1, 128), (1, 4, "indexer_fp8"), (1, 4, "indexer_mxfp4")]
    kinds += [(3000, 128), (3000, 4, "indexer_fp8"), (16, 4, "indexer_fp8", PRO.latent)]
    for kind in kinds:
        yield f"{kind}", _preprocess(*kind)


@register
def preprocess_insert_quant() -> Calls:
    """Yield every kind of layer for few tokens, with float32 weights too, as those of transformers' norms."""
    kinds: list[Args] = [(1,), (1, 128), (1, 4, "indexer_fp8")]
    for kind in kinds:
        yield f"{kind}", _preprocess(*kind)
    for kind in kinds[1:]:
        call = PreprocessArguments(*_preprocess(*kind))
        norms = {"q_weight": zeros(FLASH.latent, dtype=F32), "kv_weight": zeros(D, dtype=F32), "dtype": torch.bfloat16}
        yield f"{kind}, float32 norms", tuple(call._replace(**norms))


# Hyper-connections.


@register
def mhc_boundary() -> Calls:
    """Yield one launch, two and three, for both models."""
    for hidden, tokens in product((FLASH.hidden, PRO.hidden), (1, 8, 32, 512, 2048)):
        streams = zeros(tokens, 4, hidden), zeros(tokens, hidden)
        coefficients = zeros(tokens, 4, dtype=F32), zeros(tokens, 4, 4, dtype=F32)
        mix = (zeros(*shape, dtype=F32) for shape in ((24, 4 * hidden), (24,), (3,), (hidden,)))
        yield f"{hidden} channels, {tokens} tokens", (*streams, *coefficients, *mix, EPS, EPS)


@register
def dequantize_and_gather_k_cache() -> Calls:
    """Yield pages of CSA and of HCA."""
    for page in (64, 2):
        args = zeros(2, 4096, D), cache(page=page), ints(2), ints(2), ints(2, 64), page, 0, "fp8_ds_mla"
        yield f"pages of {page}", args


@register
def combine_topk_swa() -> Calls:
    """Yield CSA's rows and HCA's."""
    for ratio, topk in ((4, 512), (128, 1000)):
        yield f"ratio {ratio}", (ints(100, topk), ints(3), ints(2), ints(2), 128, ratio, topk, 5000, 2000)


SIZES["combine_topk_swa_ragged"] = combine_topk_swa


@register
def global_topk() -> Calls:
    """Yield rows of 512 and of 1,024 entries."""
    for tokens, topk in ((1, 512), (48, 1024)):
        yield f"{tokens} tokens, top {topk}", (ints(tokens, topk), ints(tokens), ints(4, 64), flags(tokens), 64)


SIZES["global_topk_ragged"] = global_topk


@register
def ragged_from_dense() -> Calls:
    """Yield rows of 128 and of 512 entries."""
    for tokens, width in ((1, 128), (48, 512)):
        yield f"{tokens} rows of {width}", (ints(tokens, width), ints(tokens))
