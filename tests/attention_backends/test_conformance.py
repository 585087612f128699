"""Every backend, with every cache it supports, gives the exact answer to the same mixed batches, eager and compiled."""

from __future__ import annotations

import random

import pytest
import torch

from dsv4_compile.testing import assert_bitwise, assert_close
from dsv4_compile.testing.batch import Batch
from tests.attention_backends.systems import Layer, Way, any_case, any_layer, case_of, ways


@pytest.mark.parametrize("way", list(ways()), ids=str)
def test_backend_gives_the_exact_answer(way: Way, seed: int) -> None:
    case = any_case(random.Random(seed), way)
    layer = any_layer(way, case)
    with torch.inference_mode():
        out = layer.module(*layer.arguments(case))
    assert out.dtype is torch.bfloat16
    assert_close(out, case.expected())


WAYS = list(ways(("mixed",), ratios=(4,)))


@pytest.mark.parametrize("way", [way for way in WAYS if way.name != "DSV4_PAGED"], ids=str)
def test_rows_behind_the_batch_are_zero_and_change_nothing(way: Way, seed: int) -> None:
    """A captured graph has as many queries as it was captured for, and metadata for the tokens that there are."""
    case = any_case(random.Random(seed), way)
    layer = any_layer(way, case)
    q, *others = layer.arguments(case)
    longer = torch.nn.functional.pad(q, (0, 0, 0, 0, 0, 5), value=1.0)
    out = layer.module(longer, *others)
    assert_bitwise(out[:-5], layer.module(q, *others))
    assert not out[-5:].any()


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_batch_without_tokens_gives_nothing(way: Way, seed: int) -> None:
    case = any_case(random.Random(seed), way, Batch((0,), (0,)))
    layer = any_layer(way, case)
    assert layer.module(*layer.arguments(case)).shape[:2] == (0, case.q.shape[1])


ROWS_ELSEWHERE = ("FLASHMLA_SPARSE_DSV4", "ROCM_FLASHMLA_SPARSE_DSV4")
"""Backends whose rows of bfloat16 are compiled by phase, at the other ratio."""
COMPILED = [
    *(way for way in WAYS if way.kv_cache_dtype != "bfloat16" or way.name not in ROWS_ELSEWHERE),
    *(
        way
        for way in ways(("decode", "prefill"), ratios=(128,))
        if way.kv_cache_dtype == "bfloat16" and way.name in ROWS_ELSEWHERE
    ),
]


@pytest.mark.usefixtures("sizes_by_themselves")
@pytest.mark.parametrize("way", COMPILED, ids=str)
def test_compiled_attends_every_batch_with_one_graph(way: Way, seed: int) -> None:
    rng = random.Random(seed)
    cases = [any_case(rng, way) for _ in range(3)]
    layer = any_layer(way, cases[0])
    compiled = torch.compile(layer.module, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch.inference_mode():
        for number, case in enumerate(cases):
            with torch._dynamo.config.patch(error_on_recompile=number > 0):
                out = compiled(*layer.arguments(case))
            assert_bitwise(out, layer.module(*layer.arguments(case)))


@pytest.mark.usefixtures("sizes_by_themselves")
def test_fifty_batches_run_the_code_that_the_first_one_compiled(seed: int) -> None:
    rng, way = random.Random(seed), Way("FLASHINFER_MLA_SPARSE_DSV4", "bfloat16", 4, "mixed")
    layer = Layer(way, case_of(rng, way))
    compiled = torch.compile(layer.module, backend="dsv4", fullgraph=True, dynamic=True)
    with torch.inference_mode():
        for number in range(50):
            arguments = layer.arguments(case_of(rng, way))
            with torch._dynamo.config.patch(error_on_recompile=number > 0):
                out = compiled(*arguments)
            assert_close(out, layer.module(*arguments))
