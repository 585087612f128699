"""What a tape asks of tensors, and how a plan makes and describes others like them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

Do = Callable[[list[Any]], None]
"""Does something with the tensors of a call: its arguments, and behind them what has been made since, by number."""
Fill = Callable[[list[Any]], Any]
"""Gives a value from them."""


class _Base:
    """What Triton asks of the tensor of a descriptor when it launches: its address."""

    __slots__ = ("address",)

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        """Where it begins."""
        return self.address


def like(tensor: Tensor) -> Callable[[], Tensor]:
    """Makes one that is not initialised."""
    size, stride = tensor.shape, tensor.stride()
    return partial(torch.empty_strided, size, stride, dtype=tensor.dtype, device=tensor.device)


def maker(number: int, make: Callable[[], Tensor]) -> Do:
    """A step that makes tensor `number`."""

    def step(tensors: list[Any]) -> None:
        tensors[number] = make()

    return step


def fills(view: Tensor, memory: Tensor) -> bool:
    """Whether `view` takes all of `memory`, from its start."""
    last = sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
    alike = view.dtype is memory.dtype and view.data_ptr() == memory.data_ptr()
    return alike and view.numel() > 0 and last + 1 == memory.untyped_storage().nbytes() // memory.element_size()


def shared(one: Tensor, other: Tensor) -> bool:
    """Whether they lie in one storage."""
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def same(one: Tensor, other: Tensor) -> bool:
    """Whether they are the same elements in the same places."""
    alike = one.dtype is other.dtype and one.shape == other.shape and one.stride() == other.stride()
    return alike and one.numel() > 0 and one.data_ptr() == other.data_ptr() and shared(one, other)


def is_descriptor(value: Any) -> bool:
    """Whether the copy engine takes it. Not every Triton has the class."""
    return type(value).__name__ == "TensorDescriptor"


def descriptor(value: Any, root: int, offset: int) -> Fill:
    """Gives the tensor descriptor `value` back, at `offset` of tensor `root` of another call."""
    kind, fields = type(value), {name: field for name, field in vars(value).items() if name != "base"}

    def fill(tensors: list[Any]) -> Any:
        other = object.__new__(kind)
        other.__dict__.update(fields, base=_Base(tensors[root].data_ptr() + offset))
        return other

    return fill
