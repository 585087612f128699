"""Scenario `preprocess_insert`: its arguments have the properties that its docstring states."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.bench import Problem, gate, steps
from dsv4_compile.bench import preprocess_insert as scenario
from dsv4_compile.ops.common.define import OPS, REFERENCES

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def three_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four tokens and more are a chunk of a prompt."""
    monkeypatch.setattr(steps, "MOST_REQUESTS", 3)


def found(tokens: int, kind: str) -> Problem:
    return next(scenario.problems(CPU, {"kind": {kind}}, (tokens,), 512))


@pytest.mark.parametrize("kind", scenario.KINDS)
@pytest.mark.parametrize("tokens", [1, 3, 130])
def test_the_op_and_the_separate_ops_agree(kind: str, tokens: int) -> None:
    problem = found(tokens, kind)
    want = gate.outputs(problem.reference, problem.make(3), problem.written)
    for call in (OPS["preprocess_insert"], lambda *args: scenario.separately(REFERENCES.__getitem__, *args)):
        args = problem.make(3)
        before = [x.clone() for i in problem.written if isinstance(x := args[i], Tensor)]
        got = gate.outputs(call, args, problem.written)
        assert scenario.differs(got, want) == ""
        assert all(not torch.equal(a, b) for a, b in zip(got[1:], before, strict=True))
    assert problem.cost.bytes > 0


@pytest.mark.parametrize("kind", ["hca", "csa"])
def test_a_decode_closes_a_group_for_every_token_and_a_chunk_for_every_group(kind: str) -> None:
    ratio, page = scenario.KINDS[kind], layout.PAGE_LAYOUTS[scenario.CACHE]
    block = layout.storage_block_size(ratio)
    for tokens, entries in ((3, 3), (256, 256 // ratio)):
        problem = found(tokens, kind)
        cache = gate.outputs(problem.reference, problem.make(0), problem.written)[3]
        rows = cache[:, : block * page.data].unflatten(1, (block, page.data))
        assert int(rows.any(-1).sum()) == entries


def test_too_many_wrong_bytes_are_found() -> None:
    want = [torch.zeros(3), torch.zeros(100_000, dtype=torch.uint8)]
    few, many, other = ([x.clone() for x in want] for _ in range(3))
    few[1][:7], many[1][:8], other[0][1] = 1, 1, 0.1
    assert scenario.differs(few, want) == ""
    assert "8 of 100000 bytes" in scenario.differs(many, want)
    assert "result 0" in scenario.differs(other, want)
