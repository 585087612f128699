"""`preprocess_insert` whose latents come quantised for wq_b."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from .block_scale import quantize_rows
from .preprocess_insert import preprocess_insert


@functools.wraps(preprocess_insert, assigned=())  # its signature
def preprocess_insert_quant(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """`preprocess_insert`, whose result is then quantised as `fp8_linear` does its input: the same bytes.

    Args:
        args, options: as of `preprocess_insert`.
    Returns:
        e4m3 `[T, 1, Lq]`, contiguous, and float32 scales `[T, 1, n]`, n = ceil(Lq / 128), a view of contiguous
        `[n, T]`: strides (1, T * n, T). Of one group, as `fp8_grouped_einsum` takes them for the next product.
    """
    return quantize_rows(preprocess_insert(*args, **options))
