"""Steps of prompts as CUDA graphs, two for each padded number of tokens: all layers, and those before a prompt's tail.

Rows of padding have no position and no request. The tail of a step has as many rows as the step, so one graph serves
steps before, on and inside of a tail, and prompts that run all layers on all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from ...layout import PAD_INDEX
from ...runtime import Graphs
from .cache import V41Caches
from .captured import Captures
from .model import V41Model
from .prefill import LEAST_ROWS
from .step import Tail


class PromptTensors:
    """Inputs of a captured step of `size` tokens at fixed addresses.

    Attributes:
        ids, positions, requests: int64 `[size]`; padding has position and request -1.
        rows, first: int64 `[size]`, its tail, see `Tail`.
        last: int64 `[N]`, rows of the tail with logits.
    """

    def __init__(self, size: int, logits: int, device: torch.device) -> None:
        self.ids, self.positions, self.requests, self.rows, self.first = (
            torch.full((size,), value, dtype=torch.int64, device=device) for value in (0, *[PAD_INDEX] * 4)
        )
        self.last = torch.zeros(logits, dtype=torch.int64, device=device)

    def load(self, ids: Tensor, positions: Tensor, requests: Tensor) -> None:
        """Copy the tokens of a step in, and make the rows after them padding."""
        _copy(self.ids, ids, 0)
        _copy(self.positions, positions, PAD_INDEX)
        _copy(self.requests, requests, PAD_INDEX)

    def load_tail(self, tail: Tail, last: Tensor) -> None:
        """Copy the tail of a step and its rows with logits in."""
        _copy(self.rows, tail.rows, PAD_INDEX)
        _copy(self.first, tail.first, PAD_INDEX)
        _copy(self.last, last, 0)

    def clear(self) -> None:
        """Make all rows padding."""
        self.load(*(self.ids[:0],) * 3)

    def named(self) -> dict[str, Tensor]:
        """Return the tensors by name."""
        return dict(vars(self))


def _copy(target: Tensor, values: Tensor, padding: int) -> None:
    """Copy values in, and padding after them. Waits for nothing if they are on the device."""
    target[: len(values)].copy_(values, non_blocking=True)
    target[len(values) :].fill_(padding)


class PromptSteps(Captures):
    """Captures of steps of prompts that run all layers, or, with `encode`, of steps before a prompt's tail.

    Args:
        model, caches, graphs: see `Captures`.
        call: `V41Model.logits` or `V41Model.insert` of the model, or the compiled one.
        buckets: numbers of tokens to capture, at least 2.
    """

    _tensors: dict[int, PromptTensors]

    def __init__(
        self,
        model: V41Model,
        caches: V41Caches,
        call: Callable[..., Tensor | None],
        *,
        buckets: Collection[int],
        graphs: str | Graphs,
        encode: bool = False,
    ) -> None:
        most = caches.max_batch_size * caches.max_step_tokens
        super().__init__(model, caches, buckets, most, unit="prompt tokens", graphs=graphs)
        self._call, self._is_encode = call, encode
        self._has_tail = model.config.last_source < model.config.num_layers
        self._logits = max(LEAST_ROWS, caches.max_batch_size)
        with torch.inference_mode(False):  # later steps write them in any mode
            self._tensors = {size: PromptTensors(size, self._logits, model.device) for size in self.buckets}

    def _call_of(self, size: int) -> Callable[[], Tensor | None]:
        """Return a step of `size` tokens at the fixed addresses."""
        tensors = self._tensors[size]

        def call() -> Tensor | None:
            inputs = tensors.ids, tensors.positions, tensors.requests
            if self._is_encode:
                return self._call(*inputs, self.caches)
            tail = Tail(tensors.rows, tensors.first) if self._has_tail else None
            return self._call(*inputs, self.caches, tail=tail, last=tensors.last)

        captured: Callable[[], Tensor | None] = torch.no_grad()(call)
        return captured

    def fits(self, rows: int, logits: int = 0) -> bool:
        """Return whether a step of this many tokens, with logits of so many rows, has a graph."""
        return self.sealed and super().fits(rows) and logits <= self._logits

    def step(self, ids: Tensor, positions: Tensor, requests: Tensor, tail: Tail | None, last: Tensor) -> Tensor:
        """Run a step that `fits`; return logits `[N, V]` of the rows `last`, until the next replay."""
        tensors: PromptTensors = self._choose_bucket(len(ids), True)
        tensors.load(ids, positions, requests)
        if tail is None:
            rows = torch.arange(len(ids), device=ids.device)
            tail = Tail(rows, torch.zeros_like(rows))
        tensors.load_tail(tail, last)
        logits: Tensor = self._replay()
        return logits[: len(last)]

    def encode(self, ids: Tensor, positions: Tensor, requests: Tensor) -> None:
        """Run a step that `fits` before a prompt's tail."""
        self._choose_bucket(len(ids), True).load(ids, positions, requests)
        self._replay()
