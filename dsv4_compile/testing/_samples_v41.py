"""Samples of the ops of DeepSeek-V4.1. See samples.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..layout import GRIDS, allocate_cache, page_layout
from ._samples_hyper_connections import DIM, STREAMS
from ._samples_step import EPS, REQUESTS, TOKENS, Args, Step, sample

F32, U8, E4M3 = torch.float32, torch.uint8, torch.float8_e4m3fn
PAGE = 8
"""Rows of a page: small, so that short requests fill several."""
EXPERTS, HIDDEN, TOP_K = 8, 64, 3


def rows_cache(s: Step, fmt: str, pages: int, channels: int) -> Tensor:
    """A full cache of random bytes, its scales near 1, or of random rows; its page padding stays 0."""
    cache = allocate_cache(fmt, pages, PAGE, channels, dtype=F32)
    page = page_layout(fmt, channels)
    if page is None:
        return cache.copy_(s.randn(*cache.shape, dtype=F32))
    size = PAGE * page.data
    cache[:, :size] = s.randint(0, 126, pages, size, dtype=U8)
    low = 118 if fmt != "nvfp4" else 48
    cache[:, size:] = s.randint(low, low + 8, pages, cache.shape[1] - size, dtype=U8)
    return cache


def _requests(s: Step) -> tuple[Tensor, Tensor]:
    """Positions and requests of the step's tokens, -1 for padding."""
    return torch.where(s.is_valid, s.positions, -1), torch.where(s.is_valid, s.token_to_req, -1)


@sample
def mhc_mixes(s: Step) -> list[Args]:
    """Four streams; three in float32 with their dims swapped in memory; no token."""
    streams = s.randn(TOKENS, STREAMS, DIM)
    swapped = s.randn(3, TOKENS, DIM, dtype=F32).transpose(0, 1)

    def mix(count: int) -> Args:
        rows = (count + 2) * count
        return s.randn(rows, count * DIM, dtype=F32) / 8, s.randn(rows, dtype=F32), s.randn(3, dtype=F32), EPS, EPS

    return [(streams, *mix(STREAMS)), (swapped, *mix(3), 2), (streams[:0], *mix(STREAMS))]


@sample
def mhc_collapse(s: Step) -> list[Args]:
    """Four streams; float32 with a zero row and eps 1e-20; no token."""
    streams, pre = s.randn(TOKENS, STREAMS, DIM), s.randn(TOKENS, STREAMS, dtype=F32)
    wide, weight = s.randn(TOKENS, STREAMS, 2 * DIM, dtype=F32)[..., ::2], 1 + s.randn(DIM, dtype=F32) / 8
    wide[2] = 0.0
    return [(streams, pre, weight, EPS), (wide, pre, weight, 1e-20), (streams[:0], pre[:0], weight, EPS)]


@sample
def compress_pairs(s: Step) -> list[Args]:
    """The step, in bfloat16 and in float32 with a ring of two rows; no token."""
    positions, requests = _requests(s)
    values, gates = s.randn(TOKENS, 2 * HIDDEN, dtype=F32).chunk(2, 1)
    state, weight = s.randn(REQUESTS, 8, 2 * HIDDEN, dtype=F32), 1 + s.randn(HIDDEN) / 8
    none = torch.empty(0, HIDDEN), torch.empty(0, HIDDEN), state.clone(), positions[:0], requests[:0], weight, EPS
    small = state[:, :2].clone()
    return [
        (values, gates, state, positions, requests, weight, EPS),
        (values, gates, small, positions.int(), requests.int(), weight.float(), 1e-20),
        none,
    ]


