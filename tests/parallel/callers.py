"""Not a test: code that callers pass to `generate`, which fails or shows no attribute that differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer


class Add(LogitsProcessor):
    """Adds to a token's logit, by an attribute or by hidden state."""

    hidden = 0.0

    def __init__(self, value: float = 0.0) -> None:
        self.value = value

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[:, 9] += self.value + Add.hidden
        return scores


class Stop(StoppingCriteria):
    """Stops after a number of columns that no attribute shows."""

    after = 99

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= Stop.after)


class Fails(BaseStreamer):
    """A streamer that fails at the third token, or ends its process."""

    def __init__(self, how: Callable[[], object] | None = None) -> None:
        self.left, self.how = 3, how

    def put(self, value: Any) -> None:
        self.left -= 1
        if self.how is not None and not self.left:
            self.how()

    def end(self) -> None:
        pass


class NoTokenizer:
    """A tokenizer that fails, in a streamer of transformers."""

    left = 3

    def decode(self, *args: Any, **kwargs: Any) -> str:
        self.left -= 1
        if not self.left:
            raise OSError("stdout is closed")
        return ""
