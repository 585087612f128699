"""Generation: greedy and sampled, requests of different lengths, stops, and calls that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsv4_compile.errors import InputError
from dsv4_compile.models.v41 import V41Format, V41Model, generate, prefill
from tests.models.v41.worked import token_ids

PLAIN = V41Format.plain()


@pytest.fixture
def prompts() -> list[torch.Tensor]:
    ids = token_ids()
    return [ids[:19], ids[5:12], ids[:1]]


def run(model: V41Model, prompts: Any, **options: Any) -> list[list[int]]:
    return generate(model, prompts, **({"max_new_tokens": 5, "cache_format": PLAIN, "stop": []} | options))


def test_greedy_tokens_are_the_likeliest_ones_of_each_request(worked: V41Model, prompts: list[torch.Tensor]) -> None:
    together = run(worked, prompts, chunk=7)
    for prompt, tokens in zip(prompts, together, strict=True):
        assert run(worked, [prompt.tolist()], chunk=3) == [tokens]
        ids = torch.cat((prompt, torch.tensor(tokens[:-1])))
        caches = worked.new_caches(max_batch_size=1, max_seq_len=64, cache_format=PLAIN)
        with torch.no_grad():
            logits = worked(ids, torch.arange(len(ids)), torch.zeros(len(ids)).long(), caches)
        assert logits[len(prompt) - 1 :].argmax(1).tolist() == tokens


def test_samples_depend_on_the_seed_and_not_on_other_requests(worked: V41Model, prompts: list[torch.Tensor]) -> None:
    sampled = run(worked, prompts, temperature=1.0, seed=3)
    assert sampled == run(worked, prompts, temperature=1.0, seed=3)
    assert sampled[:1] == run(worked, prompts[:1], temperature=1.0, seed=3)
    assert sampled != run(worked, prompts, temperature=1.0, seed=4)
    assert run(worked, prompts, temperature=1.0, top_k=1) == run(worked, prompts)


def test_a_stop_token_ends_its_request_alone(worked: V41Model, prompts: list[torch.Tensor]) -> None:
    tokens = run(worked, prompts)
    stop = tokens[0][2]
    for got, want in zip(run(worked, prompts, stop=[stop]), tokens, strict=True):
        assert got == (want[: want.index(stop) + 1] if stop in want else want)


def test_no_prompts_give_no_tokens(worked: V41Model) -> None:
    assert generate(worked, [], max_new_tokens=3) == []


@pytest.mark.parametrize(
    ("prompts", "options", "code"),
    [
        ([[]], {}, "E201"),
        ([[64]], {}, "E201"),
        ([[-1]], {}, "E201"),
        ([[0.5]], {}, "E201"),
        ([[1, 2]], {"max_new_tokens": 0}, "E204"),
        ([[1, 2]], {"mode": "half"}, "E201"),
        ([[1, 2]], {"temperature": -1.0}, "E201"),
        ([[1, 2]], {"chunk": 0}, "E204"),
    ],
)
def test_calls_that_are_refused(worked: V41Model, prompts: Any, options: dict[str, Any], code: str) -> None:
    with pytest.raises(InputError) as caught:
        run(worked, prompts, **options)
    assert caught.value.code == code


def test_prompts_that_do_not_fit_the_caches_write_nothing(worked: V41Model) -> None:
    caches = worked.new_caches(max_batch_size=1, max_seq_len=10, cache_format=PLAIN)
    for prompts, options in (([[1] * 6], {"caches": caches}), ([[1], [2]], {"caches": caches})):
        with pytest.raises(InputError, match="E204"):
            run(worked, prompts, **options, cache_format=None)
    with pytest.raises(InputError, match="E204"):
        prefill(worked, [[1] * 6], caches, starts=[5])
    assert all(not tensor.any() for tensor in caches.tensors())


def test_image_tokens_are_refused(worked: V41Model, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    monkeypatch.setattr(worked, "config", replace(worked.config, image_token_id=7))
    with pytest.raises(InputError, match="vision tower is not built"):
        run(worked, [[1, 7]])