@sample
def rope_quantize_insert(s: Step) -> list[Args]:
    """Each format, with slots outside the cache; plain rows on a grid; no token."""
    args: list[Args] = []
    for fmt, channels, grid in [*((grid, 128, "") for grid in GRIDS), ("plain", 64, "nvfp4"), ("fp8_ds_mla", 512, "")]:
        cache, x = rows_cache(s, fmt, 4, channels), s.randn(TOKENS, 2 * channels)[:, ::2]
        slots = torch.randperm(4 * PAGE, generator=s.generator)[:TOKENS]
        slots[1::4] = torch.tensor([-1, 4 * PAGE, -9])[: slots[1::4].shape[0]]
        args.append((x, cache, slots, s.positions, s.rope(16 if channels < 512 else 64), PAGE, fmt, grid))
    x, cache, slots, positions, *rest = args[0]
    return [*args, (x[:0], cache.clone(), slots[:0], positions[:0], *rest)]


def _index(s: Step, fmt: str, dtype: torch.dtype, grid: str) -> list[Any]:
    _, requests = _requests(s)
    table = torch.randperm(REQUESTS * 9, generator=s.generator).view(REQUESTS, 9).int()
    keys, visible = rows_cache(s, fmt, 30, 32), torch.where(s.is_valid, (s.positions + 1) // 2, 0)
    q, weights = s.randn(TOKENS, 4, 32, dtype=dtype), s.randn(TOKENS, 4, dtype=dtype)
    return [q, weights, s.positions, s.rope(8), keys, table, requests, visible, PAGE, fmt, 6, grid]


@sample
def index_topk(s: Step) -> list[Args]:
    """All entries in mxfp4; candidates in plain rows, some of them -1; no token."""
    full, plain = _index(s, "mxfp4", torch.bfloat16, "mxfp4"), _index(s, "plain", F32, "")
    candidates = torch.stack([torch.randperm(16, generator=s.generator)[:5].sort().values for _ in range(TOKENS)])
    candidates[:, 4], candidates[3] = -1, -1
    none = [x[:0] if isinstance(x, Tensor) and i in (0, 1, 2, 6, 7) else x for i, x in enumerate(full)]
    return [tuple(full), (*plain, candidates.int(), 4), tuple(none)]


@sample
def index_topk_blocks(s: Step) -> list[Args]:
    """Both formats, with more and with fewer blocks than there are."""
    full, plain = _index(s, "mxfp4", torch.bfloat16, "mxfp4"), _index(s, "plain", F32, "")
    return [(*full, None, 4, 3), (*plain, None, 8, 40)]


@sample
def sparse_mla_mixed(s: Step) -> list[Args]:
    """mxfp8 and nvfp4; a window alone in plain rows; V4's record in both; no token."""
    heads = 3

    def call(window: str, entries: str, channels: int, dtype: torch.dtype, tokens: int = TOKENS) -> Args:
        q, sink = s.randn(tokens, heads, channels, dtype=dtype) / 4, s.randn(heads, dtype=F32)
        formats = window, PAGE, entries or "plain", PAGE
        first = rows_cache(s, window, 3, channels), s.hostile(3 * PAGE, tokens, 5)
        second = (rows_cache(s, entries, 4, channels), s.hostile(4 * PAGE, tokens, 7)) if entries else (None, None)
        return q, *first, *second, *formats, channels**-0.5, sink

    return [
        call("mxfp8", "nvfp4", 64, torch.bfloat16),
        call("plain", "", 32, F32),
        call("fp8_ds_mla", "fp8_ds_mla", 512, torch.bfloat16),
        call("mxfp8", "nvfp4", 64, torch.bfloat16, 0),
    ]


@sample
def moe_route_images(s: Step) -> list[Args]:
    """A temperature, and image tokens; defaults in float32; no token."""
    x, gate = s.randn(TOKENS, HIDDEN), s.randn(EXPERTS, HIDDEN) * 0.1
    bias, image_bias = s.randn(2, EXPERTS, dtype=F32)
    image = torch.arange(TOKENS) % 3 == 1
    none = x[:0], gate, bias, image_bias, image[:0], TOP_K
    return [
        (x, gate, bias, image_bias, image, TOP_K, 1.5, 0.5),
        (x.float(), gate.float(), bias, image_bias, image),
        none,
    ]


@sample
def mx_linear(s: Step) -> list[Args]:
    """Inputs in mxfp8 and exact, partial blocks, a strided input of three dims, no token."""
    weight, scale = (s.randn(80, 96) * 0.2).to(E4M3), s.randint(124, 130, 3, 3, dtype=U8)
    odd, odd_scale = (s.randn(33, 40) * 0.2).to(E4M3), s.randint(124, 130, 2, 2).float() / 127
    x = s.randn(TOKENS, 192)[:, ::2]
    return [
        (x, weight, scale),
        (s.randn(2, TOKENS, 40, dtype=F32), odd, odd_scale, False),
        (x[:0], weight, scale.view(torch.float8_e8m0fnu)),
    ]


@sample
def mx_experts(s: Step) -> list[Args]:
    """MXFP4 and e4m3 with inputs in mxfp8; floating weights in float32; no token."""
    ids, weights, inner = s.hostile(EXPERTS, TOKENS, TOP_K), s.randn(TOKENS, TOP_K).float().abs(), 32
    x, shapes = s.randn(TOKENS, HIDDEN), ((2 * inner, HIDDEN), (HIDDEN, inner))
    plain = [s.randn(EXPERTS, n, k) * 0.1 for n, k in shapes]
    shared = [s.randn(n, k) * 0.1 for n, k in shapes]
    packed = [s.randint(0, 256, EXPERTS, n, k // 2, dtype=U8) for n, k in shapes]
    scales = [s.randint(118, 123, EXPERTS, n, k // 32, dtype=U8) for n, k in shapes]
    blocks = [s.randint(126, 129, n // 32, k // 32, dtype=U8) for n, k in shapes]
    quantised = *packed, *(w.to(E4M3) for w in shared), *scales, *blocks
    wide = [w.float() for w in (*plain, *shared)]
    return [
        (x, ids + 4, weights, *quantised, 10.0, 4, True),
        (x.float(), ids.long(), weights, *wide, None, None, None, None, 0.5),
        (x[:0], ids[:0], weights[:0], *quantised),
    ]


@sample
def engram_rows(s: Step) -> list[Args]:
    """4-grams of two hashes with image tokens; 2-grams in int32; no token."""
    positions, requests = _requests(s)
    ids = s.randint(-1, 24, TOKENS).long()
    history, multipliers = s.randint(-1, 24, REQUESTS, 6), 2 * s.randint(1, 1 << 30, 4).long() + 1
    primes = torch.tensor([61, 67, 71, 73, 79, 83])
    none = ids[:0], positions[:0], requests[:0], history.clone(), multipliers, primes, 2
    pairs = ids.int(), positions.int(), requests.int(), history[:, :1].clone(), multipliers[:2], primes[:1], 0
    return [(ids, positions, requests, history, multipliers, primes, 2), pairs, none]


@sample
def engram_embed(s: Step) -> list[Args]:
    """e4m3 rows; floating rows; no token."""
    table, scale = (s.randn(20, 64)).to(E4M3), s.randint(124, 130, 20, 2, dtype=U8)
    rows = s.hostile(20, TOKENS, 6)
    return [(rows, table, scale), (rows.long(), s.randn(20, 16)), (rows[:0], table, scale.view(torch.float8_e8m0fnu))]


@sample
def engram_gate(s: Step) -> list[Args]:
    """bfloat16 with image tokens; float32 streams that are strided, one of zeros; no token."""
    streams, keys = s.randn(TOKENS, STREAMS, DIM), s.randn(TOKENS, (STREAMS + 1) * DIM)
    q_weight, k_weight = 1 + s.randn(2, STREAMS, DIM) / 8
    image = torch.arange(TOKENS) % 3 == 1
    wide = s.randn(TOKENS, STREAMS, 2 * DIM, dtype=F32)[..., ::2]
    wide[1] = 0.0
    return [
        (streams, keys, q_weight, k_weight, image, EPS),
        (wide, keys.float(), q_weight.float(), k_weight, image, 1e-20),
        (streams[:0], keys[:0], q_weight, k_weight, image[:0], EPS),
    ]
