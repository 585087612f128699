from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_compile.errors import InputError
from dsv4_compile.metadata import BatchSplit, split_decodes_and_prefills


def split(query_lens: list[int], threshold: int = 1, **options: object) -> BatchSplit:
    starts = list(accumulate(query_lens, initial=0))
    return split_decodes_and_prefills(starts, decode_threshold=threshold, **options)


@pytest.mark.parametrize(
    ("query_lens", "threshold", "options", "expected"),
    [
        ([1, 1, 1, 300], 1, {}, (3, 1, 3, 300)),
        ([2, 2, 1], 2, {}, (3, 0, 5, 0)),
        ([2, 2, 1], 2, {"require_uniform": True}, (2, 1, 4, 1)),
        ([2, 2, 0, 0], 2, {"require_uniform": True, "num_tokens": 8}, (4, 0, 8, 0)),
        ([], 1, {}, (0, 0, 0, 0)),
        ([1, 1, 0], 1, {"num_tokens": 4}, (3, 0, 4, 0)),
        ([300, 20], 1, {"num_tokens": 384}, (0, 2, 0, 384)),
        ([1, 1, 5], 1, {"num_tokens": 8}, (2, 1, 2, 6)),
        ([1, 2, 3, 4], 3, {}, (3, 1, 6, 4)),
        ([1, 1, 1], 1, {"require_uniform": True}, (3, 0, 3, 0)),
        ([1, 1, 3], 1, {"require_uniform": True}, (2, 1, 2, 3)),
        ([3, 3, 2, 0], 3, {"require_uniform": True}, (2, 2, 6, 2)),
        ([4, 4], 3, {"require_uniform": True}, (0, 2, 0, 8)),
    ],
)
def test_prefills_begin_at_the_first_query_longer_than_the_threshold(
    query_lens: list[int], threshold: int, options: dict, expected: tuple[int, ...]
) -> None:
    assert split(query_lens, threshold, **options) == expected


@pytest.mark.parametrize(
    ("query_lens", "threshold", "uniform", "flags", "expected"),
    [
        ([1, 1, 1], 1, False, [False, False, True], (2, 1, 2, 1)),
        ([1, 1, 1], 1, False, [False, False, False], (3, 0, 3, 0)),
        ([2, 2, 1, 9], 2, False, [False, True, False, True], (1, 3, 2, 12)),
        ([2, 2, 2], 2, True, [False, False, True], (2, 1, 4, 2)),
        ([1, 1], 1, False, [True, True], (0, 2, 0, 2)),
    ],
)
def test_flagged_short_prefill_chunk_counts_as_prefill(
    query_lens: list[int], threshold: int, uniform: bool, flags: list[bool], expected: tuple[int, ...]
) -> None:
    options = {"treat_short_extends_as_decodes": False, "is_prefilling": flags, "require_uniform": uniform}
    assert split(query_lens, threshold, **options) == expected


def test_flags_are_ignored_while_short_extends_count_as_decodes() -> None:
    assert split([1, 1], is_prefilling=[True, True]) == (2, 0, 2, 0)


@given(query_lens=st.lists(st.integers(0, 6), max_size=8), threshold=st.integers(1, 4), uniform=st.booleans())
def test_parts_are_slices_and_no_decode_is_longer_than_the_threshold(
    query_lens: list[int], threshold: int, uniform: bool
) -> None:
    got = split(sorted(query_lens), threshold, require_uniform=uniform)
    decodes = sorted(query_lens)[: got.num_decodes]
    assert max(decodes, default=0) <= threshold
    assert got.num_decodes + got.num_prefills == len(query_lens)
    assert got.num_decode_tokens == sum(decodes)
    assert got.num_decode_tokens + got.num_prefill_tokens == sum(query_lens)


@pytest.mark.parametrize(
    ("starts", "options", "message"),
    [
        ([], {}, r"R \+ 1 elements"),
        ([0, 2, 1], {}, "does not decrease"),
        ([0, 1], {"treat_short_extends_as_decodes": False}, "one flag per request"),
        ([0, 1], {"treat_short_extends_as_decodes": False, "is_prefilling": []}, "one flag per request"),
    ],
)
def test_invalid_arguments_raise(starts: list[int], options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        split_decodes_and_prefills(starts, **options)
