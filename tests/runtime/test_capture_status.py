"""Tests that no garbage is collected during a capture."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch

from dsv4_compile.errors import GraphError
from dsv4_compile.runtime import graphs_for
from dsv4_compile.runtime.capture_status import without_collections


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    enabled = gc.isenabled()
    yield
    (gc.enable if enabled else gc.disable)()


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("failing", [True, False])
def test_a_capture_collects_no_garbage_and_restores_the_collector(enabled: bool, failing: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    graphs, x, seen = graphs_for(torch.device("cpu"), "standin"), torch.ones(2), []

    def step() -> torch.Tensor:
        seen.append(gc.isenabled())
        if failing:
            with pytest.raises(GraphError, match="E424"):  # a capture inside a capture ends nothing of the outer one
                graphs.capture(lambda: x + 1, "an inner step")
            seen.append(gc.isenabled())
            raise KeyError("layers.3")
        return x + 1

    if failing:
        with pytest.raises(KeyError):
            graphs.capture(step, "a step")
    else:
        graphs.capture(step, "a step")
    assert seen and not any(seen)
    assert gc.isenabled() is enabled


def test_the_collector_is_restored_by_the_last_block_of_all_threads() -> None:
    gc.enable()
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with without_collections():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=hold)
    with without_collections():
        thread.start()
        assert entered.wait(10)
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()
