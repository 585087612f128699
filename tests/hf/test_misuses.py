"""Misuses of running batches, requests, caches, buffers and runners: each is right, or an error with a code."""

from __future__ import annotations

import array
import asyncio
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import tensor

from dsv4_compile import DSV4Error, hf
from dsv4_compile.cache import PagedCaches
from dsv4_compile.metadata import MetadataBuffers
from dsv4_compile.runtime import DecodeRunner
from tests.hf.serving import alone, damaged

IDS = [5, 6, 7, 8]


class Unprintable:
    """A value that raises when it is printed, tested or used as an index."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")

    __index__ = __bool__ = __len__ = __iter__ = __repr__  # type: ignore[assignment]


async def coroutine(token: int) -> None:
    """Await nothing."""
    await asyncio.sleep(0)


@pytest.fixture(scope="module")
def model() -> Any:
    return damaged()


@pytest.fixture(scope="module")
def batch(model: Any) -> Any:
    return hf.RunningBatch(model, slots=2, prefill_chunk=48)


PROMPTS: dict[str, Any] = {
    "tensor": tensor(IDS),
    "int32": tensor(IDS, dtype=torch.int32),
    "uint8": tensor(IDS, dtype=torch.uint8),
    "numpy": np.array(IDS),
    "numpy uint16": np.array(IDS, dtype=np.uint16),
    "tuple": tuple(IDS),
    "range": range(5, 9),
    "iterator": iter(IDS),
    "numpy integers": list(np.array(IDS)),
    "scalars": list(tensor(IDS)),
    "array": array.array("i", IDS),
    "strided": tensor([IDS, IDS]).T[:, 0],
}


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_of_any_library_are_read_as_their_ids(batch: Any, name: str) -> None:
    request = batch.submit(PROMPTS[name], max_new_tokens=1)
    assert request.prompt == IDS and all(type(token) is int for token in request.prompt)
    request.cancel()


BAD_PROMPTS: list[Any] = [
    *([], (), "", b"", "hello", b"hello", bytearray(b"ab"), memoryview(b"ab"), None, 5, 5.0, object(), Unprintable()),
    *([[5, 6]], [IDS, IDS], [5.0], [True], ["5"], [None], [5, -1], [5, 512], [2**70], [10**5000], [math.nan], [1j]),
    *({5: 6}, {5, 6}, frozenset([5]), {"input_ids": IDS}, [Unprintable()], [torch.ones(1).long()], [tensor(True)]),
    *(tensor(IDS)[None], tensor(5), torch.ones(0).long(), torch.ones(3), torch.ones(3).bool(), tensor([1j])),
    *(tensor([5, -1]), tensor([512]), torch.ones(3, device="meta").long(), np.ones(3), np.array(["5"]), np.array(5)),
    *(np.array([IDS]), np.array([True]), np.array([5, None]), torch.ones(3).long().to_sparse(), itertools.repeat(5)),
    *(itertools.count(), range(10**15), (1 / 0 for _ in IDS)),
]


@pytest.mark.parametrize("at", range(len(BAD_PROMPTS)))
def test_prompts_that_are_none_are_errors(batch: Any, at: int) -> None:
    with pytest.raises(DSV4Error, match=r"E20[14]"):
        batch.submit(BAD_PROMPTS[at], max_new_tokens=1)
    assert batch.idle


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}], ids=["default", "greedy"])
def test_stop_tokens_of_any_library_stop(model: Any, batch: Any, options: dict[str, Any]) -> None:
    tokens = alone(model, IDS, max_new_tokens=8)
    stop = tokens[3]
    want = tokens[: tokens.index(stop) + 1]
    kinds: list[Any] = [
        stop,
        tensor(stop),
        np.int64(stop),
        [stop],
        {stop},
        (stop, 3),
        frozenset([stop]),
        {stop: 1}.keys(),
    ]
    kinds += [
        tensor([stop, 3]),
        [tensor(stop)],
        np.array([stop]),
        [np.int32(stop)],
        iter([stop]),
        range(stop, stop + 1),
    ]
    for kind in kinds:
        request = batch.submit(IDS, max_new_tokens=8, stop_tokens=kind, **options)
        batch.run()
        assert (request.tokens, request.state) == (want, "stop"), kind
    for none in (None, [], (), torch.ones(0).long(), np.ones(0, dtype=np.int64)):
        assert list(batch.submit(IDS, max_new_tokens=8, stop_tokens=none, **options)) == tokens


BAD_OPTIONS: list[tuple[str, Any]] = [
    *(("stop_tokens", value) for value in ("eos", b"ab", 2.0, True, [True], [2.0], ["5"], [[5]], [None], {5: 6}, [-1])),
    *(
        ("stop_tokens", value)
        for value in (-1, 512, [512], tensor([[5]]), tensor([5.0]), tensor([-1]), itertools.count())
    ),
    *(
        ("stop_tokens", value)
        for value in (object(), Unprintable(), [Unprintable()], itertools.repeat(5), tensor(True))
    ),
    *(("max_new_tokens", value) for value in (0, -1, 2.5, 3.0, math.inf, math.nan, "5", None, True, [5], tensor(2.0))),
    *(("max_new_tokens", value) for value in (tensor([5]), np.float64(5), np.ones(1), 10**5000, 2**63, Unprintable())),
    *(("on_token", value) for value in (3, "print", [print], coroutine, Unprintable())),
    *(("temperature", value) for value in (Unprintable(), [0.5], {}, 10**5000)),
]


@pytest.mark.parametrize("at", range(len(BAD_OPTIONS)))
def test_options_of_another_type_or_range_are_errors(batch: Any, at: int) -> None:
    name, value = BAD_OPTIONS[at]
    with pytest.raises(DSV4Error, match=r"E20[14]"):
        batch.submit(IDS, **{"max_new_tokens": 4, name: value})
    assert batch.idle


def test_numbers_of_new_tokens_of_libraries(batch: Any) -> None:
    for count in (2, np.int64(2), tensor(2), np.uint8(2)):
        assert len(list(batch.submit(IDS, max_new_tokens=count))) == 2


def a_runner(**options: Any) -> DecodeRunner:
    buffers = MetadataBuffers(max_num_batched_tokens=4, max_num_seqs=4, max_model_len=256)
    given = {"inputs": {"x": torch.zeros(4, 2)}, "graphs": "standin", **options}
    return DecodeRunner(given.pop("step", lambda x, metadata, caches: x + 1), given.pop("buffers", buffers), **given)


def warm(**options: Any) -> DecodeRunner:
    runner = a_runner(**options)
    runner.buffers.load([0, 1, 2], [5, 6])
    runner.warm_up()
    return runner


def buffers() -> MetadataBuffers:
    return MetadataBuffers(max_num_batched_tokens=4, max_num_seqs=4, max_model_len=256)


X = torch.zeros(2, 2)
ENGINE: dict[str, Callable[[Any], Any]] = {
    "batch of None": lambda model: hf.RunningBatch(None, slots=2),
    "batch of a module": lambda model: hf.RunningBatch(torch.nn.Linear(2, 2), slots=2),
    "batch of a stack": lambda model: hf.RunningBatch(model.model, slots=2),
    "slots 2.5": lambda model: hf.RunningBatch(model, slots=2.5),  # type: ignore[arg-type]
    "slots text": lambda model: hf.RunningBatch(model, slots="2"),  # type: ignore[arg-type]
    "slots bool": lambda model: hf.RunningBatch(model, slots=True),
    "slots huge": lambda model: hf.RunningBatch(model, slots=2**30),
    "chunk nan": lambda model: hf.RunningBatch(model, slots=2, prefill_chunk=math.nan),  # type: ignore[arg-type]
    "chunk None": lambda model: hf.RunningBatch(model, slots=2, prefill_chunk=None),  # type: ignore[arg-type]
    "length 0": lambda model: hf.RunningBatch(model, slots=2, max_seq_len=0),
    "length -1": lambda model: hf.RunningBatch(model, slots=2, max_seq_len=-1),
    "length 1.5": lambda model: hf.RunningBatch(model, slots=2, max_seq_len=1.5),  # type: ignore[arg-type]
    "length too long": lambda model: hf.RunningBatch(model, slots=2, max_seq_len=10**5000),
    "graphs unknown": lambda model: hf.RunningBatch(model, slots=2, graphs="cude"),
    "graphs None": lambda model: hf.RunningBatch(model, slots=2, graphs=None),  # type: ignore[arg-type]
    "graphs a list": lambda model: hf.RunningBatch(model, slots=2, graphs=["off"]),  # type: ignore[arg-type]
    "backend unknown": lambda model: hf.RunningBatch(model, slots=2, backend="dsv5"),
    "backend a number": lambda model: hf.RunningBatch(model, slots=2, backend=4),  # type: ignore[arg-type]
    "options a list": lambda model: hf.RunningBatch(model, slots=2, backend="dsv4", options=["x"]),  # type: ignore[arg-type]
    "options unknown": lambda model: hf.RunningBatch(model, slots=2, backend="dsv4", options={"dsv4.x": 1}),
    "options without backend": lambda model: hf.RunningBatch(model, slots=2, options={"dsv4.impl": "auto"}),
    "cache of None": lambda model: hf.new_cache(None),
    "cache of text": lambda model: hf.new_cache(model, max_seq_len="256"),  # type: ignore[arg-type]
    "cache of no rows": lambda model: hf.new_cache(model, max_batch_size=0),
    "cache of floats": lambda model: hf.new_cache(model, max_seq_len=128.0),  # type: ignore[arg-type]
    "caches of a dict": lambda model: PagedCaches({}, max_batch_size=1, max_seq_len=256),  # type: ignore[arg-type]
    "caches of another config": lambda model: PagedCaches(model.config, max_batch_size=1, max_seq_len=256),
    "caches of nan": lambda model: PagedCaches(
        model.model.dsv4_cache.paged.config,
        max_batch_size=math.nan,
        max_seq_len=256,  # type: ignore[arg-type]
    ),
    "load None": lambda model: buffers().load(None, None),  # type: ignore[arg-type]
    "load text": lambda model: buffers().load("01", "5"),  # type: ignore[arg-type]
    "load floats": lambda model: buffers().load([0, 1.0], [5.0]),  # type: ignore[list-item]
    "load ragged": lambda model: buffers().load([0, [1]], [5]),  # type: ignore[list-item]
    "load huge": lambda model: buffers().load([0, 2**70], [5]),
    "load numpy": lambda model: buffers().load(np.array([0.0, 1.0]), np.array([5.0])),  # type: ignore[arg-type]
    "refresh text": lambda model: buffers().refresh("1"),  # type: ignore[arg-type]
    "refresh 1.5": lambda model: buffers().refresh(1.5),  # type: ignore[arg-type]
    "metadata None": lambda model: buffers().metadata(None),  # type: ignore[arg-type]
    "metadata early": lambda model: buffers().metadata(1),
    "runner of None": lambda model: a_runner(step=None),
    "runner without buffers": lambda model: a_runner(buffers=None),
    "inputs a list": lambda model: a_runner(inputs=[X]),
    "inputs of numbers": lambda model: a_runner(inputs={"x": 3}),
    "buckets of text": lambda model: a_runner(buckets=["1"]),
    "buckets a number": lambda model: a_runner(buckets=2),
    "buckets empty": lambda model: a_runner(buckets=[]),
    "sampler a number": lambda model: a_runner(sampler=3),
    "tokens_each 1.5": lambda model: a_runner(tokens_each=1.5),
    "graphs of a runner": lambda model: a_runner(graphs="x"),
    "step before warm-up": lambda model: a_runner().step(1),
    "run before warm-up": lambda model: a_runner(sampler="greedy").run(1, 1),
    "step of nothing": lambda model: warm().step(),
    "step of text": lambda model: warm().step("1"),  # type: ignore[arg-type]
    "step of 1.5": lambda model: warm().step(1.5),  # type: ignore[arg-type]
    "step of nan": lambda model: warm().step(math.nan),  # type: ignore[arg-type]
    "step of both": lambda model: warm().step(1, num_reqs=1),
    "step of requests of text": lambda model: warm().step(num_reqs="1"),  # type: ignore[arg-type]
    "input a list": lambda model: warm().step(2, x=[[0.0, 0.0]] * 2),  # type: ignore[arg-type]
    "input unknown": lambda model: warm().step(2, y=X),
    "input of another shape": lambda model: warm().step(2, x=X[:1]),
    "input of another dtype": lambda model: warm().step(2, x=X.long()),
    "input on another device": lambda model: warm().step(2, x=X.to("meta")),
    "run of text": lambda model: warm(sampler="greedy").run("1", 1),  # type: ignore[arg-type]
    "run of too many": lambda model: warm(sampler="greedy").run(10**6, 1),
    "run without a sampler": lambda model: warm().run(1, 1),
    "sampler of nothing": lambda model: warm(sampler=lambda out: None).run(1, 2),
    "sampler of text": lambda model: warm(sampler=lambda out: "x").run(1, 2),
    "sampler of floats": lambda model: warm(sampler=lambda out: torch.rand(2)).run(1, 2),
    "sampler of one too few": lambda model: warm(sampler=lambda out: torch.ones(1).long()).run(1, 2),
    "warm-up twice": lambda model: warm().warm_up(),
}


@pytest.mark.parametrize("name", ENGINE)
def test_misuses_of_constructors_buffers_and_runners_are_errors(model: Any, name: str) -> None:
    with pytest.raises(DSV4Error):
        ENGINE[name](model)


def test_a_request_that_no_batch_submitted(model: Any, batch: Any) -> None:
    with pytest.raises(DSV4Error, match="E201"):
        hf.Request(None, None)  # type: ignore[arg-type]
