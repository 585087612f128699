"""Samples of the router and the experts. See samples.py."""

from __future__ import annotations

import torch

from ._samples_step import TOKENS, Args, Step, sample

EXPERTS, HIDDEN, TOP_K, VOCAB = 16, 128, 3, 40
U8, E4M3 = torch.uint8, torch.float8_e4m3fn


@sample
def moe_route(s: Step) -> list[Args]:
    x, gate = s.randn(TOKENS, HIDDEN), s.randn(EXPERTS, HIDDEN) * 0.1
    bias = s.randn(EXPERTS).float() * 0.1
    table = s.randint(0, EXPERTS, VOCAB, TOP_K).long()
    table[3, 1], table[4] = EXPERTS, -5
    return [
        (x, gate, bias, None, None, TOP_K, 1.5),
        (x, gate.float(), None, s.hostile(VOCAB, TOKENS), table, TOP_K, 1.5),
        (x.float(), gate.float(), bias),
        (x[:0], gate, bias, None, None, TOP_K),
    ]


@sample
def moe_experts(s: Step) -> list[Args]:
    ids, weights = s.hostile(EXPERTS, TOKENS, TOP_K), s.randn(TOKENS, TOP_K).float().abs()
    x, inner = s.randn(TOKENS, HIDDEN), 128
    plain = s.randn(EXPERTS, 2 * inner, HIDDEN) * 0.1, s.randn(EXPERTS, HIDDEN, inner) * 0.1
    bytes_ = [s.randint(0, 256, EXPERTS, n, k // 2, dtype=U8) for n, k in ((2 * inner, HIDDEN), (HIDDEN, inner))]
    scales = [s.randint(118, 123, EXPERTS, n, k // 32, dtype=U8) for n, k in ((2 * inner, HIDDEN), (HIDDEN, inner))]
    shared = (s.randn(2 * inner, HIDDEN) * 0.1).to(E4M3), (s.randn(HIDDEN, inner) * 0.1).to(E4M3)
    blocks = s.randint(126, 129, 2, 1, dtype=U8), s.randint(126, 129, 1, 1, dtype=U8)
    return [
        (x, ids, weights, *plain),
        (x, ids + 4, weights, *bytes_, *scales, *shared, *blocks, 10.0, 4),
        (x.float(), ids.long(), weights, plain[0].float(), plain[1].float()),
        (x[:0], ids[:0], weights[:0], *plain),
        (x, ids, weights, *bytes_, *scales, None, None, None, None, 10.0, 0, True),
    ]
