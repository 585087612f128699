"""Two-level selection against scores of Python floats: visibility, ties, candidates, and unused rows of NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.errors import InputError
from dsv4_compile.ops.common.define import OPS
from dsv4_compile.reference.common.rope import apply_rope
from dsv4_compile.reference.common.row_format import load_rows, round_to_grid
from dsv4_compile.reference.indexer.index_topk import BlocksArguments, IndexArguments
from dsv4_compile.testing import assert_bitwise, check_op
from dsv4_compile.testing.samples import op_samples

PAGE = 4


def call(visible: list[int], entries: int = 24, **changes: Any) -> IndexArguments:
    """Queries of two requests over plain keys; pages lie in reverse order."""
    tokens, pages = len(visible), entries // PAGE
    table = torch.stack((torch.arange(pages - 1, -1, -1), torch.arange(2 * pages - 1, pages - 1, -1))).int()
    values: dict[str, Any] = {
        "q": torch.randn(tokens, 4, 8),
        "weights": torch.randn(tokens, 4),
        "positions": torch.arange(tokens),
        "cos_sin_cache": torch.cat((torch.ones(32, 2), torch.zeros(32, 2)), 1),
        "keys": torch.randn(2 * pages, PAGE, 8),
        "block_table": table,
        "requests": torch.arange(tokens) % 2,
        "visible": torch.tensor(visible),
        "block_size": PAGE,
        "cache_format": "plain",
        "topk": 5,
    }
    return IndexArguments(**(values | changes))


def scores(a: IndexArguments, token: int) -> list[float]:
    """Scores of the entries that a token sees, in float64."""
    request = int(a.requests[token])
    entries = torch.arange(int(a.visible[token]))
    slots = a.block_table[request][entries // PAGE].long() * PAGE + entries % PAGE
    keys = load_rows(a.keys, a.cache_format, PAGE, slots, a.q.shape[2]).double()
    q = round_to_grid(apply_rope(a.q, a.positions, a.cos_sin_cache).to(a.q.dtype).float(), a.grid)[token].double()
    return ((q @ keys.t()).relu() * a.weights[token].double()[:, None]).sum(0).tolist()


def best(values: dict[int, float], count: int) -> list[int]:
    return sorted(sorted(values, key=lambda entry: (-values[entry], entry))[:count])


def taken(row: Tensor) -> list[int]:
    """Entries of a row; padding follows them."""
    entries = [int(x) for x in row if x >= 0]
    assert row.tolist() == entries + [-1] * (len(row) - len(entries))
    return entries


def test_the_largest_visible_scores_are_taken() -> None:
    a = call([0, 1, 4, 5, 6, 17, 24])
    for token, row in enumerate(torch.ops.dsv4.index_topk(*a)):
        assert taken(row) == best(dict(enumerate(scores(a, token))), 5)


def test_visible_counts_are_of_tokens() -> None:
    """Tokens of one request in one step see different numbers of entries, as six tokens of a step with drafts do."""
    a = call([3, 4, 4, 5, 5, 6], requests=torch.zeros(6, dtype=torch.int32), topk=6)
    assert [len(taken(row)) for row in torch.ops.dsv4.index_topk(*a)] == [3, 4, 4, 5, 5, 6]


def test_equal_scores_go_to_the_smaller_index() -> None:
    a = call([20, 20], keys=torch.zeros(12, PAGE, 8))
    assert torch.ops.dsv4.index_topk(*a).tolist() == [[0, 1, 2, 3, 4]] * 2


def test_later_layers_select_inside_the_candidates() -> None:
    candidates = torch.tensor([[0, 3, -1], [1, 2, 5], [-1, -1, -1]]).int()
    a = call([14, 24, 24], candidates=candidates, candidate_block=4)
    for token, row in enumerate(torch.ops.dsv4.index_topk(*a)):
        allowed = [e for block in candidates[token].tolist() if block >= 0 for e in range(4 * block, 4 * block + 4)]
        values = scores(a, token)
        assert taken(row) == best({e: values[e] for e in allowed if e < len(values)}, 5)


def test_without_candidate_blocks_nothing_is_selected() -> None:
    a = call([14, 24], candidates=torch.empty(2, 0, dtype=torch.int32))
    assert torch.ops.dsv4.index_topk(*a).tolist() == [[-1] * 5] * 2


def test_a_source_of_candidates_selects_among_all_entries() -> None:
    """Its picks are not restricted by its candidates, and candidates are of the token, not of a head."""
    a = call([23, 24, 9, 0], topk=8)
    picks, candidates = torch.ops.dsv4.index_topk_blocks(*BlocksArguments(*a[:12], None, 4, 2))
    assert_bitwise(picks, torch.ops.dsv4.index_topk(*a))
    for token, row in enumerate(candidates):
        values = scores(a, token)
        if not values:
            assert taken(row) == []
            continue
        newest = (len(values) - 1) // 4
        blocks = {block: max(values[4 * block : 4 * block + 4]) for block in range(newest + 1)}
        assert taken(row) == best(blocks | {newest: float("inf")}, 2)
    assert any(entry // 4 not in taken(candidates[0]) for entry in taken(picks[0]))


@pytest.mark.parametrize("visible", [1, 3, 4, 5, 8, 11, 12])
def test_borders_of_candidates(visible: int) -> None:
    """Up to as many blocks as there may be, all are candidates, and selecting inside them changes nothing."""
    a = call([visible], topk=4)
    picks, candidates = torch.ops.dsv4.index_topk_blocks(*BlocksArguments(*a[:12], None, 4, 3))
    assert taken(candidates[0]) == list(range((visible + 3) // 4))
    assert_bitwise(torch.ops.dsv4.index_topk(*a._replace(candidates=candidates, candidate_block=4)), picks)


def test_keys_that_nobody_sees_may_be_nan() -> None:
    a = call([6, 9])
    want = torch.ops.dsv4.index_topk_blocks(*BlocksArguments(*a[:12], None, 4, 3))
    seen = torch.zeros(12 * PAGE, dtype=torch.bool)
    for token, count in enumerate((6, 9)):
        entries = torch.arange(count)
        seen[a.block_table[token][entries // PAGE].long() * PAGE + entries % PAGE] = True
    a.keys.view(-1, 8)[~seen] = torch.nan
    for got, expected in zip(
        torch.ops.dsv4.index_topk_blocks(*BlocksArguments(*a[:12], None, 4, 3)), want, strict=True
    ):
        assert_bitwise(got, expected)


def test_padding_and_unknown_requests_see_nothing() -> None:
    a = call([5, 5, -3], requests=torch.tensor([-1, 2, 0]))
    assert (torch.ops.dsv4.index_topk(*a) == -1).all()


def test_queries_are_on_the_grid_of_the_keys() -> None:
    a = IndexArguments(*op_samples("index_topk")[0])
    on_grid = round_to_grid(apply_rope(a.q, a.positions, a.cos_sin_cache).to(a.q.dtype).float(), "mxfp4").bfloat16()
    still = a._replace(q=on_grid, positions=torch.zeros_like(a.positions), grid="")
    assert_bitwise(torch.ops.dsv4.index_topk(*a), torch.ops.dsv4.index_topk(*still))
    assert not torch.equal(torch.ops.dsv4.index_topk(*a._replace(grid="")), torch.ops.dsv4.index_topk(*a))


@pytest.mark.parametrize("op", ["index_topk", "index_topk_blocks"])
def test_op_keeps_its_promises(op: str) -> None:
    check_op(OPS[op], op_samples(op)[1:])


def test_wrong_arguments_raise() -> None:
    a = call([5])
    with pytest.raises(InputError, match="scores all entries"):
        torch.ops.dsv4.index_topk_blocks(*BlocksArguments(*a[:12], torch.zeros(1, 2).int(), 4, 3))
    with pytest.raises(InputError, match="same tokens"):
        torch.ops.dsv4.index_topk(*a._replace(visible=torch.tensor([5, 5])))
    with pytest.raises(InputError, match="topk"):
        torch.ops.dsv4.index_topk(*a._replace(topk=0))
