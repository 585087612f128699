"""examples/benchmarks/against.py: kernels of a second checkout compared with ours, in one process."""

from __future__ import annotations

import importlib.util
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from dsv4_compile import layout
from dsv4_compile.kernels.linear import fp8_linear

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "benchmarks" / "against.py"


@pytest.fixture
def against(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("against", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = set(sys.modules)
    monkeypatch.setitem(sys.modules, "against", module)
    spec.loader.exec_module(module)
    yield module
    for name in set(sys.modules) - before:
        if name.startswith("dsv4_compile.kernels_"):
            del sys.modules[name]


def test_other_kernels_are_packages_next_to_ours_with_our_layouts(against: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "linear").mkdir()
    (tmp_path / "parts.py").write_text("from .. import layout\n")
    linear = "from ..parts import layout\ndef fp8_linear():\n    return layout\n"
    (tmp_path / "linear" / "fp8_linear.py").write_text(linear)
    calls = against.launchers("fp8_linear", against.packages([f"theirs={tmp_path}", str(tmp_path)]))
    assert list(calls) == ["ours", "theirs", "other1"]
    assert calls["ours"] is fp8_linear.fp8_linear
    assert calls["theirs"]() is calls["other1"]() is layout and calls["theirs"] is not calls["other1"]


def test_launchers_of_a_wide_op_take_its_arguments_in_either_form(against: ModuleType, tmp_path: Path) -> None:
    """As one tuple, or one by one as in a checkout from before the tuples."""
    bodies = {
        "new": "(op):\n    return op.q, op.lens",
        "old": "(q, k_cache, indices, lens, *rest):\n    return q, lens",
    }
    for name, body in bodies.items():
        (tmp_path / name / "attention").mkdir(parents=True)
        (tmp_path / name / "attention" / "sparse_mla_decode.py").write_text(f"def sparse_mla_decode{body}\n")
    calls = against.launchers("sparse_mla_decode", {n: against.package(n, tmp_path / n) for n in bodies})
    assert {name: call(1, 2, 3, 4, 5, "plain", 1.0) for name, call in calls.items()} == dict.fromkeys(bodies, (1, 4))


def test_graphs_are_replayed_in_turn_and_compared_round_by_round(
    against: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the clock of a GPU rises, only times of one round are comparable."""
    replayed: list[str] = []

    def replay_us(graph: Any) -> float:
        name, calls = graph()
        replayed.append(name)
        return calls * (1000 - len(replayed)) * (0.5 if name == "quick" else 1.0)

    monkeypatch.setattr(against, "graph_of", lambda call, calls: Replayed(call(), calls))
    monkeypatch.setattr(against, "replay_us", replay_us)
    times = against.in_turn({"ours": lambda: "ours", "quick": lambda: "quick", "same": lambda: "same"}, 5)
    assert times["quick_faster"] == 1.0 and times["same_faster"] == 0.6
    timed = [(us, name) for us, name in enumerate(replayed[-15:], len(replayed) - 14)]
    ours = statistics.median(1000 - us for us, name in timed if name == "ours")
    assert times["ours_us"] == ours and 0.4 * ours < times["quick_us"] < 0.6 * ours
    assert [name for _, name in timed[:6]] == ["ours", "quick", "same", "same", "quick", "ours"]


class Replayed:
    """A graph of so many calls."""

    def __init__(self, name: str, calls: int) -> None:
        self.name, self.calls = name, calls

    def __call__(self) -> tuple[str, int]:
        return self.name, self.calls

    def replay(self) -> None:
        pass


def test_results_are_compared_by_their_bytes(against: ModuleType) -> None:
    nan = torch.tensor([torch.nan, 1.0])
    assert against.same((nan, None), (nan.clone(), None))
    assert not against.same((torch.zeros(2),), (-torch.zeros(2),))


def test_several_sets_of_arguments_take_turns(against: ModuleType) -> None:
    assert against.results_of(lambda x, y: x + y, [(1, 2), (3, 4)]) == [3, 7]


def test_without_a_gpu_it_says_so(
    against: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["against.py", "kernels", "gemm"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        against.main()
    assert "kernels run on GPUs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["gemm", "--only", "token=8"], "no column 'token' in gemm; there is op, layer, model, tokens, impl"),
        (["gemm", "--only", "tokens"], "--only takes COLUMN=A,B, got 'tokens'"),
        (["metadata", "--tokens", "8"], "--tokens: metadata has sizes of its own"),
        (["gemm", "--sets", "0"], "--rounds and --sets are at least 1"),
    ],
)
def test_options_without_effect_are_errors(
    against: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    argv: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["against.py", "kernels", *argv])
    with pytest.raises(SystemExit):
        against.main()
    assert f"error: {message}" in capsys.readouterr().err
