"""Comparison of two runs of vLLM with greedy tokens that a near tie may divide: its counts and its errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vllm.jobs import NEAR_TIE, common_rows, final_errors, same_until_near_ties

PROMPTS = [[5, 6], [5, 6, 7, 8]]


def run(*generated: list[int], margin: float = 1.0) -> dict[str, Any]:
    """Return what a job writes of requests that generated these tokens."""
    sequences = [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS, generated, strict=True)]
    return {"tokens": list(generated), "sequences": sequences, "margins": [[margin] * 3] * 2}


def save(folder: Path, served: dict[str, Any]) -> None:
    """Write the outputs of each row that was fed; they follow from its tokens."""
    folder.mkdir()
    rows = {
        tuple(s[:n]): torch.tensor([1.0, *s[:n]]).sum()[None] for s in served["sequences"] for n in range(1, len(s))
    }
    torch.save(rows, folder / "final.pt")


@pytest.mark.parametrize(
    ("ours", "theirs", "rows"),
    [
        (([1, 2, 3], [1, 2, 3]), ([1, 2, 3], [1, 2, 3]), 8),  # 4 and 6 were fed, 2 of them the same
        (([1, 2, 3], [1, 2, 3]), ([1, 2, 9], [1, 2, 9]), 8),  # the last tokens were never fed
        (([1, 2, 3], [1, 2, 3]), ([1, 9, 3], [1, 2, 3]), 7),
        (([1, 2, 3], [1, 2, 3]), ([9, 2, 3], [8, 2, 3]), 4),  # rows of prompts remain
    ],
)
def test_rows_until_a_near_tie_are_compared_and_no_bar_counts_those_after_it(
    ours: tuple[list[int], list[int]], theirs: tuple[list[int], list[int]], rows: int, tmp_path: Path
) -> None:
    got, want = run(*ours), run(*theirs, margin=NEAR_TIE / 2)
    save(tmp_path / "ours", got)
    save(tmp_path / "theirs", want)
    same_until_near_ties(got, want)
    errors = final_errors(tmp_path, "ours", "theirs")
    assert errors.numel() == common_rows(got, want) == rows
    assert not errors.any()


def test_a_row_that_was_not_recorded_is_missed(tmp_path: Path) -> None:
    got, want = run([1, 2, 3], [1, 2, 3]), run([1, 2, 3], [1, 2, 3])
    save(tmp_path / "theirs", want)
    save(tmp_path / "ours", {"sequences": [s[:-1] for s in got["sequences"]]})
    assert final_errors(tmp_path, "ours", "theirs").numel() < common_rows(got, want)


def test_other_tokens_without_a_near_tie_are_refused() -> None:
    with pytest.raises(AssertionError, match="1"):
        same_until_near_ties(run([1, 2, 3], [1, 2, 3]), run([1, 9, 3], [1, 2, 3], margin=2 * NEAR_TIE))
