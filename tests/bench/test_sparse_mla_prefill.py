"""Scenario `sparse_mla_prefill`: its arguments have the stated properties, and its gate finds a wrong result."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dsv4_compile import layout
from dsv4_compile.bench import Problem
from dsv4_compile.bench import sparse_mla_prefill as scenario
from dsv4_compile.bench.runner import rows_of

CPU = torch.device("cpu")


def found(tokens: int, heads: int, pattern: str = "random") -> Problem:
    only = {"heads": {str(heads)}, "pattern": {pattern}}
    (problem,) = scenario.problems(CPU, only, (tokens,))
    return problem


@pytest.mark.parametrize(("heads", "keys"), [(64, 640), (128, 1152)])
@pytest.mark.parametrize("pattern", scenario.PATTERNS)
def test_problems_are_those_of_the_models(heads: int, keys: int, pattern: str) -> None:
    problem = found(40, heads, pattern)
    q, kv, indices, lens, *_ = problem.make(0)
    assert q.shape == (40, heads, layout.HEAD_DIM)
    assert indices.shape == (40, keys) and (lens == keys).all()
    assert (indices >= 0).all() and (indices < kv.shape[0]).all()
    assert problem.cost.flops == 2 * 2 * 40 * heads * keys * layout.HEAD_DIM
    assert problem.cost.bytes > kv.numel() * 2


def test_the_last_keys_of_the_window_pattern_are_neighbours_after_the_entries() -> None:
    _, _, indices, *_ = found(80, 64, "window").make(0)
    assert (indices[:, :512] < 20).all()
    near = indices[:, 512:]
    assert (near.diff(dim=1) == 1).all() and (near >= 20).all()
    assert near[1, 0] == near[0, 0] + 1


@pytest.mark.parametrize("fault", ["out", "max_logits", "lse", "row"])
def test_a_wrong_result_gets_no_number(fault: str) -> None:
    problem = found(2, 64)

    def wrong(*args: Any) -> Any:
        out, top, lse = problem.reference(*args)
        changed = {
            "out": (out * 1.05, top, lse),
            "max_logits": (out, top + 1e-2, lse),
            "lse": (out, top, lse + 1e-2),
            "row": (out.flip(0), top, lse),
        }
        return changed[fault]

    problem = replace(problem, implementations={"right": lambda: problem.reference, "wrong": lambda: wrong})
    right, bad = rows_of(problem, {}, CPU)
    assert right["status"] == "ok" and right["us"] > 0
    assert bad["status"] == "wrong" and bad["us"] is None
