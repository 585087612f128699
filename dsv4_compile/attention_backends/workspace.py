"""Memory that attention borrows for the length of a call: reserved once, before caches take the rest."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..errors import fail

ALIGNMENT = 256


class Workspace:
    """One growing buffer, lent to one call at a time.

    Reserve the largest request during warm-up, then `lock`: a captured graph holds the buffer's address, so growing
    behind a lock raises E204. Views start at multiples of 256 bytes. What a view holds is arbitrary.
    """

    def __init__(self, device: torch.device | str | None = None, *, zeroed: bool = False) -> None:
        self._zeroed, self._locked = zeroed, False
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return self._buffer.numel()

    def reserve(self, *wanted: tuple[tuple[int, ...], torch.dtype]) -> None:
        """Have room for these tensors at once."""
        self.get_simultaneous(*wanted)

    def lock(self) -> None:
        """Keep the buffer where it is from now on."""
        self._locked = True

    def get_simultaneous(self, *wanted: tuple[tuple[int, ...], torch.dtype]) -> list[Tensor]:
        """Contiguous tensors of these shapes and dtypes that do not overlap."""
        sizes = [-(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT for shape, dtype in wanted]
        if sum(sizes) > self.nbytes:
            self._grow(sum(sizes))
        parts = self._buffer[: sum(sizes)].split(sizes)
        return [
            part[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for part, (shape, dtype) in zip(parts, wanted, strict=True)
        ]

    def _grow(self, nbytes: int) -> None:
        if self._locked:
            fail(
                "E204",
                got=f"a workspace of {nbytes} bytes, {self.nbytes} are reserved and the workspace is locked",
                fix="reserve the largest prefill before lock(); see DeepseekV4SparseAttention.reserve_workspace",
            )
        make = torch.zeros if self._zeroed else torch.empty
        self._buffer = make(nbytes, dtype=torch.uint8, device=self._buffer.device)
