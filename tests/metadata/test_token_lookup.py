from __future__ import annotations

import random

import torch

from dsv4_compile.reference.metadata.batch import token_positions, token_requests, visible_entries
from dsv4_compile.testing import hostile_indices
from dsv4_compile.testing.batch import Batch, random_batch


def test_tokens_outside_all_requests_have_request_minus_1() -> None:
    starts = torch.tensor([2, 3, 3, 6], dtype=torch.int32)
    assert token_requests(starts, torch.arange(8)).tolist() == [-1, -1, 0, 2, 2, 2, -1, -1]


def test_batch_without_requests_gives_every_token_request_minus_1() -> None:
    assert token_requests(torch.tensor([0], dtype=torch.int32), torch.arange(3)).tolist() == [-1, -1, -1]


def test_padding_has_position_minus_1() -> None:
    """A captured request of seq_len 0 may have query tokens; they are padding."""
    batch = Batch((2, 3), (7, 0), padding=1)
    tokens = torch.arange(batch.num_tokens)
    requests = token_requests(batch.query_start_loc(), tokens)
    positions = token_positions(batch.query_start_loc(), batch.seq_lens_tensor(), requests, tokens)
    assert positions.tolist() == [5, 6, -1, -1, -1, -1]


def test_position_is_minus_1_for_a_token_of_another_request(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        batch = random_batch(rng, max_seq_len=50)
        tokens = torch.arange(batch.num_tokens)
        claimed = hostile_indices((batch.num_tokens,), len(batch.seq_lens))
        positions = token_positions(batch.query_start_loc(), batch.seq_lens_tensor(), claimed, tokens)
        expected = [
            position if request == claim else -1
            for claim, (request, position) in zip(claimed.tolist(), batch.tokens(), strict=True)
        ]
        assert positions.tolist() == expected


def test_entry_is_visible_from_the_last_token_of_its_group_on() -> None:
    positions = torch.tensor([-9, -1, 0, 2, 3, 4, 7, 127])
    assert visible_entries(positions, 4).tolist() == [0, 0, 0, 0, 1, 1, 2, 32]
    assert visible_entries(positions, 128).tolist() == [0, 0, 0, 0, 0, 0, 0, 1]
