"""A launch cache: launches by shape, stride, dtype, alignment and scalars; a launcher may depend on nothing else.

A launcher chooses a tiling, allocates, makes views and has Triton look at every argument; on the host that takes longer
than most kernels run. An entry of the cache is what it came to: memory to allocate, compiled kernels with their grids,
constants and pointers, and results. Launchers that call ops of torch, other than views, are not cached.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._compat import TorchDispatchMode
from .launch import noting

ALIGN = 64
"""Bytes up to which a launcher may look at the alignment of its arguments. It must not look at their offsets in a
storage: these are not in the key, since a graph that is being compiled knows no address."""
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


def key_of(args: tuple[Any, ...]) -> Key:
    """Return all that a launcher may look at; an op's schema fixes the types."""
    return tuple(
        [
            (x.dtype, x.shape, x.stride(), x.data_ptr() % ALIGN, x.get_device()) if isinstance(x, Tensor) else x
            for x in args
        ]
    )


class NotCacheable(Exception):
    """A launcher did something that cannot be replayed."""


class Launch(NamedTuple):
    """A compiled kernel with its grid, and its arguments but for what depends on addresses.

    Attributes:
        pointers: index of an argument, index of a tensor, offset from its start in bytes.
        fills: index of an argument and what computes it, for tuples and tensor descriptors.
    """

    run: Callable[..., None]
    constants: tuple[Any, ...]
    pointers: tuple[tuple[int, int, int], ...]
    fills: tuple[tuple[int, Fill], ...]


class Replay(NamedTuple):
    """A cached call.

    Attributes:
        inputs: indices of the arguments that are tensors.
        makes: allocate the tensors that the launcher made, of which views are `outs`.
        outs: what is returned: index of a made tensor and a view of it, or None.
        single: whether the launcher returns no tuple.
    """

    inputs: tuple[int, ...]
    makes: tuple[Callable[[], Tensor], ...]
    launches: tuple[Launch, ...]
    outs: tuple[tuple[int, Callable[[Tensor], Tensor] | None] | None, ...]
    single: bool

    def __call__(self, args: tuple[Any, ...]) -> Any:
        """Launch for `args`, whose key is that of the recorded call."""
        made = [make() for make in self.makes]
        addresses = [args[i].data_ptr() for i in self.inputs]
        addresses += [x.data_ptr() for x in made]
        for run, constants, pointers, fills in self.launches:
            values = [*constants]
            for i, tensor, offset in pointers:
                values[i] = addresses[tensor] + offset
            for i, fill in fills:
                values[i] = fill(addresses)
            run(*values)
        outs = [None if out is None else made[out[0]] if out[1] is None else out[1](made[out[0]]) for out in self.outs]
        return outs[0] if self.single else tuple(outs)


