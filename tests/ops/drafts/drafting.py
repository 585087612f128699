"""Not a test: speculative decoding of each request alone in NumPy, and its parts in plain Python."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

PROPOSAL, ACCEPTANCE, RESIDUAL = 0, 1, 2
WORD = 2**32 - 1


def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, ...]:
    """Philox 4x32-10 as in "Parallel random numbers: as easy as 1, 2, 3", with Python's integers."""
    (k0, k1), (a, b, c, d) = key, counter
    for number in range(10):
        x, y = 0xD2511F53 * a, 0xCD9E8D57 * c
        keys = (k0 + number * 0x9E3779B9) & WORD, (k1 + number * 0xBB67AE85) & WORD
        a, b, c, d = (y >> 32) ^ b ^ keys[0], y & WORD, (x >> 32) ^ d ^ keys[1], x & WORD
    return a, b, c, d


def uniform(seed: int, position: int, stream: int) -> float:
    words = philox((seed & WORD, seed >> 32), (position & WORD, position >> 32, stream, 0))
    return ((words[0] >> 5) << 26 | words[1] >> 6) / 2**53


def softmax(logits: np.ndarray, temperature: float) -> np.ndarray:
    weights = np.exp((logits - logits.max()) / temperature)
    return weights / weights.sum()


def target(logits: np.ndarray, temperature: float, top_k: float, top_p: float) -> np.ndarray:
    """Probabilities after top-k and top-p, token by token from the largest."""
    p = softmax(logits, temperature)
    order = sorted(range(len(p)), key=lambda token: (-logits[token], token))
    order = order[: int(top_k)] if top_k else order
    mass, reached, kept = math.fsum(p[order]), 0.0, []
    for token in order:
        if kept and top_p < 1 and reached >= top_p * mass:
            break
        kept.append(token)
        reached += p[token]
    result = np.zeros_like(p)
    result[kept] = p[kept]
    return result / result.sum()


def inverse(weights: np.ndarray, number: float) -> int:
    reached = np.cumsum(weights)
    return int(np.searchsorted(reached, number * reached[-1], side="right"))


def usable(row: np.ndarray) -> bool:
    return bool(np.isfinite(row.max()))


def accept(
    logits: np.ndarray, drafts: list[int], proposal: np.ndarray | None, numbers: list[float], seed: int, position: int
) -> list[int]:
    """New tokens of one request."""
    temperature, top_k, top_p = numbers[:3]
    greedy, tokens = temperature < 2.0**-126, []
    for j, row in enumerate(logits):
        if not usable(row):
            return [*tokens, -1]
        draft = drafts[j] if j < len(drafts) else -1
        known = 0 <= draft < len(row)
        if greedy:
            tokens.append(int(row.argmax()))
            if not known or draft != tokens[-1]:
                return tokens
            continue
        p, q = target(row, temperature, top_k, top_p), np.zeros(len(row))
        if known and proposal is None:
            q[draft] = 1
        elif known and proposal is not None and usable(proposal[j]):
            q = softmax(proposal[j], temperature)
        else:
            known = False
        if known and uniform(seed, position + j + 1, ACCEPTANCE) * q[draft] < p[draft]:
            tokens.append(draft)
            continue
        rest = np.maximum(p - q, 0)
        rest = rest if rest.sum() >= 1e-8 else p
        return [*tokens, inverse(rest, uniform(seed, position + j + 1, RESIDUAL))]
    return tokens


def accept_all(logits: Tensor, drafts: Tensor, draft_logits: Tensor | None, *of_request: Tensor) -> list[list[int]]:
    """New tokens of every request."""
    rows = logits.double().numpy().reshape(len(drafts), drafts.shape[1] + 1, logits.shape[1])
    proposals = [None] * len(drafts) if draft_logits is None else list(draft_logits.double().numpy())
    calls = zip(rows, drafts.tolist(), proposals, *(x.tolist() for x in of_request), strict=True)
    return [accept(*call) for call in calls]


def assert_accepted(result: tuple[Tensor, Tensor], wanted: list[list[int]], width: int) -> None:
    """Compare results of the op with lists of new tokens."""
    num_new, tokens = result
    assert tokens.tolist() == [row + [-1] * (width - len(row)) for row in wanted]
    assert num_new.tolist() == [len(row) for row in wanted]


def markov(
    base: np.ndarray, anchor: int, w1: np.ndarray, w2: np.ndarray, temperature: float, seed: int, position: int
) -> tuple[list[int], np.ndarray]:
    """Drafts of one request, and their logits."""
    drafts, rows, previous = [], [], anchor
    for j, row in enumerate(base):
        known = 0 <= previous < len(row)
        row = row + w2 @ w1[previous] if known else row
        rows.append(row)
        if not known or not usable(row):
            previous = -1
        elif temperature < 2.0**-126:
            previous = int(row.argmax())
        else:
            previous = inverse(softmax(row, temperature), uniform(seed, position + j + 1, PROPOSAL))
        drafts.append(previous)
    return drafts, np.stack(rows)


def markov_all(base: Tensor, anchors: Tensor, w1: Tensor, w2: Tensor, *of_request: Any) -> tuple[Tensor, Tensor]:
    """Drafts int64 `[R, N]` of every request, and their logits float64."""
    numbers, seeds, positions = (x.tolist() for x in of_request)
    calls = zip(base.double().numpy(), anchors.tolist(), numbers, seeds, positions, strict=True)
    weights = w1.double().numpy(), w2.double().numpy()
    done = [markov(rows, anchor, *weights, n[0], seed, at) for rows, anchor, n, seed, at in calls]
    drafts = torch.tensor([row for row, _ in done], dtype=torch.int64).view(base.shape[:2])
    return drafts, torch.tensor(np.array([rows for _, rows in done])).view(base.shape)
