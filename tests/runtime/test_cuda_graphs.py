"""Order of the CUDA calls of warm-up, capture and replay, recorded by fakes. Tests of real CUDA are in tests/gpu."""

from __future__ import annotations

import gc
import itertools
import logging
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from dsv4_compile.errors import GraphError, fail
from dsv4_compile.runtime import Footprint, capture_status, cuda_graphs
from dsv4_compile.runtime.capture_status import is_invalidated
from dsv4_compile.runtime.cuda_graphs import CheckCaptureStream, CudaGraphs

POOL, OWN_POOL = (0, 7), (3, 0)
Pool = tuple[int, int]


class Allocator:
    """One of torch's two allocators, of the device or of pinned memory: pools, and those being captured into."""

    def __init__(self, forgets: bool) -> None:
        self.forgets, self.uses, self.recording = forgets, dict[Pool, int](), dict[Pool, Callable[[], Any]]()

    def begin(self, pool: Pool, graph: Any) -> None:
        assert all(asked() is not None for asked in self.recording.values()), "it asks a graph that is gone"
        if self.uses.get(pool) == 0:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        self.uses[pool] = self.uses.get(pool, 0) + 1
        if pool in self.recording:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.recording[pool] = weakref.ref(graph)

    def release(self, pool: Pool) -> None:
        self.uses[pool] -= 1
        if self.forgets and not self.uses[pool]:
            del self.uses[pool]


class Calls:
    """CUDA calls in order, torch's allocators, and the warning or error that the end of a capture gives."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.warning = ""
        self.fault = ""
        self.pools = itertools.count(POOL[1])
        # torch empties the device's pools that have no graph; it keeps those of pinned memory.
        self.device, self.pinned = self.allocators = Allocator(forgets=True), Allocator(forgets=False)


class Stream:
    def __init__(self, calls: Calls, name: str) -> None:
        self.calls, self.name = calls, name

    def wait_stream(self, other: Stream) -> None:
        self.calls.names.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls()
    current = [Stream(calls, "current")]

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
        calls.names.append(f"pool {pool.id}")
        yield
        calls.names.append("end of pool")

    class Graph:
        ended: Pool | None = None

        def capture_begin(self, pool: Pool, capture_error_mode: str) -> None:
            assert (
                _get_current_dispatch_mode() is None
            )  # no dispatch mode around the calls that begin and end a capture
            calls.names.append(f"begin on {current[-1].name}, pool {pool}, {capture_error_mode}")
            self.begun = pool
            for allocator in calls.allocators:
                allocator.begin(pool, self)

        def capture_end(self) -> None:
            assert _get_current_dispatch_mode() is None
            calls.names.append("end")
            if calls.warning:
                warnings.warn(calls.warning, stacklevel=1)
            if calls.fault:
                raise RuntimeError(calls.fault)
            for allocator in calls.allocators:
                del allocator.recording[self.begun]
            self.ended = self.begun

        def replay(self) -> None:
            calls.names.append("replay")

        def pool(self) -> Pool:
            if self.ended is None:
                raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
            return self.ended

        def reset(self) -> None:
            if self.ended is not None:
                for allocator in calls.allocators:
                    allocator.release(self.ended)
                self.ended = None

        __del__ = reset

    def record(text: str) -> Callable[..., None]:
        return lambda *args: calls.names.append(text)

    def recover(_: Any, pool: Pool) -> None:
        calls.names.append("recover")
        calls.device.recording.pop(pool, None)

    fakes = {
        "device": device,
        "Stream": lambda: Stream(calls, "side"),
        "stream": on,
        "current_stream": lambda: current[-1],
        "CUDAGraph": Graph,
        "graph_pool_handle": lambda: (POOL[0], next(calls.pools)),
        "synchronize": record("synchronize"),
        "empty_cache": record("empty_cache"),
        "reset_peak_memory_stats": record("reset peak"),
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
    monkeypatch.setattr(cuda_graphs, "recover_from_failed_capture", recover)
    return calls


@pytest.fixture
def pool(cuda: Calls) -> CudaGraphs:
    return CudaGraphs(torch.device("cuda", 0))


def test_warm_up_and_capture_run_on_one_side_stream_ordered_with_the_callers(cuda: Calls, pool: CudaGraphs) -> None:
    assert pool.warm_up(lambda: cuda.names.append("work") or 3) == 3
    captured = pool.capture(lambda: cuda.names.append("work") or "out", "a step")
    captured.replay()
    assert captured.outputs == "out"
    order = ["side waits for current", "work", "current waits for side"]
    begun = f"begin on side, pool {POOL}, thread_local"
    assert cuda.names == [
        *order,
        *["synchronize", "empty_cache", "side waits for current", begun, "work", "end", "current waits for side"],
        "replay",
    ]


def test_a_call_on_another_stream_waits_for_the_last_one(
    cuda: Calls, pool: CudaGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captures of a pool share memory, and streams of two threads are not ordered otherwise."""
    for stream in [Stream(cuda, "first")] * 2 + [Stream(cuda, "second")]:
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None, stream=stream: stream)
        pool.follow()
    assert cuda.names == ["second waits for first"]


