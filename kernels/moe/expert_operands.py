"""Weights of experts as arguments of kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...reference.moe.expert_weights import columns, weight_format


def descriptor(weight: Tensor, halves: int, rows: int, block_k: int) -> Any:
    """Return the TMA descriptor of contiguous `[E, N, K]` whose tile has rows of all `halves` of N."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    experts, n, k = weight.shape
    shape, strides = [experts, halves, n // halves, k], [n * k, n // halves * k, k, 1]
    return TensorDescriptor(weight, shape, strides, [1, halves, rows // halves, block_k])


class Weight(NamedTuple):
    """A weight `[E, N, K]` as kernels take it: elements or words, and its scales."""

    values: Tensor
    scale: Tensor | None
    kind: str
    """Its format: "mxfp4", "e4m3" or "float"."""
    size: int
    """Elements of K."""

    @classmethod
    def of(cls, weight: Tensor, scale: Tensor | None) -> Weight:
        """Return a weight `[E, N, K]`, or `[N, K]` of one expert, in its format: MXFP4 as words of eight elements."""
        kind, size = weight_format(weight), columns(weight)
        if weight.dim() == 2:
            weight, scale = weight[None], None if scale is None else scale[None]
        if kind == "mxfp4" and scale is not None:
            return cls(weight.view(torch.int32), scale.view(torch.uint8).view(torch.int32), kind, size)
        if scale is not None and scale.dtype is torch.float8_e8m0fnu:
            scale = scale.view(torch.uint8)
        return cls(weight, scale, kind, size)

    def operand(self, halves: int, rows: int, block_k: int, tma: bool) -> Any:
        """Return the weight as a kernel's argument."""
        return descriptor(self.values, halves, rows, block_k // self.pack) if tma else self.values

    @property
    def pack(self) -> int:
        """Elements of K in an element of `values`."""
        return 8 if self.kind == "mxfp4" else 1
