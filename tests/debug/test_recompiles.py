"""Reported recompiles: the guard that failed, its values, and the fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dsv4_compile
from dsv4_compile.debug.recompiles import explain_guard, split_reason
from dsv4_compile.debug.rows import Recompile

GLOBAL = 1


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def scaled(x: torch.Tensor, n: Any) -> torch.Tensor:
    return x * n


def biased(x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return x * 2 if bias is None else x + bias


def summed(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(parts).sum()


def applied(x: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    return function(x)


def grown_global(x: torch.Tensor) -> torch.Tensor:
    global GLOBAL  # noqa: PLW0603 -- the guard on it is tested
    y = x * GLOBAL
    GLOBAL += 1
    return y


def added(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


class Counter(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return x * self.steps


def recompiles(function: Callable[..., Any], *calls: tuple[Any, ...]) -> list[Recompile]:
    report = dsv4_compile.explain(function, calls=[(args, {}) for args in calls], backend="eager")
    assert report.failure is None
    assert report.calls == len(calls)
    return report.recompiles


def ones(*shape: int, **kwargs: Any) -> torch.Tensor:
    return torch.ones(shape, **kwargs)


CASES = {
    "size": (double, [(ones(2),), (ones(3),)], "size of `x` in dim 0", ["2", "3"], "mark_dynamic(x, 0)"),
    "size one": (double, [(ones(4, 3),), (ones(1, 3),)], "size of `x` in dim 0", ["4", "1"], "sizes 0 and 1"),
    "dtype": (double, [(ones(2),), (ones(2, dtype=torch.int32),)], "dtype of `x`", ["Float", "Int"], "one dtype"),
    "rank": (double, [(ones(2, 2),), (ones(2),)], "rank of `x`", ["2", "1"], "reshape"),
    "stride": (double, [(ones(4, 2),), (ones(2, 4).t(),)], "stride of dim 0 of `x`", ["2", "1"], "contiguous"),
    "gradient": (double, [(ones(2),), (ones(2, requires_grad=True),)], "requires_grad", ["0", "1"], "inference_mode"),
    "int": (scaled, [(ones(2), 3), (ones(2), 4)], "value of `n`", ["3", "4"], "tensor"),
    "float": (scaled, [(ones(2), 1.5), (ones(2), 2.5)], "value of `n`", ["1.5", "2.5"], "tensor"),
    "none to tensor": (biased, [(ones(2),), (ones(2), ones(2))], "`bias` was None", ["None", "tensor [2]"], "-1"),
    "tensor to none": (biased, [(ones(2), ones(2)), (ones(2), None)], "is None now", ["tensor", "None"], "always"),
    "length": (summed, [([ones(2)] * 2,), ([ones(2)] * 3,)], "length of `parts`", ["2", "3"], "stacked"),
    "attribute": (Counter(), [(ones(2),), (ones(2),)], ".steps` changed", ["0", "1"], "tensor buffer"),
    "global": (grown_global, [(ones(2),), (ones(2),)], "GLOBAL", ["1", "2"], "argument"),
}


@pytest.mark.parametrize("name", CASES)
def test_recompile_shows_what_changed_the_values_and_a_fix(name: str) -> None:
    function, calls, cause, values, fix = CASES[name]
    (row,) = recompiles(function, *calls)
    assert cause in row.cause
    assert row.values == values
    assert fix in row.fix
    assert row.guard
    assert row.place.file == __file__
    assert row.count == 1


def test_calls_that_are_alike_do_not_recompile() -> None:
    assert recompiles(double, (ones(2),), (ones(2),), (ones(2),)) == []


def test_dynamic_dim_that_is_marked_does_not_recompile() -> None:
    calls = [(ones(n, 4),) for n in (3, 5, 9)]
    torch._dynamo.mark_dynamic(calls[0][0], 0)
    report = dsv4_compile.explain(double, calls=[(args, {}) for args in calls], backend="eager")
    assert report.ok
    (graph,) = report.graphs
    (x,) = [entry for entry in graph.inputs if entry.name == "x"]
    assert x.dynamic
    assert x.shape[0].endswith("=3")
    assert x.shape[1] == "4"


def test_values_of_one_guard_over_many_calls_are_one_row() -> None:
    counter = Counter()
    (row,) = recompiles(counter, *[(ones(2),)] * 4)
    assert row.count == 3
    assert row.values == ["0", "1", "2", "3"]


def test_recompile_limit_is_reported() -> None:
    def named(x: torch.Tensor, mode: str) -> torch.Tensor:
        return x + len(mode)

    with torch._dynamo.config.patch(recompile_limit=3):
        report = dsv4_compile.explain(named, calls=[((ones(2), "m" * n), {}) for n in range(1, 6)], backend="eager")
    assert len(report.graphs) == 3
    assert [row.limit_hit for row in report.recompiles] == [True]
    (limit,) = report.breaks
    assert (limit.scope, limit.place.function) == ("function", "named")
    assert "recompile limit" in report.text()


def test_grad_mode_is_named_as_the_difference() -> None:
    finding = explain_guard("GLOBAL_STATE changed: grad_mode ")
    assert "grad_mode" in finding.cause
    assert "inference_mode" in finding.fix


def test_tensors_of_unequal_size_that_were_equal_show_their_sizes() -> None:
    rows = recompiles(added, (ones(20), ones(20)), (ones(21), ones(21)), (ones(21), ones(1)))
    assert any("y.size()[0] = 1" in value for row in rows for value in row.values)


def test_another_function_object_is_named() -> None:
    (row,) = recompiles(applied, (ones(2), lambda x: x + 1), (ones(2), lambda x: x + 2))
    assert "`function` is another function" in row.cause
    assert "once" in row.fix


def test_same_tensor_passed_twice_is_named() -> None:
    x = ones(4)

    def add_in_place(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a.add_(b)

    (row,) = recompiles(add_in_place, (ones(4), ones(4)), (x, x))
    assert "one tensor is passed as" in row.cause


def test_guard_that_no_rule_matches_is_shown_unchanged() -> None:
    finding = explain_guard("___quantum(L) is entangled")
    assert "___quantum(L) is entangled" in finding.cause
    assert finding.fix


def test_value_whose_attribute_raises_does_not_fail_the_report() -> None:
    class Hostile:
        @property
        def size(self) -> int:
            raise RuntimeError("no")

    finding = explain_guard("h.size == 3", {"h": Hostile()})
    assert (finding.expected, finding.actual) == ("3", "")


def test_reason_is_split_from_its_compile_id_comment_and_stack() -> None:
    reason = "0/1: n == 3        # return x * n  # model.py:4 in f\nUser stack trace:\n  File ..."
    assert split_reason(reason) == ("0/1", "n == 3")


@pytest.mark.parametrize("name", ["kwargs['past_key_values']", "kwargs['cache']"])
def test_a_cache_of_transformers_that_grows_suggests_convert(name: str) -> None:
    guard = f"tensor '{name}.layers[0].keys' size mismatch at index 2. expected 5, actual 6"
    assert "hf.convert" in explain_guard(guard, {}).fix
