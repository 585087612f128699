"""Matching of nodes of two records: pairs ascend, edits are seen as edits, and no record takes long."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from itertools import pairwise

import pytest

from dsv4_compile.debug.replay.matching import matches

N = 10_000
SHUFFLED = random.Random(0).sample(range(N), N)
LONG: dict[str, tuple[Sequence[object], Sequence[object], int]] = {
    "all equal": ([0] * N, [0] * N, N),
    "equal but for the ends": ([1, *[0] * N, 2], [3, *[0] * (N - 3), 4], N - 3),
    "every second one": ([i % 2 * i for i in range(N)], [i % 2 * i or -1 for i in range(N)], N // 2),
    "reversed": (range(N), range(N)[::-1], 1),
    "shuffled": (range(N), SHUFFLED, 100),
    "nothing equal": (range(N), range(N, 2 * N), 0),
    "two kinds": ([0, 1] * (N // 2), [1, 0, 0] * (N // 3), N // 2),
}


@pytest.mark.parametrize("name", LONG)
def test_long_records_are_matched_in_a_moment(name: str) -> None:
    old, new, least = LONG[name]
    began = time.process_time()
    found = matches(old, new)
    assert time.process_time() - began < 2
    assert len(found) >= least and all(old[i] == new[j] for i, j in found)
    assert all(i < i_next and j < j_next for (i, j), (i_next, j_next) in pairwise(found))


def longest(old: Sequence[object], new: Sequence[object]) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(new) + 1)
    for element in old:
        before = row.copy()
        for j, other in enumerate(new):
            row[j + 1] = before[j] + 1 if element == other else max(before[j + 1], row[j])
    return row[-1]


def test_edits_of_repeated_layers_are_matched_almost_as_well_as_can_be() -> None:
    lost = total = 0
    for seed in range(50):
        rng = random.Random(seed)
        old = list("abcdaebf" * 8)
        new = list(old)
        for _ in range(rng.randrange(1, 8)):
            place = rng.randrange(len(new))
            new[place : place + rng.randrange(2)] = rng.choice(["", "a", "d", "z"])
        best = longest(old, new)
        lost += best - len(matches(old, new))
        total += best
    assert lost <= total / 100
