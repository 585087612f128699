"""Compiled ops before attention need no graph for a second batch size and no memory except their results."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dsv4_compile._compat import maybe_mark_dynamic
from dsv4_compile.backend import dsv4
from dsv4_compile.bench.chain import LAYERS
from dsv4_compile.bench.chain_layers import STATE, TOKENS_FIRST, ChainLayer
from dsv4_compile.config import DeepseekV4Config

DEVICE, CONTEXT = "cuda", 16_384
BATCHES, MOST = 200, 4096
ROOM = {"auto": 1.0, "ir": 1.25}
"""Memory in addition to the queries, in multiples of their size: their projection is one, and no copy of a cache would
fit. By IR alone states are saved behind that projection, so that the float32 one of hidden is alive too."""


def layer_of(kind: str, most: int = MOST) -> ChainLayer:
    """A layer of V4-Flash with caches for steps of up to `most` tokens, a request each."""
    config, ratio = DeepseekV4Config.flash(), LAYERS[kind]
    return ChainLayer(config, ratio, CONTEXT, most, most, torch.device(DEVICE))


def compiled(layer: ChainLayer, impl: str) -> Callable[[int], Any]:
    """Return a function that runs a step of so many tokens by one graph, on new inputs and its private caches."""
    torch.compiler.reset()
    call = torch.compile(layer.in_ops, backend=dsv4, fullgraph=True, options={"dsv4.impl": impl})
    dynamic = [i for i in TOKENS_FIRST if layer.ratio > 1 or i < STATE]
    largest = layer.inputs(layer.most, 0)

    @torch.inference_mode()
    def step(tokens: int) -> Any:
        args = [x[:tokens] if i in dynamic else x for i, x in enumerate(largest)]
        for i in dynamic:
            maybe_mark_dynamic(args[i], 0)
        return call(*args)

    return step


@pytest.mark.parametrize("kind", list(LAYERS))
@pytest.mark.parametrize("impl", list(ROOM))
def test_two_hundred_batch_sizes_are_one_graph_without_memory_beside_their_results(kind: str, impl: str) -> None:
    step = compiled(layer_of(kind), impl)
    step(77)
    draw = random.Random(kind)
    sizes = [max(2, int(MOST ** draw.random())) for _ in range(BATCHES)]
    with torch.compiler.set_stance("fail_on_recompile"):
        for tokens in sizes:
            step(tokens)
        for tokens in (32, 512, MOST):
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            result = step(tokens).nbytes
            beside = torch.cuda.max_memory_allocated() - before - result
            assert beside <= ROOM[impl] * result, f"{beside} bytes beside {result} of {tokens} tokens"
