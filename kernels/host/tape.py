"""What a launcher did, noted so that it can be done again for calls like it.

A tape notes the memory that a launcher asks for, the ops of torch that it calls, and the kernels that it launches:
whose memory each pointer is into, and how far. Tensors are told apart by which object they are, never by address: two
that lie in one storage today may lie in two tomorrow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._compat import TorchDispatchMode
from .launch import noting
from .tape_tensors import Do, Fill, descriptor, fills, is_descriptor, like, maker, same, shared

aten = torch.ops.aten
EMPTY = {aten.empty.memory_format, aten.new_empty.default, aten.empty_like.default, aten.empty_strided.default}


class Unknown(Exception):
    """What a launcher did cannot be done again from a tape, and why."""


class Plan(NamedTuple):
    """What to do for a call: how many tensors are made, the steps, and what the call gives."""

    made: int
    steps: tuple[Do, ...]
    result: Fill

    def __call__(self, args: tuple[Any, ...]) -> Any:
        """Do it for `args`, which are like those of the call that was noted."""
        tensors = [*args, *(None,) * self.made]
        for step in self.steps:
            step(tensors)
        return self.result(tensors)


class _Place(NamedTuple):
    """Where a tensor is: its number, and how many bytes behind the start of tensor `root`."""

    number: int
    root: int
    offset: int


class _Step(NamedTuple):
    """A step that makes tensor `number`, -1 for none, and needs others, or but their addresses.

    What makes a tensor is left out where nobody needs it, as views are of which a kernel has but the address.
    """

    do: Do
    number: int
    needs: frozenset[int]
    addresses: frozenset[int] = frozenset()


class Tape(TorchDispatchMode):
    """While it is entered, it notes what this thread launches and which ops of torch it calls."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        super().__init__()
        self._inputs = self._count = len(args)
        self._steps: list[_Step] = []
        self._places: dict[int, _Place] = {}
        # Nobody else gets the id of an object that is kept.
        self._kept: list[Tensor] = []
        self._empty: dict[int, Tensor] = {}
        self._refused = ""
        for number, arg in enumerate(args):
            if isinstance(arg, Tensor):
                if id(arg) in self._places:
                    self._refused = "one tensor is two arguments"
                self._keep(arg, _Place(number, number, 0))

    def __enter__(self) -> Tape:
        noting.tape = self
        super().__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        noting.tape = None
        super().__exit__(*failure)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if noting.tape is not self:
            return func(*args, **kwargs)
        with self._pause():
            out = func(*args, **kwargs)
        with self._refusing():
            self._called(func, args, kwargs, out)
        return out

    def launched(self, compiled: Any, grid: tuple[int, ...], values: list[Any]) -> None:
        """Note that `compiled[grid](*values)` was launched."""
        with self._refusing():
            if compiled is None:
                raise Unknown("a kernel is not compiled")
            run, needs = compiled[(*grid, 1, 1)[:3]], frozenset(self._roots(values))
            rest, pointers, others = list(values), [], []
            for i, value in enumerate(values):
                fill = self._pointers(value)
                if isinstance(value, Tensor) and value.numel():
                    pointers.append((i, *self._place(value)[1:]))
                elif fill is not None:
                    others.append((i, fill))
                # A plan keeps no tensor alive.
                rest[i] = value if fill is None else None

            def step(tensors: list[Any]) -> None:
                values = rest.copy()
                for i, root, offset in pointers:
                    values[i] = tensors[root].data_ptr() + offset
                for i, fill in others:
                    values[i] = fill(tensors)
                run(*values)

            self._steps.append(_Step(step, -1, frozenset(), needs))

    def made_each_time(self, make: Callable[..., Tensor], args: tuple[Any, ...]) -> Tensor:
        """`make(*args)`, which is called again each time."""
        with self._pause():
            out = make(*args)
        self._made(out, partial(make, *args))
        return out

    def plan(self, result: Any) -> Plan:
        """What was noted, of a launcher that gave `result`. Unknown where it cannot be done again."""
        if self._refused:
            raise Unknown(self._refused)
        self._shape_results(result)
        steps = self._needed(self._numbers(result))
        return Plan(self._count - self._inputs, tuple(step.do for step in steps), self._tensors(result))

    def _needed(self, numbers: Iterable[int]) -> list[_Step]:
        """The steps without which these tensors would be missing, or something that is written."""
        needed, steps = set(numbers), []
        for step in reversed(self._steps):
            if step.number < 0 or step.number in needed:
                needed |= step.needs | step.addresses
                steps.append(step)
        return steps[::-1]

    def _shape_results(self, result: Any) -> None:
        """Have memory that is given as a view of it made as what is given, where nobody else has it as a tensor."""
        for out in result if isinstance(result, tuple) else (result,):
            if not isinstance(out, Tensor):
                continue
            number, root, _ = place = self._place(out)
            before = self._empty.get(root)
            if before is None or number == root or not fills(out, before):
                continue
            self._places[id(out)] = place._replace(number=root)
            if any(root in step.needs for step in self._needed(self._numbers(result))):
                self._places[id(out)] = place
                continue
            del self._empty[root]
            index = next(i for i, step in enumerate(self._steps) if step.number == root)
            self._steps[index] = _Step(maker(root, like(out)), root, frozenset())

    @contextmanager
    def _pause(self) -> Iterator[None]:
        """What happens in the block is part of something that is noted as a whole."""
        noting.tape = None
        try:
            yield
        finally:
            noting.tape = self

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """The launcher goes on where the tape cannot."""
        try:
            yield
        except Unknown as why:
            self._refused = self._refused or str(why)

    def _keep(self, tensor: Tensor, place: _Place) -> None:
        self._kept.append(tensor)
        self._places[id(tensor)] = place

    def _place(self, tensor: Tensor) -> _Place:
        if id(tensor) not in self._places:
            raise Unknown("a tensor is neither an argument nor made by the launcher")
        return self._places[id(tensor)]

    def _made(self, out: Tensor, make: Callable[[], Tensor]) -> None:
        """Note that `out` was made, from nothing."""
        number = self._next()
        self._keep(out, _Place(number, number, 0))
        self._steps.append(_Step(maker(number, make), number, frozenset()))

    def _called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Note that an op of torch gave `out`."""
        if not isinstance(out, Tensor):
            raise Unknown(f"{func} gives no tensor")
        if func in EMPTY:
            self._empty[self._count] = out
            self._made(out, like(out))
            return
        inputs, names = (args, tuple(kwargs.values())), tuple(kwargs)
        fill, needs, number = self._tensors(inputs), frozenset(self._numbers(inputs)), -1
        if not func._schema.is_mutable:
            source = next((x for x in args if isinstance(x, Tensor)), None)
            if source is not None and same(source, out):
                self._keep(out, self._place(source))
                return
            number = self._next()
            self._keep(out, self._place_of(out, number, source))
        elif id(out) not in self._places:
            raise Unknown(f"{func} gives another tensor than those it writes")

        def step(tensors: list[Any]) -> None:
            positional, rest = fill(tensors)
            out = func(*positional, **dict(zip(names, rest, strict=True)))
            if number >= 0:
                tensors[number] = out

        self._steps.append(_Step(step, number, needs))

    def _next(self) -> int:
        self._count += 1
        return self._count - 1

    def _place_of(self, out: Tensor, number: int, source: Tensor | None) -> _Place:
        """Of a result: in the memory of the first tensor that it was made from, or in its own."""
        if source is None or not shared(source, out):
            return _Place(number, number, 0)
        place = self._place(source)
        return _Place(number, place.root, place.offset + out.data_ptr() - source.data_ptr())

    def _numbers(self, value: Any) -> Iterator[int]:
        """Of all tensors in what an op takes or gives."""
        if isinstance(value, Tensor):
            yield self._place(value).number
        elif isinstance(value, (tuple, list)):
            for one in value:
                yield from self._numbers(one)

    def _tensors(self, value: Any) -> Fill:
        """The same of another call."""
        if isinstance(value, Tensor):
            number = self._place(value).number
            return lambda tensors: tensors[number]
        if next(self._numbers(value), None) is None:
            return lambda tensors: value
        fills, kind = [self._tensors(one) for one in value], type(value)
        return lambda tensors: kind([fill(tensors) for fill in fills])

    def _roots(self, value: Any) -> Iterator[int]:
        """Of all tensors in what a kernel takes."""
        if isinstance(value, (tuple, list)):
            for one in value:
                yield from self._roots(one)
        elif isinstance(value, Tensor) or is_descriptor(value):
            yield self._place(value if isinstance(value, Tensor) else value.base).root

    def _pointers(self, value: Any) -> Fill | None:
        """An argument of a kernel, of another call: addresses, where there were tensors. None if there were none."""
        if isinstance(value, Tensor):
            _, root, offset = self._place(value)
            # Of what has no elements, torch gives no address.
            return (lambda tensors: tensors[root].data_ptr() + offset) if value.numel() else lambda tensors: 0
        if is_descriptor(value):
            _, root, offset = self._place(value.base)
            return descriptor(value, root, offset)
        if not isinstance(value, tuple) or next(self._roots(value), None) is None:
            return None
        parts = [(self._pointers(one), one) for one in value]
        known = [(fill, None if fill else one) for fill, one in parts]
        return lambda tensors: tuple([fill(tensors) if fill else one for fill, one in known])
