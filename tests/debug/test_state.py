"""explain() restores the compiler, the model and the process."""

from __future__ import annotations

import logging
import sys
import threading
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
from torch._dynamo.utils import counters
from torch._inductor.graph import GraphLowering

import dsv4_compile
from dsv4_compile import _compat
from dsv4_compile.debug.state import fresh_compiler


def branchy(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    print("branchy")
    return y + 1


def loopy(x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        x = x + 1
        print("loopy")
    return x


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x).relu()


class Counting:
    """A backend that counts the graphs it compiles."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        self.graphs += 1
        return gm


def settings() -> tuple[Any, ...]:
    names = ("torch.__trace", "torch._dynamo", "torch._dynamo.convert_frame", "torch._dynamo.variables")
    loggers = [logging.getLogger(name) for name in (*names, "torch._dynamo.convert_frame.__graph_breaks")]
    return (
        torch._dynamo.config.save_config(),
        torch._inductor.config.save_config(),
        torch._functorch.config.save_config(),
        [(logger.level, logger.propagate, logger.filters) for logger in loggers],
        [[h for h in logger.handlers if type(h).__module__.startswith("dsv4_compile")] for logger in loggers],
        GraphLowering.save_output_code,
        torch.compile,
        torch.is_grad_enabled(),
        torch.random.get_rng_state().tolist(),
    )


def test_settings_counters_logging_and_random_state_are_restored() -> None:
    counters["stats"]["mine"] = 7
    counted = dict(counters["stats"])
    before = settings()
    dsv4_compile.explain(lambda x: torch.nn.functional.dropout(x) + torch.rand(2), torch.ones(2), backend="inductor")
    assert settings() == before
    assert dict(counters["stats"]) == counted
    counters.clear()


def test_nothing_is_left_compiled() -> None:
    model = Model()
    report = dsv4_compile.explain(model, torch.ones(2, 4), backend="eager")
    assert len(report.graphs) == 1
    assert _compat.compiled_versions(Model.forward.__code__) == 0
    assert model._compiled_call_impl is None
    assert type(model) is Model


def test_module_of_a_traced_function_keeps_its_names() -> None:
    before = set(vars(sys.modules[__name__]))
    for function in (branchy, loopy):
        dsv4_compile.explain(function, torch.ones(2), backend="eager")
    assert set(vars(sys.modules[__name__])) == before


def test_function_that_was_skipped_is_traced_again_afterwards() -> None:
    dsv4_compile.explain(loopy, torch.ones(2), backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(loopy, backend="eager", fullgraph=True)(torch.ones(2))


def test_function_that_torch_skips_is_explained() -> None:
    compiled = torch.compile(loopy, backend="eager")
    compiled(torch.ones(2))
    report = dsv4_compile.explain(compiled, torch.ones(2), backend="eager")
    assert [item.place.function for item in report.breaks] == ["loopy"]


def test_other_compiled_functions_stay_compiled() -> None:
    backend = Counting()
    other = torch.compile(Model(), backend=backend)
    other_function = torch.compile(lambda x: x + 1, backend=backend)
    other(torch.ones(2, 4))
    other_function(torch.ones(2))
    assert backend.graphs == 2
    dsv4_compile.explain(branchy, torch.ones(2), backend="eager")
    other(torch.ones(2, 4))
    other_function(torch.ones(2))
    assert backend.graphs == 2


def test_explained_function_that_was_compiled_before_still_works() -> None:
    backend = Counting()
    compiled = torch.compile(branchy, backend=backend)
    expected = compiled(torch.ones(2))
    report = dsv4_compile.explain(compiled, torch.ones(2), backend="eager")
    assert len(report.breaks) == 1
    assert len(report.graphs) == 2
    assert torch.equal(compiled(torch.ones(2)), expected)


def test_module_compiled_in_place_is_explained_and_stays_compiled() -> None:
    model, backend = Model(), Counting()
    model.compile(backend=backend)
    model(torch.ones(2, 4))
    compiled = model._compiled_call_impl
    report = dsv4_compile.explain(model, torch.ones(2, 4), backend="eager")
    assert len(report.graphs) == 1
    assert report.backend == "eager"
    assert model._compiled_call_impl is compiled
    assert backend.graphs == 1


def test_second_report_equals_the_first() -> None:
    calls = [((torch.ones(n),), {}) for n in (2, 3, 4)]
    first, second = (dsv4_compile.explain(branchy, calls=calls, backend="eager") for _ in range(2))
    assert [(r.place, r.values) for r in first.recompiles] == [(r.place, r.values) for r in second.recompiles]
    assert [(b.place, b.seen) for b in first.breaks] == [(b.place, b.seen) for b in second.breaks]
    assert first.recompiles


def test_sizes_seen_by_explain_do_not_make_a_later_compile_dynamic() -> None:
    dsv4_compile.explain(torch.sin, calls=[((torch.ones(n),), {}) for n in (2, 3)], backend="eager")
    shapes: list[Any] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        # A dynamic size would be a separate input.
        shapes.extend(torch.Tensor if isinstance(value, torch.Tensor) else type(value) for value in example_inputs)
        return gm

    torch.compile(torch.sin, backend=backend)(torch.ones(5))
    assert shapes == [torch.Tensor]


def test_strict_serving_stance_does_not_hide_the_report() -> None:
    with torch.compiler.set_stance("fail_on_recompile"):
        report = dsv4_compile.explain(torch.sin, calls=[((torch.ones(n),), {}) for n in (2, 3)], backend="eager")
    assert report.failure is None
    assert len(report.recompiles) == 1


def test_state_is_restored_when_the_call_raises() -> None:
    before = settings()

    def wrong(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("not today")

    assert dsv4_compile.explain(wrong, torch.ones(2), backend="eager").failure is not None
    assert settings() == before


def test_block_compiles_even_with_the_graph_cache_enabled() -> None:
    with torch._inductor.config.patch(fx_graph_cache=True):
        with fresh_compiler():
            assert torch._inductor.config.fx_graph_cache is False
        assert torch._inductor.config.fx_graph_cache is True


@pytest.mark.parametrize("calls", [[torch.ones(2)], [((torch.ones(2),),)], [(torch.ones(2), {})]])
def test_calls_that_are_not_pairs_are_rejected(calls: Any) -> None:
    with pytest.raises(dsv4_compile.DSV4Error, match=r"E201.*\n.*\(args, kwargs\)"):
        dsv4_compile.explain(torch.sin, calls=calls)


def test_an_object_that_is_not_callable_is_rejected() -> None:
    with pytest.raises(dsv4_compile.DSV4Error, match="E201"):
        dsv4_compile.explain(3)


def test_two_threads_explain_one_after_the_other() -> None:
    """Each reports what it compiled, and the last one leaves the compiler as the first one found it."""
    calls: list[Any] = [("branchy", branchy, 3), ("relu", Model(), 4)]
    before, reports = settings(), {}

    def explain(name: str, function: Any, width: int) -> None:
        reports[name] = dsv4_compile.explain(function, torch.ones(width), backend="eager")

    threads = [threading.Thread(target=explain, args=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(reports[name].graphs) for name in ("branchy", "relu")] == [2, 1]
    assert [len(reports[name].breaks) for name in ("branchy", "relu")] == [1, 0]
    assert settings() == before
