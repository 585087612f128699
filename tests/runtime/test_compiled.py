"""Tests of `dsv4.cudagraph="full"`: which calls of a compiled graph are captured, and which inputs are copied.

Most graphs run as they were traced, without Inductor, which captures do not depend on and which would take a minute.
"""

from __future__ import annotations

import gc
import importlib
import random
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from dsv4_compile import _compat
from dsv4_compile.errors import DSV4Warning, GraphError
from dsv4_compile.options import Options
from dsv4_compile.runtime import Counts, counting, mark_static_inputs
from dsv4_compile.runtime import compiled as compiled_graphs
from dsv4_compile.runtime.addresses import HeldTensors, TensorRecord, compared
from dsv4_compile.runtime.backends import Capturing
from dsv4_compile.runtime.compiled import CapturedGraph, tokens_of
from dsv4_compile.runtime.graph_inputs import inputs_in_place
from dsv4_compile.testing import assert_bitwise
from tests.runtime.engine import Engine, Stack, make_runner, make_world

STANDIN = {"dsv4.cudagraph": "full", "dsv4.cudagraph.graphs": "standin"}


def as_traced(gm: GraphModule, example_inputs: Any, **kwargs: Any) -> Callable[..., Any]:
    return gm.forward


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    if "inductor" not in request.node.name:
        monkeypatch.setitem(vars(_compat), "compile_fx", as_traced)
    torch.compiler.reset()
    with torch.no_grad():
        yield
    torch.compiler.reset()


@dataclass
class Cache:
    rows: Tensor


class Layer(nn.Module):
    """Writes rows into a cache, counts, and reads the cache again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor, slots: Tensor, cache: Cache) -> tuple[Tensor, Tensor]:
        kv = self.linear(x)
        cache.rows[slots] = kv
        self.count.add_(1)
        return kv + cache.rows.sum(0), self.count


def compiled(module: nn.Module, **options: Any) -> Any:
    return torch.compile(module, backend="dsv4", fullgraph=True, dynamic=True, options={**STANDIN, **options})


def call(layer: Any, tokens: int, cache: Cache) -> Tensor:
    return layer(torch.randn(tokens, 4), torch.arange(tokens), cache)[0]


def test_the_third_call_of_a_shape_captures_and_later_calls_replay() -> None:
    layer, cache, twin = Layer(), Cache(torch.zeros(8, 4)), Cache(torch.zeros(8, 4))
    ours, results = compiled(layer), []
    with counting() as counts:
        for step in range(8):
            x, slots = torch.randn(3, 4), torch.randperm(8)[:3]
            results.append((ours(x, slots, cache)[0], layer.linear(x)))
            twin.rows[slots] = results[-1][1]
            torch.testing.assert_close(results[-1][0], results[-1][1] + twin.rows.sum(0))
            assert torch.equal(cache.rows, twin.rows)
            assert layer.count == step + 1
    assert counts == Counts(captures=1, replays=6, compiled=2)
    # No later replay has overwritten earlier outputs.
    assert len({out.data_ptr() for out, _ in results[2:]}) == 6


def test_a_record_of_a_tensor_has_its_strides() -> None:
    square = torch.zeros(3, 3)
    with pytest.raises(GraphError, match=r"E421[\s\S]*stride \(3, 1\) -> \(1, 3\)"):
        TensorRecord.of("square", square).check(square.t(), "a graph")


def test_threads_replay_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures read copies of the inputs, and all write the same outputs."""
    layer = nn.Linear(4, 4)
    ours = compiled(layer)
    for _ in range(3):
        ours(torch.randn(3, 4))
    copy_inputs = CapturedGraph._copy_inputs

    def slow(self: CapturedGraph, *args: Any) -> None:
        copy_inputs(self, *args)
        time.sleep(0.02)

    monkeypatch.setattr(CapturedGraph, "_copy_inputs", slow)
    inputs = [torch.randn(3, 4) for _ in range(6)]
    with ThreadPoolExecutor(3) as threads:
        got = list(threads.map(torch.no_grad()(ours), inputs))
    for x, out in zip(inputs, got, strict=True):
        torch.testing.assert_close(out, layer(x))


