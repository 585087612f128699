"""Selection: which entries win. What a logit is worth is in test_indexer_logits.py."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.ops.indexer.indexer_logits import indexer_logits_topk, indexer_logits_topk_ragged
from dsv4_compile.reference.indexer import indexer_logits as reference
from dsv4_compile.testing import assert_bitwise, hostile_values, poison_

BLOCK = 4
INF, NAN = math.inf, math.nan


class Scored:
    """Requests with entries of chosen logits.

    Two heads see the one dim of a key k as k and -k, with weights 1 and -1: relu(k) - relu(-k) is k, to the bit.
    """

    def __init__(self, requests: list[list[float]], columns: int | None = None) -> None:
        self.logits = requests
        columns = max(layout.cdiv(len(r), BLOCK) for r in requests) if columns is None else columns
        pages = torch.randperm(len(requests) * columns + 2)[: len(requests) * columns]
        self.table = pages.int().view(len(requests), columns)
        self.cache = poison_(torch.empty(len(requests) * columns + 2, BLOCK + 1, 1))[:, :-1]
        for request, values in enumerate(requests):
            for entry, value in enumerate(values):
                self.cache[self.table[request, entry // BLOCK].long(), entry % BLOCK] = value

    def queries(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        signs = torch.tensor([1.0, -1.0])
        return signs.view(1, 2, 1).repeat(tokens, 1, 1), torch.empty(tokens, 2, 0), signs.repeat(tokens, 1)

    def select(self, requests: list[int], context_lens: list[int], topk: int) -> list[list[int]]:
        lens, request = torch.tensor(context_lens, dtype=torch.int32), torch.tensor(requests, dtype=torch.int32)
        args = (*self.queries(len(requests)), self.cache, self.table, request, lens)
        selected = indexer_logits_topk(*args, BLOCK, "plain", topk)
        assert (selected.dtype, selected.shape) == (torch.int32, (len(requests), topk))
        return selected.tolist()


def select_by_hand(logits: list[float], context_len: int, topk: int) -> list[int]:
    """Best first by a stable sort, NaN after every number; then in ascending order, then padding."""
    visible = range(max(0, min(context_len, len(logits))))
    best = sorted(visible, key=lambda j: (math.isnan(logits[j]), 0 if math.isnan(logits[j]) else -logits[j], j))
    chosen = sorted(best[:topk])
    return chosen + [-1] * (topk - len(chosen))


@pytest.mark.parametrize("topk", [1, 3, 8, 40])
@pytest.mark.parametrize("kinds", [2, 5, 1000])
def test_selection_is_exact_with_ties_to_the_smaller_index(topk: int, kinds: int) -> None:
    """With few kinds of values most comparisons are ties. More tokens than are scored at a time, of four requests."""
    requests = [(torch.randint(kinds, (n,)) - kinds // 2).float().tolist() for n in (36, 23, 9, 1)]
    scored = Scored(requests)
    tokens = [(r, n) for r, values in enumerate(requests) for n in range(len(values) + 1)]
    assert len(tokens) > reference.TOKENS_AT_A_TIME
    owner, lens = [r for r, _ in tokens], [n for _, n in tokens]
    assert scored.select(owner, lens, topk) == [select_by_hand(requests[r], n, topk) for r, n in tokens]


@pytest.mark.parametrize(
    ("logits", "expected"),
    [
        pytest.param([0.0] * 9, [0, 1, 2], id="all equal"),
        pytest.param([-0.0, 0.0, -0.0, 0.0, -1.0], [0, 1, 2], id="signs of zero"),
        pytest.param([1.0, 3.0, 2.0, 3.0, 3.0, 3.0], [1, 3, 4], id="tie at the last place"),
        pytest.param([-5.0, -1.0, -7.0, -3.0, -2.0], [1, 3, 4], id="negative"),
        pytest.param([-INF, 1.0, INF, -2.0, INF], [1, 2, 4], id="infinities"),
        pytest.param([NAN, 1.0, NAN, -2.0, -INF], [1, 3, 4], id="NaN loses to minus infinity"),
        pytest.param([NAN, NAN, 1.0, NAN, 2.0], [0, 2, 4], id="NaN fills up by index"),
        pytest.param([NAN] * 6, [0, 1, 2], id="NaN alone"),
        pytest.param([1.0, 1.0 + 2**-23, 1.0 - 2**-24, 1.0, 0.0], [0, 1, 3], id="neighbouring floats"),
        pytest.param([1e-45, -1e-45, 0.0, 2e-45], [0, 2, 3], id="subnormal"),
    ],
)
def test_order_of_special_values(logits: list[float], expected: list[int]) -> None:
    assert select_by_hand(logits, len(logits), 3) == expected
    visible = torch.ones(1, len(logits), dtype=torch.bool)
    assert reference.select_topk(torch.tensor([logits]), visible, 3).tolist() == [expected]
    if not any(0 < abs(x) < 1e-38 for x in logits):
        assert Scored([logits]).select([0], [len(logits)], 3) == [expected]


def test_contexts_that_fit_are_taken_whole_whatever_the_logits() -> None:
    scored = Scored([[NAN, -INF, 2.0, NAN, -3.0, INF, 0.0]])
    assert scored.select([0] * 4, [7, 5, 1, 8], 8) == [
        [0, 1, 2, 3, 4, 5, 6, -1],
        [0, 1, 2, 3, 4, -1, -1, -1],
        [0, -1, -1, -1, -1, -1, -1, -1],
        [0, 1, 2, 3, 4, 5, 6, 7],  # entry 7 was never written: it is NaN, and inside the table
    ]


def test_padding_tokens_select_nothing() -> None:
    """Request 0 with nothing to see, as graph padding has it; lengths below zero; requests out of range."""
    scored = Scored([[5.0, 6.0, 7.0]])
    requests = [0, 0, 0, *hostile_values(1)]
    lens = [0, -1, -(2**31), *([3] * len(hostile_values(1)))]
    assert scored.select(requests, lens, 2) == [[-1, -1]] * len(requests)


def test_contexts_end_with_the_block_table() -> None:
    scored = Scored([[1.0, 2.0, 3.0, 9.0, 5.0, 4.0, 8.0, 0.0]])
    for length in (8, 9, 2**31 - 1):
        assert scored.select([0], [length], 3) == [[3, 4, 6]]


@pytest.mark.parametrize("block", hostile_values(5))
def test_entries_in_illegal_blocks_are_never_selected(block: int) -> None:
    """Not even to fill the row."""
    scored = Scored([[1.0, 2.0, 3.0, 4.0, 9.0, 9.0, 9.0, 9.0, -1.0, -2.0, -3.0, -4.0]])
    assert len(scored.cache) == 5
    scored.table[0, 1] = block
    assert scored.select([0, 0, 0], [12, 12, 7], 3) == [[1, 2, 3], [1, 2, 3], [1, 2, 3]]
    assert scored.select([0], [12], 10) == [[0, 1, 2, 3, 8, 9, 10, 11, -1, -1]]


def test_stale_entries_beyond_the_context_are_not_selected() -> None:
    """A rejected draft left a large entry behind; it is hidden until its position runs again."""
    scored = Scored([[1.0, 2.0, 3.0, 100.0]])
    assert scored.select([0, 0], [3, 4], 2) == [[1, 2], [2, 3]]


@pytest.mark.parametrize("columns", [0, 1])
def test_nothing_reachable_gives_padding(columns: int) -> None:
    scored = Scored([[]], columns=columns)
    assert scored.select([0, 0], [columns - 1, 0], 3) == [[-1] * 3] * 2
    scored.cache = scored.cache[:0]
    assert scored.select([0], [4], 3) == [[-1] * 3]
    assert scored.select([], [], 3) == []


def test_tiling_does_not_change_the_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [torch.randint(6, (n,)).float().tolist() for n in (61, 40)]
    scored = Scored(requests)
    owner, lens = [0, 1, 0, 1, 1], [61, 40, 17, 33, 3]
    untiled = scored.select(owner, lens, 7)
    monkeypatch.setattr(reference, "TOKENS_AT_A_TIME", 2)
    monkeypatch.setattr(reference, "ENTRIES_AT_A_TIME", 5)
    assert scored.select(owner, lens, 7) == untiled
    assert untiled == [select_by_hand(requests[r], n, 7) for r, n in zip(owner, lens, strict=True)]


def ragged(logits: list[float], starts: list[int], ends: list[int], topk: int, *limit: int) -> list[list[int]]:
    """Rows of logits laid out one after the other, windows of them per token."""
    queries = Scored([[0.0]]).queries(len(starts))
    k, k_scale = torch.tensor(logits).view(-1, 1), torch.empty(len(logits), 0, dtype=torch.uint8)
    bounds = torch.tensor(starts, dtype=torch.int32), torch.tensor(ends, dtype=torch.int32)
    return indexer_logits_topk_ragged(*queries, k, k_scale, *bounds, "plain", topk, *limit).tolist()


@pytest.mark.parametrize("topk", [1, 4, 30])
def test_ragged_selection_is_relative_to_the_start_of_its_row(topk: int) -> None:
    logits = torch.randint(4, (50,)).float().tolist()
    windows = [(start, end) for start in (0, 13, 31) for end in range(start, 50, 2)]
    starts, ends = [w[0] for w in windows], [w[1] for w in windows]
    assert ragged(logits, starts, ends, topk) == [select_by_hand(logits[s:e], e - s, topk) for s, e in windows]


def test_ragged_windows_are_cut_to_the_keys_there_are() -> None:
    logits = [4.0, NAN, 6.0, 5.0]
    assert ragged(logits, [0, 2, 1, 4, 9, 3, 0], [9, 2**31 - 1, 3, 4, 12, 1, 0], 2) == [
        [2, 3],
        [0, 1],
        [0, 1],
        [-1, -1],
        [-1, -1],
        [-1, -1],
        [-1, -1],
    ]
    assert ragged(logits, [-1, -(2**31)], [4, 4], 2) == [[-1, -1]] * 2
    assert ragged([], [0, 0], [0, 5], 2) == [[-1, -1]] * 2
    assert ragged([1.0], [], [], 2) == []


def test_ragged_tiling_does_not_change_the_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randint(6, (50,)).float().tolist()
    starts, ends = [0, 7, 20, 20, 49], [50, 30, 41, 22, 50]
    untiled = ragged(logits, starts, ends, 6)
    monkeypatch.setattr(reference, "TOKENS_AT_A_TIME", 2)
    monkeypatch.setattr(reference, "ENTRIES_AT_A_TIME", 7)
    assert ragged(logits, starts, ends, 6) == untiled
    assert untiled == [select_by_hand(logits[s:e], e - s, 6) for s, e in zip(starts, ends, strict=True)]


def test_the_bound_on_logits_changes_no_selection_and_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randint(6, (50,)).float().tolist()
    starts, ends = [0, 7, 20, 20, 49], [50, 30, 41, 22, 50]
    untiled, scored = ragged(logits, starts, ends, 6), []
    select = reference.select_topk
    monkeypatch.setattr(
        reference, "select_topk", lambda values, *rest: (scored.append(values), select(values, *rest))[1]
    )
    for limit, at_a_time in ((0, 1), (4 * 50 * 3 - 1, 2), (4 * 50 * 3, 3)):
        scored.clear()
        assert ragged(logits, starts, ends, 6, limit) == untiled
        assert max(len(values) for values in scored) == at_a_time


def test_results_are_written_completely() -> None:
    """Rows are filled in place of fresh memory: none may keep what was there."""
    scored = Scored([[1.0, 2.0]])
    args = (*scored.queries(3), scored.cache, scored.table, torch.zeros(3, dtype=torch.int32))
    lens = torch.tensor([2, 0, 1], dtype=torch.int32)
    first = indexer_logits_topk(*args, lens, BLOCK, "plain", 6)
    expected = torch.tensor([[0, 1, -1, -1, -1, -1], [-1] * 6, [0, -1, -1, -1, -1, -1]], dtype=torch.int32)
    assert_bitwise(first, expected, strides=True)
