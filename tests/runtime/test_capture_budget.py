"""Tests of the bound on the memory of captures: which are evicted, what is reported, and that results stay right."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from dsv4_compile import _compat, progress
from dsv4_compile.errors import DSV4Warning, GraphError
from dsv4_compile.runtime import counting
from dsv4_compile.runtime.backends import shared_graphs
from dsv4_compile.runtime.capture_budget import CaptureBudget
from dsv4_compile.runtime.warmup import warming_up
from tests.runtime.engine import make_runner, make_world

CPU = torch.device("cpu")
ROW = 4 * 256
"""Bytes of a row of the test's layers."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def as_traced(gm: GraphModule, example_inputs: Any, **kwargs: Any) -> Callable[..., Any]:
        return gm.forward

    monkeypatch.setitem(vars(_compat), "compile_fx", as_traced)
    torch.compiler.reset()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DSV4Warning)
        yield
    torch.compiler.reset()


def compiled(most_rows: int, **options: Any) -> Any:
    """Return a layer with captures of at most so many rows: two for each row of a call, input and output."""
    options = {"dsv4.cudagraph": "full", "dsv4.cudagraph.graphs": "standin", **options}
    options["dsv4.cudagraph.max_bytes"] = most_rows * ROW
    return torch.compile(nn.ReLU(), backend="dsv4", fullgraph=True, dynamic=True, options=options)


def call(layer: Any, rows: int, times: int = 1) -> None:
    for _ in range(times):
        x = torch.randn(rows, 256)
        assert torch.equal(layer(x), x.relu())


def held() -> int:
    return shared_graphs(CPU, "standin").budget.held()


def test_the_least_recently_replayed_captures_make_room() -> None:
    layer = compiled(24)
    for rows in (3, 4, 5):  # 24 rows
        call(layer, rows, 3)
    call(layer, 3)
    with counting() as counts:
        call(layer, 2, 3)  # in place of the capture of 4 rows
        call(layer, 3)
        call(layer, 5)
        assert (counts.captures, counts.evictions, counts.replays) == (1, 1, 3)
        call(layer, 4)
    assert counts.compiled == 3 and held() <= 24 * ROW


def test_a_storm_of_shapes_stays_within_the_bound(seed: int) -> None:
    rng, layer = random.Random(seed), compiled(40)
    with counting() as counts:
        for _ in range(400):
            call(layer, rng.randint(2, 9))
            assert held() <= 40 * ROW
    assert counts.evictions > 0 and counts.replays > 100
    assert shared_graphs(CPU, "standin").memory() <= 50 * ROW


def test_shapes_that_evict_each_other_run_compiled_more_and_more() -> None:
    layer = compiled(13)
    with counting() as counts:
        for _ in range(100):
            call(layer, 5)
            call(layer, 6)
    assert counts.captures <= 8
    with counting() as counts:
        call(layer, 6, 40)
    assert counts.replays > 0


def test_graphs_of_a_device_share_the_bound() -> None:
    first, second = compiled(12), compiled(12)
    call(first, 4, 3)
    with counting() as counts:
        call(second, 5, 3)
    assert (counts.captures, counts.evictions) == (1, 1) and held() == 10 * ROW


def test_a_freed_graph_leaves_room() -> None:
    budget = CaptureBudget()

    @dataclass(eq=False)
    class Fake:
        output_bytes: int
        input_bytes: int
        replayed: int

        def evict(self) -> None:
            self.output_bytes = self.input_bytes = 0

    first, second = Fake(100, 10, 2), Fake(50, 10, 1)
    budget.add(first, 300)
    budget.add(second, 350)
    assert budget.held() == 370 and budget.to_evict(30, 400) == []
    assert budget.to_evict(31, 400) == [second] and budget.to_evict(200, 400) == [second, first]
    assert budget.to_evict(0, 270) == [second, first]  # 350 are a quarter above 270: a new pool
    assert budget.to_evict(0, 270, keep=second) == [first]
    del first
    assert budget.held() == 260  # 100 bytes of the pool have no user
    third = Fake(90, 0, 3)
    budget.add(third, 350)
    assert budget.held() == 350
    budget.evict([second])
    assert budget.held() == 290


