"""Not a test: tensors as other libraries hand them over."""

from __future__ import annotations

import torch
from torch import Tensor


def handed_over(x: Tensor, byte: int = 0) -> Tensor:
    """Return a contiguous copy of uint8 `x`, from DLPack, that begins `byte` bytes after a multiple of 64.

    Its offset in its storage is 0 all the same.
    """
    assert x.dtype is torch.uint8
    memory = torch.empty(x.numel() + 128, dtype=torch.uint8)
    start = -memory.data_ptr() % 64 + byte
    copy = memory[start : start + x.numel()].copy_(x.flatten()).view(x.shape)
    got: Tensor = torch.from_dlpack(copy)
    assert got.storage_offset() == 0 and got.data_ptr() % 64 == byte
    return got
