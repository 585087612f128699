"""Inverse RoPE of the attention output in one pass over it."""

from __future__ import annotations

import torch
from torch import Tensor

from ...reference.attention import inv_rope as reference
from .. import native


def inv_rope(o: Tensor, positions: Tensor, cos_sin_cache: Tensor) -> Tensor:
    """Compute the op of this name as its reference does, bit for bit."""
    if native.takes(o, cos_sin_cache, int64=(positions,)):
        out = torch.empty(o.shape, dtype=o.dtype)
        rows, rope = cos_sin_cache.shape
        arguments = o, o.stride(0), out, positions, cos_sin_cache
        native.call("rope", *arguments, *o.shape, rope, rows, 1, torch.get_num_threads())
        return out
    return reference.inv_rope(o, positions, cos_sin_cache)
