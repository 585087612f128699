"""Scenario `attention_backends`: its problems are those of the systems, and its gate finds a wrong result."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dsv4_compile import layout
from dsv4_compile.bench import Problem
from dsv4_compile.bench import attention_backends as scenario
from dsv4_compile.bench.runner import rows_of
from dsv4_compile.ops.common.define import REFERENCES

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenario.rows, "SMALLEST_POOL", 512)
    monkeypatch.setattr(scenario.rows, "POOL_PER_TOKEN", 64)


def found(**columns: str) -> list[Problem]:
    return list(scenario.problems(CPU, {name: {value} for name, value in columns.items()}, (2,)))


def test_problems_are_those_of_the_systems() -> None:
    sizes = [(p.op, p.params["cache"], p.params["heads"], p.params["keys"]) for p in found()]
    assert sizes == [
        ("sparse_mla_decode_ragged", "fp8_ds_mla", 64, 640),
        ("sparse_mla_decode", "fp8_ds_mla", 64, 640),
        ("sparse_mla_decode", "plain", 64, 640),
        ("sparse_mla_decode", "fp8", 64, 640),
        ("sparse_mla_decode_latent", "plain", 128, 2048),
    ]


def test_lists_hold_the_slots_of_the_rows() -> None:
    (problem,) = found(op=scenario.LISTS)
    for got, want in zip(
        REFERENCES[scenario.LISTS](*problem.make(3)),
        REFERENCES[scenario.ROWS](*scenario.rows.arguments(2, 64, CPU, 3)),
        strict=True,
    ):
        assert torch.equal(got, want)


def test_costs_count_cache_rows_and_flops() -> None:
    lists, same, plain, _, latent = found()
    assert lists.cost == same.cost
    assert lists.cost.bytes > 2 * 640 * 584
    assert plain.cost.bytes > 2 * 640 * 2 * layout.HEAD_DIM
    assert latent.cost.flops == 2 * 2 * 128 * 2048 * (576 + 512)
    assert latent.cost.bytes > 2 * 2048 * 2 * 576


@pytest.mark.parametrize("number", range(5))
def test_a_wrong_result_gets_no_number(number: int) -> None:
    problem = found()[number]

    def wrong(*args: Any) -> Any:
        out, lse = problem.reference(*args)
        return out.flip(0), lse

    problem = replace(problem, implementations={"right": lambda: problem.reference, "wrong": lambda: wrong}, cold=False)
    right, bad = rows_of(problem, {}, CPU)
    assert right["status"] == "ok"
    assert (bad["status"], bad["us"]) == ("wrong", None)