def test_inductor_code_is_replayed() -> None:
    layer, cache = Layer(), Cache(torch.zeros(8, 4))
    ours = compiled(layer)
    with counting() as counts:
        for step in range(6):
            x, slots = torch.randn(3, 4), torch.randperm(8)[:3]
            out, count = ours(x, slots, cache)
            torch.testing.assert_close(cache.rows[slots], layer.linear(x))
            torch.testing.assert_close(out, layer.linear(x) + cache.rows.sum(0))
            assert count is layer.count and count == step + 1
    assert counts == Counts(captures=1, replays=4, compiled=2)


def test_a_runner_over_a_compiled_stack_compiles_and_captures_nothing_after_warm_up(seed: int) -> None:
    world = make_world()
    stack = torch.compile(world.stack, backend="dsv4", fullgraph=True)
    runner = make_runner(world, step=stack, buckets=(1, 2, 4, 6, 12))
    runner.warm_up()
    assert _compat.compiled_versions(Stack.forward.__code__) <= 3
    engine = Engine(random.Random(seed))
    with torch.compiler.set_stance("fail_on_recompile"):
        for _ in range(40):
            query_lens, seq_lens = engine.advance()
            hidden = world.load(query_lens, seq_lens)
            out = runner.step(sum(query_lens), hidden=hidden)
            expected = world.eager(hidden, query_lens, seq_lens, runner.buckets.fit(sum(query_lens)))
            assert_bitwise(out, expected)
    assert (runner.statistics.captures, runner.statistics.uncaptured) == (5, 0)
    moved = world.stack.layers[0].attn_sink
    world.stack.layers[0].attn_sink = nn.Parameter(moved.detach().clone(), requires_grad=False)
    runner.debug = True
    with pytest.raises(GraphError, match="attn_sink"):
        runner.step(1)


def test_every_shape_has_its_own_capture() -> None:
    layer, cache = compiled(Layer()), Cache(torch.zeros(8, 4))
    for tokens in (6, 2, 3):
        for _ in range(3):
            call(layer, tokens, cache)
    with counting() as counts:
        for tokens in (2, 6, 3, 2):
            assert call(layer, tokens, cache).shape == (tokens, 4)
    assert counts == Counts(captures=0, replays=4, compiled=0)


def test_another_cache_gets_another_capture_and_leaves_the_first_cache_alone() -> None:
    layer, first, second = Layer(), Cache(torch.zeros(8, 4)), Cache(torch.zeros(8, 4))
    ours = compiled(layer)
    with counting() as counts:
        for cache in (first, second) * 5:
            mark_static_inputs({"rows": cache.rows})
            x = torch.randn(3, 4)
            before = (first.rows.clone(), second.rows.clone())
            ours(x, torch.arange(3), cache)
            assert torch.equal(cache.rows[:3], layer.linear(x))
            other, index = (second, 1) if cache is first else (first, 0)
            assert torch.equal(other.rows, before[index])
    assert counts == Counts(captures=2, replays=6, compiled=4)


def test_captures_do_not_keep_a_cache_alive() -> None:
    layer = compiled(Layer(), **{"dsv4.cudagraph.max_captures": 1})
    with counting() as counts:
        for _ in range(3):
            cache = Cache(torch.zeros(8, 4))
            for _ in range(4):
                call(layer, 3, cache)
            alive = weakref.ref(cache.rows)
            del cache
            gc.collect()
            assert alive() is None
    assert counts == Counts(captures=3, replays=6, compiled=6)


def test_prefills_run_compiled() -> None:
    layer, cache = compiled(Layer(), **{"dsv4.cudagraph.max_tokens": 4}), Cache(torch.zeros(8, 4))
    with counting() as counts:
        for _ in range(4):
            call(layer, 5, cache)
            call(layer, 4, cache)
    assert counts == Counts(captures=1, replays=2, compiled=6)


def test_shapes_after_the_last_capture_run_compiled_and_are_reported_once() -> None:
    layer, cache = compiled(Layer(), **{"dsv4.cudagraph.max_captures": 2}), Cache(torch.zeros(8, 4))
    with warnings.catch_warnings(record=True) as caught, counting() as counts:
        warnings.simplefilter("always")
        for tokens in (2, 3, 4, 5) * 4:
            call(layer, tokens, cache)
    assert counts == Counts(captures=2, replays=4, compiled=12)
    assert [str(w.message).split("\n")[2] for w in caught if w.category is DSV4Warning] == [
        "  got   another shape after dsv4.cudagraph.max_captures=2"
    ]


