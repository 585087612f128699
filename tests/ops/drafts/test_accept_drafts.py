"""`accept_drafts` against each request alone in NumPy: greedy, sampled, without drafts, hostile logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, inf, nan

from dsv4_compile.errors import InputError
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.ops.drafts.accept_drafts import accept_drafts
from dsv4_compile.testing import assert_bitwise, check_op, padded, strided
from dsv4_compile.testing.samples import op_samples
from tests.ops.drafts.drafting import accept_all, assert_accepted

ALL = 0.0, 1.0
"""Top-k and top-p that keep every token."""


def calls(requests: int, count: int, vocabulary: int = 12, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """Arguments of greedy and sampled requests, whose drafts are likely, and sometimes absent."""
    logits = (2 * torch.randn(requests * (count + 1), vocabulary)).to(dtype)
    rows = logits.view(requests, count + 1, vocabulary)[:, :-1]
    draft_logits = rows.float() + 0.7 * torch.randn(requests, count, vocabulary)
    chance = torch.rand(requests, count)
    drafts = torch.where(chance < 0.8, rows.argmax(-1), torch.randint(-1, vocabulary + 1, (requests, count)))
    choice = torch.tensor([[0.0, *ALL], [1.0, *ALL], [0.7, 5, 1.0], [1.4, 0, 0.8], [0.9, 6, 0.6], [1e-40, 3, 0.5]])
    numbers = torch.nn.functional.pad(choice[torch.arange(requests) % len(choice)], (0, 1)).double()
    seeds, positions = torch.randint(0, 2**62, (requests,)), torch.randint(0, 2**20, (requests,))
    return logits, drafts, draft_logits, numbers, seeds, positions


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_each_request_gets_what_it_gets_alone(count: int, dtype: torch.dtype) -> None:
    args = calls(120, count, dtype=dtype)
    for proposal in (args[2], None):
        call = *args[:2], proposal, *args[3:]
        wanted = accept_all(*call)
        lengths = {len(row) for row in wanted}
        assert lengths == set(range(1, count + 2)), "a number of accepted drafts that never occurs"
        for run in (accept_drafts, REFERENCES["accept_drafts"]):
            assert_accepted(run(*call), wanted, count + 1)


@pytest.mark.parametrize("number", range(len(op_samples("accept_drafts"))))
@pytest.mark.parametrize("spread", [lambda x: x, padded, strided])
def test_samples_of_any_strides_with_NaN_between(number: int, spread: Callable[[Tensor], Tensor]) -> None:
    args = op_samples("accept_drafts")[number]
    wanted = accept_all(*args)
    result = accept_drafts(*(spread(x) if isinstance(x, Tensor) and x.numel() else x for x in args))
    assert_accepted(result, wanted, args[1].shape[1] + 1)


def test_a_request_does_not_depend_on_the_batch() -> None:
    args, count = calls(30, 4), 4
    num_new, tokens = accept_drafts(*args)
    for chosen in (torch.tensor([7]), torch.randperm(30), torch.arange(3, 9)):
        rows = args[0].view(30, count + 1, -1)[chosen].flatten(0, 1)
        part = accept_drafts(rows, *(x[chosen] for x in args[1:]))
        assert torch.equal(part[0], num_new[chosen]) and torch.equal(part[1], tokens[chosen])


def run(
    logits: list[list[float]], drafts: list[int], *numbers: float, proposal: Any = None, seed: int = 0
) -> list[int]:
    """Return the new tokens of one request."""
    sent = torch.tensor([[*(numbers or (0.0, *ALL)), 0.0]], dtype=torch.float64)
    proposal = None if proposal is None else torch.tensor([proposal])
    at = torch.tensor([seed]), torch.tensor([5])
    num_new, tokens = accept_drafts(torch.tensor(logits), torch.tensor([drafts]).long(), proposal, sent, *at)
    assert tokens[0, int(num_new[0]) :].eq(-1).all()
    return tokens[0, : int(num_new[0])].tolist()


def test_the_worked_example_of_three_drafts() -> None:
    """Drafts 2, 7, 1 where the target says 2, 7, 4: two are accepted, and 4 follows."""
    rows = [[float(token == best) for token in range(8)] for best in (2, 7, 4, 3)]
    assert run(rows, [2, 7, 1]) == [2, 7, 4]
    assert run(rows, [2, 7, 4]) == [2, 7, 4, 3]
    assert run(rows, [0, 7, 4]) == [2]


def test_of_equal_logits_the_smallest_id_is_the_likeliest() -> None:
    rows = [[1.0, 3.0, 3.0, 3.0], [2.0, 2.0, 0.0, 2.0]]
    assert run(rows, [1]) == [1, 0]
    assert run(rows, [2]) == run(rows, [3]) == [1]
    assert {run(rows, [3], 1.0, 1.0, 1.0, seed=seed)[0] for seed in range(20)} == {1}
    assert {run(rows, [-1], 1.0, 2.0, 1.0, seed=seed)[0] for seed in range(40)} == {1, 2}
    assert {run([[0.0] * 4], [], 1.0, 0.0, 0.5, seed=seed)[0] for seed in range(40)} == {0, 1}


@pytest.mark.parametrize("numbers", [(0.0, *ALL), (1.0, *ALL), (0.5, 2.0, 0.9)])
@pytest.mark.parametrize("row", [[nan, 1.0, 2.0], [-inf] * 3, [0.0, inf, 0.0], [nan] * 3], ids=str)
def test_verification_ends_without_a_token_at_a_row_that_has_none(row: list[float], numbers: Any) -> None:
    good = [[9.0, -inf, -inf]]
    assert run([row, *good], [0], *numbers) == [-1]
    assert run([*good, row], [0], *numbers) == [0, -1]
    assert run([*good, row], [-1], *numbers) == [0]


@pytest.mark.parametrize("proposal", [[nan, 0.0, 0.0], [-inf] * 3, [inf, 0.0, 0.0]], ids=str)
def test_a_draft_of_unknown_probability_is_no_draft(proposal: list[float]) -> None:
    rows = [[5.0, 1.0, -inf], [0.0, 0.0, 0.0]]
    for seed in range(20):
        numbers = 1.0, *ALL
        assert run(rows, [0], *numbers, proposal=[proposal], seed=seed) == run(rows, [-1], *numbers, seed=seed)
    assert run(rows, [0], proposal=[proposal]) == [0, 0]


def test_an_absent_draft_leaves_the_distribution_as_it_is() -> None:
    rows, requests = torch.tensor([[0.0, 0.5, 1.0], [0.0, 0.0, 0.0]]), 2000
    numbers = torch.tensor([[1.0, *ALL, 0.0]], dtype=torch.float64).expand(requests, -1)
    at = torch.arange(requests)
    for absent in (-1, -7, 3, 2**40):
        drafts = torch.full((requests, 1), absent)
        num_new, tokens = accept_drafts(rows.repeat(requests, 1), drafts, None, numbers, at, at)
        assert num_new.eq(1).all() and tokens[:, 1].eq(-1).all()
        share = tokens[:, 0].bincount() / requests
        torch.testing.assert_close(share, rows[0].softmax(0), atol=0.04, rtol=0)


def test_a_residual_below_the_limit_is_rounding_and_the_token_is_drawn_from_the_target() -> None:
    """The draft has no mass in the target, and the proposal takes it from token 0 alone: 5e-9, or 5e-8."""
    row, seen = [0.0] * 7 + [-9.0], []
    for logit in (-17.1656, -14.8630):
        proposal = [-7 * float(torch.tensor(logit).exp()) / 7, *[0.0] * 6, logit]
        seen.append({run([row, row], [7], 1.0, 7.0, 1.0, proposal=[proposal], seed=seed)[0] for seed in range(60)})
    assert seen == [set(range(7)), {0}]


def test_mass_that_the_target_lacks_is_never_accepted_and_mass_that_the_proposal_lacks_always_is() -> None:
    first, second = [0.0, 0.0, -inf], [-inf, 0.0, 0.0]
    for seed in range(40):
        assert run([first, first], [2], 1.0, *ALL, proposal=[second], seed=seed) == [0]
        assert run([second, first], [2], 1.0, *ALL, proposal=[first], seed=seed)[0] == 2


STRANGE = [0.0, -1.0, nan, inf, -inf, 1e-320, 1e300, 0.5]


def test_whatever_the_numbers_are_a_token_is_in_range() -> None:
    numbers = torch.cartesian_prod(*[torch.tensor(STRANGE, dtype=torch.float64)] * 3)
    numbers = torch.nn.functional.pad(numbers, (0, 1))
    requests, at = len(numbers), torch.arange(len(numbers))
    logits, drafts = torch.randn(2 * requests, 7), torch.randint(0, 7, (requests, 1))
    num_new, tokens = accept_drafts(logits, drafts, torch.randn(requests, 1, 7), numbers, at, at)
    for row, count in zip(tokens.tolist(), num_new.tolist(), strict=True):
        assert all(0 <= token < 7 for token in row[:count])


def test_promises() -> None:
    check_op(accept_drafts, op_samples("accept_drafts")[1:3])


def test_compiled_for_any_number_of_requests_it_does_the_same() -> None:
    def step(logits: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        return torch.ops.dsv4.accept_drafts(logits[:, 1:], *rest)

    compiled = torch.compile(step, backend="dsv4", fullgraph=True, dynamic=True)
    with torch.no_grad():
        for requests in (4, 7):
            logits, drafts, _, *of_request = calls(requests, 2)
            args = logits, drafts, None, *of_request
            for got, want in zip(compiled(*args), step(*args), strict=True):
                assert_bitwise(got, want)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, torch.zeros(5, 12), r"logits has N \+ 1 rows"),
        (0, torch.zeros(9, 0), "columns of logits is at least 1"),
        (0, torch.zeros(9, 12, dtype=torch.float64), "logits"),
        (1, torch.zeros(3, 2, dtype=torch.int32), "drafts"),
        (2, torch.zeros(3, 2, 12, dtype=torch.bfloat16), "draft_logits"),
        (2, torch.zeros(3, 2, 11), "the same tokens"),
        (2, torch.zeros(3, 1, 12), "the same drafts"),
        (3, torch.zeros(3, 4), "numbers"),
        (3, torch.zeros(3, 3, dtype=torch.float64), "four columns"),
        (4, torch.zeros(3, dtype=torch.int32), "seeds"),
        (5, torch.zeros(2, dtype=torch.int64), "positions has one element for each request"),
    ],
)
def test_wrong_arguments_are_refused(place: int, value: Any, message: str) -> None:
    args = list(calls(3, 2))
    args[place] = value
    with pytest.raises(InputError, match=message):
        accept_drafts(*args)