def test_an_empty_capture_is_an_error_and_other_warnings_are_passed_on(cuda: Calls, pool: CudaGraphs) -> None:
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
def test_a_failed_capture_is_ended_cleaned_up_and_explained(cuda: Calls, pool: CudaGraphs, when: str) -> None:
    earlier = pool.capture(lambda: None, "an earlier step")
    cuda.fault = "CUDA error: capture was not joined: unjoined work"

    def step() -> None:
        if when == "in the step":
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    with pytest.raises(GraphError) as caught:
        pool.capture(step, "a step")
    assert caught.value.code == "E422"
    assert ("not permitted" if when == "in the step" else "unjoined") in caught.value.got
    assert cuda.names[-2:] == ["end", "recover"]
    cuda.fault = ""
    del caught  # with the frames that hold the graph
    gc.collect()
    pool.capture(lambda: None, "the next step")
    earlier.replay()


def test_a_capture_that_cannot_begin_is_cleaned_up_too(cuda: Calls, pool: CudaGraphs) -> None:
    cuda.pinned.uses[POOL] = 0
    with pytest.raises(GraphError, match=r"E422[\s\S]*use_count > 0"):
        pool.capture(lambda: None, "a step")
    assert not cuda.device.recording
    pool.capture(lambda: None, "the next step")


