"""Not a test: prompts, and the tokens that a request of a RunningBatch gets alone."""

from __future__ import annotations

import math
import random
from typing import Any

from dsv4_compile import hf
from dsv4_compile.hf.tiny import tiny_model
from tests.hf.small import LAYERS

SAMPLED = {"temperature": 1.5, "top_k": 50, "top_p": 0.9}

BAD_TOKEN, HUGE_TOKEN = 510, 511
"""Tokens with embeddings of NaN and of infinity, which no good prompt has and no step chooses."""
GOOD = 510


def prompt(length: int, seed: int = 0, vocab: int = 512) -> list[int]:
    """Return random token ids below `vocab`."""
    rng = random.Random(1000 * length + seed)
    return [rng.randrange(vocab) for _ in range(length)]


def alone(model: Any, ids: list[int], **options: Any) -> list[int]:
    """Return the tokens of a request that runs alone."""
    batch = hf.RunningBatch(model, slots=1, prefill_chunk=48)
    return list(batch.submit(ids, **options))


def damaged(seed: int = 0, device: str = "cpu") -> Any:
    """Return a converted model with embeddings of NaN and of infinity."""
    model = tiny_model(seed, **LAYERS)
    model.model.embed_tokens.weight.data[BAD_TOKEN] = math.nan
    model.model.embed_tokens.weight.data[HUGE_TOKEN] = math.inf
    model.lm_head.weight.data[[BAD_TOKEN, HUGE_TOKEN]] = 0
    return hf.convert(model.to(device), max_batch_size=1, max_seq_len=256, attention_only=False)


def good(length: int, seed: int = 0) -> list[int]:
    """Return a prompt without damaged tokens."""
    return prompt(length, seed, GOOD)


def assert_as_alone(request: Any, **options: Any) -> None:
    """Assert that a request ran to its end and got the tokens that it gets alone with `options`."""
    model = request._batch.model
    assert request.state == "length" and request.error is None
    assert request.tokens == alone(model, request.prompt, max_new_tokens=request.max_new_tokens, **options)
