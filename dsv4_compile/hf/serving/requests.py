"""A request of a `RunningBatch`: what its caller sees, and what the batch keeps of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from ...errors import check
from ...runtime import DraftStatistics
from ...runtime.addresses import AtFixedAddresses
from .sampling import RequestSampling

ENDED = ("stop", "length", "cancelled", "failed")
"""States of a request that gets no more tokens."""


@dataclass(eq=False, slots=True)
class Progress:
    """Record that a batch keeps of a request. Only the batch writes it; see `Request` for the meaning.

    Attributes:
        number: requests that were submitted to the batch before.
        cached: tokens of the request in the cache.
        drafts: whether its tokens are drafted.
        accepted: its steps by number of accepted drafts; empty in a batch without drafts.
    """

    number: int
    prompt: list[int]
    max_new_tokens: int
    stop_tokens: frozenset[int]
    sampling: RequestSampling
    on_token: Callable[[int], object] | None
    drafts: bool = False
    accepted: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    state: str = "waiting"
    cached: int = 0
    error: Exception | None = None
    request: Request = field(init=False, repr=False)

    @property
    def ended(self) -> bool:
        """Whether the request gets no more tokens."""
        return self.state in ENDED


class Batch(Protocol):
    """The `RunningBatch` of a request."""

    def cancel(self, request: Request) -> None:
        """End the request."""

    def step_for(self, request: Request) -> None:
        """Run a step, for the caller who iterates over the request."""


class Request(AtFixedAddresses):
    """A request of a `RunningBatch`, which iterates over its tokens as they come. `RunningBatch.submit` makes it.

    A caller cannot change it, except by `cancel`: lists are copies.
    """

    def __init__(self, batch: Batch, progress: Progress) -> None:
        made = isinstance(progress, Progress)
        check(made, "E201", got="a Request without a batch", rule="a batch makes its requests", fix="call batch.submit")
        self._batch, self._progress = batch, progress
        progress.request = self

    @property
    def prompt(self) -> list[int]:
        """Token ids of the prompt."""
        return list(self._progress.prompt)

    @property
    def tokens(self) -> list[int]:
        """New tokens so far, a stop token included."""
        return list(self._progress.tokens)

    @property
    def max_new_tokens(self) -> int:
        """Most tokens to generate."""
        return self._progress.max_new_tokens

    @property
    def stop_tokens(self) -> frozenset[int]:
        """Tokens that end the request."""
        return self._progress.stop_tokens

    @property
    def sampling(self) -> RequestSampling:
        """How the request samples."""
        return self._progress.sampling

    @property
    def state(self) -> str:
        """State of the request.

        "waiting", "prefill", "decode", or why it ended: "stop", "length", "cancelled", or "failed", see `error`.
        """
        return self._progress.state

    @property
    def error(self) -> Exception | None:
        """Cause of the end.

        E211 for logits of NaN or a step that raised, what the request's callback raised, or the E702 or E703 that ended
        a batch of several ranks.
        """
        return self._progress.error

    @property
    def ended(self) -> bool:
        """Whether the request gets no more tokens."""
        return self._progress.ended

    @property
    def draft_statistics(self) -> DraftStatistics:
        """Acceptance of its drafts so far; without steps in a batch without drafts."""
        return DraftStatistics(tuple(self._progress.accepted))

    def progress_in(self, batch: Batch) -> Progress | None:
        """Return the record that `batch` keeps of the request, None if it is a request of another batch."""
        return self._progress if self._batch is batch else None

    def cancel(self) -> None:
        """End the request now, and free its slot. Does nothing if it has ended. See `RunningBatch.cancel`."""
        self._batch.cancel(self)

    def __iter__(self) -> Iterator[int]:
        """Yield all tokens from the first on, running steps of the batch until there are new ones.

        Raises `error` after the last token of a request that has one. Callbacks of other requests that raise end those
        requests; their errors are logged here. A caller that stops iterating leaves the request in the batch.
        """
        at, progress = 0, self._progress
        while True:
            while at < len(progress.tokens):
                yield progress.tokens[at]
                at += 1
            if progress.ended:
                break
            self._batch.step_for(self)
        if progress.error is not None:
            raise progress.error.with_traceback(None)

    def __repr__(self) -> str:
        kept = self._progress
        return f"Request({len(kept.prompt)} tokens, {len(kept.tokens)} of {kept.max_new_tokens} new, {kept.state})"
