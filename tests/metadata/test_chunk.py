from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_compile.errors import InputError
from dsv4_compile.metadata import get_prefill_chunk_plan, prefill_workspace_rows


def test_chunk_grows_while_its_requests_fit_the_workspace() -> None:
    """At ratio 4 the requests need 100, 50 and 10 entries and 30, 40 and 20 raw tokens."""
    plan = get_prefill_chunk_plan([400, 200, 43], [30, 40, 20], 4, max_rows=300)
    assert plan == [(0, 2, 100, 140), (2, 3, 10, 30)]


def test_a_window_only_layer_gathers_no_entries() -> None:
    for ratio in (0, 1):
        assert get_prefill_chunk_plan([400, 200], [30, 40], ratio, max_rows=80) == [(0, 2, 0, 40)]


def test_no_prefills_give_no_chunks() -> None:
    assert get_prefill_chunk_plan([], [], 4, max_rows=0) == []


def test_padded_requests_need_no_rows() -> None:
    assert get_prefill_chunk_plan([0, 0], [0, 0], 4, max_rows=0) == [(0, 2, 0, 0)]


requests = st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 600)), max_size=12)


@given(requests=requests, ratio=st.sampled_from([1, 4, 128]))
def test_every_plan_fits_covers_all_requests_and_has_the_fewest_chunks(
    requests: list[tuple[int, int]], ratio: int
) -> None:
    seq_lens = [max(seq_len, query_len) for seq_len, query_len in requests]
    gather_lens = [
        query_len + min(seq - query_len, 127) for seq, (_, query_len) in zip(seq_lens, requests, strict=True)
    ]
    rows = prefill_workspace_rows(ratio, max_model_len=2000, window=128, max_num_batched_tokens=600)
    plan = get_prefill_chunk_plan(seq_lens, gather_lens, ratio, rows)

    assert [chunk.start for chunk in plan] == [0, *(chunk.end for chunk in plan)][: len(plan)]
    assert (plan[-1].end if plan else 0) == len(requests)
    for chunk in plan:
        members = range(chunk.start, chunk.end)
        assert chunk.n == (max(seq_lens[r] // ratio for r in members) if ratio > 1 else 0)
        assert chunk.m - chunk.n == max(gather_lens[r] for r in members)
        assert len(members) * chunk.m <= rows
    for before, after in pairwise(plan):
        first = after.start
        n = max(before.n, seq_lens[first] // ratio if ratio > 1 else 0)
        assert (before.end - before.start + 1) * (n + max(before.m - before.n, gather_lens[first])) > rows


@pytest.mark.parametrize(("ratio", "rows"), [(0, 4 * 628), (1, 4 * 628), (4, 4 * (501 + 628)), (128, 4 * (16 + 628))])
def test_the_reserved_workspace_holds_four_requests_of_any_length(ratio: int, rows: int) -> None:
    assert prefill_workspace_rows(ratio, max_model_len=2001, window=128, max_num_batched_tokens=500) == rows
    longest = get_prefill_chunk_plan([2001] * 5, [627] * 5, ratio, rows)
    assert [chunk.end - chunk.start for chunk in longest] == [4, 1]


def test_request_larger_than_the_workspace_raises() -> None:
    with pytest.raises(InputError, match="request 1 needs 140 rows of a prefill workspace of 139"):
        get_prefill_chunk_plan([4, 400], [4, 40], 4, max_rows=139)


def test_lists_of_different_lengths_raise() -> None:
    with pytest.raises(InputError, match="2 seq_lens, 1 gather_lens"):
        get_prefill_chunk_plan([4, 4], [4], 4, max_rows=100)
