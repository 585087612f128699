"""`compile`: what a model can be asked for runs in the graphs that were compiled before the first request."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from dsv4_compile.errors import InputError
from dsv4_compile.models.v41 import CompiledSteps, V41Format, V41Model, compile, generate
from dsv4_compile.models.v41.prefill import MODES
from dsv4_compile.models.v41.tiny import tiny_model
from tests.models.v41.test_compiled import KINDS
from tests.models.v41.worked import token_ids

SHARES_GRAPHS = True


@pytest.fixture(scope="module")
def model() -> V41Model:
    return tiny_model(**KINDS)


@pytest.fixture(scope="module")
def steps(model: V41Model) -> CompiledSteps:
    """Compiled for three requests."""
    caches = model.new_caches(max_batch_size=3, max_seq_len=64, cache_format=V41Format.plain(grids=True))
    before = [tensor.clone() for tensor in caches.tensors()]
    steps = compile(model, caches=caches, backend="eager")
    assert all(map(torch.equal, caches.tensors(), before))
    return steps


def test_a_storm_of_sizes_compiles_nothing(model: V41Model, steps: CompiledSteps) -> None:
    draw = random.Random(3)
    with torch.compiler.set_stance("fail_on_recompile"):
        for _ in range(10):
            lengths = [draw.choice((1, 2, 3, 9, 30, 50)) for _ in range(draw.randint(1, 3))]
            prompts = [token_ids(length).roll(draw.randrange(9)) for length in lengths]
            options: dict[str, Any] = {"max_new_tokens": draw.randint(1, 5), "stop": [draw.randrange(64)]}
            options |= {"mode": draw.choice(MODES), "chunk": draw.choice((None, 1, 2, 7, 20))}
            got = generate(model, prompts, **options, forward=steps)
            caches = model.new_caches(max_batch_size=3, max_seq_len=64, cache_format=steps.caches.cache_format)
            assert got == generate(model, prompts, **options, caches=caches), options


def test_inference_mode_compiles_nothing(model: V41Model, steps: CompiledSteps) -> None:
    """Nor do inputs that were made in it."""
    options: dict[str, Any] = {"max_new_tokens": 3, "forward": steps, "mode": "replay"}
    want = generate(model, [[1, 2, 3] * 9], **options)
    with torch.compiler.set_stance("fail_on_recompile"):
        with torch.inference_mode():
            assert generate(model, [[1, 2, 3] * 9], **options) == want
            inputs = token_ids(7), torch.arange(7), torch.zeros(7, dtype=torch.int64)
        assert torch.equal(steps(*inputs, steps.caches), steps(*(x.clone() for x in inputs), steps.caches))


def test_logits_of_all_rows_are_those_of_the_model(model: V41Model, steps: CompiledSteps) -> None:
    inputs = token_ids(7), torch.arange(7), torch.zeros(7, dtype=torch.int64)
    want = model(*inputs, model.new_caches(max_batch_size=3, max_seq_len=64, cache_format=steps.caches.cache_format))
    torch.testing.assert_close(steps(*inputs, steps.caches), want, rtol=0, atol=1e-4)


def test_what_steps_were_not_compiled_for_is_refused(model: V41Model, steps: CompiledSteps) -> None:
    others = model.new_caches(max_batch_size=2, max_seq_len=64)
    with pytest.raises(InputError, match="other caches"):
        generate(model, [[1, 2]], max_new_tokens=1, forward=steps, caches=others)
    with pytest.raises(InputError, match="caches and max_seq_len"):
        compile(model, caches=steps.caches, max_seq_len=32)
    with pytest.raises(InputError, match="max_batch_size=3"):
        generate(model, [[1, 2]] * 4, max_new_tokens=1, forward=steps)
