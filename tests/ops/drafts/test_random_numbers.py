"""Counter-based random numbers: known answers, keys and counters of all sizes, and independence."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dsv4_compile.reference.drafts.random_numbers import ACCEPTANCE, PROPOSAL, RESIDUAL, philox, uniform
from tests.ops.drafts import drafting

ONES = 2**32 - 1
KNOWN = [
    ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES), (ONES, ONES, ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0xA4093822, 0x299F31D0),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
"""Key, counter and result, as published with Random123."""


def words(values: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.tensor(value) for value in values)


@pytest.mark.parametrize(("key", "counter", "answer"), KNOWN)
def test_known_answers(key: tuple[int, ...], counter: tuple[int, ...], answer: tuple[int, ...]) -> None:
    assert tuple(map(int, philox(words(key), words(counter)))) == answer  # type: ignore[arg-type]
    assert drafting.philox(key, counter) == answer  # type: ignore[arg-type]


def test_numbers_are_those_of_plain_integers_for_every_seed_and_position() -> None:
    seeds = torch.tensor([0, 1, ONES, ONES + 1, 2**40 + 5, 2**63 - 1])
    positions = torch.tensor([[0], [1], [2**20], [ONES], [2**40]])
    for stream in (PROPOSAL, ACCEPTANCE, RESIDUAL):
        got = uniform(seeds, positions, stream)
        assert got.dtype is torch.float64
        assert got.tolist() == [[drafting.uniform(s, p[0], stream) for s in seeds.tolist()] for p in positions.tolist()]


def test_streams_in_a_tensor_are_the_streams_by_number() -> None:
    seeds, positions = torch.arange(4)[:, None], torch.arange(5)
    together = uniform(seeds, positions, torch.arange(3)[:, None, None])
    for stream in (PROPOSAL, ACCEPTANCE, RESIDUAL):
        assert torch.equal(together[stream], uniform(seeds, positions, stream))


def test_numbers_are_uniform_and_independent_of_neighbouring_seeds_positions_and_streams() -> None:
    numbers = uniform(torch.arange(300)[:, None], torch.arange(300), torch.arange(3)[:, None, None])
    assert ((numbers >= 0) & (numbers < 1)).all()
    cells = (numbers * 16).long()
    pairs = [
        (cells[:, 1:], cells[:, :-1]),
        (cells[:, :, 1:], cells[:, :, :-1]),
        *((cells[a], cells[b]) for a, b in ((0, 1), (0, 2), (1, 2))),
    ]
    for a, b in pairs:
        counts = torch.bincount((16 * a + b).flatten(), minlength=256).double()
        mean = a.numel() / 256
        assert float(((counts - mean) ** 2 / mean).sum()) < 255 + 4 * math.sqrt(2 * 255)  # four standard deviations
