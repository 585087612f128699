"""Negative lengths of either cache, in the bounds-checking interpreter: they attend nothing, as length 0 does."""

from __future__ import annotations

import pytest
import torch

from dsv4_compile.testing import assert_bitwise
from tests.kernels.attention.test_sparse_mla_decode_triton import TILES, assert_same, launch
from tests.ops.attention.test_sparse_mla_decode import sample

interpreted = pytest.mark.interpreted
WINDOW_LENS, EXTRA_LENS = 3, 10


@interpreted
@pytest.mark.parametrize("splits", [1, 2])
def test_negative_lengths_of_two_caches_attend_nothing(splits: int) -> None:
    args = list(sample(4, window=40, extra=37))
    args[WINDOW_LENS] = torch.tensor([-1000, 40, -33, -(2**31)], dtype=torch.int32)
    args[EXTRA_LENS] = torch.tensor([37, -1000, -33, 5], dtype=torch.int32)
    assert_same(tuple(args), TILES[0], splits)
    got = launch(tuple(args), TILES[0], splits)
    args[WINDOW_LENS], args[EXTRA_LENS] = args[WINDOW_LENS].clamp_min(0), args[EXTRA_LENS].clamp_min(0)
    for ours, theirs in zip(got, launch(tuple(args), TILES[0], splits), strict=True):
        assert_bitwise(ours, theirs)