@pytest.mark.parametrize("freed", ["dropped", "reset"])
def test_captures_go_on_when_all_earlier_ones_have_been_freed(cuda: Calls, pool: CudaGraphs, freed: str) -> None:
    """Graphs are freed where a weight that all of them read is replaced, or the only model of a process."""
    first, second = (pool.capture(lambda: None, "a step") for _ in range(2))
    assert cuda.device.uses == {POOL: 2}, "they share memory"
    if freed == "reset":
        for graph in (first, second):
            graph.replay.__self__.reset()  # type: ignore[attr-defined]
    else:
        del first, second
    third, fourth = (pool.capture(lambda: None, "a step") for _ in range(2))
    assert list(cuda.device.uses.values()) == [2] and POOL not in cuda.device.uses
    del third
    fifth = pool.capture(lambda: None, "a step")
    assert list(cuda.device.uses.values()) == [2]
    del fourth, fifth


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("aten.add.Tensor", lambda x: x + 1),
        ("aten.fill_.Scalar", lambda x: x[0].fill_(2.0)),
        ("aten.zeros.default", lambda x: torch.zeros(2, device="cpu")),
    ],
)
def test_an_op_on_a_stream_that_is_not_captured_raises(
    name: str, step: Callable[[torch.Tensor], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.ones(4, 4)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with CheckCaptureStream("a step", "cpu"), pytest.raises(GraphError, match=f"a step: {name} on a stream") as caught:
        step(x)
    assert x.sum() == 16
    assert caught.value.code == "E422"
    with CheckCaptureStream("a step", "cpu"):
        assert x.view(16)[:3].shape == (3,)  # launches nothing
    with CheckCaptureStream("a step", "cuda"):
        step(x)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with CheckCaptureStream("a step", "cpu"):
        step(x)


PREVIOUS = "CUDA error: operation failed due to a previous error during capture"


@pytest.mark.parametrize(
    ("valid", "named"),
    [(2, "before aten.mul.Tensor"), (3, "by aten.mul.Tensor"), (9, PREVIOUS)],
    ids=["between ops", "in an op", "at a launch that torch does not dispatch"],
)
def test_the_error_of_an_invalidated_capture_names_the_last_valid_op(
    valid: int, named: str, cuda: Calls, pool: CudaGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA reports it at the next launch, which is innocent, once the error of the forbidden call is caught."""
    x = torch.ones(4)
    answers = iter([False] * valid + [True])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(cuda_graphs, "is_invalidated", lambda: next(answers))

    def step() -> Any:
        y = x.add(1)
        if named != PREVIOUS:
            return y.mul(3)
        raise RuntimeError(f"Triton Error [CUDA]: {PREVIOUS}")

    with pytest.raises(GraphError) as caught:
        pool.capture(step, "a step")
    assert caught.value.code == "E422" and named in caught.value.got
    assert "the last op that ended in the valid capture is aten.add.Tensor" in caught.value.why
    assert "its error was caught" in caught.value.why
    assert cuda.names[-1] == "end"


def test_the_error_of_a_capture_names_collections_and_compilations(
    cuda: Calls, pool: CudaGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = iter([4, 6, 6, 6])
    monkeypatch.setattr(capture_status, "_compiled_graphs", lambda: next(compiled))

    def step() -> None:
        gc.collect()
        raise RuntimeError(PREVIOUS)

    before = list(gc.callbacks)
    with pytest.raises(GraphError, match=r"garbage was collected.*2 graphs were compiled"):
        pool.capture(step, "a step")
    with pytest.raises(GraphError) as caught:
        pool.capture(lambda: fail("E422", got="else"), "a step")
    assert "garbage" not in str(caught.value)
    assert gc.callbacks == before


def test_the_error_of_a_capture_names_the_guard_that_failed(
    cuda: Calls, pool: CudaGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    scale = torch.compile(lambda x, factor: x * factor, backend="eager", dynamic=False)
    scale(torch.ones(4), 2)

    def step() -> None:
        scale(torch.ones(4), 3)
        scale(torch.ones(5), 2)
        raise RuntimeError(PREVIOUS)

    handlers = list(logging.getLogger("torch.__trace").handlers)
    with pytest.raises(GraphError, match=r"graphs were compiled.*did not hold: .*factor == 2") as caught:
        pool.capture(step, "a step")
    assert "size mismatch" not in caught.value.why  # the first one alone
    assert logging.getLogger("torch.__trace").handlers == handlers


def test_the_driver_says_whether_a_capture_is_invalidated(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([(0, 0), (0, 1), (0, 2), (999, 2)])

    def ask(stream: Any, status: Any) -> int:
        assert stream.value == 77
        result, status._obj.value = next(answers)
        return result

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=77))
    monkeypatch.setattr(capture_status, "_driver", lambda: SimpleNamespace(cuStreamIsCapturing=ask))
    assert [is_invalidated() for _ in range(4)] == [False, False, True, False]
    monkeypatch.setattr(capture_status, "_driver", lambda: None)
    assert not is_invalidated()


def test_an_error_of_the_step_itself_is_passed_on(cuda: Calls, pool: CudaGraphs) -> None:
    def step() -> None:
        raise KeyError("layers.3")

    with pytest.raises(KeyError, match=r"layers\.3"):
        pool.capture(step, "a step")
    assert cuda.names[-1] == "end"


def test_memory_counts_the_pool_and_a_footprint_one_call(cuda: Calls, pool: CudaGraphs) -> None:
    assert pool.memory() == 96
    x = torch.zeros(8)
    assert pool.measure(lambda: (cuda.names.append("work"), x[:4], x)[1:]) == Footprint(4000, 32, reserved=8192)
    names = [name for name in cuda.names if name in ("work", f"pool {OWN_POOL}", "end of pool")]
    assert names == [f"pool {OWN_POOL}", "work", "end of pool"]


@pytest.mark.parametrize(
    ("largest", "others", "expected"),
    [
        ((9 << 20, 49_152, 24 << 20), [(1 << 20, 8192, 23 << 20)] * 4, 24 << 20),
        ((2 << 20, 1 << 20, 2 << 20), [(1 << 20, 1 << 20, 2 << 20)], 4 << 20),
        ((1 << 20, 1 << 20, 2 << 20), [(1 << 20, 1 << 20, 2 << 20)], 2 << 20),
        ((18 << 20, 8 << 20, 20 << 20), [(9 << 20, 4 << 20, 20 << 20)] * 3, 30 << 20),
    ],
)
def test_prediction_is_the_largest_call_plus_outputs_that_do_not_fit_into_its_free_part(
    pool: CudaGraphs, largest: tuple[int, int, int], others: list[tuple[int, int, int]], expected: int
) -> None:
    assert pool.predict([Footprint(*largest), *(Footprint(*other) for other in others)]) == expected
