"""Generation with drafts: after the prompts each step gives a request 1 to N + 1 tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import check, fail
from ...reference.drafts.distributions import NO_TOKEN
from ...runtime.drafting import SEEDS, Verified
from ...sizes import shown
from .cache import V41Caches
from .calls import default_device
from .compiled import CompiledSteps
from .draft_captured import CapturedDrafts, DraftSteps
from .draft_steps import DraftRows, follow, verify
from .model import V41Model
from .prefill import to_device
from .ranks import step_of_ranks
from .reading import TokenReading


def uses_drafts(model: V41Model, drafts: Any, caches: V41Caches | None, decode: Any) -> bool:
    """Return whether a call of `generate` has drafts: by default where model and caches have them.

    Raises E201 for other values, and E208 for drafts=True of a model or caches without.
    """
    check(drafts is None or type(drafts) is bool, "E201", got=f"drafts={shown(drafts)}", rule="True, False or None")
    missing, fix = "", ""
    if model.mtp is None:
        missing, fix = "a model without drafts", 'load a folder with drafts, drafts="on"'
    elif caches is not None and caches.drafts is None:
        missing, fix = "caches without drafts", "make caches by model.new_caches(...) without drafts=False"
    elif decode is not None:
        missing, fix = "decode=, which runs one token a step", "leave decode out"
    if drafts and missing:
        fail("E208", got=f"drafts=True with {missing}", fix=fix)
    return drafts is not False and not missing


def sizes_of(
    model: V41Model, prompts: Sequence[Tensor], new: int, chunk: int | None, with_drafts: bool
) -> dict[str, Any]:
    """Return the sizes of caches for prompts and `new` tokens, with room to draft up to the last one."""
    tokens = max(map(len, prompts)) + new
    sizes = {"max_batch_size": len(prompts), "max_seq_len": tokens, "max_step_tokens": chunk}
    if with_drafts and model.mtp is not None:
        width = model.mtp.config.step_tokens
        sizes |= {"max_seq_len": tokens + width, "max_step_tokens": None if chunk is None else max(chunk, width)}
    return sizes


def draft_steps_of(
    model: V41Model, caches: V41Caches, forward: Callable[..., Tensor] | None, requests: int
) -> DraftSteps | CapturedDrafts:
    """Return the steps with drafts of a call: captured, compiled, or those of the function that runs the model."""
    if isinstance(forward, CompiledSteps):
        return forward.drafts_for(requests)
    if forward is None:
        return DraftSteps(model, caches, verify)

    def called(model: V41Model, rows: DraftRows, caches: V41Caches) -> Verified:
        return follow(model, forward(*rows.tokens(), caches), rows, caches)

    return DraftSteps(model, caches, called)


class Texts:
    """Tokens of each request on the host, up to a stop token or `most` of them."""

    def __init__(self, requests: int, stops: Collection[int], most: int) -> None:
        self.tokens, self.live = [list[int]() for _ in range(requests)], [True] * requests
        self._stops, self._most = stops, most

    def take(self, new: Sequence[Sequence[int]]) -> list[int]:
        """Append the new tokens of each request; return the requests that ended. Raises E211 for a token of -1."""
        ended = []
        for i, tokens in enumerate(new):
            for token in tokens if self.live[i] else ():
                why = "a NaN in the weights, or a position beyond the caches"
                check(token != NO_TOKEN, "E211", got=f"logits of request {i} without a finite largest one", why=why)
                self.tokens[i].append(token)
                if token in self._stops or len(self.tokens[i]) == self._most:
                    self.live[i] = False
                    ended.append(i)
                    break
        return ended

    @property
    def may_end_next(self) -> bool:
        """Whether one more token ends all requests."""
        return all(not live or len(self.tokens[i]) + 1 >= self._most for i, live in enumerate(self.live))


def generate_with_drafts(
    steps: DraftSteps | CapturedDrafts, logits: Tensor, lengths: Sequence[int], settings: Sequence[Any], texts: Texts
) -> list[list[int]]:
    """Return the new tokens of each request.

    Args:
        logits: `[R, V]`, of the last tokens of prompts with `lengths` tokens.
        settings: how each request samples.
    """
    model, device = steps.model, logits.device
    numbers = to_device(torch.tensor([s.numbers() for s in settings], dtype=torch.float64, device="cpu"), device)
    seeds = to_device(torch.tensor([s.seed % SEEDS for s in settings], device="cpu"), device)
    ends = to_device(torch.tensor(lengths, device="cpu"), device)
    none = torch.empty((len(lengths), 0), dtype=torch.int64, device=device)
    first = torch.ops.dsv4.accept_drafts(logits, none, None, numbers, seeds, ends - 1)[1][:, 0]
    steps.load(first, ends, numbers, seeds)
    new, runs_ahead = [[token] for token in TokenReading(first).tokens()], isinstance(steps, CapturedDrafts)
    ahead: Tensor | None = None
    while True:
        for row in texts.take(new):
            steps.stop(row)
        if not any(texts.live):
            return texts.tokens
        with step_of_ranks(model), default_device():
            reading = TokenReading(steps.step() if ahead is None else ahead)
            # Before the host knows these tokens: a request that ends with them runs one step too many.
            ahead = steps.step() if runs_ahead and not texts.may_end_next else None
        new = [tokens[:count] for count, *tokens in reading.tokens()]
