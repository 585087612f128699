"""Register values of a simulated Gluon kernel: torch tensors with the operators that kernels use, and addresses."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def raw(x: Any) -> Any:
    return x.data if isinstance(x, Value) else x


class Value:
    """A tensor in registers."""

    type = types.SimpleNamespace(layout=None)

    def __init__(self, data: Tensor) -> None:
        self.data = data

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Value:
        if bitcast:
            return Value(self.data.contiguous().view(dtype))
        if dtype is torch.float8_e4m3fn:  # the conversion of GPUs saturates
            return Value(self.data.clamp(-448.0, 448.0).to(dtype))
        return Value(self.data.to(dtype))

    def permute(self, order: tuple[int, ...]) -> Value:
        return Value(self.data.permute(order))

    def __index__(self) -> int:
        return int(self.data)

    def __bool__(self) -> bool:
        return bool(self.data)

    def __neg__(self) -> Value:
        return Value(-self.data)


def _operator(name: str) -> Callable[[Value, Any], Any]:
    def run(self: Value, other: Any) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        result = getattr(self.data, name)(raw(other))
        return result if result is NotImplemented else Value(result)

    return run


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift"):
    setattr(Value, f"__{_name}__", _operator(f"__{_name}__"))
for _name in ("radd", "rsub", "rmul", "rtruediv", "rfloordiv", "rmod", "rand", "ror"):
    setattr(Value, f"__{_name}__", _operator(f"__{_name}__"))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Value, f"__{_name}__", _operator(f"__{_name}__"))
Value.__rlshift__ = lambda self, other: Value(torch.full_like(self.data, other) << self.data)  # type: ignore[attr-defined]


class Pointer:
    """Addresses of elements of a tensor's storage."""

    dtype: Any = None

    def __init__(self, memory: Tensor, offset: Any, ends: tuple[Any, Any] | None = None) -> None:
        """`ends` are the first element and the one past the last that may be accessed, if not all of `memory`."""
        self.memory, self.offset = memory, offset
        self.is_copy, self.ends = ends is not None, ends or (0, len(memory))

    @staticmethod
    def of(tensor: Tensor) -> Pointer:
        flat = torch.empty(0, dtype=tensor.dtype)
        storage = tensor.untyped_storage()
        return Pointer(flat.set_(storage, 0, (storage.nbytes() // tensor.element_size(),)), tensor.storage_offset())

    def __add__(self, other: Any) -> Pointer:
        step = raw(other)
        offset = self.offset + (step.long() if isinstance(step, Tensor) else int(step))
        return Pointer(self.memory, offset, self.ends if self.is_copy else None)

    @staticmethod
    def select(condition: Tensor, a: Pointer, b: Pointer) -> Pointer:
        """Return pointers to elements of either, which can be loaded."""
        size, total = len(a.memory), len(a.memory) + len(b.memory)
        ends = torch.where(condition, 0, size), torch.where(condition, size, total)
        return Pointer(torch.cat([a.memory, b.memory]), torch.where(condition, a.offset, b.offset + size), ends)

    def to(self, kind: Any, bitcast: bool = False) -> Pointer:
        """Reinterpret the pointed bytes as a different dtype; addresses must be multiples of its size."""
        assert not self.is_copy
        viewed = self.memory.view(kind)
        address = self.offset * self.memory.element_size()
        assert torch.as_tensor(address % viewed.element_size() == 0).all()
        return Pointer(viewed, address // viewed.element_size())

    def resolve(self, mask: Any) -> tuple[Tensor, Tensor]:
        """Return offsets and which of them are accessed. Raise for one outside the storage."""
        offset = torch.as_tensor(self.offset)
        offset, live = torch.broadcast_tensors(offset, torch.as_tensor(True if mask is None else raw(mask)))
        if not ((offset >= self.ends[0]) & (offset < self.ends[1]) | ~live).all():
            raise AssertionError("an access is outside its tensor")
        return torch.where(live, offset, 0), live
