"""Tests that the stand-in obeys the rules of CUDA graphs."""

from __future__ import annotations

import functools
import gc
import importlib
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dsv4_compile.errors import GraphError
from dsv4_compile.parallel import Ranks, all_gather, all_reduce
from dsv4_compile.parallel.fake_group import fake_mesh
from dsv4_compile.runtime import DecodeRunner, Graphs, graphs_for, standin
from dsv4_compile.runtime.aliasing import owner
from dsv4_compile.runtime.captures import explain_failure
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


def test_a_replay_overwrites_the_first_outputs(graphs: Graphs) -> None:
    x = torch.arange(4.0)
    captured = graphs.capture(lambda: (x * 2, x[1:] + 1), "a step")
    addresses = [out.data_ptr() for out in captured.outputs]
    x.copy_(torch.tensor([5.0, 6.0, 7.0, 8.0]))
    captured.replay()
    doubled, plus = captured.outputs
    assert doubled.tolist() == [10, 12, 14, 16]
    assert plus.tolist() == [7, 8, 9]
    assert [out.data_ptr() for out in captured.outputs] == addresses


def test_a_replay_waits_for_its_own_collectives(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[tuple[int, list[float]]] = []
    wait, x = standin.functional_collectives.wait_tensor, torch.arange(3.0)

    def note(tensor: Tensor) -> Tensor:
        waited.append((tensor.data_ptr(), tensor.tolist()))
        done: Tensor = wait(tensor)
        return done

    with fake_mesh(2, CPU) as mesh:
        ranks = Ranks.of(mesh)
        captured = graphs.capture(lambda: (all_reduce(x, ranks), all_gather(x, ranks)), "a step")
        monkeypatch.setattr(standin, "functional_collectives", SimpleNamespace(wait_tensor=note))
        x.add_(1)
        captured.replay()
    assert [values for _, values in waited] == [[1, 2, 3], [1, 2, 3] * 2]
    assert [out.tolist() for out in captured.outputs] == [[1, 2, 3], [1, 2, 3] * 2]
    assert not {address for address, _ in waited} & {out.data_ptr() for out in captured.outputs}


def test_host_values_are_frozen(graphs: Graphs) -> None:
    """A replay keeps the host values of the capture, as on a GPU."""
    x, host = torch.arange(4.0), {"scale": 2.0, "buffer": torch.ones(4)}
    captured = graphs.capture(lambda: x * host["scale"] + host["buffer"], "a step")
    host["scale"], host["buffer"] = 3.0, torch.zeros(4)
    captured.replay()
    assert captured.outputs.tolist() == [1, 3, 5, 7]


def test_freed_memory_is_noticed(graphs: Graphs) -> None:
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
def test_a_step_that_reads_the_device_raises(graphs: Graphs, step: Callable[[Tensor], Tensor]) -> None:
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


def test_integer_indices_are_captured(graphs: Graphs) -> None:
    x, i = torch.arange(4.0), torch.tensor([3, 0])
    captured = graphs.capture(lambda: x[i], "a step")
    i.copy_(torch.tensor([1, 2]))
    captured.replay()
    assert captured.outputs.tolist() == [1, 2]


def test_a_compiled_graph_of_this_package_is_one_call_and_is_undone_too(graphs: Graphs) -> None:
    x, state = torch.arange(4.0), torch.zeros(4)

    def compiled(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state.numpy()[:] += x.numpy()  # outside of the dispatcher, like generated C++ code
        return torch.from_numpy(x.numpy() * 2), state

    captured = graphs.capture(lambda: recordable(compiled)(x, state), "a step")
    assert state.tolist() == [0, 0, 0, 0]
    x.add_(1)
    captured.replay()
    assert captured.outputs[0].tolist() == [2, 4, 6, 8]
    assert captured.outputs[1] is state
    assert state.tolist() == [1, 2, 3, 4]


def test_replays_write_an_output_that_repeats_a_row(graphs: Graphs) -> None:
    x = torch.arange(4.0)
    captured = graphs.capture(lambda: recordable(lambda x: (x * 2).expand(3, 4))(x), "a step")
    x.add_(1)
    captured.replay()
    assert captured.outputs.tolist() == [[2, 4, 6, 8]] * 3


def test_recorded_views_keep_their_common_base_and_not_the_callers_tensor(graphs: Graphs) -> None:
    """AOTAutograd's code builds its arguments from their bases."""
    seen: list[list[Tensor | None]] = []

    def compiled(*args: Tensor) -> Tensor:
        seen.append([owner(arg) for arg in args])
        return args[1] + args[2].view(torch.float32)

    base = torch.arange(8.0)
    views = base[1::2], base.view(torch.int32)[::2]
    captured = graphs.capture(functools.partial(recordable(compiled), base, *views), "a step")
    assert captured.outputs.tolist() == [1, 5, 9, 13]
    base.add_(1)
    captured.replay()
    assert captured.outputs.tolist() == [3, 7, 11, 15]
    first, second, _ = seen[1]
    assert first is second
    assert first is not base
    reference = weakref.ref(base)
    del base, views, first, second
    seen.clear()
    gc.collect()
    assert reference() is None


def test_a_capture_undoes_writes_to_memory_that_two_storages_share(graphs: Graphs) -> None:
    rows = np.zeros(4, dtype=np.float32)
    first, second = torch.from_numpy(rows), torch.from_numpy(rows[2:])
    graphs.capture(lambda: (first.add_(1), second.add_(1)), "a step")
    assert rows.tolist() == [0, 0, 0, 0]


def test_outputs_of_code_outside_the_dispatcher_raise(graphs: Graphs) -> None:
    x = torch.arange(4.0)

    def unseen() -> tuple[Tensor, Tensor]:
        return x + 1, torch.from_numpy(x.numpy() * 2)

    with pytest.raises(GraphError, match="that no recorded op made") as caught:
        graphs.capture(unseen, "a step")
    assert caught.value.code == "E422"


def test_captures_made_in_inference_mode_replay_outside_it(graphs: Graphs) -> None:
    x = torch.arange(4.0)
    with torch.inference_mode():
        captured = graphs.capture(lambda: x * 2, "a step")
    x.zero_()
    captured.replay()
    assert captured.outputs.tolist() == [0, 0, 0, 0]


def test_graphs_of_reduce_overhead_raise_inside_a_capture(graphs: Graphs) -> None:
    """The check is in the method that replays all of them."""
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
def test_graphs_on_the_wrong_device_raise(device: str, kind: str, why: str) -> None:
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
def test_the_fix_for_a_cpu_names_the_callers_own_option(way: str) -> None:
    with pytest.raises(Exception, match=r"\[E420\]") as caught:
        WAYS[way]()
    fix = next(line for line in str(caught.value).splitlines() if line.startswith("  fix "))
    assert [other for other in WAYS if other in fix] == [way]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "CUDA error: operation would make the legacy stream depend on a capturing one",
            "launched on a stream",
        ),
        ("CUDA error: capture was not joined: unjoined work", "did not join"),
        ("CUDA error: operation not permitted when stream is capturing", "waits for the device"),
        ("Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned", ""),
        ("CUDA out of memory. Tried to allocate 20.00 MiB", "do not fit"),
    ],
)
def test_cuda_errors_are_kept_and_explained(text: str, why: str) -> None:
    fault = explain_failure(RuntimeError(text + "\nCUDA kernel errors might be reported later"), "the step of 8 tokens")
    assert fault.code == "E422"
    assert text in fault.got
    assert "the step of 8 tokens" in fault.got
    assert why in str(fault)


def test_a_compilation_that_failed_in_a_capture_keeps_its_cause() -> None:
    text = "backend='dsv4' raised:\nRuntimeError: no memory for scratch\n\nSet TORCHDYNAMO_VERBOSE=1 for the stack"
    fault = explain_failure(RuntimeError(text), "the step of 8 tokens")
    assert fault.got == "the step of 8 tokens: backend='dsv4' raised: RuntimeError: no memory for scratch"
