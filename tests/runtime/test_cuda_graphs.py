"""The order in which CUDA is told what, seen by a CUDA that only takes notes. What CUDA does is for tests/gpu."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from dsv4_compile.errors import GraphError
from dsv4_compile.runtime import Footprint, graphs
from dsv4_compile.runtime.capture_stream import OnCaptureStream
from dsv4_compile.runtime.graphs import CudaGraphs

POOL, OWN_POOL = (0, 7), (3, 0)


class Notes:
    """Everything that was said, in order, and what CUDA shall answer at the end of a capture."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.warning = ""
        self.fault = ""


class Stream:
    def __init__(self, notes: Notes, name: str) -> None:
        self.notes, self.name = notes, name

    def wait_stream(self, other: Stream) -> None:
        self.notes.said.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Notes:
    notes = Notes()
    current = [Stream(notes, "current")]

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    @contextmanager
    def device(_: Any) -> Iterator[None]:
        yield

    @contextmanager
    def on_pool(pool: Any, _: Any) -> Iterator[None]:
        notes.said.append(f"pool {pool.id}")
        yield
        notes.said.append("end of pool")

    class Graph:
        def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
            assert _get_current_dispatch_mode() is None  # CUDA's own work, before a capture and after it
            notes.said.append(f"begin on {current[-1].name}, pool {pool}, {capture_error_mode}")

        def capture_end(self) -> None:
            assert _get_current_dispatch_mode() is None
            notes.said.append("end")
            if notes.warning:
                warnings.warn(notes.warning, stacklevel=1)
            if notes.fault:
                raise RuntimeError(notes.fault)

        def replay(self) -> None:
            notes.said.append("replay")

    def note(text: str) -> Callable[..., None]:
        return lambda *args: notes.said.append(text)

    fakes = {
        "device": device,
        "Stream": lambda: Stream(notes, "side"),
        "stream": on,
        "current_stream": lambda: current[-1],
        "CUDAGraph": Graph,
        "graph_pool_handle": lambda: POOL,
        "synchronize": note("synchronize"),
        "empty_cache": note("empty_cache"),
        "reset_peak_memory_stats": note("reset peak"),
        "memory_allocated": lambda _: 1000,
        "max_memory_allocated": lambda _: 5000,
        "MemPool": lambda: SimpleNamespace(id=OWN_POOL),
        "use_mem_pool": on_pool,
        "memory_snapshot": lambda: [
            {"segment_pool_id": POOL, "total_size": 64},
            {"segment_pool_id": (0, 0), "total_size": 1},
            {"segment_pool_id": POOL, "total_size": 32},
            {"segment_pool_id": OWN_POOL, "total_size": 8192},
        ],
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(graphs, "recover_from_failed_capture", note("recover"))
    return notes


@pytest.fixture
def pool(cuda: Notes) -> CudaGraphs:
    return CudaGraphs(torch.device("cuda", 0))


def test_warm_up_and_capture_run_on_one_side_stream_ordered_with_the_callers(cuda: Notes, pool: CudaGraphs) -> None:
    assert pool.warm_up(lambda: cuda.said.append("work") or 3) == 3
    captured = pool.capture(lambda: cuda.said.append("work") or "out", "a step")
    captured.replay()
    assert captured.outputs == "out"
    order = ["side waits for current", "work", "current waits for side"]
    begun = f"begin on side, pool {POOL}, thread_local"
    assert cuda.said == [
        *order,
        *["synchronize", "empty_cache", "side waits for current", begun, "work", "end", "current waits for side"],
        "replay",
    ]


def test_an_empty_capture_is_an_error_and_other_warnings_are_passed_on(cuda: Notes, pool: CudaGraphs) -> None:
    cuda.warning = "The CUDA Graph is empty. This usually means that ..."
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(GraphError) as caught:
            pool.capture(lambda: None, "a step")
    assert caught.value.code == "E423"
    cuda.warning = "something else"
    with pytest.warns(UserWarning, match="something else"):
        pool.capture(lambda: None, "a step")


@pytest.mark.parametrize("when", ["in the step", "at the end"])
def test_a_failed_capture_is_ended_cleaned_up_and_explained(cuda: Notes, pool: CudaGraphs, when: str) -> None:
    cuda.fault = "CUDA error: capture was not joined: unjoined work"

    def step() -> None:
        if when == "in the step":
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    with pytest.raises(GraphError) as caught:
        pool.capture(step, "a step")
    assert caught.value.code == "E422"
    assert ("not permitted" if when == "in the step" else "unjoined") in caught.value.got
    assert cuda.said[-2:] == ["end", "recover"]
    cuda.fault = ""
    pool.capture(lambda: None, "the next step")


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("aten.add.Tensor", lambda x: x + 1),
        ("aten.fill_.Scalar", lambda x: x[0].fill_(2.0)),
        ("aten.zeros.default", lambda x: torch.zeros(2, device="cpu")),
    ],
)
def test_an_op_on_a_stream_that_is_not_captured_is_refused(
    name: str, step: Callable[[torch.Tensor], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.ones(4, 4)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with OnCaptureStream("a step", "cpu"), pytest.raises(GraphError, match=f"a step: {name} on a stream") as caught:
        step(x)
    assert x.sum() == 16
    assert caught.value.code == "E422"
    with OnCaptureStream("a step", "cpu"):
        assert x.view(16)[:3].shape == (3,)  # launches nothing
    with OnCaptureStream("a step", "cuda"):
        step(x)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with OnCaptureStream("a step", "cpu"):
        step(x)


def test_an_error_of_the_step_itself_stays_what_it_is(cuda: Notes, pool: CudaGraphs) -> None:
    def step() -> None:
        raise KeyError("layers.3")

    with pytest.raises(KeyError, match=r"layers\.3"):
        pool.capture(step, "a step")
    assert cuda.said[-1] == "end"


def test_memory_is_that_of_the_pool_and_a_footprint_that_of_one_call(cuda: Notes, pool: CudaGraphs) -> None:
    assert pool.memory() == 96
    x = torch.zeros(8)
    assert pool.measure(lambda: (cuda.said.append("work"), x[:4], x)[1:]) == Footprint(4000, 32, reserved=8192)
    said = [note for note in cuda.said if note in ("work", f"pool {OWN_POOL}", "end of pool")]
    assert said == [f"pool {OWN_POOL}", "work", "end of pool"]


@pytest.mark.parametrize(
    ("largest", "others", "expected"),
    [
        ((9 << 20, 49_152, 24 << 20), [(1 << 20, 8192, 23 << 20)] * 4, 24 << 20),
        ((2 << 20, 1 << 20, 2 << 20), [(1 << 20, 1 << 20, 2 << 20)], 4 << 20),
        ((1 << 20, 1 << 20, 2 << 20), [(1 << 20, 1 << 20, 2 << 20)], 2 << 20),
        ((18 << 20, 8 << 20, 20 << 20), [(9 << 20, 4 << 20, 20 << 20)] * 3, 30 << 20),
    ],
)
def test_a_pool_holds_its_largest_call_and_the_outputs_for_which_that_leaves_no_room(
    pool: CudaGraphs, largest: tuple[int, int, int], others: list[tuple[int, int, int]], expected: int
) -> None:
    assert pool.predict([Footprint(*largest), *(Footprint(*other) for other in others)]) == expected
