"""Scenario `sparse_mla_decode`: its arguments have the stated properties, and its gate finds a wrong result."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dsv4_compile import layout
from dsv4_compile.bench import Problem
from dsv4_compile.bench import sparse_mla_decode as scenario
from dsv4_compile.bench.runner import rows_of
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.reference.common import kv_format

CPU = torch.device("cpu")


def found(tokens: int, heads: int, fused: str = "none") -> Problem:
    (problem,) = scenario.problems(CPU, {"heads": {str(heads)}, "fused": {fused}}, (tokens,), 512)
    return problem


@pytest.mark.parametrize(("heads", "keys"), [(8, 640), (64, 640), (128, 1152)])
def test_problems_are_those_of_the_models(heads: int, keys: int) -> None:
    problem = found(2, heads)
    q, _, slots, lens, _, _, _, _, _, entries, entry_lens, _ = problem.make(0)
    assert q.shape == (2, heads, layout.HEAD_DIM)
    assert slots.shape[1] + entries.shape[1] == keys == int(lens[0] + entry_lens[0])
    assert problem.cost.flops == 2 * 2 * 2 * heads * keys * layout.HEAD_DIM
    assert problem.cost.bytes > 2 * keys * 584


def test_random_pages_hold_finite_keys_of_order_one() -> None:
    cache = scenario.random_cache(640, torch.Generator().manual_seed(0))
    keys = kv_format.load_kv(cache, scenario.CACHE, scenario.BLOCK, torch.arange(640)).float()
    assert keys.isfinite().all()
    assert 0.1 < keys.square().mean().sqrt() < 2
    assert keys[:, : layout.NOPE_DIM].abs().max() < 8


def test_arguments_of_a_seed_repeat() -> None:
    problem = found(2, 8)
    for a, b in zip(problem.make(3), problem.make(3), strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("fault", ["out", "lse", "row"])
def test_a_wrong_result_gets_no_number(fault: str) -> None:
    problem = found(2, 8)

    def wrong(*args: Any) -> Any:
        out, lse = problem.reference(*args)
        if fault == "row":
            return out.flip(0), lse
        return (out * 1.05, lse) if fault == "out" else (out, lse + 1e-2)

    ways = {"right": lambda: problem.reference, "wrong": lambda: wrong}
    problem = Problem(**{name: getattr(problem, name) for name in Problem.__slots__} | {"implementations": ways})
    right, bad = rows_of(problem, {}, CPU)
    assert right["status"] == "ok" and right["us"] > 0
    assert bad["status"] == "wrong" and bad["us"] is None


@pytest.mark.parametrize("fused", scenario.FUSED[1:])
def test_fused_calls_are_compared_with_the_separate_ops(fused: str) -> None:
    """Separate ops agree; attention without the fused steps does not."""
    problem, groups = found(3, 8, fused), 1 if fused == "quant" else 0

    def without(*args: Any) -> Any:
        return problem.reference(*args[:13], *args[13:15], None, False, False, *args[18:])

    ways = {"separate": lambda: scenario.separate(REFERENCES.__getitem__), "without": lambda: without}
    problem = replace(problem, implementations=ways)
    same, wrong = rows_of(problem, {}, CPU)
    assert (same["status"], wrong["status"]) == ("ok", "wrong")
    assert len(problem.make(0)) == 18 + 3 * groups
    assert set(scenario.implementations(problem.op, fused, 8)) > {"separate"}


def test_quantised_values_whose_rotation_cancels_are_compared_by_pair_and_others_one_by_one() -> None:
    """Outputs rounded to one or the other neighbour before inverse RoPE and quantisation."""
    exact = torch.randn(64, 16, layout.HEAD_DIM)
    angles = torch.rand(64, layout.ROPE_DIM // 2) * 6.28
    rope = torch.arange(64), torch.cat((angles.cos(), angles.sin()), dim=-1), 2, 8

    def quantised(shift: float) -> list[torch.Tensor]:
        return list(REFERENCES["inv_rope_fp8_quant"]((exact * (1 + shift)).bfloat16(), *rope))

    want, got = quantised(0.0), quantised(2.0**-10)
    assert scenario.differs(want, want, layout.ROPE_DIM) == ""
    assert "not close" in scenario.differs(got, want)
    assert scenario.differs(got, want, layout.ROPE_DIM) == ""
    for dim in (layout.NOPE_DIM - 1, layout.NOPE_DIM):
        wrong = [got[0].clone(), got[1]]
        largest = want[0][..., dim].float().abs().argmax()
        token, group = divmod(int(largest), 2)
        wrong[0][token, group, dim] = -wrong[0][token, group, dim].float()
        assert "1 of" in scenario.differs(wrong, want, layout.ROPE_DIM)
