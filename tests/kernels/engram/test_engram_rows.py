"""Kernels of `engram_rows` in the checking interpreter, and compiled for every GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.kernels.engram import engram_rows as kernels
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.ops.common.kernels import refusal
from dsv4_compile.testing import assert_bitwise, hostile_values, padded, poisoned_empty, strided
from dsv4_compile.testing.samples import op_samples
from tests.kernels.gpus import begins_early, sees
from tests.support import fake_triton
from tests.support.bounds import checked
from tests.tools.compiled_facts import compiled_for

interpreted = pytest.mark.interpreted
LAYER_1 = torch.tensor([76632096046245, 4839876093313, 35959672319349, 73987337458391])


def check(args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """Compare rows and history with the reference's, and return them."""
    ids, positions, requests, history, *rest = args
    mine, theirs = history.clone(), history.clone()
    want = REFERENCES["engram_rows"](ids, positions, requests, theirs, *rest)
    if not history.is_contiguous():
        mine = history
    with poisoned_empty(), checked(mutated=("p_out", "p_history")):
        out = kernels.engram_rows(ids, positions, requests, mine, *rest)
    assert_bitwise(out, want, strides=True)
    assert_bitwise(mine.contiguous(), theirs.contiguous())
    return out, mine


def step(*runs: tuple[int, int, int], columns: int = 3, hashes: int = 8, orders: int = 4) -> tuple[Any, ...]:
    """Return a step of runs: request, first position and number of tokens; a quarter of the ids is -1."""
    requests = torch.tensor([request for request, _, count in runs for _ in range(count)]).long()
    positions = torch.tensor([first + i for _, first, count in runs for i in range(count)]).long()
    ids = torch.randint(-1, 99092, (len(requests),))
    ids[torch.rand(len(ids)) < 0.2] = -1
    primes = 16000057 + 2 * torch.randint(1000, ((orders - 1) * hashes,))
    history = torch.randint(-1, 99092, (5, columns), dtype=torch.int32)
    return ids, positions, requests, history, LAYER_1.repeat(2)[:orders], primes, 2


@interpreted
@pytest.mark.parametrize("number", range(3))
def test_samples(number: int) -> None:
    check(op_samples("engram_rows")[number])


@interpreted
@pytest.mark.parametrize(("columns", "hashes", "orders"), [(3, 8, 4), (8, 1, 2), (5, 3, 6), (1, 5, 2), (64, 16, 3)])
def test_runs_of_several_requests(columns: int, hashes: int, orders: int) -> None:
    """Prompts longer than a block and than the history, single tokens, starts, gaps in a request, and padding."""
    runs = [(2, 0, 40), (0, 17, 1), (4, 100, 6), (4, 110, 2), (-1, -1, 3), (1, 0, 2), (7, 5, 2), (3, 2, 1)]
    check(step(*runs, columns=columns, hashes=hashes, orders=orders))


@interpreted
def test_the_history_keeps_the_last_positions_whatever_the_order_of_rows() -> None:
    ids, positions, requests, *rest = step((2, 0, 20), (0, 17, 9), columns=4)
    check((ids.flip(0), positions.flip(0), requests.flip(0), *rest))


@interpreted
def test_chunks_of_a_prompt_are_the_prompt() -> None:
    ids, positions, requests, history, *rest = step((1, 0, 90))
    prompt, after = check((ids, positions, requests, history, *rest))
    rows, notes = [], history.clone()
    for chunk in (slice(0, 1), slice(1, 40), slice(40, 42), slice(42, 90)):
        out, notes = check((ids[chunk], positions[chunk], requests[chunk], notes, *rest))
        rows.append(out)
    assert_bitwise(torch.cat(rows), prompt)
    assert_bitwise(notes, after)


@interpreted
def test_known_rows_of_layer_1() -> None:
    """The four tokens of the specification, position 3, with primes from 16000057 on."""
    primes = torch.tensor(first_primes(24))
    ids = torch.tensor([100, 2000, 30000, 99091])
    args = ids, torch.arange(4), torch.zeros(4).long(), torch.zeros(1, 3).int(), LAYER_1, primes, 2
    out, history = check(args)
    assert out[3, [0, 7, 8, 16, 23]].tolist() == [1366601, 114229692, 140958730, 270552685, 378426074]
    assert out[0, [0, 7, 8, 16, 23]].tolist() == [4052413, 112422857, 138893193, 270913409, 378065828]
    assert history.tolist() == [[99091, 2000, 30000]]


def first_primes(count: int) -> list[int]:
    """Return the first primes from 16 million on."""
    primes, number = list[int](), 16_000_001
    while len(primes) < count:
        if all(number % divisor for divisor in range(3, 4001, 2)):
            primes.append(number)
        number += 2
    return primes


@interpreted
def test_prompts_of_several_passes_over_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SCANNED", 16)
    check(step((0, 3, 20), (3, 0, 37), (1, 8, 1), columns=5))


@interpreted
@pytest.mark.parametrize("request_number", hostile_values(5))
def test_requests_and_positions_out_of_range_are_padding(request_number: int) -> None:
    args = step((2, 4, 6), (0, 9, 3))
    args[2][2], args[1][7] = request_number, -5
    out, _ = check(args)
    assert_bitwise(out[2], out[7])


@interpreted
@pytest.mark.parametrize("spread", [padded, strided])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_any_strides_and_integers(spread: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    ids, positions, requests, history, multipliers, primes, pad = step((2, 4, 6), (0, 9, 3))
    tokens = (spread(x.to(dtype)) for x in (ids, positions, requests))
    check((*tokens, spread(history), spread(multipliers), spread(primes), pad))


@interpreted
def test_no_request_and_no_hash() -> None:
    ids, positions, requests, history, multipliers, primes, pad = step((2, 4, 6))
    out, _ = check((ids, positions, requests, history[:0], multipliers, primes, pad))
    assert (out == out[0]).all()
    check((ids, positions, requests, history, multipliers, primes[:0], pad))


def test_longer_n_grams_are_unsupported() -> None:
    why = refusal("engram_rows")
    assert why is not None and why(*step((0, 0, 1))) == ""
    assert "these are of 17 with 16 hashes" in why(
        *step((0, 0, 1))[:4], torch.ones(17).long(), torch.ones(16).long(), 2
    )
    assert "these are of 2 with 257 hashes" in why(
        *step((0, 0, 1))[:4], torch.ones(2).long(), torch.ones(257).long(), 2
    )


@pytest.mark.parametrize("target", fake_triton.TARGETS)
def test_kernels_compile_ahead_of_time(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    early = sees(monkeypatch, target)
    with compiled_for(target) as compiled:
        kernels.engram_rows(*step((0, 0, 40)))
    assert [kernel.assembled for kernel in compiled] == [True, True]
    assert all(begins_early(kernel) == early for kernel in compiled)