def test_calls_with_gradients_run_compiled() -> None:
    layer = compiled(nn.Linear(4, 4))
    x = torch.randn(3, 4)
    with torch.enable_grad(), pytest.warns(DSV4Warning, match="gradients enabled"), counting() as counts:
        for _ in range(4):
            layer(x).sum().backward()
    assert counts == Counts(captures=0, replays=0, compiled=4)


@pytest.mark.parametrize("debug", [False, True])
def test_a_tensor_whose_memory_moved_is_found(debug: bool) -> None:
    layer, cache = Layer(), Cache(torch.zeros(8, 4))
    ours = compiled(layer, **{"dsv4.cudagraph.debug": debug})
    for _ in range(5 if debug else 4):
        call(ours, 3, cache)
    layer.linear.weight.data = layer.linear.weight.data * 2
    if debug:
        with pytest.raises(GraphError, match=r"E421.*\n.*\n.*weight.*address"):
            call(ours, 3, cache)
        return
    with counting() as counts:
        for _ in range(4):
            x = torch.randn(3, 4)
            ours(x, torch.arange(3), cache)
            torch.testing.assert_close(cache.rows[:3], layer.linear(x))
    assert counts == Counts(captures=1, replays=2, compiled=2)


def test_inputs_that_the_caller_has_not_compared_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, cache, other = Layer(), Cache(torch.zeros(8, 4)), Cache(torch.ones(8, 4))
    ours, seen, look = compiled(layer), [], compiled_graphs._lies_still
    monkeypatch.setattr(compiled_graphs, "_lies_still", lambda *args: seen.append(1) or look(*args))
    token = compared.set((HeldTensors(layer.parameters()),))  # not the cache, and not the count
    try:
        for _ in range(6):
            call(ours, 3, cache)
        assert len(seen) == 1, "later calls look at the cache and the count alone"
        moved = Cache(cache.rows)
        for argument in (other, cache, other, moved):
            if argument is moved:
                cache.rows.data = cache.rows + 1
            x, rows = torch.randn(3, 4), argument.rows.clone()
            rows[torch.arange(3)] = layer.linear(x)
            torch.testing.assert_close(ours(x, torch.arange(3), argument)[0], layer.linear(x) + rows.sum(0))
    finally:
        compared.reset(token)


@pytest.mark.parametrize("value", ["full", "trees"])
def test_graphs_on_a_cpu_raise_unless_the_stand_in_is_asked_for(value: str) -> None:
    layer = torch.compile(nn.Linear(4, 4), backend="dsv4", options={"dsv4.cudagraph": value})
    with pytest.raises(Exception, match=r"\[E420\]"):
        layer(torch.randn(3, 4))


def test_a_graph_that_captures_itself_raises_inside_a_capture() -> None:
    from dsv4_compile.runtime import graphs_for

    layer, cache = compiled(Layer()), Cache(torch.zeros(8, 4))
    call(layer, 3, cache)
    graphs = graphs_for(torch.device("cpu"), "standin")
    with pytest.raises(GraphError, match=r"E424.*\n.*\n.*inside the capture of a step"):
        graphs.capture(lambda: call(layer, 3, cache), "a step")


def test_a_graph_without_captures_is_one_call_of_a_runners_capture() -> None:
    from dsv4_compile.runtime import graphs_for

    layer, cache = Layer(), Cache(torch.zeros(8, 4))
    ours = torch.compile(layer, backend="dsv4", fullgraph=True)
    x, slots = torch.randn(3, 4), torch.arange(3)
    ours(x, slots, cache)
    captured = graphs_for(torch.device("cpu"), "standin").capture(lambda: ours(x, slots, cache), "a step")
    assert layer.count == 1
    x.copy_(torch.randn(3, 4))
    captured.replay()
    assert layer.count == 2
    assert torch.equal(cache.rows[:3], layer.linear(x))


