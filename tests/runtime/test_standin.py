"""The stand-in obeys the rules of CUDA graphs, so what passes on it passes for the right reason."""

from __future__ import annotations

import functools
import gc
import importlib
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dsv4_compile.errors import GraphError
from dsv4_compile.runtime import DecodeRunner, graphs_for
from dsv4_compile.runtime.aliasing import owner
from dsv4_compile.runtime.capture_errors import explain_failure
from dsv4_compile.runtime.graphs import Graphs
from dsv4_compile.runtime.standin import recordable
from tests.runtime.engine import make_world

CPU = torch.device("cpu")


@pytest.fixture
def graphs() -> Graphs:
    return graphs_for(CPU, "standin")


def test_a_capture_executes_nothing(graphs: Graphs) -> None:
    x, total = torch.arange(4.0), torch.zeros(())
    captured = graphs.capture(lambda: total.add_(x.sum()), "a step")
    assert total == 0
    captured.replay()
    captured.replay()
    assert total == 12


def test_a_replay_writes_where_the_first_results_lay(graphs: Graphs) -> None:
    x = torch.arange(4.0)
    captured = graphs.capture(lambda: (x * 2, x[1:] + 1), "a step")
    addresses = [out.data_ptr() for out in captured.outputs]
    x.copy_(torch.tensor([5.0, 6.0, 7.0, 8.0]))
    captured.replay()
    doubled, plus = captured.outputs
    assert doubled.tolist() == [10, 12, 14, 16]
    assert plus.tolist() == [7, 8, 9]
    assert [out.data_ptr() for out in captured.outputs] == addresses


def test_what_the_host_computed_is_frozen(graphs: Graphs) -> None:
    """The fault that hurts most on a GPU: a number that was right when the graph was captured."""
    x, host = torch.arange(4.0), {"scale": 2.0, "buffer": torch.ones(4)}
    captured = graphs.capture(lambda: x * host["scale"] + host["buffer"], "a step")
    host["scale"], host["buffer"] = 3.0, torch.zeros(4)
    captured.replay()
    assert captured.outputs.tolist() == [1, 3, 5, 7]


def test_memory_that_is_given_back_is_noticed(graphs: Graphs) -> None:
    x = torch.arange(4.0)
    captured = graphs.capture(lambda: x * 2, "a step")
    x.untyped_storage().resize_(1 << 20)
    with pytest.raises(GraphError, match="resized or freed") as caught:
        captured.replay()
    assert caught.value.code == "E421"


@pytest.mark.parametrize(
    "step",
    [
        lambda x: x.sum().item(),
        lambda x: x[x > 1],
        lambda x: x.nonzero(),
        lambda x: x * (2 if x.max() > 1 else 3),
        lambda x: x.unique(),
    ],
    ids=["item", "mask", "nonzero", "branch", "unique"],
)
def test_a_step_that_reads_the_device_is_refused(graphs: Graphs, step: Callable[[Tensor], Tensor]) -> None:
    x = torch.arange(4.0)
    with pytest.raises(GraphError) as caught:
        graphs.capture(lambda: step(x), "a step")
    assert caught.value.code == "E422"


def test_a_failed_capture_leaves_memory_as_it_was(graphs: Graphs) -> None:
    x = torch.arange(4.0)
    with pytest.raises(GraphError):
        graphs.capture(lambda: x.add_(1).sum().item(), "a step")
    assert x.tolist() == [0, 1, 2, 3]
    graphs.capture(lambda: x + 1, "another step")


def test_indices_are_no_masks(graphs: Graphs) -> None:
    x, i = torch.arange(4.0), torch.tensor([3, 0])
    captured = graphs.capture(lambda: x[i], "a step")
    i.copy_(torch.tensor([1, 2]))
    captured.replay()
    assert captured.outputs.tolist() == [1, 2]


