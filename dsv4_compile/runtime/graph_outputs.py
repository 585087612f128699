"""What a call of a captured graph returns, in the memory where the graph without a capture would return it.

Results lie in memory of the capture, which every replay writes anew: the caller gets copies, and results that share
memory get one copy. What lies in an input is a view of the input of this call, also where the capture has a copy of it:
a write to the view is then a write to the input, as in the code that was compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .aliasing import extent, view_at

_Read = Callable[[Sequence[Any], Sequence[Tensor]], Any]
"""Gives one output, from the inputs of a call and the copies that were made for it."""
_ALIGNED = 64
"""Bytes: what launchers look at in an address."""


class GraphOutputs:
    """How to give the outputs of a captured graph; keeps those in memory whose memory is the capture's, and no input.

    Args:
        outputs: what the graph returned when it was captured: tensors, numbers and None.
        inputs: what it was captured with.
    """

    def __init__(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
        self._sources: list[Tensor] = []
        self._reads: list[_Read] = [_constant(out) for out in outputs]
        places: dict[int, int] = {}
        for i, given in enumerate(inputs):
            if isinstance(given, Tensor) and given.untyped_storage().nbytes():  # an empty one has no address
                places.setdefault(given.untyped_storage().data_ptr(), i)
        own: dict[int, Tensor] = {}
        for index, out in enumerate(outputs):
            if isinstance(out, Tensor):
                place = places.get(out.untyped_storage().data_ptr()) if _is_plain(out) else None
                if place is None:
                    own[index] = out
                else:
                    self._reads[index] = _from_input(out, inputs, place)
        for together in _groups(own):
            self._copy(together)

    def of(self, args: Sequence[Any]) -> list[Any]:
        """The outputs of a call with `args`, after the replay."""
        copies = [source.clone() for source in self._sources]
        return [read(args, copies) for read in self._reads]

    def _copy(self, together: dict[int, Tensor]) -> None:
        """Copy these outputs at each call: one as it is, several with all that lies between them."""
        index = len(self._sources)
        first = next(iter(together.values()))
        if len(together) == 1:
            self._sources.append(first)
            self._reads[next(iter(together))] = lambda args, copies: copies[index]
            return
        begin = extent(first)[0] // _ALIGNED * _ALIGNED
        end = max(extent(out)[1] for out in together.values())
        self._sources.append(view_at(first, begin, torch.uint8, (end - begin,), (1,)))
        for position, out in together.items():
            self._reads[position] = _from_copy(out, index, begin)


def _constant(value: Any) -> _Read:
    return lambda args, copies: value


def _from_input(out: Tensor, inputs: Sequence[Any], place: int) -> _Read:
    """`out` as a view of input `place`, or the very input that it is."""
    same = next((i for i, given in enumerate(inputs) if given is out), None)
    if same is not None:
        return lambda args, copies: args[same]
    distance, size = extent(out)[0] - extent(inputs[place])[0], inputs[place].itemsize
    dtype, shape, stride = out.dtype, out.shape, out.stride()
    return lambda args, _: view_at(args[place], args[place].storage_offset() * size + distance, dtype, shape, stride)


def _from_copy(out: Tensor, index: int, begin: int) -> _Read:
    byte, dtype, shape, stride = extent(out)[0] - begin, out.dtype, out.shape, out.stride()
    return lambda args, copies: view_at(copies[index], byte, dtype, shape, stride)


def _groups(outputs: dict[int, Tensor]) -> Iterator[dict[int, Tensor]]:
    """The outputs whose memory overlaps, in the order of their first bytes; most are alone."""
    order = sorted(outputs, key=lambda i: (outputs[i].untyped_storage().data_ptr(), *extent(outputs[i])))
    group: dict[int, Tensor] = {}
    storage, end = 0, 0
    for i in order:
        out, (first, behind) = outputs[i], extent(outputs[i])
        joins = out.untyped_storage().data_ptr() == storage and first < end and _is_plain(out)
        if group and not joins:
            yield group
            group = {}
        end = max(end, behind) if group else behind
        storage = out.untyped_storage().data_ptr() if _is_plain(out) else 0
        group[i] = out
    if group:
        yield group


def _is_plain(tensor: Tensor) -> bool:
    """Whether the bytes of `tensor` are its values: those of a conjugate, or of a negative, are not."""
    return not tensor.is_conj() and not tensor.is_neg()
