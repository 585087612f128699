"""Samples of the ops around the key/value cache and of attention. See samples.py."""

from __future__ import annotations

import torch

from .. import layout
from ._samples_step import DECODES, EPS, KV, REQUESTS, TOKENS, Args, Step, rope_dim, sample
from .generate import RandomCache


def _window_caches(s: Step) -> list[tuple[RandomCache, int, torch.dtype]]:
    """A full window cache in each format, with its head dim and the dtype of activations."""
    block = layout.WINDOW_BLOCK
    return [(s.cache(fmt, s.window, block, head_dim=dim, dtype=dtype), dim, dtype) for fmt, dim, dtype in KV]


@sample
def fused_q_kv_rmsnorm(s: Step) -> list[Args]:
    qr, kv = s.randn(TOKENS, 96 + 64).split((96, 64), dim=1)
    weights = s.randn(96), s.randn(64, dtype=torch.float32)
    empty = s.randn(0, 96), s.randn(0, 64)
    return [(qr, kv, *weights, EPS), (qr.float(), kv.float(), *weights, EPS), (*empty, *weights, EPS)]


@sample
def q_norm_rope(s: Step) -> list[Args]:
    scale = torch.tensor([0.0078125])
    q, table = s.randn(TOKENS, 3, 512), s.rope()
    small = s.randn(TOKENS, 3, 64, dtype=torch.float32), s.positions, s.rope(16), EPS
    return [(q, s.positions, table, EPS, 8), (q, s.positions, table, EPS, 0, scale), small]


@sample
def kv_rope_insert(s: Step) -> list[Args]:
    slots = s.slots(s.window, layout.WINDOW_BLOCK)
    return [
        (
            s.randn(TOKENS, dim, dtype=dtype),
            c.cache,
            slots,
            s.positions,
            s.rope(rope_dim(dim)),
            c.block_size,
            c.fmt,
            c.kv_scale,
        )
        for c, dim, dtype in _window_caches(s)
    ]


@sample
def q_norm_rope_kv_insert(s: Step) -> list[Args]:
    return [
        (s.randn(TOKENS, 3, kv.shape[1], dtype=kv.dtype), kv, *where, EPS, block, fmt, 4, None, scale)
        for kv, *where, block, fmt, scale in kv_rope_insert(s)
    ]


@sample
def quantize_and_insert_k_cache(s: Step) -> list[Args]:
    block = layout.WINDOW_BLOCK
    return [(s.randn(TOKENS, 512), s.cache("fp8_ds_mla", s.window, block).cache, s.slots(s.window, block), block)]


@sample
def dequantize_and_gather_k_cache(s: Step) -> list[Args]:
    prefills, lens = slice(DECODES, None), torch.tensor([131, 0], dtype=torch.int32)
    return [
        (
            s.randn(REQUESTS - DECODES, 140, dim, dtype=dtype),
            c.cache,
            s.seq_lens[prefills],
            gather_lens,
            s.window[prefills],
            c.block_size,
            offset,
            c.fmt,
            c.kv_scale,
        )
        for c, dim, dtype in _window_caches(s)
        for gather_lens, offset in ((lens, 9), (None, 0))
    ]


@sample
def inv_rope(s: Step) -> list[Args]:
    return [
        (s.randn(TOKENS, 3, 512), s.positions, s.rope()),
        (s.randn(TOKENS, 3, 64, dtype=torch.float32), s.positions, s.rope(16)),
    ]


@sample
def inv_rope_fp8_quant(s: Step) -> list[Args]:
    o = s.randn(TOKENS, 5, 512)
    return [(o, s.positions, s.rope(), 2, 2, packed) for packed in (False, True)]


@sample
def fp8_grouped_einsum(s: Step) -> list[Args]:
    a, b = (s.randn(*shape, dtype=torch.float8_e4m3fn) for shape in ((TOKENS, 2, 256), (2 * 128, 256)))
    scale, packed = 2.0 ** s.randint(-8, 2, TOKENS, 2, 2).float(), s.randint(120, 128, TOKENS, 2, 4, dtype=torch.uint8)
    block_scale = s.randint(115, 125, 2, 2, dtype=torch.uint8)
    return [(a, scale, b, 0.5 * block_scale.float()), (a, packed.view(torch.int32), b, block_scale)]


@sample
def fp8_grouped_einsum_quant(s: Step) -> list[Args]:
    return fp8_grouped_einsum(s)


@sample
def fp8_linear(s: Step) -> list[Args]:
    x, weight = s.randn(TOKENS, 256), s.randn(300, 256, dtype=torch.float8_e4m3fn)
    scale = s.randint(115, 125, 3, 2, dtype=torch.uint8)
    plain = [(x, weight, scale), (x.float(), weight, scale.view(torch.float8_e8m0fnu), False)]
    return [*plain, (x, weight, scale, True, s.randn(20, 256))]


@sample
def sparse_mla_decode(s: Step) -> list[Args]:
    samples: list[Args] = []
    for c, dim, dtype in _window_caches(s):
        e = s.cache(c.fmt, s.table(2, layout.HCA_RATIO), 2, head_dim=dim, dtype=dtype)
        q, sink = s.randn(TOKENS, 3, dim, dtype=dtype), s.randn(3, dtype=torch.float32)
        slots, extra = s.hostile(len(c.slots), TOKENS, 20), s.hostile(len(e.slots), TOKENS, 6)
        lens, extra_lens = s.randint(-1, 22, TOKENS), s.randint(-1, 8, TOKENS)
        one = (q, c.cache, slots, lens, c.block_size, c.fmt, dim**-0.5)
        samples.append((*one, sink, e.cache, extra, extra_lens, e.block_size, c.kv_scale))
        samples.append((*one, None, None, None, None, 0, c.kv_scale))
        table = s.rope(rope_dim(dim))
        samples.append((*samples[-2], s.positions, table, EPS, True, True))
    return samples


@sample
def sparse_mla_decode_out(s: Step) -> list[Args]:
    return [
        (s.randn(*call[0].shape, dtype=call[0].dtype), torch.ones(TOKENS, 3), *call) for call in sparse_mla_decode(s)
    ]


@sample
def sparse_mla_decode_quant(s: Step) -> list[Args]:
    plain, fused = sparse_mla_decode(s)[1:3]
    no_rope = (*plain, None, None, None, False, False, 1, 2)
    return [(*fused, 1, 2, packed) for packed in (False, True)] + [no_rope]


@sample
def sparse_mla_prefill(s: Step) -> list[Args]:
    slots, lens = s.hostile(50, TOKENS, 20), s.randint(-1, 22, TOKENS)
    q, kv, sink = s.randn(TOKENS, 3, 64), s.randn(50, 64), s.randn(3, dtype=torch.float32)
    return [(q, kv, slots, lens, 0.125, sink), (q.float(), kv.float(), slots, None, 0.125)]


@sample
def sparse_mla_prefill_ragged(s: Step) -> list[Args]:
    lens = s.randint(0, 20, TOKENS).cumsum(0).int()
    slots, indptr = s.hostile(50, 20 * TOKENS), torch.cat((torch.zeros(1, dtype=torch.int32), lens))
    q, kv, sink = s.randn(TOKENS, 3, 64), s.randn(50, 64), s.randn(3, dtype=torch.float32)
    return [(q, kv, slots, indptr, 0.125, sink, 12), (q.float(), kv.float(), slots[:60], indptr, 0.125)]
