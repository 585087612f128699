"""Tokens that the host reads while the device runs on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class TokenReading:
    """Chosen tokens int64 `[R, ...]` on their way to the host, which waits for this copy alone."""

    def __init__(self, tokens: Tensor) -> None:
        self._host = torch.empty(tokens.shape, dtype=tokens.dtype, device="cpu", pin_memory=tokens.is_cuda)
        self._host.copy_(tokens, non_blocking=True)
        self._copied = torch.cuda.Event() if tokens.is_cuda else None
        if self._copied is not None:
            self._copied.record()

    def tokens(self) -> Any:
        """Return the tokens, after the work that chooses them."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host.tolist()
