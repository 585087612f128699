from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.errors import InputError
from dsv4_compile.ops.metadata.advance import advance
from dsv4_compile.testing import check_op, padded, strided
from dsv4_compile.testing.samples import op_samples

STALE = 777


def arguments(
    queries: list[int],
    lens: list[int],
    num_new: list[int],
    tokens: list[list[int]],
    drafts: list[list[int]] | None = None,
    reserved: list[int] | None = None,
    rows: int = 0,
) -> list[Any]:
    """Arguments for a next query as long as `drafts` say."""
    requests, query_len = len(lens), 1 if drafts is None else 1 + len(drafts[0])
    starts = [sum(queries[:r]) for r in range(requests + 1)]
    return [
        torch.tensor(num_new, dtype=torch.int32),
        torch.tensor(tokens, dtype=torch.int64).view(requests, len(tokens[0]) if tokens else 1),
        None if drafts is None else torch.tensor(drafts),
        torch.tensor(reserved or [10_000] * requests, dtype=torch.int32),
        query_len,
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(lens, dtype=torch.int32),
        torch.full((rows or requests * query_len,), STALE),
        torch.zeros(requests, dtype=torch.int32),
    ]


def run(*args: Any, **kwargs: Any) -> list[list[int]]:
    values = arguments(*args, **kwargs)
    advance(*values)
    return [x.tolist() for x in values[5:]]


def expected(args: list[Any]) -> list[list[int]]:
    """One request after the other, in Python."""
    num_new, tokens, drafts, reserved, query_len, starts, lens, ids, overflow = (
        x.tolist() if isinstance(x, Tensor) else x for x in args
    )
    fed = [0] * len(ids)
    for r, length in enumerate(lens):
        query = starts[r + 1] - starts[r]
        lens[r] = 0
        if query == 0 or length < query:
            continue
        new = min(max(num_new[r], 1), query)
        accepted = length - query + new
        if accepted + query_len > reserved[r]:
            overflow[r] = accepted
            continue
        lens[r] = accepted + query_len
        row = [tokens[r][min(new, len(tokens[r])) - 1], *([] if drafts is None else drafts[r])]
        fed[r * query_len : (r + 1) * query_len] = row
    return [[r * query_len for r in range(len(lens) + 1)], lens, fed, overflow]


def test_plain_decode_grows_each_request_by_one() -> None:
    starts, lens, ids, overflow = run([1, 1], [7, 300], [1, 1], [[11], [12]], rows=4)
    assert (starts, lens, ids, overflow) == ([0, 1, 2], [8, 301], [11, 12, 0, 0], [0, 0])


def test_a_rejected_draft_takes_the_length_back() -> None:
    """Of three tokens at 7, 8, 9 two are kept: 9 tokens, then the three at 9, 10, 11."""
    starts, lens, ids, _ = run([3], [10], [2], [[21, 22, 23]], [[31, 32]])
    assert (starts, lens, ids) == ([0, 3], [12], [22, 31, 32])


def test_a_prompt_goes_over_to_decoding() -> None:
    _, lens, ids, _ = run([5, 1], [5, 9], [5, 1], [[41], [42]], [[1], [2]])
    assert (lens, ids) == ([7, 11], [41, 1, 42, 2])


def test_the_first_token_is_always_kept_and_never_more_than_the_query() -> None:
    assert run([2], [9], [0], [[21, 22]], [[1]])[1:3] == [[10], [21, 1]]
    assert run([2], [9], [-5], [[21, 22]], [[1]])[1:3] == [[10], [21, 1]]
    assert run([2], [9], [99], [[21, 22]], [[1]])[1:3] == [[11], [22, 1]]


def test_a_request_without_room_stops_with_what_it_has() -> None:
    starts, lens, ids, overflow = run([2, 2, 2], [8, 8, 8], [2, 1, 2], [[1, 2]] * 3, [[9]] * 3, [10, 9, 9])
    assert starts == [0, 2, 4, 6]
    assert lens == [10, 9, 0]
    assert ids == [2, 9, 1, 9, 0, 0]
    assert overflow == [0, 0, 8]


def test_what_overflow_says_stays_until_the_host_clears_it() -> None:
    args = arguments([1, 1], [8, 4], [1, 1], [[5], [5]], reserved=[8, 9])
    for step in range(3):
        advance(*args)
        assert args[-1].tolist() == [8, 0], step
        assert args[6].tolist() == [0, 5 + step]


def test_padding_stays_padding() -> None:
    _, lens, ids, overflow = run([2, 0, 2], [0, 0, 1], [2, 1, 2], [[5, 6]] * 3, [[9]] * 3)
    assert (lens, ids, overflow) == ([0] * 3, [0] * 6, [0] * 3)


@pytest.mark.parametrize("query_len", [1, 2, 5])
def test_random_steps(query_len: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(40):
        requests, width = rng.randint(1, 6), rng.choice((1, query_len, query_len + 2))
        queries = [rng.choice((0, 1, query_len, 30)) for _ in range(requests)]
        drafts = [[rng.randint(1, 99) for _ in range(query_len - 1)] for _ in range(requests)]
        args = arguments(
            queries,
            [rng.choice((0, 1, q, q + rng.randint(0, 300))) for q in queries],
            [rng.randint(-2, q + 2) for q in queries],
            [[rng.randint(1, 99) for _ in range(width)] for _ in range(requests)],
            drafts if query_len > 1 else None,
            [rng.choice((10_000, rng.randint(0, 300))) for _ in range(requests)],
            requests * query_len + rng.choice((0, 3)),
        )
        wanted = expected(args)
        advance(*args)
        assert [x.tolist() for x in args[5:]] == wanted


@pytest.mark.parametrize("spread", [padded, strided])
def test_strides_change_nothing(spread: Callable[[Tensor], Tensor]) -> None:
    args = [spread(x) if isinstance(x, Tensor) else x for x in op_samples("advance")[0]]
    wanted = expected(args)
    advance(*args)
    assert [x.tolist() for x in args[5:]] == wanted


def test_no_requests() -> None:
    args = arguments([], [], [], [], rows=3)
    advance(*args)
    assert [x.tolist() for x in args[5:]] == [[0], [], [0, 0, 0], []]


def test_promises() -> None:
    check_op(advance, op_samples("advance")[1:])


def test_compiled_it_does_the_same() -> None:
    args = op_samples("advance")[0]
    wanted = expected(args)
    torch.compile(advance, backend="aot_eager", fullgraph=True)(*args)
    assert [x.tolist() for x in args[5:]] == wanted


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (2, None, "drafts come where query_len is above 1"),
        (2, torch.zeros(1, 2, dtype=torch.int64), "drafts has a column for each token"),
        (1, torch.zeros(1, 0, dtype=torch.int64), "tokens has a column"),
        (4, 0, "query_len is at least 1"),
        (6, torch.zeros(1, dtype=torch.int64), r"seq_lens \[R\] is int32"),
        (7, torch.zeros(1, dtype=torch.int64), "E204"),
        (8, torch.zeros(2, dtype=torch.int32), "overflow"),
    ],
)
def test_wrong_arguments_are_refused(place: int, value: Any, message: str) -> None:
    args = arguments([1], [4], [1], [[5]], [[6]])
    args[place] = value
    with pytest.raises(InputError, match=message):
        advance(*args)
