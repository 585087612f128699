"""Whole decode steps as CUDA graphs: bitwise like eager, nothing allocated, copied or waited for; misuse refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.errors import GraphError
from dsv4_compile.runtime import Counts, DecodeRunner, counting, graphs_for
from dsv4_compile.selection import proven
from dsv4_compile.testing import assert_bitwise
from tests.gpu.soak import SETUPS, SMALL_ON_GPU, random_steps, steady
from tests.runtime.engine import REQUESTS, SMALL, World, make_runner, make_world

CUDA = torch.device("cuda")


@pytest.fixture(scope="module", params=SETUPS)
def warm(request: pytest.FixtureRequest) -> Iterator[tuple[World, DecodeRunner]]:
    """A world and its runner after warm-up, for each setup."""
    with proven.trust():  # as in each test, which begins after this
        world = make_world(setup=SETUPS[request.param])
        runner = make_runner(world)
        runner.warm_up()
        yield world, runner


def profiled(call: Callable[[], Any]) -> list[Any]:
    """What `call` puts on the GPU."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return [event for event in profile.events() if event.device_type.name == "CUDA"]


@pytest.mark.parametrize("setup", SETUPS)
def test_random_steps_over_poisoned_tails(setup: str, seed: int, pytestconfig: pytest.Config) -> None:
    random_steps(SETUPS[setup], pytestconfig.option.steps, seed)


@pytest.mark.parametrize("kind", ["speculated", "mixed"])
def test_random_steps_of_more_tokens(kind: str, seed: int) -> None:
    random_steps(SETUPS["flash bfloat16"], 60, seed, kind=kind)


def test_a_step_allocates_nothing_copies_nothing_and_waits_for_nothing(warm: tuple[World, DecodeRunner]) -> None:
    world, runner = warm
    hidden = world.load([1] * REQUESTS, [100 + i for i in range(REQUESTS)])
    runner.step(REQUESTS, hidden=hidden)
    torch.cuda.synchronize()
    before, held = torch.cuda.memory_stats(), runner.graphs.memory()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(200):
            runner.step(REQUESTS)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    after = torch.cuda.memory_stats()
    for name in ("allocation.all.allocated", "reserved_bytes.all.current", "num_alloc_retries"):
        assert after[name] == before[name], name
    assert runner.graphs.memory() == held
    copies = [e.name for e in profiled(lambda: runner.step(REQUESTS)) if "HtoD" in e.name or "DtoH" in e.name]
    assert copies == []


def test_nodes_of_a_step(warm: tuple[World, DecodeRunner], record_property: Callable[..., None]) -> None:
    """Nodes are the work of one replay on the GPU: as many in each."""
    world, runner = warm
    world.load([1] * REQUESTS, [300] * REQUESTS)
    runner.step(REQUESTS)
    torch.cuda.synchronize()
    first, again = (len(profiled(lambda: runner.step(REQUESTS))) for _ in range(2))
    record_property("nodes", first)
    print(f"\n{world.setup.dtype}, fp8={world.setup.fp8}: {first} nodes a step")
    assert first == again > 1


def test_captures_hold_what_was_planned(warm: tuple[World, DecodeRunner]) -> None:
    _, runner = warm
    print(f"\n{runner.plan()}\nheld {runner.graphs.memory():,}")
    assert runner.graphs.memory() <= runner.plan().graphs * 1.2 + (2 << 20)


@pytest.mark.parametrize("setup", ["flash bfloat16", "flash fp8"])
def test_steps_and_batches_compile_capture_and_hold_nothing_more(setup: str, seed: int) -> None:
    counts = steady(SETUPS[setup], 500, 100, seed)
    assert counts["uncaptured"] > 0


