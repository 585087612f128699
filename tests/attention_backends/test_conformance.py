"""Every backend, with every cache it supports, gives the exact answer to the same mixed batches, eager and compiled."""

from __future__ import annotations

import random

import pytest
import torch

from dsv4_compile.testing import assert_bitwise, assert_close
from tests.attention_backends.systems import Layer, Way, case_of, ways


@pytest.mark.parametrize("way", list(ways()), ids=str)
def test_backend_gives_the_exact_answer(way: Way, seed: int) -> None:
    rng = random.Random(seed)
    case = case_of(rng, way)
    layer = Layer(way, case)
    with torch.inference_mode():
        out = layer.module(*layer.arguments(case))
    assert out.shape == case.q.shape
    assert out.dtype is torch.bfloat16
    assert_close(out, case.expected())


COMPILED = [
    *(way for way in ways(("mixed",), ratios=(4,))),
    *(way for way in ways(("decode", "prefill"), ratios=(128,)) if way.fmt == "plain"),
]


@pytest.mark.usefixtures("sizes_by_themselves")
@pytest.mark.parametrize("way", COMPILED, ids=str)
def test_compiled_attends_every_batch_with_one_graph(way: Way, seed: int) -> None:
    rng = random.Random(seed)
    cases = [case_of(rng, way) for _ in range(3)]
    layer = Layer(way, cases[0])
    compiled = torch.compile(layer.module, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch.inference_mode():
        for number, case in enumerate(cases):
            with torch._dynamo.config.patch(error_on_recompile=number > 0):
                out = compiled(*layer.arguments(case))
            assert_bitwise(out, layer.module(*layer.arguments(case)))
