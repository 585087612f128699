"""Uncommon calls of V4.1 give the model's tokens, or an error with a code.

Roads: prompts of any kind; arguments of generation; sizes at the border; caches of others; raw steps; positions that go
back; weights that are copied, saved, loaded or cast; gradients and modes; settings of torch; objects that are copied.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dsv4_compile.errors import DSV4Error
from dsv4_compile.models.v41 import V41Caches, V41Format, V41Model, compile, generate, prefill
from dsv4_compile.models.v41.tiny import tiny_model
from tests.models.v41.test_compiled import KINDS
from tests.models.v41.worked import token_ids

Tokens = list[list[int]]
IDS = token_ids()
PROMPTS = [IDS[:19], IDS[5:12], IDS[:1]]


@pytest.fixture(scope="module")
def model() -> V41Model:
    return tiny_model(**KINDS)


@pytest.fixture(scope="module")
def want(model: V41Model) -> Tokens:
    return run(model)


def run(model: V41Model, prompts: Any = PROMPTS, **options: Any) -> Tokens:
    return generate(model, prompts, **{"max_new_tokens": 4, "stop": []} | options)


def caches_of(model: V41Model, **sizes: Any) -> V41Caches:
    return model.new_caches(**{"max_batch_size": 3, "max_seq_len": 32} | sizes)


def assert_code(code: str, call: Callable[[], Any]) -> None:
    with pytest.raises(DSV4Error) as caught:
        call()
    assert caught.value.code == code, caught.value


@pytest.mark.parametrize(
    "convert",
    [
        lambda prompts: (prompt.tolist() for prompt in prompts),
        lambda prompts: [prompt.numpy() for prompt in prompts],
        lambda prompts: tuple(prompt.int() for prompt in prompts),
        lambda prompts: [prompt.to(torch.uint8) for prompt in prompts],
        lambda prompts: [torch.stack((prompt, prompt), 1)[:, 0] for prompt in prompts],
        lambda prompts: [np.asarray(prompt, dtype=np.int16) for prompt in prompts],
    ],
    ids=["iterator of lists", "numpy", "int32", "uint8", "not contiguous", "int16"],
)
def test_prompts_of_any_kind(convert: Callable[[list[Tensor]], Any], model: V41Model, want: Tokens) -> None:
    assert run(model, convert(PROMPTS)) == want


def test_a_matrix_of_prompts_and_none_at_all(model: V41Model) -> None:
    rows = [IDS[:5], IDS[3:8]]
    assert run(model, torch.stack(rows)) == run(model, rows)
    assert run(model, []) == []
    assert prefill(model, [], caches_of(model)).shape == (0, 64)


@pytest.mark.parametrize(
    "prompts",
    [
        None,
        "abc",
        ["abc"],
        [1, 2, 3],
        torch.tensor([1, 2, 3]),
        {0: [1]},
        [[1, None]],
        [[[1, 2]]],
        [[2**70]],
        [[True]],
        [[1j]],
        [[]],
        [[-3]],
        [[64]],
        [torch.zeros(3, dtype=torch.int64, device="meta")],
    ],
    ids=str,
)
def test_prompts_that_are_none(prompts: Any, model: V41Model) -> None:
    assert_code("E201", lambda: run(model, prompts))


@pytest.mark.parametrize(
    "options",
    [
        {"seed": None},
        {"seed": -1},
        {"seed": 0.5},
        {"temperature": float("nan")},
        {"stop": [64]},
        {"stop": ["a"]},
        {"mode": None},
        {"cache_format": "plain"},
    ],
    ids=str,
)
def test_arguments_of_generation_out_of_range(options: dict[str, Any], model: V41Model) -> None:
    assert_code("E201", lambda: run(model, **options))


def test_one_stop_token_is_a_number(model: V41Model, want: Tokens) -> None:
    stop = want[0][1]
    assert run(model, stop=stop) == run(model, stop=[stop]) != want


def test_sizes_at_the_border(model: V41Model, want: Tokens) -> None:
    assert run(model, caches=caches_of(model, max_seq_len=23)) == want
    assert run(model, caches=caches_of(model, max_batch_size=5, max_seq_len=24, max_step_tokens=1)) == want
    assert_code("E204", lambda: run(model, caches=caches_of(model, max_seq_len=22)))
    assert_code("E204", lambda: run(model, caches=caches_of(model, max_batch_size=2)))
    assert run(model, [[5]], max_new_tokens=1, caches=caches_of(model, max_seq_len=2)) == run(
        model, [[5]], max_new_tokens=1
    )
    for sizes in ({"requests": [True]}, {"requests": [0.0]}, {"starts": [1.5]}, {"requests": [0, 1]}):
        assert_code("E201", lambda sizes=sizes: prefill(model, [[1]], caches_of(model), **sizes))


def test_caches_of_others(model: V41Model, want: Tokens) -> None:
    others = tiny_model(3)
    assert_code("E208", lambda: run(model, caches=caches_of(others)))
    assert_code("E201", lambda: run(model, caches=5))
    assert_code("E201", lambda: run(model, caches=caches_of(model), cache_format=V41Format()))
    assert_code(
        "E201", lambda: run(model, caches=V41Caches(model.config, max_batch_size=3, max_seq_len=32, device="meta"))
    )
    same = copy.deepcopy(model)
    assert run(model, caches=caches_of(same)) == run(model, caches=pickle.loads(pickle.dumps(caches_of(same)))) == want
    steps = compile(same, caches=caches_of(same), backend=None)
    assert run(same, forward=steps) == want
    assert_code("E208", lambda: run(model, forward=steps))


def test_raw_steps(model: V41Model) -> None:
    ids, positions, requests = IDS[:3], torch.arange(3), torch.zeros(3, dtype=torch.int64)
    caches, steps = caches_of(model), compile(model, caches=caches_of(model), backend=None)
    want = model(ids, positions, requests, caches)
    assert torch.equal(model(ids.int(), positions.int(), requests.int(), caches_of(model)), want)
    for changes in (
        {0: ids.to(torch.uint8)},
        {0: ids.short()},
        {0: ids.float()},
        {0: ids.tolist()},
        {1: positions.float()},
        {1: positions[:2]},
        {2: requests[:1]},
        {0: ids[None], 1: positions[None], 2: requests[None]},
        {0: ids.to("meta")},
        {2: requests.to("meta")},
    ):
        step = [changes.get(index, values) for index, values in enumerate((ids, positions, requests))]
        for call, mine in ((model, caches), (model.encode, caches), (steps, steps.caches)):
            assert_code("E201", partial(call, *step, mine))
    short = caches_of(model, max_step_tokens=2)
    assert_code("E204", lambda: model(ids, positions, requests, short))
    assert model(ids, positions, torch.tensor([0, 0, 1]), short).isfinite().all()
    assert model(ids[:0], positions[:0], requests[:0], caches).shape == (0, 64)


@pytest.mark.parametrize("graphs", ["off", "standin"])
def test_positions_that_go_back(model: V41Model, graphs: str) -> None:
    """Others are tried at a position, and then the right ones run again: nothing of the others is left."""
    steps, caches = compile(model, caches=caches_of(model), backend=None, graphs=graphs), caches_of(model)
    rows, wrong = torch.arange(2), (IDS[20:40] + 7) % 64
    for position in range(20):
        at = torch.full((2,), position)
        want = model(IDS[position : position + 2], at, rows, caches)
        if position % 4 == 0:
            for ahead in range(4):
                steps(wrong[position + ahead : position + ahead + 1].expand(2), at + ahead, rows, steps.caches)
        got = steps(IDS[position : position + 2], at, rows, steps.caches)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_weights_that_are_copied_saved_and_loaded(model: V41Model, want: Tokens) -> None:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert run(torch.load(file, weights_only=False)) == run(copy.deepcopy(model)) == want
    for assign in (False, True):
        other = tiny_model(9, **KINDS)
        steps = compile(other, caches=caches_of(other), backend=None, graphs="standin")
        assert run(other, forward=steps) != want
        other.load_state_dict(model.state_dict(), assign=assign)
        assert run(other) == want
        if assign:
            assert_code("E421", lambda steps=steps, other=other: run(other, forward=steps))
        else:
            assert run(other, forward=steps) == want


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_that_are_cast(model: V41Model, dtype: torch.dtype) -> None:
    """Some of them are float32 in every model."""
    other = copy.deepcopy(model)
    steps = compile(other, caches=caches_of(other), backend=None, graphs="standin")
    other.to(dtype)
    assert_code("E201", lambda: run(other))
    assert_code("E421", lambda: steps(IDS[:2], IDS[:2] * 0, torch.arange(2), steps.caches))


def test_gradients_and_modes(model: V41Model, want: Tokens) -> None:
    other = copy.deepcopy(model).requires_grad_(True)
    steps = compile(other, caches=caches_of(other), backend=None)
    assert run(other) == run(other, forward=steps) == want
    step = IDS[:2], torch.zeros(2).long(), torch.arange(2)
    assert not steps(*step, steps.caches).requires_grad
    assert_code("E206", lambda: other(*step, caches_of(other)))
    with torch.inference_mode():
        assert run(model) == run(other, forward=steps) == want
    other.train()
    for call in (
        lambda: run(other),
        lambda: prefill(other, PROMPTS, steps.caches),
        lambda: compile(other, max_seq_len=8),
    ):
        assert_code("E208", call)


@contextmanager
def defaults(device: str | None = None, dtype: torch.dtype = torch.float32) -> Iterator[None]:
    torch.set_default_device(device)
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def test_settings_of_torch(model: V41Model, want: Tokens) -> None:
    with defaults("meta"):
        steps = compile(model, max_batch_size=3, max_seq_len=32, backend=None, graphs="standin")
        assert run(model) == run(model, forward=steps) == want
    with defaults(dtype=torch.bfloat16):
        assert run(model) == want
        assert prefill(model, PROMPTS, caches_of(model)).dtype is torch.float32
    with defaults(dtype=torch.float64):
        assert_code("E208", lambda: run(model))
    step = IDS[:2], torch.zeros(2).long(), torch.arange(2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_code("E208", lambda: run(model))
        assert_code("E208", lambda: model(*step, caches_of(model)))
        assert_code("E208", lambda: steps(*step, steps.caches))


def test_steps_are_not_copied(model: V41Model) -> None:
    steps = compile(model, caches=caches_of(model), backend=None)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        assert_code("E432", lambda copied=copied: copied(steps))
