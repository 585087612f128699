"""`diverge`, `witness` and `dsv4.strict` around CUDA graphs and generated Triton code."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dsv4_compile
from dsv4_compile.debug import diverge, witness
from dsv4_compile.debug.rerun import rerun
from dsv4_compile.errors import GraphError
from dsv4_compile.runtime import counting
from dsv4_compile.runtime.warmup import begin_anew
from dsv4_compile.selection import proven
from tests.debug.test_diverge import FAULTS, ROWS, D, Model, T, line_of
from tests.debug.test_witness import FAULTS as STALE
from tests.debug.test_witness import serve
from tests.gpu.soak import SETUPS
from tests.runtime.engine import REQUESTS, World, make_runner, make_world, new_caches

CUDA = torch.device("cuda")


@pytest.fixture
def model() -> Model:
    torch.manual_seed(3)
    return Model().to(CUDA)


@pytest.fixture
def call() -> tuple[Tensor, list[Tensor], Tensor]:
    torch.manual_seed(4)
    caches = [torch.randn(ROWS, D, device=CUDA) for _ in range(3)]
    return torch.randn(T, D, device=CUDA), caches, torch.arange(T, device=CUDA) * 2


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found_at_its_op(fault: str, model: Model, call: Any, tmp_path: Path) -> None:
    plant, op, line = FAULTS[fault]
    divergence = diverge(model, plant(model), *call, save=tmp_path / "call.pt")
    assert (divergence.op, divergence.place.line, divergence.layer) == (op, line_of(line), "layers.1"), str(divergence)
    assert rerun(tmp_path / "call.pt").first.largest == 0


def test_value_that_a_cuda_graph_froze_is_found(model: Model, call: Any) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        model(*call)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            output = model(*call)

    def replayed() -> Tensor:
        graph.replay()
        return output

    agreed = diverge(lambda: model(*call), replayed, state=call[1], save=None)
    assert agreed.agrees, str(agreed)
    model.layers[1].gain = 2.0
    divergence = diverge(lambda: model(*call), replayed, state=call[1], save=None)
    assert not divergence.agrees, str(divergence)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Three attention layers of V4-Flash's sizes."""
    with proven.trust():
        yield make_world(setup=SETUPS["flash bfloat16"])


def test_compiled_layers_agree_with_eager_ones_and_a_fault_in_one_is_named(world: World) -> None:
    hidden = world.load([1] * REQUESTS, [300] * REQUESTS)
    world.buffers.refresh(REQUESTS)
    metadata, caches = world.buffers.metadata(REQUESTS), new_caches(world.setup).layers
    compiled = torch.compile(world.stack, fullgraph=True, dynamic=True, backend="dsv4")
    agreed = diverge(world.stack, compiled, hidden, metadata, caches, save=None)
    print(f"\n{agreed}")
    assert agreed.agrees, str(agreed)
    broken = copy.deepcopy(world.stack)
    with torch.no_grad():
        broken.layers[1].attn_sink.add_(3.0)
    torch.compiler.reset()
    compiled = torch.compile(broken, fullgraph=True, dynamic=True, backend="dsv4")
    divergence = diverge(world.stack, compiled, hidden, metadata, caches, save=None)
    print(divergence)
    assert not divergence.agrees and divergence.layer == "layers.1", str(divergence)


@pytest.mark.parametrize("fault", STALE)
def test_stale_buffer_is_named_before_the_replay(fault: str) -> None:
    plant, named, _, _ = STALE[fault]
    served = serve(engine_slots=fault == "slots", device="cuda")
    with witness(served.runner) as seen:
        served.step()
        assert seen.stale == []
        with pytest.raises(GraphError) as caught:
            plant(served)
    assert caught.value.code == "E431" and named in caught.value.got


def test_steps_of_a_correct_engine_raise_nothing_and_cost_nothing_afterwards(world: World) -> None:
    runner = make_runner(world)
    runner.warm_up()

    def seconds() -> float:
        hidden = world.load([1] * REQUESTS, [300] * REQUESTS)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(100):
            runner.step(REQUESTS, hidden=hidden)
        return time.perf_counter() - begin

    seconds()
    before = seconds()
    with witness(runner) as seen:
        for length in range(300, 310):
            runner.step(REQUESTS, hidden=world.load([1] * REQUESTS, [length] * REQUESTS))
    assert seen.stale == []
    after = seconds()
    print(f"\n{before * 1e4:.1f} us a step on the host before a witness, {after * 1e4:.1f} us after it")


def test_work_after_warm_up_is_an_error() -> None:
    options: Any = {"dsv4.strict": "after_warmup", "dsv4.cudagraph": "full"}
    compiled = torch.compile(lambda x: x * 2 + 1, backend="dsv4", options=options, dynamic=False)
    try:
        with dsv4_compile.runtime.warming_up(), torch.no_grad():
            x = torch.ones(64, device=CUDA)
            for _ in range(3):
                compiled(x)
        with counting() as counts, torch.no_grad():
            assert torch.equal(compiled(x), x * 2 + 1)
        assert counts.captures == 0 and counts.replays == 1, counts
        with torch.no_grad(), pytest.raises(Exception, match=r"E430[\s\S]*now 65"):
            compiled(torch.ones(65, device=CUDA))
        with torch.no_grad():
            assert torch.equal(compiled(x), x * 2 + 1)
    finally:
        torch.compiler.reset()
        begin_anew()
