"""Interleaved RoPE on the last dims of a vector, and its tables.

A pair is (x[2i], x[2i+1]); rotating by angle a gives (e*cos a - o*sin a, e*sin a + o*cos a). `cos_sin_cache` is float32
`[max_pos, rope_dim]`: the first half of a row holds the cosines, the second half the sines, one per pair.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs of `x` `[..., 2n]` by `cos`, `sin` `[..., n]` in float32. Returns float32."""
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def gather_cos_sin(positions: Tensor, cos_sin_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of the table for `positions` int `[T]`: two float32 `[T, rope_dim / 2]`.

    Positions outside the table read its nearest row. The last row of a layer's own table is NaN (see `rope_tables`).
    """
    rows = cos_sin_cache[positions.long().clamp(0, cos_sin_cache.shape[0] - 1)]
    cos, sin = rows.chunk(2, dim=-1)
    return cos, sin


def apply_rope(x: Tensor, positions: Tensor, cos_sin_cache: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate the last `rope_dim` of `x` `[T, D]` or `[T, H, D]` to `positions` `[T]`. Returns float32, nothing rounded.

    `inverse` rotates by the negative angle.
    """
    cos, sin = gather_cos_sin(positions, cos_sin_cache)
    if x.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    if inverse:
        sin = -sin
    nope = x.shape[-1] - cos_sin_cache.shape[1]
    return torch.cat((x[..., :nope].float(), rotate(x[..., nope:], cos, sin)), dim=-1)
