"""Scenarios `router` and `experts`: costs of what is touched, and gates that find a wrong result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.bench import Problem, experts, router
from dsv4_compile.bench.runner import rows_of
from dsv4_compile.ops.common.define import OPS

CPU = torch.device("cpu")
ROUTER, EXPERTS = {"tiny": router.Router(8, 64, 2, 1.5)}, {"tiny": experts.Experts(4, 128, 128, 2)}


def routers(tokens: int = 5, **only: str) -> list[Problem]:
    return list(router.problems(CPU, {name: {value} for name, value in only.items()}, ROUTER, (tokens,)))


def layers(tokens: int = 3, **only: str) -> list[Problem]:
    return list(experts.problems(CPU, {name: {value} for name, value in only.items()}, EXPERTS, (tokens,)))


def moved(*tensors: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tensors if isinstance(x, Tensor))


def test_every_format_and_routing_is_measured() -> None:
    assert len(routers()) == 3 and len(layers()) == 12
    assert len(layers(weights="e4m3")) == 3 and len(layers(weights="e4m3", shared="none")) == 1


@pytest.mark.parametrize("problem", routers(), ids=lambda problem: " ".join(map(str, problem.params.values())))
def test_a_router_costs_what_it_moves(problem: Problem) -> None:
    args = problem.make(0)
    table = args[4]
    rows = 0 if table is None else len(args[0]) * table.shape[1] * table.element_size()
    assert problem.cost.bytes == moved(*args[:4], *OPS[problem.op](*args)) + rows


@pytest.mark.parametrize("shared", experts.SHARED)
@pytest.mark.parametrize("kind", experts.FORMATS)
def test_experts_cost_the_weights_that_uniform_routing_touches(kind: str, shared: str) -> None:
    (problem,) = layers(weights=kind, shared=shared)
    args = problem.make(0)
    result = OPS[problem.op](*args)
    assert not result.isnan().any()
    touched = 4 * (1 - (1 - 2 / 4) ** 3)
    weights = moved(*args[3:7]) / 4 * touched
    assert problem.cost.bytes == pytest.approx(moved(*args[:3], *args[7:], result) + weights, abs=1)


def test_gates_find_a_wrong_result() -> None:
    (problem,) = layers(weights="mxfp4", shared="none")
    want = OPS[problem.op](*problem.make(0))
    assert problem.differs is not None and problem.differs([want], [want]) == ""
    assert "relative error" in problem.differs([want * 1.1], [want])
    assert "relative error" in problem.differs([want * torch.nan], [want])
    assert "the reference gives" in problem.differs([want.float()], [want])
    problem = routers()[0]
    ids, weights = OPS[problem.op](*problem.make(0))
    assert problem.differs is not None and problem.differs([ids, weights], [ids, weights]) == ""
    assert "other experts" in problem.differs([(ids + 1) % 8, weights], [ids, weights])
    assert "weights are wrong" in problem.differs([ids, weights * 1.1], [ids, weights])


def test_references_are_timed() -> None:
    for problem in (routers()[0], layers(weights="bfloat16", shared="e4m3")[0]):
        rows = list(rows_of(problem, {"impl": {"eager"}}, CPU))
        assert [(row["impl"], row["status"]) for row in rows] == [("eager", "ok")]
