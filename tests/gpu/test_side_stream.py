"""Tests of the indexer's selection on a side stream: eager, compiled and captured, repeatedly."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from dsv4_compile.bench.decode_layers import DecodeStep
from dsv4_compile.testing import assert_bitwise
from tests.gpu.test_attention_backends import assert_similar, compiled, of_the_step
from tests.modules.test_attention_backend import CONFIG, REQUESTS, Serving, layer_of

LAYERS = [("DSV4_PAGED", "fp8_ds_mla"), ("FLASHMLA_SPARSE_DSV4", "fp8_ds_mla")]


def serving(name: str, kv_cache_dtype: str, aux: bool, compile_it: bool) -> Serving:
    layer = layer_of("csa", attention_backend=name, kv_cache_dtype=kv_cache_dtype, device="cuda", aux_stream=aux)
    return Serving(layer, compiled(layer) if compile_it else None)


@pytest.mark.parametrize("compile_it", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("name", "kv_cache_dtype"), LAYERS)
def test_a_layer_with_a_side_stream_equals_one_without(
    name: str, kv_cache_dtype: str, compile_it: bool, seed: int
) -> None:
    rng = random.Random(seed)
    without, with_it = (serving(name, kv_cache_dtype, aux, compile_it) for aux in (False, True))
    for step in range(6):
        counts = [rng.randint(4, 50) for _ in range(REQUESTS)] if step < 3 else [1] * REQUESTS
        hidden = torch.randn(sum(counts), CONFIG.hidden_size).bfloat16()
        assert_similar(with_it.step(counts, hidden), without.step(counts, hidden))


@pytest.mark.parametrize("compile_it", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("name", "kv_cache_dtype"), LAYERS)
def test_captured_steps_wait_for_the_selection(name: str, kv_cache_dtype: str, compile_it: bool, seed: int) -> None:
    """Three calls in one graph with side streams that share memory, replayed without a pause, equal single calls."""
    rng = random.Random(seed)
    plain, ours = (serving(name, kv_cache_dtype, True, compile_it) for _ in range(2))
    for _ in range(4):
        counts = [rng.randint(4, 50) for _ in range(REQUESTS)]
        hidden = torch.randn(sum(counts), CONFIG.hidden_size).bfloat16()
        for layer in (plain, ours):
            layer.step(counts, hidden)
    graph, held, outs = torch.cuda.CUDAGraph(), None, []
    for _ in range(5):
        hidden = torch.randn(REQUESTS, CONFIG.hidden_size).bfloat16()
        new = ours.arguments([1] * REQUESTS, hidden)
        with torch.inference_mode():
            if held is None:
                held = new
                ours.call(*held)
                torch.cuda.synchronize()
                with torch.cuda.graph(graph):
                    # All of the same step, which inserts the same rows again.
                    outs = [ours.call(*held) for _ in range(3)]
            for mine, fresh in zip(of_the_step(held), of_the_step(new), strict=True):
                mine.copy_(fresh)
            for _ in range(20):
                graph.replay()
        expected: Any = plain.step([1] * REQUESTS, hidden)
        for out in outs:
            assert_bitwise(out, expected)


def test_a_runner_captures_both_streams() -> None:
    step = DecodeStep.build(CONFIG.with_layers(4, 4), False, 4, 512, torch.device("cuda")).with_side_stream()
    runner = step.runner(step.compiled(backend="dsv4"), [1, 4])
    for tokens in (1, 4):
        hidden = torch.randn(tokens, CONFIG.hidden_size, device="cuda").bfloat16()
        replayed = [out.clone() for out in step.replay(runner, tokens)(hidden)]
        again = step.replay(runner, tokens)(hidden)
        for ours, twice, called in zip(replayed, again, step.call(step.layers, tokens)(hidden), strict=True):
            assert_bitwise(twice, ours)
            assert_similar(ours, called)
