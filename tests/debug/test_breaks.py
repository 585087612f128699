"""Every planted graph break is found at its line, with a cause and a fix in plain words."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import dsv4_compile
from dsv4_compile.debug import breaks, places
from dsv4_compile.debug.places import Place
from dsv4_compile.debug.report import Report
from tests.debug import planted_breaks

PLANTED = {
    name: function
    for name, function in vars(planted_breaks).items()
    if not name.startswith("_") and inspect.isfunction(function) and function.__module__ == planted_breaks.__name__
}
MARK = re.compile(r"  # (BREAK|EAGER)(?:: (.+))?$")
MARKED = {
    number: mark
    for number, line in enumerate(Path(planted_breaks.__file__).read_text().splitlines(), 1)
    if (mark := MARK.search(line))
}


def explain(function: Callable[..., torch.Tensor], *args: object) -> Report:
    return dsv4_compile.explain(function, *args, backend="eager")


def marked_lines(name: str) -> list[int]:
    """Return the marked lines of a planted function, or of the private helper before it that it calls."""
    lines, first = inspect.getsourcelines(PLANTED[name])
    inside = [number for number in MARKED if first <= number < first + len(lines)]
    return inside or [max(number for number in MARKED if number < first)]


def test_at_least_twenty_five_kinds_of_break_are_planted() -> None:
    assert len(PLANTED) >= 25
    assert {line for name in PLANTED for line in marked_lines(name)} == set(MARKED)


@pytest.mark.parametrize("name", PLANTED)
def test_planted_break_is_found_at_its_line_and_nowhere_else(name: str) -> None:
    report = explain(PLANTED[name], torch.randn(4, 4))

    lines = {item.place.line for item in report.breaks}
    assert lines == set(marked_lines(name))
    assert {item.place.file for item in report.breaks} == {planted_breaks.__file__}
    for line in marked_lines(name):
        here = [item for item in report.breaks if item.place.line == line]
        if MARKED[line][1] == "EAGER":
            assert "function" in {item.scope for item in here}
        words = MARKED[line][2] or ""
        assert any(words in item.cause for item in here), [item.cause for item in here]
        assert all(item.fix and item.kind and "# " in item.place.source for item in here)
    assert not report.ok
    assert report.failure is None


def test_function_without_a_break_is_ok() -> None:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.softmax(q @ k.T, dim=-1) @ v

    report = explain(attention, *torch.randn(3, 4, 8))
    assert report.ok
    assert report.breaks == []
    assert [graph.op_count for graph in report.graphs] == [4]
    assert "ok; 1 graph" in report.text()


def test_break_reached_from_several_callers_is_one_row() -> None:
    def helper(x: torch.Tensor) -> torch.Tensor:
        print("helper")
        return x + 1

    report = explain(lambda x: helper(helper(x)), torch.ones(2))
    assert len(report.breaks) == 1
    assert report.breaks[0].seen > 1


def test_functions_that_run_eagerly_come_first() -> None:
    def whole(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = x + 1
            print("loop")
        return x

    def partly(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        print("once")
        return whole(y + 1)

    report = explain(partly, torch.ones(2))
    assert [item.scope for item in report.breaks] == ["function", "break"]
    assert [item.place.function for item in report.breaks] == ["whole", "partly"]


def test_break_in_an_installed_package_names_the_line_that_led_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "installed_package.py"
    package.write_text("def layer(x):\n    y = x + 1\n    print('inside')\n    return y\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(places, "_site_packages", lambda: (tmp_path,))
    import installed_package

    report = explain(lambda x: installed_package.layer(x * 2), torch.ones(2))
    del sys.modules["installed_package"]
    (item,) = report.breaks
    assert (item.place.file, item.place.line) == (str(package), 3)
    assert item.called_from is not None
    assert item.called_from.file == __file__
    assert "installed_package.layer" in item.called_from.source


def test_call_that_raises_is_reported_with_the_findings_before_it() -> None:
    def wrong(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        print("first")
        return y @ torch.ones(3, 3)

    report = explain(wrong, torch.ones(2, 2))
    assert report.failure is not None
    assert report.failure.place.file == __file__
    assert "torch.ones(3, 3)" in report.failure.place.source
    assert [item.place.function for item in report.breaks] == ["wrong"]
    assert "THE CALL FAILED" in report.text()
    assert not report.ok


def test_break_in_the_transformers_model_suggests_hf_convert() -> None:
    cause, fix = breaks.explain_break(
        "Data-dependent branching", "", "", [], "site-packages/transformers/models/deepseek_v4/modeling_deepseek_v4.py"
    )
    assert "value of a tensor" in cause
    assert "hf.convert" in fix


@pytest.mark.parametrize(
    ("module", "replacement"),
    [
        ("flash_mla.cuda", "sparse_mla_decode"),
        ("deep_gemm_cpp", "fp8_linear"),
        ("fast_hadamard_transform_cuda", "hadamard"),
    ],
)
def test_break_in_a_kernel_package_suggests_the_op_that_replaces_it(module: str, replacement: str) -> None:
    context = f"module: {module}, qualname: run, skip reason: cannot determine source file (likely a C extension)"
    explanation = "This function is either a Python builtin or a third-party C/C++ Python extension."
    cause, fix = breaks.explain_break("Attempted to call function marked as skipped", explanation, context, [], "")
    assert f"{module}.run" in cause
    assert replacement in fix


def test_unknown_kind_of_break_shows_the_explanation_and_first_useful_hint_of_torch() -> None:
    hints = ["Please report an issue to PyTorch.", "Avoid the frobnicator."]
    cause, fix = breaks.explain_break("New kind", "The frobnicator is not supported. At all.", "", hints, "")
    assert (cause, fix) == ("The frobnicator is not supported", "Avoid the frobnicator.")


def test_parsed_break_of_a_skipped_frame_without_a_reason_keeps_its_place() -> None:
    text = (
        "Graph break: torch.compile cannot properly resume from this graph break, which results in a skip.\n"
        "torch.compile will skip tracing the frame f (model.py line 1) and fall back to eager.\n"
        "The graph break occurred in the following user code:\n"
        '  File "model.py", line 7, in f\n    y.step()\n\n'
        "Traceback (most recent call last):\n"
        '  File "torch/_dynamo/x.py", line 1, in g\n    raise Unsupported\n'
        "torch._dynamo.exc.Unsupported: cannot step\n"
    )
    raw = breaks.parse_break(text)
    assert raw.whole_function
    assert raw.stack == [Place("model.py", 7, "f", "y.step()")]
    assert "cannot step" in raw.kind
