"""Tests of the choice of tokens: transformers' distribution, rows that do not depend on others, any logits."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nan
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from dsv4_compile.hf.serving.sampling import LEAST_TEMPERATURE, NO_TOKEN, RequestSampling, choose_tokens

ALMOST_ONE = 1 - 2**-53
"""Largest number that a request draws."""
SETTINGS = [
    (1.0, 0, 1.0),
    (0.7, 5, 1.0),
    (1.3, 0, 0.8),
    (1.5, 6, 0.7),
    (0.2, 40, 0.999),
    (30.0, 0, 0.35),
    (1e9, 3, 1.0),
]


def warped(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Return probabilities of transformers' warpers for logits `[V]`."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    probabilities: Tensor = warpers(torch.zeros(1, 1, dtype=torch.long), logits[None]).softmax(-1)[0]
    return probabilities


def chosen(logits: Tensor, *numbers: float) -> int:
    """Return the choice for logits `[V]`."""
    return int(choose_tokens(logits[None], torch.tensor([numbers], dtype=torch.float64)))


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), SETTINGS)
def test_probabilities_are_those_of_transformers(temperature: float, top_k: int, top_p: float) -> None:
    """Uniform numbers of even distance choose each token as often as its probability says."""
    count, logits = 20_000, 2 * torch.randn(1, 12)
    numbers = torch.tensor([[temperature, top_k, top_p, 0.0]], dtype=torch.float64).repeat(count, 1)
    numbers[:, 3] = (torch.arange(count) + 0.5) / count
    found = Counter(choose_tokens(logits.expand(count, -1), numbers).tolist())
    got = torch.tensor([found[i] / count for i in range(12)])
    torch.testing.assert_close(got, warped(logits[0], temperature, top_k, top_p), atol=2 / count, rtol=0)


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), SETTINGS)
def test_drawn_tokens_pass_a_chi_square_test_against_transformers(temperature: float, top_k: int, top_p: float) -> None:
    count, logits = 4000, 2 * torch.randn(12, generator=torch.Generator().manual_seed(1))
    sampling = RequestSampling(temperature, top_k, top_p, seed=5)
    numbers = torch.tensor([sampling.draw() for _ in range(count)], dtype=torch.float64)
    found = Counter(choose_tokens(logits.expand(count, -1), numbers).tolist())
    want = count * warped(logits, temperature, top_k, top_p).double()
    likely = [i for i in range(12) if want[i] >= 5]
    rare = [i for i in range(12) if want[i] < 5]
    groups = [([i], float(want[i])) for i in likely] + [(rare, float(want[rare].sum()))]
    statistic = sum((sum(found[i] for i in tokens) - mean) ** 2 / mean for tokens, mean in groups if mean > 0)
    assert statistic < len(groups) + 4 * math.sqrt(2 * len(groups))  # four standard deviations
    assert all(want[token] > 0 for token in found)


HOSTILE: dict[str, list[float]] = {
    "NaN": [0.0, nan, 1.0, 2.0],
    "all NaN": [nan] * 4,
    "all -inf": [-math.inf] * 4,
    "+inf": [0.0, math.inf, 1.0, 2.0],
    "two of +inf": [math.inf, 0.0, math.inf, 2.0],
    "NaN and both infinities": [nan, math.inf, -math.inf, 0.0],
}
NUMBERS = [
    (0.0, 0.0, 1.0, 0.0),
    (1.0, 0.0, 1.0, 0.5),
    (1e-45, 2.0, 0.5, ALMOST_ONE),
    (1e308, 0.0, 1.0, ALMOST_ONE),
    (nan, nan, nan, nan),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numbers", NUMBERS, ids=str)
def test_rows_without_a_finite_largest_logit_have_no_token_and_change_no_other(
    numbers: tuple[float, ...], dtype: torch.dtype
) -> None:
    good = torch.randn(4).to(dtype)
    rows = torch.stack([*(torch.tensor(row).to(dtype) for row in HOSTILE.values()), good])
    sent = torch.tensor([numbers] * len(HOSTILE) + [(0.7, 0.0, 0.9, 0.6)], dtype=torch.float64)
    tokens = choose_tokens(rows, sent).tolist()
    assert tokens[:-1] == [NO_TOKEN] * len(HOSTILE)
    assert tokens[-1] == chosen(good, 0.7, 0.0, 0.9, 0.6) >= 0


def test_whatever_the_numbers_are_a_token_is_in_range() -> None:
    strange = [0.0, -1.0, nan, math.inf, -math.inf, 1e-320, 1e300, 0.5]
    numbers = torch.cartesian_prod(*[torch.tensor(strange, dtype=torch.float64)] * 4)
    logits = torch.randn(7).expand(len(numbers), -1)
    tokens = choose_tokens(logits, numbers)
    assert 0 <= int(tokens.min()) <= int(tokens.max()) < 7


def test_banned_tokens_are_never_chosen() -> None:
    logits = torch.tensor([-math.inf, 1.0, -math.inf, 2.0])
    assert {chosen(logits, 5.0, 0.0, 1.0, u / 50) for u in range(50)} == {1, 3}
    assert chosen(logits, 5.0, 0.0, 1.0, ALMOST_ONE) == 1 and chosen(logits, 0.0, 0.0, 1.0, 0.0) == 3


def test_a_uniform_number_that_rounds_to_one() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]]).repeat(2, 1)
    numbers: Tensor = torch.tensor([[0.0, 0.0, 1.0, 0.9], [1.0, 3.0, 1.0, ALMOST_ONE]])
    assert choose_tokens(logits, numbers).tolist() == [1, 3]


def _sum_in_blocks(weights: Tensor, dim: int) -> Tensor:
    """Return a cumulative sum of columns that is added up in blocks of 16."""
    assert dim == 1
    blocks = torch.nn.functional.pad(weights, (0, -weights.shape[1] % 16)).unflatten(1, (-1, 16))
    inner = torch.cumsum(blocks, 2)
    before = torch.nn.functional.pad(torch.cumsum(inner[..., -1], 1)[:, :-1], (1, 0))
    return (inner + before[..., None]).flatten(1)[:, : weights.shape[1]]


def test_a_token_does_not_depend_on_the_order_of_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uniform numbers at the borders of tokens tell a sum in one order from a sum in another."""
    logits = 2 * torch.randn(1, 500)
    borders = logits[0].sort(descending=True).values.double().softmax(0).cumsum(0)[:-1]
    numbers = torch.tensor([[1.0, 0.0, top_p, 0.0] for top_p in (1.0, 0.9)], dtype=torch.float64)
    numbers = numbers.repeat_interleave(len(borders), 0)
    numbers[:, 3] = torch.cat((borders, borders))
    rows = logits.expand(len(numbers), -1)
    want = choose_tokens(rows, numbers)
    monkeypatch.setattr(Tensor, "cumsum", _sum_in_blocks)
    assert torch.equal(choose_tokens(rows, numbers), want)


