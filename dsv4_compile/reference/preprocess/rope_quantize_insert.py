"""Insertion of rows into a cache of DeepSeek-V4.1: rotated, rounded to a grid, stored."""

from __future__ import annotations

from torch import Tensor

from ..common.rope import apply_rope
from ..common.row_format import store_rows


def rope_quantize_insert(
    x: Tensor,
    cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    block_size: int,
    cache_format: str,
    grid: str = "",
) -> None:
    """Rotate the last dims of each row to its position, round to x's dtype, and store it at its slot.

    The format rounds all channels: window rows are mxfp8, compressed entries nvfp4, index keys mxfp4, or any of them
    `plain` rows that hold the values of `grid`.

    Args:
        x: `[T, D]` bfloat16, float16 or float32, normed and not rotated, any strides.
        cache: of `cache_format`, one of `layout.ROW_FORMATS`.
        slots: int `[T]`; rows with a slot outside the cache are not written.
        positions: int `[T]`, of the first token that a row stands for.
        grid: one of `layout.GRIDS` that plain rows are rounded to; "" stores them as they are.
    """
    rotated = apply_rope(x, positions, cos_sin_cache).to(x.dtype).float()
    store_rows(cache, cache_format, block_size, slots, rotated, grid)
