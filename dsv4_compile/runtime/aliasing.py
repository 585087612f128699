"""Tensors that share memory: byte ranges, overlap, and outputs of a captured graph that alias inputs or each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .._compat import base_of
from ..errors import check

_Read = Callable[[Sequence[Any], Sequence[Tensor]], Any]
"""Returns one output, from the inputs of a call and the copies made for it."""
_ALIGNMENT = 64
"""Bytes of an address that kernel launchers look at; a copy of several outputs keeps them."""


def byte_range(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of `tensor` in its storage and the byte after its last, gaps between rows included."""
    first = int(tensor.storage_offset()) * tensor.itemsize
    if tensor.numel() == 0:
        return first, first
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (last + 1) * tensor.itemsize


def overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether the byte ranges of both tensors intersect."""
    (a, a_end), (b, b_end) = _addresses(one), _addresses(other)
    return one.device == other.device and max(a, b) < min(a_end, b_end)


def rows_coincide(one: Tensor, other: Tensor) -> bool:
    """Return whether row i of one `[N, ...]` shares memory with no row of the other but row i, for every i."""
    if not overlap(one, other):
        return True
    pitch, other_pitch = (tensor.stride(0) * tensor.itemsize for tensor in (one, other))
    (a, a_end), (b, b_end) = _addresses(one[0]), _addresses(other[0])
    return pitch == other_pitch and max(a_end, b_end) - min(a, b) <= pitch


def without_repeats(tensor: Tensor) -> Tensor:
    """Return `tensor` without dims of stride 0, so that each element is in memory once and copy_ can write it."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def owner(tensor: Tensor) -> Tensor:
    """Return the tensor that `tensor` is a view of, or itself. Views made in inference mode have no base."""
    base = base_of(tensor)
    return tensor if base is None else base


def view_at(base: Tensor, byte: int, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Return a view of the storage of `base` that begins at `byte`, inside `base` or not.

    Raises E201 if `byte` is no multiple of the element size.
    """
    if base.dtype != dtype:
        check(
            byte % dtype.itemsize == 0,
            "E201",
            got=f"a tensor of which {byte} bytes into its storage begins a view as {dtype}",
            rule=f"views as {dtype} begin at multiples of {dtype.itemsize} bytes",
            fix="pass a copy of the tensor",
        )
        # Flatten the whole storage first: view(dtype) asks for strides that `base` need not have.
        largest = max(base.itemsize, dtype.itemsize)
        count = base.untyped_storage().nbytes() // largest * largest // base.itemsize
        base = base.as_strided((count,), (1,), 0).view(dtype)
    return base.as_strided(shape, stride, byte // dtype.itemsize)


def _addresses(tensor: Tensor) -> tuple[int, int]:
    start = tensor.untyped_storage().data_ptr()
    first, end = byte_range(tensor)
    return start + first, start + end


class GraphOutputs:
    """Outputs of a captured graph, returned with the aliasing that the graph without a capture would give them.

    Every replay overwrites the capture's memory, so the caller gets copies; outputs that share memory get one copy. An
    output that lies in an input becomes a view of that input of this call, even where the capture reads a copy of it,
    so that a write to the view is a write to the input. Capture memory is kept alive, inputs are not.

    Args:
        outputs: what the graph returned when it was captured: tensors, numbers and None.
        inputs: what it was captured with.
    """

    def __init__(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
        self._sources: list[Tensor] = []
        self._reads: list[_Read] = [_constant(out) for out in outputs]
        input_of: dict[int, int] = {}  # by the address of the storage
        for i, value in enumerate(inputs):
            if isinstance(value, Tensor) and value.untyped_storage().nbytes():  # an empty one has no address
                input_of.setdefault(value.untyped_storage().data_ptr(), i)
        copied: dict[int, Tensor] = {}
        for index, out in enumerate(outputs):
            if isinstance(out, Tensor):
                source = input_of.get(out.untyped_storage().data_ptr()) if _is_plain(out) else None
                if source is None:
                    copied[index] = out
                else:
                    self._reads[index] = _from_input(out, inputs, source)
        for group in _overlapping(copied):
            self._copy(group)

    @property
    def nbytes(self) -> int:
        """Bytes of the capture's memory that is kept alive."""
        storages = {s.untyped_storage().data_ptr(): s.untyped_storage().nbytes() for s in self._sources}
        return sum(storages.values())

    def for_call(self, args: Sequence[Any]) -> list[Any]:
        """Return the outputs of a call with `args`, after the replay."""
        copies = [source.clone() for source in self._sources]
        return [read(args, copies) for read in self._reads]

    def _copy(self, group: dict[int, Tensor]) -> None:
        """Copy these outputs at each call: a single one as it is, several with the bytes between them."""
        index = len(self._sources)
        first = next(iter(group.values()))
        if len(group) == 1:
            self._sources.append(first)
            self._reads[next(iter(group))] = lambda args, copies: copies[index]
            return
        begin = byte_range(first)[0] // _ALIGNMENT * _ALIGNMENT
        end = max(byte_range(out)[1] for out in group.values())
        self._sources.append(view_at(first, begin, torch.uint8, (end - begin,), (1,)))
        for position, out in group.items():
            self._reads[position] = _from_copy(out, index, begin)


def _constant(value: Any) -> _Read:
    return lambda args, copies: value


def _from_input(out: Tensor, inputs: Sequence[Any], source: int) -> _Read:
    """Read `out` as a view of input `source`, or as the input itself if it is one."""
    same = next((i for i, value in enumerate(inputs) if value is out), None)
    if same is not None:
        return lambda args, copies: args[same]
    distance, size = byte_range(out)[0] - byte_range(inputs[source])[0], inputs[source].itemsize
    dtype, shape, stride = out.dtype, out.shape, out.stride()
    return lambda args, _: view_at(args[source], args[source].storage_offset() * size + distance, dtype, shape, stride)


def _from_copy(out: Tensor, index: int, begin: int) -> _Read:
    byte, dtype, shape, stride = byte_range(out)[0] - begin, out.dtype, out.shape, out.stride()
    return lambda args, copies: view_at(copies[index], byte, dtype, shape, stride)


def _overlapping(outputs: dict[int, Tensor]) -> Iterator[dict[int, Tensor]]:
    """Yield groups of outputs with overlapping byte ranges, in the order of their first bytes; most groups have one."""
    order = sorted(outputs, key=lambda i: (outputs[i].untyped_storage().data_ptr(), *byte_range(outputs[i])))
    group: dict[int, Tensor] = {}
    storage, end = 0, 0
    for i in order:
        out, (first, after) = outputs[i], byte_range(outputs[i])
        same = out.untyped_storage().data_ptr() == storage and first < end and _is_plain(out)
        if group and not same:
            yield group
            group = {}
        end = max(end, after) if group else after
        storage = out.untyped_storage().data_ptr() if _is_plain(out) else 0
        group[i] = out
    if group:
        yield group


def _is_plain(tensor: Tensor) -> bool:
    """Return whether the bytes of `tensor` are its values; those of a conjugate or negative view are not."""
    return not tensor.is_conj() and not tensor.is_neg()
