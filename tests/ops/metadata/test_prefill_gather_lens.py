"""`prefill_gather_lens`: cached tokens that each prefill gathers."""

from __future__ import annotations

import random

import pytest
import torch

from dsv4_compile.ops.metadata.prefill_gather_lens import prefill_gather_lens
from dsv4_compile.ops.metadata.swa_metadata import swa_metadata
from dsv4_compile.testing import check_op, strided
from dsv4_compile.testing.batch import Batch, random_batch
from tests.ops.metadata.test_swa_metadata import samples


@pytest.mark.parametrize(("query_len", "seq_len", "expected"), [(300, 300, 300), (10, 1000, 137), (5, 8, 8), (0, 0, 0)])
def test_a_prefill_gathers_its_query_and_the_window_before_it(query_len: int, seq_len: int, expected: int) -> None:
    batch = Batch((1, query_len), (50, seq_len))
    lens = prefill_gather_lens(batch.query_start_loc(), batch.seq_lens_tensor(), 1, 128)
    assert lens.dtype is torch.int32
    assert lens.tolist() == [expected]


def test_gathered_tokens_cover_every_window_and_nothing_that_does_not_exist(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        batch = random_batch(rng, max_seq_len=300)
        lens = prefill_gather_lens(batch.query_start_loc(), batch.seq_lens_tensor(), 0, 128).tolist()
        for request, (gathered, seq_len) in enumerate(zip(lens, batch.seq_lens, strict=True)):
            needed = {
                position
                for owner, last in batch.tokens()
                if owner == request
                for position in range(max(last - 127, 0), last + 1)
            }
            assert set(range(seq_len - gathered, seq_len)) == needed


def test_op_contracts() -> None:
    check_op(swa_metadata, samples())
    one = Batch((3,), (200,))
    two = Batch((1, 3, 0), (7, 200, 0))
    check_op(
        prefill_gather_lens,
        [
            (two.query_start_loc(), two.seq_lens_tensor(), 1, 128),
            (strided(two.query_start_loc()), strided(two.seq_lens_tensor()), 0, 128),
            (two.query_start_loc(), two.seq_lens_tensor(), 3, 128),
            (one.query_start_loc(), one.seq_lens_tensor(), 0, 8),
            (torch.zeros(1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32), 0, 8),
        ],
    )