def test_top_p_of_one_keeps_every_token_with_a_probability() -> None:
    """Sums in float32 reach one long before the last of these."""
    logits = torch.full((100_000,), -20.0)
    logits[0] = 0.0
    assert chosen(logits, 1.0, 0.0, 1.0, ALMOST_ONE) == 99_999
    assert chosen(torch.zeros(100_000), 1.0, 0.0, 1.0, ALMOST_ONE) == 99_999


def test_ends_of_top_p_and_top_k_keep_the_first_of_equal_tokens() -> None:
    ties, steps = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0]), [u / 64 for u in range(64)]
    assert {chosen(ties, 1.0, 0.0, 1e-300, u) for u in steps} == {0}
    assert {chosen(ties, 1e9, 0.0, 0.4, u) for u in steps} == {0, 1}
    assert {chosen(ties, 1.0, 3.0, 1.0, u) for u in steps} == {0, 1, 2}
    assert {chosen(torch.zeros(4), 1.0, 0.0, 0.5, u) for u in steps} == {0, 1}  # exactly half


def test_one_token_is_the_greedy_one_and_a_top_k_above_the_vocabulary_keeps_all() -> None:
    logits = torch.randn(64).bfloat16()
    logits[[5, 9]] = logits.max() + 1
    greedy = chosen(logits, 0.0, 0.0, 1.0, 0.0)
    assert greedy == 5
    for number in (0.0, 0.3, 0.7, ALMOST_ONE):
        assert chosen(logits, 1.0, 1.0, 1.0, number) == greedy
        assert chosen(logits, 3.0, 0.0, 1.0, number) == chosen(logits, 3.0, 65.0, 1.0, number)


@pytest.mark.parametrize("temperature", [1e-45, 1e-39, 1e-38, 1e-30, 1e-10])
def test_small_temperatures_choose_the_largest_logit(temperature: float) -> None:
    logits = torch.randn(64)
    sampling = RequestSampling(temperature, 0, 1.0, seed=3)
    assert sampling.greedy == (temperature < LEAST_TEMPERATURE)
    for _ in range(5):
        assert chosen(logits, *sampling.draw()) == int(logits.argmax())


def test_large_temperatures_choose_any_token() -> None:
    logits = 10 * torch.randn(4)
    assert {chosen(logits, 1.7e308, 0.0, 1.0, u / 8) for u in range(8)} == {0, 1, 2, 3}


BAD: list[tuple[str, Any]] = [
    *(("temperature", value) for value in (-1.0, -1e-45, nan, math.inf, -math.inf, 10**400, "0.5", b"1", None, True)),
    *(("temperature", value) for value in (1j, [1.0], torch.ones(1), torch.tensor(True), np.bool_(True), np.ones(1))),
    *(("top_k", value) for value in (-1, 2.0, 2.5, nan, "3", None, True, [3], torch.tensor(3.0), torch.ones(1).long())),
    *(("top_p", value) for value in (0, -0.1, 1.0000001, nan, math.inf, "1", None, True, torch.tensor(nan), 10**400)),
    *(("seed", value) for value in (-1, 1.0, nan, "1", None, True, b"1", [1], (1, 2), torch.tensor([1, 2]))),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda value: repr(value)[:20])
def test_settings_of_another_type_or_out_of_range_are_errors(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"E201[\s\S]*{name}"):
        RequestSampling(**{"temperature": 1.0, name: value})


def test_numbers_of_libraries_are_read_as_their_values() -> None:
    sampling = RequestSampling(np.float32(0.5), torch.tensor(7), Fraction(1, 2), np.int64(11))  # type: ignore[arg-type]
    assert sampling == RequestSampling(0.5, 7, 0.5, 11)
    assert [type(value) for value in (sampling.temperature, sampling.top_k, sampling.seed)] == [float, int, int]
    assert RequestSampling(1, 10**400, 1, 10**5000).draw()[1] > 10**9  # more than any vocabulary


def test_equal_seeds_draw_equal_numbers_and_others_do_not() -> None:
    drawn = [RequestSampling(1.0, seed=seed).draw()[3] for seed in (0, 1, 2, 2**64, 2**64 + 1, 10**400)]
    assert len(set(drawn)) == len(drawn) and drawn[2] == RequestSampling(1.0, seed=2).draw()[3]
