"""A scratch buffer for attention calls, reserved once before caches are allocated."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..errors import fail

ALIGNMENT = 256


class Workspace:
    """One growing buffer, used by one call at a time.

    Reserve the largest request during warm-up, then `lock`: a captured graph holds the buffer's address, so growing a
    locked buffer raises E204. Views start at multiples of 256 bytes; their contents are arbitrary.
    """

    def __init__(self, device: torch.device | str | None = None, *, zeroed: bool = False) -> None:
        self._zeroed, self._locked = zeroed, False
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return self._buffer.numel()

    def reserve(self, *wanted: tuple[tuple[int, ...], torch.dtype]) -> None:
        """Grow the buffer to hold these tensors at the same time."""
        self.get_simultaneous(*wanted)

    def lock(self) -> None:
        """Fix the address and the size of the buffer."""
        self._locked = True

    def get_simultaneous(self, *wanted: tuple[tuple[int, ...], torch.dtype]) -> list[Tensor]:
        """Return contiguous tensors of these shapes and dtypes that do not overlap."""
        sizes = [-(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT for shape, dtype in wanted]
        if sum(sizes) > self.nbytes:
            self._grow(sum(sizes))
        parts = self._buffer[: sum(sizes)].split(sizes)
        return [
            piece[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for piece, (shape, dtype) in zip(parts, wanted, strict=True)
        ]

    def _grow(self, nbytes: int) -> None:
        if self._locked:
            fail(
                "E204",
                got=f"a workspace of {nbytes} bytes, but {self.nbytes} are reserved and the workspace is locked",
                fix="reserve the largest prefill before lock(); see DeepseekV4SparseAttention.reserve_workspace",
            )
        make = torch.zeros if self._zeroed else torch.empty
        self._buffer = make(nbytes, dtype=torch.uint8, device=self._buffer.device)
