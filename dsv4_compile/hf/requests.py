"""A request of a `RunningBatch`: its prompt, how it samples, and its tokens as they come."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from ..errors import check
from .sampling import RequestSampling

ENDED = ("stop", "length", "cancelled", "failed")
"""States of a request that gets no more tokens."""


class Request:
    """A request of a `RunningBatch`, which iterates over its tokens as they come.

    Attributes:
        prompt: its token ids.
        tokens: the new ones so far, a stop token included.
        state: "waiting", "prefill", "decode", or why it ended: "stop", "length", "cancelled", or "failed" (a step of
            the batch raised).
    """

    def __init__(
        self,
        prompt: list[int],
        max_new_tokens: int,
        stop_tokens: frozenset[int],
        sampling: RequestSampling,
        on_token: Callable[[int], object] | None,
        step: Callable[[], object],
        cancel: Callable[[Request], None],
    ) -> None:
        self.prompt, self.max_new_tokens, self.stop_tokens = prompt, max_new_tokens, stop_tokens
        self.sampling, self.on_token = sampling, on_token
        self.tokens: list[int] = []
        self.state = "waiting"
        self.cached = 0
        """Tokens of the request in the cache."""
        self._step, self._cancel = step, cancel

    @property
    def ended(self) -> bool:
        """Whether the request gets no more tokens."""
        return self.state in ENDED

    def cancel(self) -> None:
        """End the request now, and free its slot. Does nothing if it has ended."""
        self._cancel(self)

    def __iter__(self) -> Iterator[int]:
        """Yield all tokens from the first on, running steps of the batch until there are new ones."""
        at = 0
        while True:
            while at < len(self.tokens):
                yield self.tokens[at]
                at += 1
            if self.ended:
                return
            self._step()

    def __repr__(self) -> str:
        return f"Request({len(self.prompt)} tokens, {len(self.tokens)} of {self.max_new_tokens} new, {self.state})"


def token_ids(prompt: Sequence[int] | Tensor, vocab: int) -> list[int]:
    """Return the ids of a prompt. Raises E201 unless they are those of one sequence of tokens."""
    one = not isinstance(prompt, Tensor) or prompt.dim() == 1
    ids: list[Any] = prompt.tolist() if isinstance(prompt, Tensor) else list(prompt)
    wrong = [i for i in ids if isinstance(i, bool) or not hasattr(i, "__index__") or not 0 <= i < vocab] if one else ids
    check(
        one and bool(ids) and not wrong,
        "E201",
        got=f"a prompt with {str(wrong[0])[:40]}" if wrong else "an empty prompt",
        rule=f"a prompt is at least one token id, an integer from 0 to {vocab - 1}",
        fix="pass the ids of one sequence",
    )
    return [int(i) for i in ids]
