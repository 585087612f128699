"""Scenario `prefill`: its arguments are of one prompt, and selections from pages and from gathered keys are equal."""

from __future__ import annotations

from typing import Any

import torch

from dsv4_compile.bench import Problem, gate, prefill
from dsv4_compile.ops.common.define import OPS
from dsv4_compile.ops.common.kernels import KERNELS

CPU = torch.device("cpu")
PROBLEMS = {problem.op: problem for problem in prefill.problems(CPU, {}, (24,), 256)}


def result(problem: Problem) -> Any:
    return gate.outputs(OPS[problem.op], problem.make(3), problem.written)


def test_every_op_agrees_with_its_reference_and_has_a_kernel_and_a_cost() -> None:
    assert set(PROBLEMS) == set(prefill.OPS) <= set(KERNELS)
    for problem in PROBLEMS.values():
        want = gate.outputs(problem.reference, problem.make(3), problem.written)
        assert gate.disagreement(result(problem), want) == ""
        assert problem.cost.bytes > 0


def test_both_selections_are_equal_and_some_tokens_see_less_than_others() -> None:
    (ragged,), (paged,) = (result(PROBLEMS[op]) for op in ("indexer_logits_topk_ragged", "indexer_logits_topk"))
    assert torch.equal(ragged, paged)
    seen = (ragged >= 0).sum(1)
    assert seen.min() == 58 and seen.max() == 64


def test_rows_of_both_forms_name_the_gathered_window_of_the_token() -> None:
    rows, lens = result(PROBLEMS["combine_topk_swa"])
    flat, indptr, _ = result(PROBLEMS["combine_topk_swa_ragged"])
    last = rows[-1, : lens[-1]]
    assert torch.equal(flat[indptr[-2] : indptr[-1]], last)
    assert torch.equal(last[-128:], 64 + 151 - 128 + torch.arange(128, dtype=torch.int32))
