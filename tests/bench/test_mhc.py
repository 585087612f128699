"""Scenario `mhc`: costs are bytes of arguments, transformers' code agrees, and its gate finds a wrong result."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4_compile.bench import Problem, mhc
from dsv4_compile.bench.runner import rows_of
from dsv4_compile.ops.common.define import OPS

CPU = torch.device("cpu")


def found(tokens: int = 3, **only: str) -> list[Problem]:
    return list(mhc.problems(CPU, {name: {value} for name, value in only.items()}, {"tiny": 64}, (tokens,)))


def results(problem: Problem) -> list[Tensor]:
    result = OPS[problem.op](*problem.make(0))
    return [result] if isinstance(result, Tensor) else list(result)


@pytest.mark.parametrize("op", mhc.OPS)
def test_an_op_costs_what_it_moves_and_transformers_agrees(op: str) -> None:
    (problem,) = found(op=op)
    moved = [x for x in problem.make(0) if isinstance(x, Tensor)] + results(problem)
    assert problem.cost.bytes == sum(x.numel() * x.element_size() for x in moved)
    rows = {row["impl"]: row["status"] for row in rows_of(problem, {"impl": {"eager", "transformers", "triton"}}, CPU)}
    assert rows == {"eager": "ok", "transformers": "ok", "triton": "unavailable"}


def test_gate_finds_a_wrong_result() -> None:
    (problem,) = found(op="mhc_boundary")
    want = results(problem)
    assert problem.differs is not None and problem.differs(want, want) == ""
    for index in range(len(want)):
        for wrong in (want[index] * 1.02, want[index].roll(1, 1), want[index] * torch.nan):
            got = [wrong if i == index else x for i, x in enumerate(want)]
            assert f"result {index} has a relative error" in problem.differs(got, want)
    assert "the reference gives" in problem.differs([want[0].float(), *want[1:]], want)


def test_models_are_those_of_deepseek_v4() -> None:
    assert mhc.MODELS == {"Flash": 4096, "Pro": 7168}
    assert len(list(mhc.problems(CPU, {}))) == 2 * 3 * 2
