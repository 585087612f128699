"""Tensors that share memory: where each lies, views at a given place, and what of two tensors coincides."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._compat import base_of
from ..errors import check


def extent(tensor: Tensor) -> tuple[int, int]:
    """First byte of `tensor` in its storage, and the first one behind it; gaps count as its own."""
    first = int(tensor.storage_offset()) * tensor.itemsize
    if tensor.numel() == 0:
        return first, first
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (last + 1) * tensor.itemsize


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether the memory between the first and the last element of each has bytes in common."""
    (a, a_end), (b, b_end) = _addresses(one), _addresses(other)
    return one.device == other.device and max(a, b) < min(a_end, b_end)


def rows_coincide(one: Tensor, other: Tensor) -> bool:
    """Whether row i of one `[N, ...]` has memory in common with row i of the other at most, for every i."""
    if not overlap(one, other):
        return True
    pitch, other_pitch = (tensor.stride(0) * tensor.itemsize for tensor in (one, other))
    (a, a_end), (b, b_end) = _addresses(one[0]), _addresses(other[0])
    return pitch == other_pitch and max(a_end, b_end) - min(a, b) <= pitch


def distinct(tensor: Tensor) -> Tensor:
    """`tensor` without the dims that repeat one element: each element in memory once, as a copy needs it."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def owner(tensor: Tensor) -> Tensor:
    """The tensor that `tensor` is a view of, or itself, as for a view that was made in inference mode."""
    base = base_of(tensor)
    return tensor if base is None else base


def view_at(base: Tensor, byte: int, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    """The view of `base` that begins `byte` bytes into its storage, within `base` or not. E201 between two elements."""
    if base.dtype != dtype:
        check(
            byte % dtype.itemsize == 0,
            "E201",
            got=f"a tensor of which {byte} bytes into its storage begins a view as {dtype}",
            rule=f"views as {dtype} begin at multiples of {dtype.itemsize} bytes",
            fix="pass a copy of the tensor",
        )
        # All of the storage in a row: a view of another dtype asks for strides that its base need not have.
        largest = max(base.itemsize, dtype.itemsize)
        count = base.untyped_storage().nbytes() // largest * largest // base.itemsize
        base = base.as_strided((count,), (1,), 0).view(dtype)
    return base.as_strided(shape, stride, byte // dtype.itemsize)


def _addresses(tensor: Tensor) -> tuple[int, int]:
    start = tensor.untyped_storage().data_ptr()
    first, end = extent(tensor)
    return start + first, start + end
