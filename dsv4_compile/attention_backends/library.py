"""Helpers for calls into kernel libraries: is one installed, and are arguments padded to the sizes it takes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import fail, is_installed
from ..layout import PAD_INDEX, align_up


def is_importable(module: str) -> bool:
    """Return whether `import module` would succeed, without importing it."""
    return is_installed(module)


def padded_heads(num_heads: int, sizes: tuple[int, ...]) -> int:
    """Return the smallest of a library's head counts that holds `num_heads`; E205 if none does."""
    for size in sizes:
        if num_heads <= size:
            return size
    fail("E205", got=f"{num_heads} query heads", rule=f"at most {sizes[-1]} query heads on a device")


def pad_heads(q: Tensor, heads: int) -> Tensor:
    """Pad queries with zero heads to `[T, heads, D]`, contiguous."""
    if q.dtype is torch.float8_e4m3fn:
        # Zero is the byte 0, and not every device can fill 8-bit floats.
        return pad_heads(q.view(torch.uint8), heads).view(q.dtype)
    return pad(q, (0, 0, 0, heads - q.shape[1])).contiguous()


def pad_sink(sink: Tensor | None, heads: int) -> Tensor | None:
    """Pad sink logits to float32 `[heads]` with -inf, which has no effect."""
    return None if sink is None else pad(sink, (0, heads - sink.shape[0]), value=-torch.inf)


def pad_rows(indices: Tensor, multiple: int) -> Tensor:
    """Pad index rows with -1 to a multiple of `multiple` columns, contiguous."""
    width = indices.shape[1]
    return pad(indices, (0, align_up(width, multiple) - width), value=PAD_INDEX).contiguous()
