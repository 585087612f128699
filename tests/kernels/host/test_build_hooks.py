"""Tests of steps before Triton's builds: the choice of a ptxas, and texts of constants for hooks of other code."""

from __future__ import annotations

import inspect
import json
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from dsv4_compile._compat import compile_tasks
from dsv4_compile.kernels.host import build_hooks, launch

jit: Any = pytest.importorskip("triton.runtime.jit")


class Described:
    """A kernel that Triton describes to a hook at each launch."""

    params = ()

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        nothing = SimpleNamespace()

        def run(*args: Any, **constants: Any) -> None:
            paths = {(i,): value for i, value in enumerate(constants.values())}
            count = len(inspect.signature(jit.serialize_specialization_data).parameters)  # one more since Triton 3.7
            rest = ({}, nothing, "key", nothing)[: count - 3]
            self.found.append(json.loads(jit.serialize_specialization_data("kernel", {}, paths, *rest)))

        return run


def _forget() -> None:
    build_hooks.prepare_builds.cache_clear()
    build_hooks.describe_any_kernel.cache_clear()


@pytest.mark.parametrize("early", [False, True])
def test_the_ptxas_is_settled_before_the_first_build(early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton keeps the version of the ptxas that it finds at its first build in the names of its cache."""
    done: list[str] = []
    monkeypatch.setattr(compile_tasks, "_set_triton_ptxas_path", lambda: done.append("ptxas"))
    monkeypatch.setattr(Described, "__getitem__", lambda self, grid: lambda **constants: done.append("launch"))
    _forget()
    try:
        with launch.building(lambda *call: done.append("build")) if early else nullcontext():
            launch.launch_kernel(Described(), (1,), A=3)
            launch.launch_kernel(Described(), (1,), A=3)
    finally:
        _forget()
    word = "build" if early else "launch"
    assert done == ["ptxas", word, word]


def test_a_constant_that_is_no_json_is_described_by_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    describe = jit.serialize_specialization_data
    monkeypatch.setattr(jit, "serialize_specialization_data", getattr(describe, "__wrapped__", describe))
    _forget()
    kernel = Described()
    try:
        launch.launch_kernel(kernel, (1,), A=3)
        launch.launch_kernel(kernel, (1,), A=3, CONFIG=range(2))
    finally:
        _forget()
    assert kernel.found[0]["constant_vals"] == [True, 3]
    assert kernel.found[1]["constant_vals"] == [True, 3, "range(0, 2)"]