class LaunchCache:
    """A launcher with a launch cache.

    A call is recorded when its key comes the second time: most sizes of a prompt come once. `unsupported` says why a
    key is not cached.
    """

    def __init__(self, launcher: Callable[..., Any]) -> None:
        self._launcher = launcher
        self.entries: dict[Key, Replay | None] = {}
        """None for a key that came once."""
        self.unsupported: dict[Key, str] = {}

    def find(self, args: tuple[Any, ...]) -> Replay | None:
        """Return the entry for `args`, None if there is none."""
        return self.entries.get(key_of(args))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Launch."""
        if kwargs:
            return self._launcher(*args, **kwargs)
        key = key_of(args)
        entry = self.entries.get(key)
        if entry is not None:
            return entry(args)
        if key not in self.entries:
            if len(self.entries) >= MAX_ENTRIES:
                self.entries.clear()
                self.unsupported.clear()
            self.entries[key] = None
        elif key not in self.unsupported:
            return self._record(key, args)
        return self._launcher(*args)

    def _record(self, key: Key, args: tuple[Any, ...]) -> Any:
        with Recorder(args) as recorder:
            result = self._launcher(*args)
        try:
            self.entries[key] = recorder.replay(result)
        except NotCacheable as why:
            self.unsupported[key] = str(why)
        return result


class _Base:
    """Stands for the tensor of a tensor descriptor, of which Triton asks the address."""

    __slots__ = ("address",)

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        """Return the address."""
        return self.address


class Recorder(TorchDispatchMode):
    """Records what this thread launches while it is entered.

    Tensors are told apart by identity, not by address: two arguments in one storage may be in two the next time.
    """

    def __init__(self, args: tuple[Any, ...]) -> None:
        super().__init__()
        tensors = [x for x in args if isinstance(x, Tensor)]
        self._args = args
        self._roots: dict[int, tuple[Tensor, Tensor]] = {id(x): (x, x) for x in tensors}
        """By id: a tensor, kept so that nothing else gets its id, and the one whose memory it is a view of."""
        self._made: dict[int, Callable[[], Tensor] | None] = {}
        """By id of a tensor that the launcher made: how to make it again, None for memory to allocate."""
        self._launches: list[tuple[Callable[..., None], list[Any]]] = []
        self._why = "" if len(self._roots) == len(tensors) else "two arguments are one tensor"
        self._ours = False

    def __enter__(self) -> Recorder:
        noting.tape = self
        super().__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        noting.tape = None
        super().__exit__(*failure)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._ours:
            return out
        if func in EMPTY:
            self._roots[id(out)], self._made[id(out)] = (out, out), None
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

    def made_each_time(self, make: Callable[..., Tensor], args: tuple[Any, ...]) -> Tensor:
        """Return `make(*args)`, which replays call again."""
        self._ours = True
        out = make(*args)
        self._ours = False
        self._roots[id(out)], self._made[id(out)] = (out, out), partial(make, *args)
        return out

    def replay(self, result: Any) -> Replay:
        """Return the recorded call, of a launcher that returned `result`; NotCacheable if it cannot be replayed."""
        if self._why:
            raise NotCacheable(self._why)
        inputs = tuple(i for i, x in enumerate(self._args) if isinstance(x, Tensor))
        outs = result if isinstance(result, tuple) else (result,)
        self._numbers = {id(self._args[i]): number for number, i in enumerate(inputs)}
        launches = tuple(Launch(run, *self._arguments(values)) for run, values in self._launches)
        given: dict[int, list[Tensor]] = {}
        for out in outs:
            if out is not None:
                given.setdefault(self._number(out), []).append(out)
        if any(number < len(inputs) for number in given):
            raise NotCacheable("a result is a view of an argument")
        makes, whole = [], set()
        for ident, number in list(self._numbers.items())[len(inputs) :]:
            root, again = self._roots[ident][0], self._made[ident]
            views = given.get(number, [])
            if again is None and len(views) == 1 and _fills(views[0], root):
                whole.add(number)
                again = _like(views[0])
            makes.append(again or partial(torch.empty, _bytes(root), dtype=torch.uint8, device=root.device))
        results = tuple(
            None if out is None else (number - len(inputs), None if number in whole else _view(out))
            for out in outs
            for number in (self._number(out) if out is not None else 0,)
        )
        return Replay(inputs, tuple(makes), launches, results, not isinstance(result, tuple))

    def _number(self, tensor: Tensor) -> int:
        """Return the index of the tensor whose memory `tensor` is in: arguments come first."""
        return self._numbers.setdefault(id(self._root(tensor)), len(self._numbers))

    def _root(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._roots:
            raise NotCacheable("a tensor is neither an argument nor made by the launcher")
        return self._roots[id(tensor)][1]

    def _arguments(self, values: list[Any]) -> tuple[Any, ...]:
        """Return constants, pointers and fills of a launch; constants hold no tensor."""
        constants, pointers, fills = [*values], [], []
        for i, value in enumerate(values):
            if isinstance(value, Tensor) and value.numel():
                pointers.append((i, *self._pointer(value)))
            elif fill := self._fill(value):
                fills.append((i, fill))
            else:
                continue
            constants[i] = None
        return tuple(constants), tuple(pointers), tuple(fills)

    def _pointer(self, tensor: Tensor) -> tuple[int, int]:
        """Return the index of a tensor and the offset from its start in bytes."""
        return self._number(tensor), tensor.data_ptr() - self._root(tensor).data_ptr()

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
        if not isinstance(value, tuple):
            return None
        fills = [self._fill(part) for part in value]
        if not any(fills):
            return None
        parts = [(fill, None if fill else part) for fill, part in zip(fills, value, strict=True)]
        return lambda addresses: tuple([fill(addresses) if fill else part for fill, part in parts])


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


def _view(tensor: Tensor) -> Callable[[Tensor], Tensor]:
    """Return what makes such a view of bytes."""
    dtype, where = tensor.dtype, (tensor.shape, tensor.stride(), tensor.storage_offset())
    return lambda memory: memory.view(dtype).as_strided(*where)
