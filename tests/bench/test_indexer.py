"""Scenario `indexer`: its arguments have the properties that its docstring states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.bench import Problem, gate, indexer, nodes, runner, steps, table
from dsv4_compile.ops.common.define import OPS, REFERENCES

CPU = torch.device("cpu")
CONTEXT = 1024


def found(tokens: int, **only: str) -> list[Problem]:
    return list(indexer.problems(CPU, {name: {value} for name, value in only.items()}, (tokens,), CONTEXT))


@pytest.fixture
def three_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four tokens and more are a chunk of a prompt."""
    monkeypatch.setattr(steps, "MOST_REQUESTS", 3)


@pytest.mark.usefixtures("three_requests")
@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_every_op_takes_its_arguments_and_agrees_with_itself(tokens: int) -> None:
    problems = found(tokens)
    assert len(problems) == 13
    for problem in problems:
        ours, again = problem.make(3), problem.make(3)
        assert (
            gate.disagreement([a for a in ours if isinstance(a, Tensor)], [a for a in again if isinstance(a, Tensor)])
            == ""
        )
        want = gate.outputs(problem.reference, ours, problem.written)
        assert gate.disagreement(gate.outputs(OPS[problem.op], again, problem.written), want) == ""
        assert problem.cost.bytes > 0


def written_rows(problem: Problem) -> int:
    """Rows of a cache that a call changes."""
    args = problem.make(0)
    cache: Any = args[problem.written[0]]
    before = cache.clone()
    problem.reference(*args)
    data = layout.PAGE_LAYOUTS[args[13]].data
    rows = (cache != before)[:, : args[12] * data].unflatten(1, (args[12], data))
    return int(rows.any(-1).sum())


@pytest.mark.usefixtures("three_requests")
@pytest.mark.parametrize("layer", ["CSA", "HCA", "indexer"])
def test_decode_closes_a_group_for_every_token_and_a_chunk_for_every_group(layer: str) -> None:
    assert written_rows(found(3, op="compress_norm_rope_insert", layer=layer)[0]) == 3
    ratio = layout.HCA_RATIO if layer == "HCA" else layout.CSA_RATIO
    assert written_rows(found(256, op="compress_norm_rope_insert", layer=layer)[0]) == 256 // ratio


def test_sums_of_the_score_are_exact() -> None:
    q, q_scale, weights, *rest = found(2, op="indexer_logits_topk", topk="512")[0].make(0)[:9]
    order = torch.randperm(q.shape[1])
    score = REFERENCES["indexer_logits"]
    logits = score(q, q_scale, weights, *rest, CONTEXT // 4)
    shuffled = score(q[:, order], q_scale[:, order], weights[:, order], *rest, CONTEXT // 4)
    assert torch.equal(logits, shuffled)
    assert logits.isfinite().all()
    # Nearly all of them differ: a search for the boundary has work to do.
    assert min(row.unique().numel() for row in logits) > 0.9 * logits.shape[1]


def test_other_contexts_are_measured_on_request() -> None:
    asked = {"context": {"4096", "131072"}, "topk": {"512"}}
    problems = [(p.op, p.params["context"]) for p in indexer.problems(CPU, asked, (1,))]
    assert problems == [(op, context) for op in indexer.SCORES for context in (4096, 131072)]
    assert {p.params["context"] for p in indexer.problems(CPU, {}, (1,))} == {indexer.CONTEXT["cpu"]}


def test_kernels_of_a_call_have_times_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = [nodes.Node("score", 1.5), nodes.Node("select", 2.25), nodes.Node("score", 1.0)]
    monkeypatch.setattr(nodes, "nodes", lambda call: launches)
    kernels = runner._kernels(lambda: None)
    assert kernels == {"score": 2.5, "select": 2.25}
    row = {"op": "indexer_topk_slots", "tokens": 8, "impl": "triton", "us": 5.0, "published_us": {}, "launches": 2}
    row |= {"note": "", "gb_s": 1.0, "of_copy": 0.1, "clock": "cuda graph", "kernels_us": kernels}
    assert "triton, 8: us, warm, of score 2.50, select 2.25" in table._block("indexer_topk_slots", [row])
