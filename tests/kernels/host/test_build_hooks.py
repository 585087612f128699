"""Kernels with a constant of any class are launched beside hooks of Triton's builds, which other code sets."""

from __future__ import annotations

import inspect
import json
from types import SimpleNamespace
from typing import Any

import pytest

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


def test_a_constant_that_is_no_json_is_described_by_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    describe = jit.serialize_specialization_data
    monkeypatch.setattr(jit, "serialize_specialization_data", getattr(describe, "__wrapped__", describe))
    build_hooks.describe_any_kernel.cache_clear()
    kernel = Described()
    try:
        launch.launch_kernel(kernel, (1,), A=3)
        launch.launch_kernel(kernel, (1,), A=3, CONFIG=range(2))
    finally:
        build_hooks.describe_any_kernel.cache_clear()
    assert kernel.found[0]["constant_vals"] == [True, 3]
    assert kernel.found[1]["constant_vals"] == [True, 3, "range(0, 2)"]
