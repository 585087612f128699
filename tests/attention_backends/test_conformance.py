"""Conformance: every backend with every cache it supports is exact on the same batches, eager and compiled."""

from __future__ import annotations

import random

import pytest
import torch

from dsv4_compile.testing import assert_bitwise, assert_close
from dsv4_compile.testing.batch import Batch
from tests.attention_backends.systems import Layer, Setup, any_case, any_layer, case_of, setups


@pytest.mark.parametrize("setup", list(setups()), ids=str)
def test_backend_output_is_exact(setup: Setup, seed: int) -> None:
    case = any_case(random.Random(seed), setup)
    layer = any_layer(setup, case)
    with torch.inference_mode():
        out = layer.module(*layer.arguments(case))
    assert out.dtype is torch.bfloat16
    assert_close(out, case.expected())


SETUPS = list(setups(("mixed",), ratios=(4,)))


@pytest.mark.parametrize("setup", [setup for setup in SETUPS if setup.name != "DSV4_PAGED"], ids=str)
def test_padding_rows_are_zero_and_do_not_change_other_rows(setup: Setup, seed: int) -> None:
    """A captured graph has as many queries as at capture, and metadata for the tokens of the batch."""
    case = any_case(random.Random(seed), setup)
    layer = any_layer(setup, case)
    q, *others = layer.arguments(case)
    longer = torch.nn.functional.pad(q, (0, 0, 0, 0, 0, 5), value=1.0)
    out = layer.module(longer, *others)
    assert_bitwise(out[:-5], layer.module(q, *others))
    assert not out[-5:].any()


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_empty_batch_gives_empty_output(setup: Setup, seed: int) -> None:
    case = any_case(random.Random(seed), setup, Batch((0,), (0,)))
    layer = any_layer(setup, case)
    assert layer.module(*layer.arguments(case)).shape[:2] == (0, case.q.shape[1])


COMPILED_BY_PHASE = ("FLASHMLA_SPARSE_DSV4", "ROCM_FLASHMLA_SPARSE_DSV4")
"""Backends that compile decodes and prefills with bfloat16 caches separately, at ratio 128."""
COMPILED = [
    *(setup for setup in SETUPS if setup.kv_cache_dtype != "bfloat16" or setup.name not in COMPILED_BY_PHASE),
    *(
        setup
        for setup in setups(("decode", "prefill"), ratios=(128,))
        if setup.kv_cache_dtype == "bfloat16" and setup.name in COMPILED_BY_PHASE
    ),
]


@pytest.mark.usefixtures("sizes_by_themselves")
@pytest.mark.parametrize("setup", COMPILED, ids=str)
def test_one_compiled_graph_serves_every_batch(setup: Setup, seed: int) -> None:
    rng = random.Random(seed)
    cases = [any_case(rng, setup) for _ in range(3)]
    layer = any_layer(setup, cases[0])
    compiled = torch.compile(layer.module, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch.inference_mode():
        for number, case in enumerate(cases):
            with torch._dynamo.config.patch(error_on_recompile=number > 0):
                out = compiled(*layer.arguments(case))
            assert_bitwise(out, layer.module(*layer.arguments(case)))


@pytest.mark.usefixtures("sizes_by_themselves")
def test_fifty_batches_do_not_recompile(seed: int) -> None:
    rng, setup = random.Random(seed), Setup("FLASHINFER_MLA_SPARSE_DSV4", "bfloat16", 4, "mixed")
    layer = Layer(setup, case_of(rng, setup))
    options = {"fallback_by_default": True}  # Inductor calls PyTorch: its C++ is not the question
    compiled = torch.compile(layer.module, backend="dsv4", fullgraph=True, dynamic=True, options=options)
    with torch.inference_mode():
        for number in range(50):
            arguments = layer.arguments(case_of(rng, setup))
            with torch._dynamo.config.patch(error_on_recompile=number > 0):
                out = compiled(*arguments)
            assert_close(out, layer.module(*arguments))
