"""`engram_rows` against published rows and a scalar hash, over chunks, images and padding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4_compile.errors import InputError
from dsv4_compile.ops.common.define import OPS
from dsv4_compile.testing import check_op
from dsv4_compile.testing.samples import op_samples

LAYER_1 = torch.tensor([76632096046245, 4839876093313, 35959672319349, 73987337458391])
PAD = 2
rows_of = torch.ops.dsv4.engram_rows


def primes_from(first: int, count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        if all(first % divisor for divisor in range(2, int(first**0.5) + 1)):
            found.append(first)
        first += 1
    return found


def scalar(ids: list[int], multipliers: list[int], primes: list[int]) -> list[list[int]]:
    """Rows of every position of one request, -1 for image tokens, in Python integers."""
    result = []
    for position in range(len(ids)):
        terms, reached = [], True
        for back in range(len(multipliers)):
            reached = reached and position >= back and ids[position - back] >= 0
            terms.append(ids[position - back] if reached else PAD)
        value, row, first = terms[0] * multipliers[0], [], 0
        per_order = len(primes) // (len(multipliers) - 1)
        for order in range(1, len(multipliers)):
            value ^= terms[order] * multipliers[order]
            for prime in primes[(order - 1) * per_order : order * per_order]:
                row.append(value % prime + first)
                first += prime
        result.append(row)
    return result


def run(ids: list[int], chunks: list[int], columns: int = 3, dtype: torch.dtype = torch.int64) -> Tensor:
    primes = torch.tensor([61, 67, 71, 73, 79, 83])
    history, result, start = torch.full((2, columns), 7, dtype=torch.int32), [], 0
    for size in chunks:
        part, positions = torch.tensor(ids[start : start + size], dtype=dtype), torch.arange(start, start + size)
        result.append(rows_of(part, positions, torch.ones(size, dtype=torch.int32), history, LAYER_1, primes, PAD))
        start += size
    return torch.cat(result)


def test_published_rows_of_the_first_layer() -> None:
    primes = torch.tensor(primes_from(16_000_000, 24))
    assert (int(primes[0]), int(primes[-1]), int(primes.sum())) == (16000057, 16000463, 384006168)
    ids, history = torch.tensor([100, 2000, 30000, 99091]), torch.zeros(1, 3, dtype=torch.int32)
    rows = rows_of(ids, torch.arange(4), torch.zeros(4).int(), history, LAYER_1, primes, PAD)
    columns = [0, 7, 8, 16, 23]
    assert rows[3, columns].tolist() == [1366601, 114229692, 140958730, 270552685, 378426074]
    assert rows[0, columns].tolist() == [4052413, 112422857, 138893193, 270913409, 378065828]


@pytest.mark.parametrize("chunks", [[12], [1] * 12, [2, 1, 5, 4], [11, 1]])
@pytest.mark.parametrize("columns", [3, 8])
def test_every_split_into_steps_gives_the_same_rows(chunks: list[int], columns: int) -> None:
    """The look-back reaches across steps, and stops at image tokens and at the start of the request."""
    ids = [5, 0, 23, 7, -1, 3, 3, 9, -1, -1, 4, 20]
    want = scalar(ids, LAYER_1.tolist(), [61, 67, 71, 73, 79, 83])
    assert run(ids, chunks, columns).tolist() == want
    assert run(ids, chunks, columns, torch.int32).tolist() == want


def test_stale_history_of_an_earlier_request_is_not_reached() -> None:
    ids = [5, 6, 7, 8]
    assert torch.equal(run(ids, [1, 1, 1, 1], 3)[0], run(ids, [4], 8)[0])


def test_rejected_drafts_leave_no_trace() -> None:
    ids, primes = [5, 6, 7, 8, 9, 10], torch.tensor([61, 67, 71])
    history, requests = torch.zeros(1, 8, dtype=torch.int32), torch.zeros(6, dtype=torch.int32)
    positions = torch.arange(6)
    rows_of(torch.tensor([5, 6, 1, 2, 3, 4]), positions, requests, history, LAYER_1, primes, PAD)
    rows = rows_of(torch.tensor(ids[2:]), positions[2:], requests[2:], history, LAYER_1, primes, PAD)
    assert rows.tolist() == scalar(ids, LAYER_1.tolist(), [61, 67, 71])[2:]


def test_padding_gives_rows_of_pads_and_writes_nothing() -> None:
    primes, history = torch.tensor([61, 67, 71]), torch.full((2, 4), 9, dtype=torch.int32)
    padding = torch.tensor([-1, -1]), torch.tensor([-1, 3]), torch.tensor([0, 7])
    rows = rows_of(*padding, history, LAYER_1, primes, PAD)
    assert rows.tolist() == [scalar([-1], LAYER_1.tolist(), [61, 67, 71])[0]] * 2
    assert (history == 9).all()


def test_op_keeps_its_promises() -> None:
    check_op(OPS["engram_rows"], op_samples("engram_rows")[1:])


def test_wrong_arguments_raise() -> None:
    args = list(op_samples("engram_rows")[0])
    with pytest.raises(InputError, match="at least 3 columns"):
        rows_of(*args[:3], args[3][:, :2], *args[4:])
    with pytest.raises(InputError, match="for each of 3 lengths"):
        rows_of(*args[:5], args[5][:5], args[6])
