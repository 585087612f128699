"""Memory of one thread between a file and the device: pinned, and in two halves, one read while the other is copied."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

CHUNK = 8 << 20
"""Bytes of a half, and of the largest read: a copy of so many takes longer than its launch by far."""
_ALIGNMENT = 64
"""Bytes that every dtype and vector copy is aligned to."""


class Staging:
    """Staging memory for copies to a GPU, on a stream of this thread. For a CPU it is scratch alone.

    A CPU's tensors are read in place; `scratch` holds rows of which some columns are kept.
    """

    def __init__(self, device: torch.device, chunk: int = CHUNK) -> None:
        self._gpu = device.type == "cuda"
        self._chunk = chunk
        self._scratch: Tensor | None = None
        self._half = self._used = 0
        self._stream: Any = None
        if self._gpu:
            self._stream = torch.cuda.Stream(device)
            self._events = [torch.cuda.Event(), torch.cuda.Event()]
            self._halves = [torch.empty(chunk, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(2)]

    def stream(self) -> AbstractContextManager[Any]:
        """Return a block whose copies to the device run on this thread's stream."""
        return torch.cuda.stream(self._stream) if self._gpu else nullcontext()

    def room(self, target: Tensor) -> Tensor:
        """Return memory to read `target` into, uint8 of one dim: `target` itself on a CPU."""
        if not self._gpu:
            return target
        begin = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        if begin + target.numel() > self._chunk:
            self._events[self._half].record(self._stream)
            self._half ^= 1
            self._events[self._half].synchronize()  # returns at once for one that was never recorded
            begin = 0
        self._used = begin + target.numel()
        return self._halves[self._half][begin : self._used]

    def scratch(self, nbytes: int) -> Tensor:
        """Return memory of this thread, which the next call returns again."""
        if self._scratch is None:
            self._scratch = torch.empty(self._chunk, dtype=torch.uint8, device="cpu")
        return self._scratch[:nbytes]

    def place(self, room: Tensor, target: Tensor) -> None:
        """Copy what was read to `target`, without waiting for the device."""
        if self._gpu:
            target.copy_(room, non_blocking=True)
