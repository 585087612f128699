"""Samples of the router and the experts. See samples.py."""

from __future__ import annotations

from ._samples_step import TOKENS, Args, Step, sample

EXPERTS, HIDDEN, TOP_K, VOCAB = 16, 128, 3, 40


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
