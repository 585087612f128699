"""`moe_route` against a scalar computation of scores, choice and weights."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.errors import InputError
from dsv4_compile.ops.moe.moe_route import moe_route
from dsv4_compile.testing import assert_bitwise, check_op, hostile_indices, padded, strided

EXPERTS, HIDDEN, TOP_K, SCALE = 12, 40, 4, 1.5


def problem(tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randn(tokens, HIDDEN).to(dtype),
        (torch.randn(EXPERTS, HIDDEN) * 0.2).to(dtype),
        torch.randn(EXPERTS) * 0.3,
    )


def scores_of(x: Tensor, gate: Tensor) -> list[list[float]]:
    logits = (x.double() @ gate.double().t()).tolist()
    return [[math.sqrt(math.log1p(math.exp(-abs(v))) + max(v, 0)) for v in row] for row in logits]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_largest_scores_with_bias_are_chosen_and_weighed_without_it(dtype: torch.dtype) -> None:
    x, gate, bias = problem(7, dtype)
    ids, weights = moe_route(x, gate, bias, None, None, TOP_K, SCALE)
    assert (ids.dtype, weights.dtype, ids.shape, weights.shape) == (torch.int32, torch.float32, (7, TOP_K), (7, TOP_K))
    for scores, chosen, row in zip(scores_of(x, gate), ids.tolist(), weights.tolist(), strict=True):
        order = sorted(range(EXPERTS), key=lambda e: (-(scores[e] + bias[e].item()), e))
        assert chosen == order[:TOP_K]
        total = sum(scores[e] for e in chosen)
        assert row == pytest.approx([SCALE * scores[e] / total for e in chosen], rel=1e-5)


def test_the_bias_changes_the_choice() -> None:
    x, gate, bias = problem(50)
    assert not torch.equal(
        moe_route(x, gate, bias, None, None, TOP_K)[0], moe_route(x, gate, None, None, None, TOP_K)[0]
    )


def test_of_equal_scores_the_smaller_id_comes_first() -> None:
    x, gate, _ = problem(3)
    gate[1::2] = gate[::2]
    ids, _ = moe_route(x, gate, None, None, None, TOP_K)
    assert (ids[:, ::2] % 2 == 0).all() and (ids[:, 1::2] == ids[:, ::2] + 1).all()
    ids, weights = moe_route(torch.zeros_like(x), gate, None, None, None, TOP_K, SCALE)
    assert ids.tolist() == [[*range(TOP_K)]] * 3
    assert torch.equal(weights, torch.full_like(weights, SCALE / TOP_K))


def test_scores_that_vanish_give_weights_of_0_and_nan_stays_in_its_row() -> None:
    x, gate = torch.ones(3, HIDDEN), torch.full((EXPERTS, HIDDEN), -20.0)
    x[1], x[2] = torch.nan, -1
    ids, weights = moe_route(x, gate, None, None, None, TOP_K)
    assert ids.tolist() == [[*range(TOP_K)]] * 3
    assert not weights[0].any() and weights[1].isnan().all() and not weights[2].isnan().any()


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_a_table_gives_the_experts_of_a_token_id(kind: torch.dtype) -> None:
    x, gate, _ = problem(6)
    table = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(9)]).to(kind)
    tokens = torch.tensor([4, 0, 8, 4, 1, 2], dtype=kind)
    ids, weights = moe_route(x, gate, None, tokens, table, TOP_K, SCALE)
    assert torch.equal(ids, table[tokens.long()].int())
    for scores, chosen, row in zip(scores_of(x, gate), ids.tolist(), weights.tolist(), strict=True):
        assert row == pytest.approx([SCALE * scores[e] / sum(scores[i] for i in chosen) for e in chosen], rel=1e-5)


def test_hostile_token_ids_and_entries_choose_no_expert() -> None:
    x, gate, _ = problem(64)
    table = hostile_indices((9, TOP_K), EXPERTS, dtype=torch.int64)
    tokens = hostile_indices((64,), 9)
    ids, weights = moe_route(x, gate, None, tokens, table, TOP_K)
    for token, chosen, row_weights in zip(tokens.tolist(), ids.tolist(), weights.tolist(), strict=True):
        row = table[token].tolist() if 0 <= token < 9 else [-1] * TOP_K
        assert chosen == [e if 0 <= e < EXPERTS else -1 for e in row]
        assert all((w == 0) == (e < 0) for e, w in zip(chosen, row_weights, strict=True))
        assert sum(row_weights) == pytest.approx(1.0) or max(chosen) < 0


def test_tokens_do_not_influence_each_other() -> None:
    x, gate, bias = problem(5)
    want = moe_route(x, gate, bias, None, None, TOP_K)
    x[3] = torch.nan
    for got, before in zip(moe_route(x, gate, bias, None, None, TOP_K), want, strict=True):
        assert_bitwise(torch.cat((got[:3], got[4:])), torch.cat((before[:3], before[4:])))


def test_op_keeps_its_promises() -> None:
    x, gate, bias = problem(5, torch.bfloat16)
    table = hostile_indices((9, TOP_K), EXPERTS, dtype=torch.int64)
    check_op(
        moe_route,
        [
            (x, gate, bias, None, None, TOP_K, SCALE),
            (padded(x)[:1], strided(gate), strided(bias), None, None, TOP_K),
            (strided(x), gate.float(), None, hostile_indices((5,), 9), padded(table), TOP_K),
            (x[:0], gate, bias, None, None, TOP_K),
        ],
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(5, 41)}, "x and gate have the same D"),
        ({"bias": torch.zeros(11)}, "one element for every expert"),
        ({"bias": torch.zeros(12).bfloat16()}, "bias"),
        ({"top_k": 13}, "top_k is at most the experts"),
        ({"top_k": 0}, "top_k is at least 1"),
        ({"token_ids": torch.zeros(5, dtype=torch.int32)}, "token_ids alone"),
        ({"token_ids": torch.zeros(5, dtype=torch.int32), "tid2eid": torch.zeros(9, 4).int()}, "takes no bias"),
        ({"token_ids": torch.zeros(4).int(), "tid2eid": torch.zeros(9, 4).int(), "bias": None}, "for every token"),
        ({"token_ids": torch.zeros(5).int(), "tid2eid": torch.zeros(9, 3).int(), "bias": None}, "top_k columns"),
        ({"token_ids": torch.zeros(5).int(), "tid2eid": torch.zeros(0, 4).int(), "bias": None}, "at least 1"),
    ],
)
def test_wrong_arguments_are_refused(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"x": torch.zeros(5, HIDDEN), "gate": torch.zeros(EXPERTS, HIDDEN)}
    arguments |= {"bias": torch.zeros(EXPERTS), "top_k": TOP_K}
    with pytest.raises(InputError, match=rf"(?s)\[E201\].*{message}"):
        torch.ops.dsv4.moe_route(**arguments | changes)
