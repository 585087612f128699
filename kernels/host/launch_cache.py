"""A launch cache: launches by shape, stride, dtype, alignment and scalars; a launcher may depend on nothing else.

A launcher chooses a tiling, allocates, makes views and has Triton look at every argument; on the host that takes longer
than most kernels run. An entry of the cache is the outcome: memory to allocate, compiled kernels with their grids,
constants and pointers, and results. Calls that run other ops of torch than views are not cached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._compat import TorchDispatchMode
from .launch import recording

ALIGN = 64
"""Largest alignment in bytes that a launcher may look for in its arguments. Offsets in a storage are not in the key: a
launcher may ask for them only where a graph that is being compiled knows no address."""
MAX_ENTRIES = 256
"""Entries of one launcher, before all are dropped: prompts have many sizes."""
EMPTY = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
}

Key = tuple[Any, ...]
Fill = Callable[[list[int]], Any]
"""Computes an argument of a kernel from the addresses of a call's tensors."""


def key_of(args: Sequence[Any]) -> Key:
    """Return all that a launcher may look at; an op's schema fixes the types."""
    return tuple(
        [
            (x.dtype, x.shape, x.stride(), x.data_ptr() % ALIGN, x.get_device())
            if isinstance(x, Tensor)
            else x
            if type(x) is not list
            else key_of(x)
            if x and isinstance(x[0], Tensor)
            else tuple(x)
            for x in args
        ]
    )


class NotCacheable(Exception):
    """A launcher did something that an entry cannot hold."""


class Launch(NamedTuple):
    """A compiled kernel with its grid, and its arguments, None for those that depend on addresses.

    Attributes:
        pointers: index of an argument, index of a tensor, offset from its start in bytes.
        fills: index of an argument and the function that computes it, for tuples and tensor descriptors.
    """

    run: Callable[..., None]
    constants: list[Any]
    pointers: list[tuple[int, int, int]]
    fills: list[tuple[int, Fill]]


class Entry(NamedTuple):
    """A cached call. Its tensors are the arguments, then what `makes` allocates, from which `result` is.

    Attributes:
        inputs: index of each tensor among the arguments; of lists, the index of the list and that of the tensor in it.
    """

    inputs: list[int]
    in_lists: list[tuple[int, int]]
    makes: list[Callable[[], Tensor]]
    launches: list[Launch]
    result: Callable[[list[Tensor]], Any]

    def __call__(self, args: tuple[Any, ...]) -> Any:
        """Launch for `args` with the key of the recorded call."""
        tensors = [make() for make in self.makes]
        addresses = [args[i].data_ptr() for i in self.inputs]
        addresses += [args[i][j].data_ptr() for i, j in self.in_lists]
        addresses += [x.data_ptr() for x in tensors]
        for run, constants, pointers, fills in self.launches:
            values = constants.copy()
            for i, tensor, offset in pointers:
                values[i] = addresses[tensor] + offset
            for i, fill in fills:
                values[i] = fill(addresses)
            run(*values)
        return self.result(tensors)


class Found(NamedTuple):
    """The state of a call in a cache.

    Attributes:
        state: its entry; None if its key came once; why it is not cached; or NEW.
    """

    key: Key
    state: Entry | str | None

    @property
    def entry(self) -> Entry | None:
        """The entry of the call, None if it has none."""
        return self.state if isinstance(self.state, Entry) else None


NEW = "its key has not come yet"
"""The state of a call that no cache keeps."""


