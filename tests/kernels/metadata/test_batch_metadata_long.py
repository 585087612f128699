"""Requests longer than the rows of indices, in the bounds-checking interpreter."""

from __future__ import annotations

import pytest

from dsv4_compile import layout
from dsv4_compile.testing.batch import Batch
from tests.kernels.metadata.test_batch_metadata import arguments, compare

interpreted = pytest.mark.interpreted


@interpreted
def test_lengths_of_entries_end_at_the_width_of_their_rows() -> None:
    width = layout.c128a_width(700)
    length = (width + 3) * layout.HCA_RATIO
    ours = compare(arguments(Batch((1, 2, 1), (length, length, 300)), 5, groups=("entries_128",)))
    assert ours["lens"][0].tolist() == [width, width, width, 2, 0]
    assert ours["context_lens"][1].tolist() == [width + 3, width + 2, width + 3, 2, 0]