def test_a_run_waits_for_nothing_and_decodes_what_steps_decode() -> None:
    worlds = [make_world(setup=SMALL_ON_GPU) for _ in range(2)]
    embed = torch.randn(40, SMALL.config.hidden_size, device=CUDA)
    runners = []
    for world, sampler in zip(worlds, ("greedy", lambda logits: logits.argmax(-1)), strict=True):

        def step(ids: Tensor, metadata: Any, caches: Any, stack: Any = world.stack) -> Tensor:
            return stack(embed[ids], metadata, caches) @ embed.t().roll(1, 1)

        inputs = {"input_ids": world.buffers.tensors["input_ids"]}
        runners.append(make_runner(world, step=step, inputs=inputs, sampler=sampler))
        runners[-1].warm_up()
        world.buffers.load([0, 1, 2, 3], [5, 120, 250], input_ids=[3, 1, 4])
    torch.cuda.set_sync_debug_mode("error")
    try:
        captured, _ = runners[0].run(24, num_reqs=3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    between, _ = runners[1].run(24, num_reqs=3)
    # The sampler between steps sees three rows, the captured one four: same tokens, whatever the rows behind.
    assert_bitwise(captured, between)
    copies = [e.name for e in profiled(lambda: runners[0].run(8, num_reqs=3)) if "HtoD" in e.name]
    assert copies == []


def capture(step: Callable[[], Any]) -> None:
    graphs = graphs_for(CUDA)
    graphs.warm_up(step)
    graphs.capture(step, "a step")


def reads(x: Tensor) -> Tensor:
    return x * x.sum().item()


def does_nothing(x: Tensor) -> Tensor:
    return x


def loses_a_stream(x: Tensor) -> Tensor:
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        return x + 1


def leaves_its_stream(x: Tensor) -> Tensor:
    y = x * 2
    with torch.cuda.stream(torch.cuda.Stream()):
        return y + 1


@pytest.mark.parametrize(
    ("step", "code"), [(reads, "E422"), (does_nothing, "E423"), (loses_a_stream, "E422"), (leaves_its_stream, "E422")]
)
def test_misuse_is_refused_and_leaves_the_device_usable(step: Callable[[Tensor], Tensor], code: str) -> None:
    x = torch.arange(4.0, device=CUDA)
    with pytest.raises(GraphError) as caught:
        capture(lambda: step(x))
    assert caught.value.code == code
    torch.cuda.synchronize()
    assert torch.randn(4, device=CUDA).isfinite().all()
    capture(lambda: x * torch.rand(4, device=CUDA))


@pytest.mark.parametrize("before", ["freed", "failed", "failed, freed"])
def test_captures_into_one_pool_go_on(before: str) -> None:
    """When the other ones have been freed, though not their outputs, and after one that has failed."""
    x, graphs = torch.arange(4.0, device=CUDA), graphs_for(CUDA, "cuda")
    outputs, others = [], []
    graphs.warm_up(lambda: loses_a_stream(x * 2))
    for _ in range(3):
        captured = graphs.capture(lambda: x * 2, "a step")
        captured.replay()
        outputs.append(captured.outputs)
        if "failed" in before:
            with pytest.raises(GraphError, match="E422"):
                graphs.capture(lambda: loses_a_stream(x), "a step that loses a stream")
        if "freed" in before:
            del captured
        else:
            others.append(captured)
    for graph in others:
        graph.replay()
    assert all(torch.equal(output, x * 2) for output in outputs)


def test_a_nested_capture_is_refused() -> None:
    x = torch.arange(4.0, device=CUDA)
    graphs = graphs_for(CUDA)
    with pytest.raises(GraphError, match="E424"):
        graphs.capture(lambda: graphs.capture(lambda: x * 2, "inner").outputs, "outer")
    torch.cuda.synchronize()


@torch.no_grad()
def test_reduce_overhead_within_a_capture_is_refused() -> None:
    x = torch.arange(4.0, device=CUDA)
    step = torch.compile(lambda x: (x * 2).sin(), mode="reduce-overhead")
    for _ in range(3):
        step(x)
    with pytest.raises(GraphError, match="E424"):
        capture(lambda: step(x))
    torch.cuda.synchronize()


@pytest.mark.parametrize("value", ["full", "trees"])
def test_generate_with_graphs_gives_eagers_tokens(value: str) -> None:
    """One CSA layer, so that it compiles in a minute."""
    from dsv4_compile import hf
    from dsv4_compile.hf.tiny import quiet_libraries, tiny_model

    quiet_libraries()
    model: Any = tiny_model(num_hidden_layers=1, layer_types=["compressed_sparse_attention"]).to(CUDA)
    ids = torch.randint(1, 512, (3, 30), device=CUDA)
    mask = torch.ones_like(ids)
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=40, do_sample=False)
    hf.convert(model, max_batch_size=3, max_seq_len=128)
    model.compile(fullgraph=True, backend="dsv4", options={"dsv4.cudagraph": value})
    for _ in range(2):
        with counting() as counts:
            got = model.generate(ids, attention_mask=mask, max_new_tokens=40, do_sample=False)
        assert torch.equal(got, expected)
    if value == "full":
        assert counts == Counts(captures=0, replays=39, compiled=1)