class LaunchCache:
    """A launcher with a launch cache; called with the arguments of its op.

    A call is recorded when its key comes the second time: most sizes of a prompt come once. A key takes as long to
    compute and to hash as a kernel to launch, so that a call is looked up once.
    """

    def __init__(self, launcher: Callable[..., Any]) -> None:
        self._launcher = launcher
        self.states: dict[Key, Entry | str | None] = {}
        """The states of the keys that have come, see `Found`."""

    @property
    def unsupported(self) -> dict[Key, str]:
        """Why keys are not cached."""
        return {key: state for key, state in self.states.items() if isinstance(state, str)}

    def look_up(self, args: tuple[Any, ...]) -> Found:
        """Return what is known of a call of `args`."""
        key = key_of(args)
        return Found(key, self.states.get(key, NEW))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Launch."""
        return self._launcher(*args, **kwargs) if kwargs else self.run(self.look_up(args), args)

    def run(self, found: Found, args: tuple[Any, ...]) -> Any:
        """Launch for `args`, which were looked up."""
        key, state = found
        if isinstance(state, Entry):
            return state(args)
        if state is None:
            return self._record(key, args)
        if state is NEW:
            if len(self.states) >= MAX_ENTRIES:
                self.states.clear()
            self.states[key] = None
        return self._launcher(*args)

    def _record(self, key: Key, args: tuple[Any, ...]) -> Any:
        with CallRecorder(args) as recorder:
            result = self._launcher(*args)
        try:
            self.states[key] = recorder.entry(result)
        except NotCacheable as why:
            self.states[key] = str(why)
        return result


class _Base:
    """Stands for the tensor of a tensor descriptor, of which Triton takes the address."""

    __slots__ = ("address",)

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        """Return the address."""
        return self.address


class CallRecorder(TorchDispatchMode):
    """Records what this thread launches while it is entered.

    Tensors are told apart by identity, not by address: two arguments in one storage may be in two the next time.
    """

    def __init__(self, args: tuple[Any, ...]) -> None:
        super().__init__()
        self._inputs = [i for i, x in enumerate(args) if isinstance(x, Tensor)]
        lists = [(i, x) for i, x in enumerate(args) if type(x) is list]
        self._in_lists = [(i, j) for i, values in lists for j, x in enumerate(values) if isinstance(x, Tensor)]
        tensors = [args[i] for i in self._inputs] + [args[i][j] for i, j in self._in_lists]
        self._given = len(tensors)
        self._roots: dict[int, tuple[Tensor, Tensor]] = {id(x): (x, x) for x in tensors}
        """By id: a tensor, kept so that nothing else gets its id, and the one that it is a view of, or itself."""
        self._numbers = {id(x): number for number, x in enumerate(tensors)}
        """Index of a tensor of the entry, by id."""
        self._makes: dict[int, Callable[[], Tensor] | None] = {}
        """Function that makes a tensor of the launcher again, by id; None for memory."""
        self._launches: list[tuple[Callable[..., None], list[Any]]] = []
        self._why = "" if len(self._roots) == len(tensors) else "two arguments are one tensor"
        self._making = False

    def __enter__(self) -> CallRecorder:
        recording.recorder = self
        super().__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        recording.recorder = None
        super().__exit__(*failure)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._making:
            return out
        if func in EMPTY:
            self._own(out, None)
        elif not func.is_view:
            self._why = self._why or f"it calls {func}"
        elif id(args[0]) in self._roots:
            root = self._roots[id(args[0])][1]
            self._roots |= {id(view): (view, root) for view in (out if isinstance(out, (list, tuple)) else (out,))}
        return out

    def launched(self, compiled: Any, grid: tuple[int, ...], values: list[Any]) -> None:
        """Record the launch `compiled[grid](*values)`."""
        if compiled is None:
            self._why = self._why or "a kernel is not compiled"
        else:
            self._launches.append((compiled[(*grid, 1, 1)[:3]], values))

    def made(self, make: Callable[..., Tensor], args: tuple[Any, ...]) -> Tensor:
        """Return `make(*args)`, which the entry calls again; a view, since it may be the same tensor each time."""
        self._making = True
        out = make(*args)[:]
        self._making = False
        self._own(out, partial(make, *args))
        return out

    def entry(self, result: Any) -> Entry:
        """Return the recorded call, of a launcher that returned `result`; NotCacheable if it did something else."""
        if self._why:
            raise NotCacheable(self._why)
        outs = result if isinstance(result, tuple) else (result,)
        views: dict[int, list[Tensor]] = {}
        for out in outs:
            if out is not None:
                views.setdefault(self._number(out), []).append(out)
        if any(number < self._given for number in views):
            raise NotCacheable("a result is a view of an argument")
        launches = [Launch(run, *self._arguments(values)) for run, values in self._launches]
        makes, contiguous = [], set()
        for ident, number in [*self._numbers.items()][self._given :]:
            root, make = self._roots[ident][0], self._makes[ident]
            if make is None and len(views.get(number, ())) == 1 and _fills(views[number][0], root):
                contiguous.add(number)
                make = _like(views[number][0])
            makes.append(make or partial(torch.empty, _bytes(root), dtype=torch.uint8, device=root.device))
        first = self._given
        results = [
            (lambda made: None) if out is None else _out(out, number - first, number in contiguous)
            for out in outs
            for number in [0 if out is None else self._number(out)]
        ]
        return Entry(
            self._inputs, self._in_lists, makes, launches, _tuple(results) if isinstance(result, tuple) else results[0]
        )

    def _own(self, tensor: Tensor, make: Callable[[], Tensor] | None) -> None:
        """Remember a tensor that the launcher made."""
        self._roots[id(tensor)], self._makes[id(tensor)] = (tensor, tensor), make

    def _root(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._roots:
            raise NotCacheable("a tensor is neither an argument nor made by the launcher")
        return self._roots[id(tensor)][1]

    def _number(self, tensor: Tensor) -> int:
        """Return the index of the tensor that `tensor` is a view of."""
        return self._numbers.setdefault(id(self._root(tensor)), len(self._numbers))

    def _pointer(self, tensor: Tensor) -> tuple[int, int]:
        """Return that index and the offset from its start in bytes."""
        return self._number(tensor), tensor.data_ptr() - self._root(tensor).data_ptr()

    def _arguments(self, values: list[Any]) -> tuple[list[Any], list[tuple[int, int, int]], list[tuple[int, Fill]]]:
        """Return constants, pointers and fills of a launch; none holds a tensor."""
        constants, pointers, fills = values.copy(), [], []
        for i, value in enumerate(values):
            if isinstance(value, Tensor) and value.numel():
                pointers.append((i, *self._pointer(value)))
            elif fill := self._fill(value):
                fills.append((i, fill))
            else:
                continue
            constants[i] = None
        return constants, pointers, fills

    def _fill(self, value: Any) -> Fill | None:
        """Return what computes an argument that holds tensors, None for a constant."""
        if isinstance(value, Tensor):
            if not value.numel():
                return lambda addresses: 0  # torch's address of a tensor without elements
            number, offset = self._pointer(value)
            return lambda addresses: addresses[number] + offset
        if type(value).__name__ == "TensorDescriptor":  # not every Triton has the class
            number, offset = self._pointer(value.base)
            kind, fields = type(value), {name: field for name, field in vars(value).items() if name != "base"}

            def describe(addresses: list[int]) -> Any:
                descriptor = object.__new__(kind)
                descriptor.__dict__.update(fields, base=_Base(addresses[number] + offset))
                return descriptor

            return describe
        fills = [self._fill(item) for item in value] if isinstance(value, tuple) else []
        if not any(fills):
            return None
        count = next((i for i, x in enumerate(value) if not isinstance(x, Tensor) or not x.numel()), len(value))
        pointers = [self._pointer(x) for x in value[:count]]
        if count > 1 and not any(fills[count:]) and not any(offset for _, offset in pointers):
            # Tensors without offsets, then constants, take less time together than item by item.
            get, constants = itemgetter(*[number for number, _ in pointers]), tuple(value[count:])
            return (lambda addresses: get(addresses) + constants) if constants else get
        parts = [(fill, None if fill else item) for fill, item in zip(fills, value, strict=True)]
        return lambda addresses: tuple([fill(addresses) if fill else item for fill, item in parts])


def _bytes(tensor: Tensor) -> int:
    """Return the size of a tensor's memory."""
    return tensor.untyped_storage().nbytes()


def _fills(view: Tensor, root: Tensor) -> bool:
    """Return whether `view` takes all memory of `root`."""
    last = sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
    size = (last + 1) * view.element_size() if view.numel() else 0
    return view.data_ptr() == root.data_ptr() and size == _bytes(root)


def _like(tensor: Tensor) -> Callable[[], Tensor]:
    """Return what allocates a tensor like this one."""
    return partial(torch.empty_strided, tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _out(out: Tensor, index: int, whole: bool) -> Callable[[list[Tensor]], Tensor]:
    """Return what takes a result like `out` from the tensors made: one of them, or a view of one that is bytes."""
    if whole:
        return itemgetter(index)
    dtype, where = out.dtype, (out.shape, out.stride(), out.storage_offset())
    return lambda made: made[index].view(dtype).as_strided(*where)


def _tuple(results: list[Callable[[list[Tensor]], Any]]) -> Callable[[list[Tensor]], Any]:
    return lambda made: tuple([result(made) for result in results])
