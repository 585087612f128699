"""Caches with all pages in use behind the first 2^31 bytes."""

from __future__ import annotations

import torch
from torch import Tensor


def behind_2_31_bytes(pages: Tensor) -> tuple[Tensor, int]:
    """Pages that end with `pages` and begin 2^31 bytes in front of them, and how many were added."""
    added = 2**31 // pages[0].nbytes + 1
    return torch.cat((pages.new_zeros(added, *pages.shape[1:]), pages)), added


def moved(index: Tensor, by: int) -> Tensor:
    """`index` with everything but padding moved."""
    return torch.where(index >= 0, index + by, index)