def test_a_compiled_graph_of_this_package_is_one_node_and_is_undone_too(graphs: Graphs) -> None:
    x, state = torch.arange(4.0), torch.zeros(4)

    def compiled(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state.numpy()[:] += x.numpy()  # like generated C++ code, past the dispatcher
        return torch.from_numpy(x.numpy() * 2), state

    captured = graphs.capture(lambda: recordable(compiled)(x, state), "a step")
    assert state.tolist() == [0, 0, 0, 0]
    x.add_(1)
    captured.replay()
    assert captured.outputs[0].tolist() == [2, 4, 6, 8]
    assert captured.outputs[1] is state
    assert state.tolist() == [1, 2, 3, 4]


def test_a_result_that_repeats_a_row_is_written_by_replays(graphs: Graphs) -> None:
    x = torch.arange(4.0)
    captured = graphs.capture(lambda: recordable(lambda x: (x * 2).expand(3, 4))(x), "a step")
    x.add_(1)
    captured.replay()
    assert captured.outputs.tolist() == [[2, 4, 6, 8]] * 3


def test_views_of_one_tensor_are_still_that_at_a_replay_and_do_not_keep_it(graphs: Graphs) -> None:
    """Code of AOTAutograd puts its arguments together from what they are views of."""
    seen: list[list[Tensor | None]] = []

    def compiled(*args: Tensor) -> Tensor:
        seen.append([owner(arg) for arg in args])
        return args[1] + args[2].view(torch.float32)

    whole = torch.arange(8.0)
    views = whole[1::2], whole.view(torch.int32)[::2]
    captured = graphs.capture(functools.partial(recordable(compiled), whole, *views), "a step")
    assert captured.outputs.tolist() == [1, 5, 9, 13]
    whole.add_(1)
    captured.replay()
    assert captured.outputs.tolist() == [3, 7, 11, 15]
    first, second, _ = seen[1]
    assert first is second
    assert first is not whole
    kept = weakref.ref(whole)
    del whole, views, first, second
    seen.clear()
    gc.collect()
    assert kept() is None


def test_a_capture_undoes_writes_to_memory_that_two_storages_share(graphs: Graphs) -> None:
    rows = np.zeros(4, dtype=np.float32)
    first, second = torch.from_numpy(rows), torch.from_numpy(rows[2:])
    graphs.capture(lambda: (first.add_(1), second.add_(1)), "a step")
    assert rows.tolist() == [0, 0, 0, 0]


def test_code_that_the_stand_in_cannot_see_is_refused_and_not_left_out(graphs: Graphs) -> None:
    x = torch.arange(4.0)

    def unseen() -> tuple[Tensor, Tensor]:
        return x + 1, torch.from_numpy(x.numpy() * 2)

    with pytest.raises(GraphError, match="that no recorded op made") as caught:
        graphs.capture(unseen, "a step")
    assert caught.value.code == "E422"


def test_captures_made_in_inference_mode_replay_outside_of_it(graphs: Graphs) -> None:
    x = torch.arange(4.0)
    with torch.inference_mode():
        captured = graphs.capture(lambda: x * 2, "a step")
    x.zero_()
    captured.replay()
    assert captured.outputs.tolist() == [0, 0, 0, 0]


def test_graphs_of_reduce_overhead_are_refused_within_a_capture(graphs: Graphs) -> None:
    """By the method that every one of them is replayed through."""
    manager = importlib.import_module("torch._inductor.cudagraph_trees").CUDAGraphTreeManager
    replay = manager._run
    with pytest.raises(GraphError, match="Inductor's CUDA graphs inside the capture of a step") as caught:
        graphs.capture(lambda: manager._run(None), "a step")
    assert caught.value.code == "E424"
    assert manager._run is replay


@pytest.mark.parametrize(
    ("device", "kind", "why"),
    [("cpu", "auto", "no graphs"), ("cpu", "cuda", "no graphs"), ("cuda", "standin", "replays on the CPU")],
)
def test_what_a_device_cannot_do_is_refused(device: str, kind: str, why: str) -> None:
    with pytest.raises(GraphError, match=why) as caught:
        graphs_for(torch.device(device), kind)
    assert caught.value.code == "E420"


def by_runner() -> None:
    DecodeRunner(print, make_world().buffers, inputs={})


def by_option() -> None:
    torch.compile(lambda x: x * 2, backend="dsv4", options={"dsv4.cudagraph": "full"})(torch.ones(2))


WAYS: dict[str, Callable[[], Any]] = {
    'graphs_for(device, "standin")': lambda: graphs_for(CPU),
    'DecodeRunner(graphs="standin")': by_runner,
    'options={"dsv4.cudagraph": "full", "dsv4.cudagraph.graphs": "standin"}': by_option,
}


@pytest.mark.parametrize("way", WAYS)
def test_the_fix_for_a_cpu_is_written_as_graphs_were_asked_for(way: str) -> None:
    with pytest.raises(Exception, match=r"\[E420\]") as caught:
        WAYS[way]()
    fix = next(line for line in str(caught.value).splitlines() if line.startswith("  fix "))
    assert [other for other in WAYS if other in fix] == [way]


@pytest.mark.parametrize(
    ("said", "meaning"),
    [
        (
            "CUDA error: operation would make the legacy stream depend on a capturing one",
            "went to a stream",
        ),
        ("CUDA error: capture was not joined: unjoined work", "did not join"),
        ("CUDA error: operation not permitted when stream is capturing", "waits for the device"),
        ("Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned", ""),
        ("CUDA out of memory. Tried to allocate 20.00 MiB", "do not fit"),
    ],
)
def test_what_cuda_says_is_kept_and_explained(said: str, meaning: str) -> None:
    fault = explain_failure(RuntimeError(said + "\nCUDA kernel errors might be reported later"), "the step of 8 tokens")
    assert fault.code == "E422"
    assert said in fault.got
    assert "the step of 8 tokens" in fault.got
    assert meaning in str(fault)
