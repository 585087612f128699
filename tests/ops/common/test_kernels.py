"""Dispatch of a call to the kernel of an op: a call that the kernel does not support at run time is never silent."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.backend import dsv4
from dsv4_compile.errors import DSV4Warning
from dsv4_compile.kernels.host.launch_cache import Found
from dsv4_compile.lowering import registry
from dsv4_compile.ops.common import kernels
from dsv4_compile.selection import decisions
from dsv4_compile.selection.decisions import Decision
from dsv4_compile.testing import assert_bitwise


@pytest.fixture(autouse=True)
def nothing_shown_yet() -> Iterator[None]:
    dsv4.reset()  # type: ignore[attr-defined]
    yield
    dsv4.reset()  # type: ignore[attr-defined]


def call(impl: str, dim: int) -> Tensor:
    """Rotate heads; the kernel of this op supports powers of two of dims."""
    registry.load()
    run: Any = registry.twin("inv_rope", impl)
    o = torch.linspace(-1, 1, 6 * dim).view(3, 2, dim)
    return run(o, torch.arange(3), torch.linspace(0, 1, 16).view(4, 4))


def test_a_call_that_the_kernel_does_not_support_runs_the_reference_with_a_warning() -> None:
    with pytest.warns(DSV4Warning, match=r"\[W603\](.|\n)*inv_rope: the head dim 12 is not a power") as shown:
        assert_bitwise(call("triton", 12), call("eager", 12))
    assert [warning.filename for warning in shown] == [__file__]


def test_it_warns_once_for_each_reason_until_reset() -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        for dim in (12, 12, 20, 12):
            call("triton", dim)
        assert len(shown) == 2
        dsv4.reset()  # type: ignore[attr-defined]
        call("triton", 12)
    assert len(shown) == 3


def test_who_collects_decisions_gets_one_for_the_call() -> None:
    with pytest.warns(DSV4Warning), decisions.collect() as decided:
        call("triton", 12)
        call("triton", 12)
    reason = "at run time: the head dim 12 is not a power of two"
    assert decided == [Decision("inv_rope", "eager", reason)] * 2


def test_a_call_that_the_kernel_supports_is_launched_without_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []

    class Cache:
        def look_up(self, args: Any) -> Found:
            return Found((), None)

        def run(self, found: Found, args: tuple[Tensor, ...]) -> Tensor:
            launched.append(args[0].shape[-1])
            return args[0].clone()

    monkeypatch.setattr(kernels, "launch_cache", lambda op, invariant: Cache())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call("triton", 16)
    assert launched == [16]