def test_inputs_that_a_graph_writes_are_used_in_place() -> None:
    """Writes in place, by assignment, through views, by an op's schema, and by `out=`."""
    in_place: list[frozenset[int]] = []
    names: list[list[str]] = []

    def backend(gm: GraphModule, example_inputs: Any) -> Any:
        in_place.append(inputs_in_place(gm))
        names.append([node.name for node in gm.graph.find_nodes(op="placeholder")])
        return gm.forward

    def step(x: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, slots: Tensor, table: Tensor) -> Tensor:
        a.add_(1)
        b[0] = 2
        c.view(-1)[2:].mul_(3)
        torch.ops.dsv4.kv_rope_insert(x, d, slots, slots, table, 4, "plain")
        torch.add(x, 1, out=e)
        c += 1
        return x * 2

    x, table, slots = torch.randn(3, 8), torch.zeros(4, 4), torch.arange(3)
    a, b, c, e = (torch.randn(3, 8) for _ in range(4))
    torch.compile(step, backend=backend, fullgraph=True)(x, a, b, c, torch.zeros(2, 4, 8), e, slots, table)
    assert {names[0][i] for i in in_place[0]} == {"l_a_", "l_b_", "l_c_", "l_d_", "l_e_"}


@pytest.mark.parametrize(
    ("inputs", "tokens"),
    [
        ((3, torch.zeros(3, 20, dtype=torch.int64), torch.zeros(3, 20, dtype=torch.bool)), 60),
        ((torch.zeros(7, 2), torch.zeros(7, 128, dtype=torch.int32)), 7),
        ((torch.zeros(2, 5, 8), torch.zeros((), dtype=torch.int32)), 10),
        ((5,), 1),
    ],
)
def test_tokens_of_a_call(inputs: tuple[Any, ...], tokens: int) -> None:
    assert tokens_of(inputs) == tokens


def test_generate_replays_graphs_in_decode() -> None:
    """A Hugging Face model with an SWA, a CSA and an HCA layer; unequal prompts; two batch sizes; a second cache."""
    from dsv4_compile import hf
    from dsv4_compile.hf.tiny import quiet_libraries, tiny_config, tiny_model

    quiet_libraries()
    model: Any = tiny_model(num_hidden_layers=3, layer_types=tiny_config().layer_types[:3])
    prompts = [torch.randint(1, 512, (n,)) for n in (126, 5, 30)]
    expected = [model.generate(p[None], max_new_tokens=12, do_sample=False)[0, len(p) :] for p in prompts]
    hf.convert(model, max_batch_size=3, max_seq_len=256)
    model.compile(fullgraph=True, backend="dsv4", options=STANDIN)
    ids = torch.zeros(3, 126, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, 126 - len(prompt) :] = prompt

    def generate(rows: int, **kwargs: Any) -> None:
        mask = (ids[:rows] != 0).long()
        out = model.generate(ids[:rows], attention_mask=mask, max_new_tokens=12, do_sample=False, **kwargs)
        assert all(torch.equal(out[row, 126:], expected[row]) for row in range(rows))

    with counting() as counts:
        generate(3)
    # A prefill and two calls of the decode graph run compiled; the third captures it, and all others replay.
    assert counts == Counts(captures=1, replays=9, compiled=3)
    before = _compat.counters["stats"]["unique_graphs"]
    with counting() as counts, torch.compiler.set_stance("fail_on_recompile"):
        generate(3)
    assert counts == Counts(captures=0, replays=11, compiled=1)
    with counting() as counts, torch.compiler.set_stance("fail_on_recompile"):
        generate(2)
        generate(3, past_key_values=hf.new_cache(model))
    assert (counts.captures, counts.compiled) == (2, 6)
    assert _compat.counters["stats"]["unique_graphs"] == before


def test_ops_that_trees_leave_out_of_graphs_exist() -> None:
    importlib.import_module("transformers.integrations.moe")
    plan = Capturing.plan(Options(cudagraph="trees"), GraphModule({}, torch.fx.Graph()), {torch.device("cuda")})
    outside = plan.inductor["custom_should_partition_ops"]
    assert outside
    for name in outside:
        namespace, op = name.split("::")
        assert hasattr(getattr(torch.ops, namespace), op)
