"""A float32 GEMM: by a kernel for a few rows, by oneDNN for many rows and a large weight, otherwise by torch.mm.

In the kernel, a row has the same bits alone and among others; libraries may sum in other orders for other numbers of
rows. oneDNN reads the weight where it is, as torch.mm does; on an AMD CPU it is faster than the library that torch.mm
calls.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..._compat import onednn_linear
from .. import native

FEW_TOKENS = 16
"""Most rows that a kernel takes."""
LARGE_WEIGHT = 2**18
"""Fewest elements of a weight that is worth a call of oneDNN."""


def mm(x: Tensor, weight: Tensor) -> Tensor:
    """Return `[T, N]`: `x` `[T, K]` times `weight` `[K, N]`, the transpose of a contiguous matrix."""
    rows = weight.t()
    if x.shape[0] > FEW_TOKENS and _in_onednn(x, rows):
        product: Tensor = onednn_linear(x, rows)
        return product
    return mm_out(x, rows, torch.empty((x.shape[0], rows.shape[0]), dtype=x.dtype))


def mm_out(x: Tensor, rows: Tensor, out: Tensor) -> Tensor:
    """Write `x` `[T, K]` times the transpose of `rows` `[N, K]` to `out` `[T, N]`, contiguous in its last dim."""
    tokens, (columns, dim) = x.shape[0], rows.shape
    if tokens <= FEW_TOKENS and native.takes(rows, rows=x):
        sizes = tokens, dim, columns, torch.get_num_threads()
        native.call("matmul", x, x.stride(0), rows, out, out.stride(0), *sizes)
        return out
    if tokens > FEW_TOKENS and _in_onednn(x, rows):
        return out.copy_(onednn_linear(x, rows))
    return torch.mm(x, rows.t(), out=out)


def _in_onednn(x: Tensor, rows: Tensor) -> bool:
    """Return whether oneDNN multiplies `x` and `rows`, which it reads where they are."""
    plain = x.dtype is rows.dtype is torch.float32 and rows.is_contiguous()
    return plain and rows.numel() >= LARGE_WEIGHT and onednn_linear is not None
