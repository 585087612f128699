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
from ..common.invariant import alone, before_sums_by_torch, is_required, required

FEW_TOKENS = 16
"""Most rows that a kernel takes."""
TOKENS_AT_A_TIME = 32
"""Rows that share a pass over the weight: they stay in the second cache."""
_EXACT_IN_FLOAT32 = (torch.float32, torch.bfloat16, torch.float16)
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
    tokens = x.shape[0]
    if tokens <= FEW_TOKENS and native.takes(rows, rows=x):
        _in_kernel(x, rows, out)
        return out
    if is_required() and native.takes(rows, rows=x):
        for some in (slice(first, first + TOKENS_AT_A_TIME) for first in range(0, tokens, TOKENS_AT_A_TIME)):
            _in_kernel(x[some], rows, out[some])
        return out
    before_sums_by_torch()
    if tokens > FEW_TOKENS and _in_onednn(x, rows):
        return out.copy_(onednn_linear(x, rows))
    return torch.mm(x, rows.t(), out=out)


def _in_kernel(x: Tensor, rows: Tensor, out: Tensor) -> None:
    sizes = x.shape[0], rows.shape[1], rows.shape[0], torch.get_num_threads()
    native.call("matmul", x, x.stride(0), rows, out, out.stride(0), *sizes)


def invariant_mm(x: Tensor, weight: Tensor) -> Tensor:
    """Return `[T, N]`: `x` `[T, K]` times `weight` `[K, N]`, with the same bits of a row whatever the other rows.

    float32 rows are multiplied in the kernel. Those of other dtypes are multiplied as float32 and rounded once; without
    the kernel each row is a call of torch.
    """
    if native.takes() and x.dtype in _EXACT_IN_FLOAT32:
        columns = weight.t().float().contiguous()
        wide = x.float()
        wide = wide if wide.stride(1) == 1 else wide.contiguous()
        with required():
            return mm_out(wide, columns, torch.empty((x.shape[0], weight.shape[1]))).to(x.dtype)
    product: Tensor = alone(torch.mm, (x, weight), (0,), x.shape[0])
    return product


def _in_onednn(x: Tensor, rows: Tensor) -> bool:
    """Return whether oneDNN multiplies `x` and `rows`, which it reads where they are."""
    plain = x.dtype is rows.dtype is torch.float32 and rows.is_contiguous()
    return plain and rows.numel() >= LARGE_WEIGHT and onednn_linear is not None
