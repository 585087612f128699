"""Tensors with an address that a capture has recorded, and the check that none of them moved.

A captured kernel knows addresses, not tensors. A tensor that is reallocated, resized or cast after the capture leaves
the graph reading memory that nothing fills any more, and nothing else reports that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._compat import TensorGuards, lie_at, mark_static, mark_static_address
from ..errors import check, fail
from ..metadata.fixed import AtFixedAddresses as AtFixedAddresses
from .captures import tensor_bytes


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """Address and layout of a tensor when it was captured."""

    name: str
    address: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> TensorRecord:
        """Record `tensor` as it is now."""
        return cls(name, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def check(self, tensor: Tensor | None, where: str) -> None:
        """Raise E421, with the changes, unless `tensor` is the recorded one."""
        if tensor is None:
            fail("E421", got=f"{self.name}, captured in {where}, is gone")
        now = TensorRecord.of(self.name, tensor)
        if now == self:
            return
        changes = [
            f"{what} {_text(what, getattr(self, what))} -> {_text(what, getattr(now, what))}"
            for what in ("address", "shape", "stride", "dtype")
            if getattr(self, what) != getattr(now, what)
        ]
        fail("E421", got=f"{self.name}, captured in {where}: {', '.join(changes)}")


class AddressCheck:
    """Records of all tensors that `find` returns now; `check` calls `find` again and compares.

    Args:
        find: names the tensors, from the containers of their owner, so that a replaced tensor is noticed too.
        device: where all of them must be; E428 otherwise.
    """

    def __init__(self, find: Callable[[], Mapping[str, Tensor]], device: torch.device) -> None:
        self._find = find
        self._tensors = dict(find())  # held, so that nothing else is allocated at an address that a graph knows
        for name, tensor in self._tensors.items():
            check(tensor.device == device, "E428", got=f"{name} on {tensor.device}, captures on {device}")
        self._records = [TensorRecord.of(name, tensor) for name, tensor in self._tensors.items()]

    def check(self, where: str) -> None:
        """Raise E421 for the first tensor that is gone, or that changed its address, shape, strides or dtype."""
        now = self._find()
        for record in self._records:
            record.check(now.get(record.name), where)

    @property
    def nbytes(self) -> int:
        """Bytes of the distinct storages."""
        return tensor_bytes(self._tensors)


class HeldTensors:
    """Many tensors as they are now, compared in two calls: addresses, types, dtypes, devices, shapes and strides.

    Attributes:
        ids: ids of the tensors, which are kept alive.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = list(tensors)
        self.ids = frozenset(map(id, self._tensors))
        self._addresses = list(map(Tensor.data_ptr, self._tensors))
        with torch.inference_mode(False):  # the layout of a tensor is compared with the modes of its call
            self._layouts: Any = TensorGuards(*self._tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)

    def __reduce__(self) -> tuple[Any, ...]:
        """Become None in a copy of their owner, which has other tensors."""
        return type(None), ()

    def hold(self) -> bool:
        """Return whether all are unchanged."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self.hold()
        # In this order the second comparison finds what the first has read in the host's caches.
        return bool(self._layouts.check(*self._tensors)) and lie_at(self._tensors, self._addresses)


compared: ContextVar[tuple[HeldTensors, ...]] = ContextVar("dsv4_compared", default=())
"""Tensors that the caller has compared in this call, so that a captured graph need not do so again."""


def named_tensors(tree: Any, name: str) -> dict[str, Tensor]:
    """Return the tensors in nested modules, dataclasses, mappings and sequences, by the expression for each."""
    if isinstance(tree, Tensor):
        return {name: tree}
    if isinstance(tree, nn.Module):
        parts: list[tuple[str, Any]] = [*tree.named_parameters(prefix=name), *tree.named_buffers(prefix=name)]
    elif is_dataclass(tree) and not isinstance(tree, type):
        parts = [(f"{name}.{field.name}", getattr(tree, field.name)) for field in fields(tree)]
    elif isinstance(tree, Mapping):
        parts = [(f"{name}[{key!r}]", value) for key, value in tree.items()]
    elif isinstance(tree, Sequence) and not isinstance(tree, (str, bytes)):
        parts = [(f"{name}[{index}]", value) for index, value in enumerate(tree)]
    else:
        return {}
    tensors: dict[str, Tensor] = {}
    for path, value_at_path in parts:
        tensors |= named_tensors(value_at_path, path)
    return tensors


def mark_static_inputs(tensors: Mapping[str, Tensor]) -> None:
    """Tell the compiler that these tensors keep their addresses and shapes: caches, tables, persistent buffers.

    Their dims do not become symbols of a graph, and a capture uses them in place instead of copying them.
    """
    for tensor in tensors.values():
        mark_static(tensor)
        mark_static_address(tensor, guard=False)


def _text(what: str, value: Any) -> str:
    return f"{value:#x}" if what == "address" else str(value)