def test_a_capture_larger_than_the_bound_runs_compiled_and_is_reported_once() -> None:
    layer = compiled(8, **{"dsv4.strict": "after_warmup"})
    match = r"W601[\s\S]*10,240 bytes, the graph of \(5, 256\), for at most 8,192"
    with pytest.warns(DSV4Warning, match=match) as caught, warming_up(), counting() as counts:
        call(layer, 3, 3)
        call(layer, 5, 5)
    assert len(caught) == 1 and (counts.captures, counts.evictions, counts.replays) == (1, 0, 1)
    with counting() as counts:
        call(layer, 5, 3)
        call(layer, 3, 1)
    assert (counts.compiled, counts.replays) == (3, 1)


def test_a_capture_whose_intermediates_are_larger_than_the_bound_is_given_up() -> None:
    wide = nn.Sequential(nn.Linear(256, 2560), nn.Linear(2560, 256))
    options = {"dsv4.cudagraph": "full", "dsv4.cudagraph.graphs": "standin", "dsv4.cudagraph.max_bytes": 32 * ROW}
    with pytest.MonkeyPatch.context() as patch:
        pool = shared_graphs(CPU, "standin")
        patch.setattr(pool, "memory", lambda: 40 * ROW)  # CUDA's pool has intermediates too
        layer: Any = torch.compile(wide, backend="dsv4", fullgraph=True, dynamic=True, options=options)
        with pytest.warns(DSV4Warning, match="W601"), counting() as counts:
            for _ in range(6):
                layer(torch.randn(3, 256))
    assert (counts.captures, counts.replays, counts.compiled) == (1, 0, 6)
    with counting() as counts:
        for _ in range(4):
            layer(torch.randn(2, 256))
    assert (counts.captures, counts.replays) == (1, 2) and held() <= 32 * ROW


def test_after_warm_up_an_evicted_capture_says_why_it_is_gone() -> None:
    layer = compiled(12, **{"dsv4.strict": "after_warmup"})
    with warming_up(), pytest.warns(DSV4Warning, match=r"W601[\s\S]*least recently used"):
        call(layer, 4, 3)
        call(layer, 5, 3)
    call(layer, 5)
    with pytest.raises(GraphError, match=r"E430[\s\S]*evicted, to keep captures within 12,288 bytes"):
        call(layer, 4)


def test_progress_says_that_captures_make_room() -> None:
    layer, notes = compiled(12), list[str]()
    with progress.listen(lambda event: notes.append(event.note)):
        call(layer, 4, 3)
        call(layer, 5, 3)
    assert "the graph of (5, 256), in place of 1 captures" in notes


def test_caches_that_a_graph_returns_count_for_nothing() -> None:
    class Write(nn.Module):
        def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
            cache.add_(1)
            return x.relu(), cache

    options = {"dsv4.cudagraph": "full", "dsv4.cudagraph.graphs": "standin", "dsv4.cudagraph.max_bytes": 20 * ROW}
    layer: Any = torch.compile(Write(), backend="dsv4", fullgraph=True, dynamic=True, options=options)
    cache = torch.zeros(1000, 256)
    with counting() as counts:
        for rows in (2, 3):
            for _ in range(4):
                layer(torch.randn(rows, 256), cache)
    assert (counts.captures, counts.evictions, counts.replays) == (2, 0, 4) and held() <= 20 * ROW


def test_a_runner_reports_the_bytes_of_its_captures() -> None:
    runner = make_runner(make_world())
    assert runner.statistics.capture_bytes == 0
    runner.warm_up()
    assert runner.statistics.capture_bytes == runner.graphs.memory() > 0
