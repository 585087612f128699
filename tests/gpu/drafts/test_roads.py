"""`generate` and RunningBatch with drafts on a GPU: the text without drafts, wherever its choice is no near tie."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dsv4_compile import hf
from dsv4_compile.hf.tiny import FLASH, layers_in_turn, quiet_libraries, random_model, tiny_config, tiny_drafts
from tests.support.draft_sources import Known

VOCAB, MAX_SEQ_LEN = 4096, 1024


def converted(kind: str, compiled: bool) -> Any:
    """Return a converted model of real layers with random draft layers of a kind."""
    quiet_libraries()
    sizes = FLASH | layers_in_turn(4) | {"n_routed_experts": 16, "vocab_size": VOCAB, "num_hash_layers": 1}
    model: Any = random_model(tiny_config(**sizes), torch.device("cuda"))
    hf.convert(model, max_batch_size=4, max_seq_len=MAX_SEQ_LEN, drafts=tiny_drafts(model, kind))
    if compiled:
        model.compile(fullgraph=True, backend="dsv4", options={"dsv4.cudagraph": "full"})
    return model


@pytest.fixture(scope="module", params=[("dspark", False), ("dspark", True), ("mtp", True)], ids=str)
def model(request: pytest.FixtureRequest) -> Any:
    return converted(*request.param)


@pytest.fixture(autouse=True)
def drafts_as_before(model: Any) -> Iterator[None]:
    before = model.dsv4_drafts
    yield
    model.__dict__["dsv4_drafts"] = before


def assert_same_text(model: Any, prompt: list[int], got: list[int], want: list[int]) -> None:
    """Assert that two texts are equal up to a near tie."""
    assert len(got) == len(want)
    if got == want:
        return
    first = next(i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b)
    gap, rounding = gap_and_rounding(model, prompt + want[:first])
    print(f"token {first} differs: the two best logits are {gap:.4f} apart, rounding moves logits by {rounding:.4f}")
    assert gap <= 2 * rounding


@torch.no_grad()
def gap_and_rounding(model: Any, tokens: list[int]) -> tuple[float, float]:
    """Return the difference of the two best next logits, and how far other sizes of steps move a logit."""
    ids = torch.tensor([tokens], device="cuda")
    wanted = model(ids, logits_to_keep=1).logits[0, -1].float()
    others = model(ids.repeat(3, 1), logits_to_keep=1).logits[:, -1].float()
    moved = [float((others - wanted).abs().max()), float(wanted.max()) / 256]  # one bfloat16 apart
    for last in range(1, min(7, len(tokens))):
        cache = model(ids[:, :-last]).past_key_values
        logits = model(ids[:, -last:], past_key_values=cache, logits_to_keep=1).logits[0, -1].float()
        moved.append(float((logits - wanted).abs().max()))
    best, second = wanted.topk(2).values.tolist()
    return best - second, max(moved)


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, VOCAB) for _ in range(length)]


def test_generate(model: Any) -> None:
    ids = torch.tensor([prompt(40, 1), prompt(40, 2)], device="cuda")
    want = model.generate(ids, max_new_tokens=64, do_sample=False, drafts=False)
    got = model.generate(ids, max_new_tokens=64, do_sample=False)
    assert model.draft_statistics is not None and model.draft_statistics.steps > 0
    for row in range(2):
        assert_same_text(model, ids[row].tolist(), got[row, 40:].tolist(), want[row, 40:].tolist())
    model.__dict__["dsv4_drafts"] = Known(got.tolist(), VOCAB, "cuda")
    got = model.generate(ids, max_new_tokens=64, do_sample=False)
    assert model.draft_statistics.tokens_per_step > 1.5
    for row in range(2):
        assert_same_text(model, ids[row].tolist(), got[row, 40:].tolist(), want[row, 40:].tolist())
    print(model.draft_statistics)


def test_generate_by_sampling(model: Any) -> None:
    ids = torch.tensor([prompt(10, 3)], device="cuda")
    got = model.generate(ids, max_new_tokens=32, do_sample=True, temperature=0.8, top_k=50, top_p=0.9)
    assert got.shape == (1, 42) and model.draft_statistics is not None and len(set(got[0].tolist())) > 5


@pytest.mark.parametrize("backend", [None, "dsv4"])
def test_running_batch(backend: str | None, model: Any) -> None:
    rng = random.Random(4)
    lengths = [1, 3, 20, 200, rng.randint(40, 60), 100, 7, 150]
    requests = [(prompt(n, i), {"max_new_tokens": rng.randint(9, 40)}) for i, n in enumerate(lengths)]
    for i in (2, 5):
        requests[i][1].update(temperature=0.9, top_k=30, seed=i)

    def texts(**options: Any) -> tuple[Any, list[Any]]:
        batch = hf.RunningBatch(model, slots=3, prefill_chunk=96, backend=backend, **options)
        submitted = [batch.submit(ids, **settings) for ids, settings in requests]
        batch.run()
        return batch, submitted

    plain, wanted = texts(drafts=False)
    submitted: list[Any] = []
    for _ in range(2):  # drafts of random layers, then of the text that these gave
        if submitted:
            known = [ids + request.tokens for (ids, _), request in zip(requests, submitted, strict=True)]
            model.__dict__["dsv4_drafts"] = Known(known, VOCAB, "cuda")
        batch, submitted = texts()
        print(batch.statistics, batch.draft_statistics)
        for request, want, (ids, settings) in zip(submitted, wanted, requests, strict=True):
            if "temperature" not in settings:
                assert_same_text(model, ids, request.tokens, want.tokens)
            assert len(request.tokens) == settings["max_new_tokens"]
        assert batch.statistics.uncaptured == 0
    assert batch.draft_statistics.tokens_per_step > 1.5 and plain.draft_statistics.steps == 0
