"""What the tests of every lowering ask: of a call, whether it is lowered, and of a report, whether it is right."""

from __future__ import annotations

from typing import Any

import torch

from dsv4_compile.lowering import registry
from dsv4_compile.selection.decisions import Call, Decision

Reports = dict[str, dict[str, Any]]

MOST_MOVED = 1e-3
"""Share of the elements that a sum in a different order may move to their neighbour: one in 2^15 or so moves."""
TARGETS = ("sm_90", "gfx942")
"""Targets that code of Inductor is compiled for: one of each maker. The hand-written kernels are compiled for all
targets of tests/kernels/gpus.py."""
SM80, SM90 = ("triton", "cuda sm_80"), ("triton", "cuda sm_90")
CPP, HALIDE = ("cpp", "cpu"), ("halide", "cpu")


def ir_decision(op: str, backend: tuple[str, str] = SM90, **arguments: Any) -> Decision:
    """What the lowering of `op` says to a call: for IR, or for the reference with a reason."""
    registry.load()
    return registry.LOWERINGS[op].can_lower(Call(op, arguments, torch.device("cpu"), *backend))


def assert_equals_reference(report: dict[str, Any], *, steps: float = 0) -> None:
    """Fail unless memory is the reference's byte by byte, and outputs are at most `steps` roundings from it.

    Of elements that are rounded to 16 bits or less nearly all must be the reference's.
    """
    assert set(report["impls"]) == {"ir"}
    assert report["memory"] == []
    if steps == 0:
        assert report["outputs"] == []
    else:
        assert max(worst for worsts in report["ulps"] for worst in worsts) <= steps, report["outputs"]
        assert max(report["moved"]) <= MOST_MOVED, report["outputs"]


def assert_kernels(report: dict[str, Any], launches: int) -> None:
    """Fail unless one graph serves every size by `launches` kernels and nothing else: no copy, no clone, no reference.

    In particular no copy of a cache. And no source of a kernel is a file, which nobody would remove.
    """
    assert report["graphs"] == 1
    assert report["launches"] == launches, report["kernels"]
    assert report["extern"] == []
    assert report["files"] == []
