"""`dsv4.strict="after_warmup"`: after warm-up a compilation or capture is an error that names its cause."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import dsv4_compile
from dsv4_compile.debug import explain, strict
from dsv4_compile.errors import DSV4Warning, GraphError
from dsv4_compile.metadata import MetadataBuffers
from dsv4_compile.options import Options
from dsv4_compile.runtime import DecodeRunner, counting, warming_up
from dsv4_compile.runtime.compiled import CapturedGraph, Policy
from dsv4_compile.runtime.standin import StandInGraphs
from dsv4_compile.runtime.structured_log import TRACE
from dsv4_compile.runtime.warmup import ask_for_strict, begin_anew, is_late, suspended

OPTIONS: Any = {"dsv4.strict": "after_warmup"}
LATE = r"E430[\s\S]*"


def scale(x: Tensor, factor: int) -> Tensor:
    return x * factor


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Tensor]]:
    """A function that this backend compiles, without the time that Inductor takes."""
    monkeypatch.setattr("dsv4_compile._compat.compile_fx", lambda gm, inputs, **_: gm.forward, raising=False)
    torch.compiler.reset()
    yield torch.compile(scale, backend="dsv4", options=OPTIONS, dynamic=False)
    torch.compiler.reset()
    logging.getLogger(TRACE).removeHandler(strict._causes)


def test_shape_or_value_that_was_never_warmed_up_is_named(compiled: Callable[..., Tensor]) -> None:
    compiled(torch.ones(3), 2)
    with warming_up():
        compiled(torch.ones(4), 2)
    for x in (torch.ones(3), torch.ones(4)):
        assert torch.equal(compiled(x, 2), 2 * x)
    with pytest.raises(Exception, match=LATE + r"compile scale, [\s\S]*`x`[\s\S]*now 5"):
        compiled(torch.ones(5), 2)
    with pytest.raises(Exception, match=LATE + r"compile scale, [\s\S]*`factor`[\s\S]*now 7"):
        compiled(torch.ones(4), 7)
    assert torch.equal(compiled(torch.ones(4), 2), torch.full((4,), 2.0))
    with warming_up():
        compiled(torch.ones(5), 2)
    assert torch.equal(compiled(torch.ones(5), 2), torch.full((5,), 2.0))


def test_function_that_had_not_run_is_named(compiled: Callable[..., Tensor]) -> None:
    with warming_up():
        compiled(torch.ones(3), 2)
    other = torch.compile(lambda x: x + 41, backend="dsv4", options=OPTIONS)
    with pytest.raises(Exception, match=LATE + "<lambda>[\\s\\S]*it had not run before"):
        other(torch.ones(3))
    torch.compile(lambda x: x + 42, backend="dsv4")(torch.ones(3))  # without the option


def test_warm_up_ends_when_a_function_with_the_option_was_compiled(compiled: Callable[..., Tensor]) -> None:
    with warming_up():
        pass
    compiled(torch.ones(3), 2)
    with suspended(), warming_up():  # a tool that warms a runner up
        pass
    assert not is_late()
    with warming_up():
        with warming_up():
            pass
        compiled(torch.ones(4), 2)
    assert is_late()
    torch.compiler.reset()
    assert not is_late()
    compiled(torch.ones(5), 2)


def test_explain_compiles_again_and_leaves_the_rule(compiled: Callable[..., Tensor]) -> None:
    with warming_up():
        compiled(torch.ones(3), 2)
    assert explain(scale, torch.ones(6), 2, options=OPTIONS).ok
    thread: list[str] = []

    def late() -> None:
        try:
            compiled(torch.ones(6), 2)
        except Exception as error:
            thread.append(str(error))

    other = threading.Thread(target=late)
    other.start()
    other.join()
    assert len(thread) == 1 and "E430" in thread[0]


def runner_of(step: Callable[..., Any]) -> DecodeRunner:
    buffers = MetadataBuffers(max_num_batched_tokens=4, max_num_seqs=4, max_model_len=128, ratios=())
    inputs = {"hidden": torch.zeros(4, 8)}
    return DecodeRunner(step, buffers, inputs=inputs, graphs="standin", buckets=(2,))


def test_warm_up_of_a_runner_ends_it(compiled: Callable[..., Tensor]) -> None:
    factor = [3]

    def step(hidden: Tensor, metadata: Any, caches: Any) -> Tensor:
        return compiled(hidden, factor[0])

    first, second = runner_of(step), runner_of(lambda hidden, metadata, caches: compiled(hidden, 4))
    first.warm_up()
    first.buffers.load([0, 1], [5])
    assert torch.equal(first.step(1, hidden=torch.ones(1, 8)), torch.full((1, 8), 3.0))
    factor[0] = 5
    with pytest.warns(DSV4Warning, match="W601"), pytest.raises(Exception, match=LATE + "`factor`[\\s\\S]*now 5"):
        first.step(3)
    second.plan()
    second.warm_up()


def graph_of(strict: bool) -> CapturedGraph:
    policy = Policy(max_captures=3, strict=strict)
    return CapturedGraph(lambda x, cache: [x + cache], ("x", "cache"), frozenset({1}), StandInGraphs(), policy)


def test_captures_after_warm_up_are_named() -> None:
    graph, free = graph_of(strict=True), graph_of(strict=False)
    cache, other = torch.ones(1), torch.ones(1)
    try:
        ask_for_strict(lambda: None)
        with warming_up():
            for _ in range(3):
                graph(torch.ones(2), cache)
            graph(torch.ones(3), cache)
        assert graph(torch.ones(2), cache)[0].tolist() == [2.0, 2.0]
        for size in range(6, 20):
            with pytest.raises(GraphError, match=LATE + "capture"):
                graph(torch.ones(size), cache)
        expected = {
            (5, cache): r"capture the graph of \(5,\)[\s\S]*warm-up captured the graph of \(2,\)",
            (3, cache): r"capture the graph of \(3,\)[\s\S]*warm-up made 1 of the 3 calls",
            (2, other): r"capture the graph of \(2,\)[\s\S]*captured with other memory for cache",
        }
        for (size, memory), text in expected.items():
            for _ in range(2):
                with pytest.raises(GraphError, match=LATE + text):
                    graph(torch.ones(size), memory)
        for _ in range(3):
            free(torch.ones(5), cache)
        with warming_up():
            for _ in range(3):
                graph(torch.ones(5), cache)
        with counting() as counts:
            assert graph(torch.ones(5), cache)[0].tolist() == [2.0] * 5
        assert counts.replays == 1  # a late shape takes no place of a capture
    finally:
        begin_anew()


def test_option_reaches_the_captures_of_a_compiled_function(compiled: Callable[..., Tensor]) -> None:
    full = {"dsv4.cudagraph": "full", "dsv4.cudagraph.graphs": "standin"}
    captured = torch.no_grad()(torch.compile(lambda x: x * 5, backend="dsv4", options=OPTIONS | full, dynamic=True))
    free = torch.no_grad()(torch.compile(lambda x: x * 6, backend="dsv4", options=full, dynamic=True))
    with warming_up():
        for _ in range(3):
            captured(torch.ones(4))
    with pytest.raises(GraphError, match=LATE + r"capture the graph of \(5,\)"):
        captured(torch.ones(5))
    for _ in range(3):  # of a function without the option, in the same process
        assert free(torch.ones(5)).tolist() == [6.0] * 5


def test_kernels_that_triton_builds_in_a_function_with_the_option_are_named(compiled: Callable[..., Tensor]) -> None:
    import triton

    strict._watch_kernels()
    hook = triton.knobs.runtime.jit_cache_hook
    build = strict.watched(lambda: hook(key="k", repr="my_kernel[num_warps=4](*bf16)", fn=None))
    with warming_up():
        compiled(torch.ones(3), 2)
        build()
    hook(key="k", repr="my_kernel", fn=None)  # of other code
    with pytest.raises(GraphError, match=LATE + r"kernel my_kernel\[num_warps=4\]"):
        build()
    assert triton.knobs.runtime.jit_cache_hook is hook


def test_option_is_checked() -> None:
    assert Options.parse(None, None, ops=()).strict == "off"
    with pytest.raises(dsv4_compile.DSV4Error, match=r"E301[\s\S]*did you mean after_warmup"):
        Options.parse(None, {"dsv4.strict": "after_warm_up"}, ops=())
