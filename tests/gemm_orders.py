"""GEMMs on a CPU with an order of sums that follows from their sizes, as in libraries: no bit may depend on it."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return `a` `[..., M, K]` times `b` `[..., K, N]`: sums of two parts of K, divided by where the sizes say.

    Sums that are exact in any order stay so. Of 16-bit tensors the first part is rounded to their dtype, since orders
    would otherwise differ in one element of thousands.
    """
    depth, wide = a.shape[-1], torch.promote_types(a.dtype, torch.float32)
    cut = 1 + zlib.crc32(repr((*a.shape, b.shape[-1])).encode()) % max(depth - 1, 1)
    parts = [
        torch.from_numpy(a[..., rows].detach().to(wide).numpy() @ b[..., rows, :].detach().to(wide).numpy())
        for rows in (slice(cut), slice(cut, None))
    ]
    return (parts[0].to(a.dtype).to(wide) + parts[1]).to(a.dtype)


def _sum(into: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    scaled = product(a, b) * alpha
    return scaled if beta == 0 else scaled + into * beta


def _out(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def write(*args: Any, out: Tensor, **kwargs: Any) -> Tensor:
        result = compute(*args, **kwargs)
        return (out if out.shape == result.shape else out.resize_(result.shape)).copy_(result)

    return write


_OPS: dict[str, Callable[..., Tensor]] = {"mm": product, "bmm": product, "addmm": _sum, "baddbmm": _sum}


@contextmanager
def by_size() -> Iterator[None]:
    """Let every float GEMM of torch on a CPU sum in an order that follows from its sizes."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel is replaced
        for name, compute in _OPS.items():
            library.impl(name, compute, "CPU")
            library.impl(f"{name}.out", _out(compute), "CPU")
    try:
        yield
    finally:
        library._destroy()
