"""`markov_drafts` against each request alone in NumPy. Weights are small integers, so that every sum is exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, inf, nan

from dsv4_compile.errors import InputError
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.ops.drafts.markov_drafts import markov_drafts
from dsv4_compile.testing import assert_bitwise, check_op, padded, strided
from dsv4_compile.testing.samples import op_samples
from tests.ops.drafts.drafting import markov_all


def integers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randint(-2, 3, shape).to(dtype)


def calls(requests: int, count: int, vocabulary: int = 13, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, ...]:
    base, anchors = integers(requests, count, vocabulary, dtype=dtype), torch.randint(0, vocabulary, (requests,))
    w1, w2 = (integers(vocabulary, 6, dtype=dtype) for _ in range(2))
    choice = torch.tensor([[0.0, 0.0, 1.0], [1.0, 2.0, 0.1], [3.0, 0.0, 1.0], [1e-39, 0.0, 1.0]])
    numbers = torch.nn.functional.pad(choice[torch.arange(requests) % len(choice)], (0, 1)).double()
    seeds, positions = torch.randint(0, 2**62, (requests,)), torch.randint(0, 2**20, (requests,))
    return base, anchors, w1, w2, numbers, seeds, positions


def check(args: tuple[Any, ...], spread: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
    """Compare op and reference with NumPy, and return the drafts."""
    wanted, logits = markov_all(*args)
    spread_args = [spread(x) if x.numel() else x for x in args]
    for run in (markov_drafts, REFERENCES["markov_drafts"]):
        drafts, draft_logits = run(*spread_args)
        assert_bitwise(drafts, wanted)
        assert_bitwise(draft_logits.nan_to_num(nan=7.0), logits.float().nan_to_num(nan=7.0))
    return wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("spread", [lambda x: x, padded, strided])
def test_each_request_drafts_what_it_drafts_alone(
    count: int, dtype: torch.dtype, spread: Callable[[Tensor], Tensor]
) -> None:
    for requests in (1, 40):
        check(calls(requests, count, dtype=dtype), spread)
    greedy = calls(3, count, dtype=dtype)
    check((*greedy[:4], greedy[4] * 0, *greedy[5:]), spread)


def test_no_requests() -> None:
    drafts, logits = markov_drafts(*(x[:0] if i not in (2, 3) else x for i, x in enumerate(calls(2, 3))))
    assert drafts.shape == (0, 3) and logits.shape == (0, 3, 13)


def test_unknown_tokens_and_logits_give_no_drafts_from_there_on() -> None:
    args = calls(12, 4, dtype=torch.float32)
    base, anchors = args[:2]
    anchors[0], anchors[5], anchors[6] = -1, 13, -(2**40)
    base[1, 0] = nan
    base[2, 2, 4] = nan
    base[3, 1] = -inf
    base[4, 3, 1] = inf
    base[7, :, ::2] = -inf
    drafts = check(args)
    assert [(row == -1).sum().item() for row in drafts[:7]] == [4, 4, 2, 3, 1, 4, 4]
    assert drafts[7:].min() >= 0
    padding = markov_drafts(*args)[1][0]
    assert_bitwise(padding, base[0])


def test_a_draft_depends_on_the_one_before_it_only_through_w1() -> None:
    args = list(calls(1, 2))
    args[4] = args[4] * 0
    for anchor in range(13):
        args[1] = torch.tensor([anchor])
        drafts, logits = markov_drafts(*args)
        first, second = (args[0][0, j].float() for j in range(2))
        w1, w2 = args[2].float(), args[3].float()
        assert_bitwise(logits[0, 0], first + w2 @ w1[anchor])
        assert_bitwise(logits[0, 1], second + w2 @ w1[drafts[0, 0]])
        assert drafts[0].tolist() == [int(row.argmax()) for row in logits[0]]


def test_a_request_does_not_depend_on_the_batch() -> None:
    args = calls(20, 3)
    drafts, logits = markov_drafts(*args)
    for chosen in (torch.tensor([6]), torch.randperm(20), torch.arange(3, 9)):
        part = markov_drafts(*(x if i in (2, 3) else x[chosen] for i, x in enumerate(args)))
        assert_bitwise(part[0], drafts[chosen])
        assert_bitwise(part[1], logits[chosen])


def test_promises() -> None:
    check_op(markov_drafts, op_samples("markov_drafts")[::2])  # torch's check takes no NaN for equal


def test_compiled_for_any_number_of_requests_it_does_the_same() -> None:
    def step(base: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        return torch.ops.dsv4.markov_drafts(base[:, 1:], *rest)

    compiled = torch.compile(step, backend="dsv4", fullgraph=True, dynamic=True)
    with torch.no_grad():
        for requests in (4, 7):
            args = calls(requests, 3)
            for got, want in zip(compiled(*args), step(*args), strict=True):
                assert_bitwise(got, want)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, torch.zeros(3, 0, 13), "drafts is at least 1"),
        (0, torch.zeros(3, 2, 12), "w1 has a row for each token"),
        (1, torch.zeros(3, dtype=torch.int32), "anchors"),
        (1, torch.zeros(2, dtype=torch.int64), "anchors has one element"),
        (2, torch.zeros(13, 6), "w2"),
        (3, torch.zeros(13, 5, dtype=torch.bfloat16), "the same rank"),
        (3, torch.zeros(12, 6, dtype=torch.bfloat16), "w2 has a row"),
        (4, torch.zeros(3, 4), "numbers"),
        (5, torch.zeros(4, dtype=torch.int64), "seeds has one element"),
        (6, torch.zeros(3, dtype=torch.int32), "positions"),
    ],
)
def test_wrong_arguments_are_refused(place: int, value: Any, message: str) -> None:
    args = list(calls(3, 2))
    args[place] = value
    with pytest.raises(InputError, match=message):
        markov_drafts(*args)
