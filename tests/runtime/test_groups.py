"""Tests of captured graphs that communicate: they are freed before their process group."""

from __future__ import annotations

import gc
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsv4_compile.errors import DSV4Error
from dsv4_compile.runtime.cuda_graphs import CheckCaptureStream
from dsv4_compile.runtime.groups import group_of, release, replay_of


class Recorded:
    """A CUDA graph that records what is done with it."""

    def __init__(self) -> None:
        self.replays, self.freed = 0, False

    def replay(self) -> None:
        if self.freed:
            raise RuntimeError("replay without a capture")
        self.replays += 1

    def reset(self) -> None:
        self.freed = True


@pytest.fixture
def group(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Process group of this process alone; the functions that destroy it are put back."""
    for module in (torch.distributed, torch.distributed.distributed_c10d):
        monkeypatch.setattr(module, "destroy_process_group", module.destroy_process_group)
    store = torch.distributed.FileStore(os.fspath(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_destroying_the_world_frees_the_graphs_first(group: Any) -> None:
    graph, alone = Recorded(), Recorded()
    replay = replay_of(graph, frozenset({group.group_name}), "the step")
    replay_alone = replay_of(alone, frozenset(), "another step")
    replay()
    torch.distributed.destroy_process_group()
    assert not torch.distributed.is_initialized()
    assert (graph.replays, graph.freed, alone.freed) == (1, True, False)
    replay_alone()
    with pytest.raises(DSV4Error, match=r"(?s)E704.*the step"):
        replay()


def test_destroying_another_group_frees_nothing(group: Any) -> None:
    other = torch.distributed.new_group([0])
    graph = Recorded()
    replay = replay_of(graph, frozenset({group.group_name}), "the step")
    torch.distributed.destroy_process_group(other)
    replay()
    assert graph.replays == 1 and not graph.freed
    torch.distributed.destroy_process_group(torch.distributed.group.WORLD)
    assert graph.freed


def test_an_error_of_a_graph_that_lives_is_its_own(group: Any) -> None:
    graph = Recorded()
    replay = replay_of(graph, frozenset({group.group_name}), "the step")
    graph.freed = True
    with pytest.raises(RuntimeError, match="without a capture"):
        replay()


def test_a_graph_that_nobody_holds_is_not_kept() -> None:
    replay_of(Recorded(), frozenset({"tp"}), "the step")
    gc.collect()
    assert release("tp") == 0


def test_a_capture_notes_the_groups_of_its_collectives(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    x = torch.ones(3)
    with CheckCaptureStream("the step", "cpu") as mode:
        assert mode.groups == set()
        y = torch.ops._c10d_functional.all_reduce(x + 1, "sum", group.group_name)
        torch.ops._c10d_functional.wait_tensor(y)
    assert mode.groups == {group.group_name}
    op: Any = SimpleNamespace(namespace="aten")
    assert group_of(op, (x, "sum"), {}) is None
