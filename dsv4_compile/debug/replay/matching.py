"""Matching of two sequences, in time that grows little faster than their lengths."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from itertools import pairwise

_ROUNDS = 8
"""Rounds of matching what lies between earlier matches: each takes n log n."""
Pair = tuple[int, int]


def matches(old: Sequence[Hashable], new: Sequence[Hashable]) -> list[Pair]:
    """Return pairs of places with equal elements, ascending in both sequences.

    Equal beginnings and ends are matched, then elements that occur as often in both, as in a patience diff, then what
    lies between those.
    """
    pairs: list[Pair] = []
    spans = [(0, len(old), 0, len(new), _ROUNDS)]
    while spans:
        i, i_end, j, j_end, rounds = spans.pop()
        while i < i_end and j < j_end and old[i] == new[j]:
            pairs.append((i, j))
            i, j = i + 1, j + 1
        while i < i_end and j < j_end and old[i_end - 1] == new[j_end - 1]:
            i_end, j_end = i_end - 1, j_end - 1
            pairs.append((i_end, j_end))
        anchors = _anchors(_places(old, i, i_end), _places(new, j, j_end)) if rounds else []
        pairs += anchors
        if anchors:
            limits = [(i - 1, j - 1), *anchors, (i_end, j_end)]
            spans += [(a + 1, c, b + 1, d, rounds - 1) for (a, b), (c, d) in pairwise(limits)]
    return sorted(pairs)


def _places(sequence: Sequence[Hashable], begin: int, end: int) -> dict[Hashable, list[int]]:
    """Return the places of each element within a span."""
    places: dict[Hashable, list[int]] = {}
    for position in range(begin, end):
        places.setdefault(sequence[position], []).append(position)
    return places


def _anchors(old: dict[Hashable, list[int]], new: dict[Hashable, list[int]]) -> list[Pair]:
    """Match the n-th occurrences of elements that occur as often in both, or of all if there is none such.

    Of pairs that cross, the longest ascending series is kept.
    """
    common = old.keys() & new.keys()
    alike = {element for element in common if len(old[element]) == len(new[element])} or common
    return _ascending(sorted(pair for key in alike for pair in zip(old[key], new[key], strict=False)))


def _ascending(pairs: Sequence[Pair]) -> list[Pair]:
    """Return the longest series of `pairs`, which ascend in their first places, that ascends in the second too."""
    ends: list[int] = []  # the lowest second place that a series of this length ends with
    last: list[int] = []
    before: list[int] = []
    for number, (_, second) in enumerate(pairs):
        length = bisect_left(ends, second)
        before.append(last[length - 1] if length else -1)
        ends[length : length + 1] = [second]
        last[length : length + 1] = [number]
    series, number = [], last[-1] if last else -1
    while number >= 0:
        series.append(pairs[number])
        number = before[number]
    return series[::-1]
