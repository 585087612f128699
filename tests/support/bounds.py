"""Run Triton kernels in the interpreter with every access checked against the argument its pointer comes from.

    with checked(mutated=("out",)) as launched:      # in a process started with TRITON_INTERPRET=1
        kernel[grid](out, x, ...)
    assert launched == ["kernel"]

A tensor argument is its elements and nothing else: gaps between rows, page padding and the memory around it are out of
bounds. The 16 bits of a pointer above any address of a process carry the number of its argument, so an access that
runs from one argument into the next is reported as well.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from types import FrameType
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from dsv4_compile._compat import triton_interpreter
from tests.support import quick_interpreter

_TAG_SHIFT = 48
_ADDRESS = np.uint64((1 << _TAG_SHIFT) - 1)
_OURS = __file__, quick_interpreter.__file__, triton.__path__[0]


class BoundsError(AssertionError):
    """A kernel accessed memory that none of its arguments gives it, or wrote to one that it must not change."""


class _Argument:
    """A tensor argument of a launch, and the bytes that belong to it."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name, self.tensor = name, tensor
        self.address, self.size = tensor.data_ptr(), tensor.element_size()
        span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        self.span = span if tensor.numel() else 0

    @cached_property
    def elements(self) -> np.ndarray:
        """Return which places of the tensor's memory, counted from its start, are elements of it."""
        elements = torch.zeros(self.span, dtype=torch.bool)
        if self.span:
            elements.as_strided(self.tensor.shape, self.tensor.stride()).fill_(True)
        return elements.numpy()

    @cached_property
    def dense(self) -> bool:
        """Return whether all of the memory from the first to the last element is elements."""
        return self.tensor.is_contiguous() or bool(self.elements.all())

    def holds_all(self, addresses: np.ndarray, width: int) -> bool:
        """Return whether all accesses are as for `holds`, by their range where that says it."""
        first, last = int(addresses.min()), int(addresses.max())
        if first < self.address or last + width > self.address + self.span * self.size:
            return False
        if width > 1 and (addresses & np.uint64(width - 1)).any():
            return False
        return self.dense or bool(self.holds(addresses, width).all())

    def holds(self, addresses: np.ndarray, width: int) -> np.ndarray:
        """Return which accesses of `width` bytes lie in elements of the tensor, aligned to their width."""
        ok = addresses % np.uint64(width) == 0
        offsets = addresses.astype(np.int64) - self.address
        first = offsets // self.size
        if width == self.size and self.address % width == 0:  # an aligned access is one element
            return ok & self._inside(first)
        last = (offsets + width - 1) // self.size
        for step in range(width // self.size + 1):
            ok &= self._inside(np.minimum(first + step, last))
        return ok

    def _inside(self, elements: np.ndarray) -> np.ndarray:
        """Return which of the numbers, counted from the tensor's start in memory, are elements of it."""
        inside = (elements >= 0) & (elements < self.span)
        return inside & self.elements[np.where(inside, elements, 0)] if self.span else inside

    def __str__(self) -> str:
        kind = str(self.tensor.dtype).removeprefix("torch.")
        return f"{self.name!r}, {kind} {tuple(self.tensor.shape)} with strides {self.tensor.stride()}"


class _Checker:
    """The arguments of the launch under way, and the check that each access goes through."""

    def __init__(self, mutated: Collection[str]) -> None:
        self.mutated = mutated
        self.launched: list[str] = []
        self.kernel = ""
        self.arguments: dict[int, _Argument] = {}
        self.tags: dict[int, int] = {}

    def bind(self, kernel: str, values: dict[str, Any]) -> None:
        """Start a launch of `kernel` with these arguments by name."""
        self.kernel = kernel
        self.launched.append(kernel)
        tensors = [tensor for name, value in values.items() for tensor in _tensors(name, value)]
        self.arguments = {tag: _Argument(*item) for tag, item in enumerate(tensors, 1)}
        self.tags = {id(argument.tensor): tag for tag, argument in self.arguments.items()}

    def tag(self, tensor: Any, pointer: Any) -> None:
        """Mark the pointer made of an argument with the argument's number."""
        pointer.handle.data |= np.uint64(self.tags[id(tensor)] << _TAG_SHIFT)

    def resolve(self, kind: str, pointers: Any, mask: Any) -> Any:
        """Return the addresses of tagged pointers. Raise unless every live one is valid for this `kind` of access."""
        tagged = np.asarray(pointers.data)
        addresses = tagged & _ADDRESS
        live: Any = ...
        if mask is not None and not (lanes := np.asarray(mask.data, bool)).all():
            live = np.broadcast_to(lanes, tagged.shape)
        alive = addresses[live].reshape(-1)
        if alive.size:
            width = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
            first, last = int(tagged.min()) >> _TAG_SHIFT, int(tagged.max()) >> _TAG_SHIFT
            if first == last:  # nearly always
                self._check(kind, self.arguments.get(first), alive, width)
            else:
                of = tagged[live].reshape(-1) >> np.uint64(_TAG_SHIFT)
                for number in np.unique(of).tolist():
                    self._check(kind, self.arguments.get(number), alive[of == number], width)
        return triton_interpreter.TensorHandle(addresses, pointers.dtype)

    def _check(self, kind: str, argument: _Argument | None, addresses: np.ndarray, width: int) -> None:
        if argument is None:
            self._fail(kind, f"through {addresses.size} pointers that come from no argument")
        elif kind != "load" and argument.name not in self.mutated:
            self._fail(kind, f"to argument {argument}, which is not declared as mutated")
        elif not argument.holds_all(addresses, width):
            good = argument.holds(addresses, width)
            wrong = f"{int((~good).sum())} of {good.size} accesses of {width} bytes miss argument {argument}"
            first = int(addresses[~good][0]) - argument.address
            self._fail(kind, f"{wrong}; the first is at byte {first} from its start")

    def _fail(self, kind: str, what: str) -> None:
        program = tuple(triton_interpreter.interpreter_builder.grid_idx)
        raise BoundsError(f"{kind} in {self.kernel}, program {program}, {_kernel_line()}: {what}")


def _tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in an argument, with their names: itself, those of a tuple, or the base of a descriptor."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, tuple):
        fields = getattr(value, "_fields", ())
        for i, item in enumerate(value):
            yield from _tensors(f"{name}.{fields[i]}" if fields else f"{name}[{i}]", item)
    elif isinstance(value, TensorDescriptor):
        yield name, value.base


def _kernel_line() -> str:
    """Return the kernel's current line: the innermost frame that is neither ours nor Triton's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _cause(error: BaseException | None) -> BoundsError | None:
    """Return the fault inside the errors that the interpreter wraps around it, one for each device function."""
    while error is not None and not isinstance(error, BoundsError):
        error = error.__cause__
    return error


@contextmanager
def checked(mutated: Collection[str] = ()) -> Iterator[list[str]]:
    """Check every load, store and atomic of the kernels launched in the block. Yields the names of these kernels.

    Args:
        mutated: names of the kernel arguments that may be written, for all kernels of the block together.
    Raises:
        BoundsError: an access misses the elements of the argument its pointer comes from, is not aligned to its own
            width, goes through a pointer made of a number, or writes to an argument that is not in `mutated`. Raised
            from the launch, with the kernel's line. Lanes that are masked off may point anywhere.
        RuntimeError: Triton was not imported with TRITON_INTERPRET=1, so nothing could be checked.
    """
    interpreter = triton_interpreter
    if not isinstance(tl.softmax, interpreter.InterpretedFunction):
        raise RuntimeError("checked() needs the interpreter: set TRITON_INTERPRET=1 before Triton is imported")
    checker = _Checker(mutated)
    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    call, to_host, to_handle = executor.__call__, executor._init_args_hst, interpreter._implicit_cvt

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return call(self, *args, **kwargs)
        except Exception as error:
            fault = _cause(error)
            if fault is None:
                raise
            raise fault from None

    def bind(self: Any, args: Any, kwargs: Any) -> Any:
        hosted, hosted_kwargs = to_host(self, args, kwargs)
        checker.bind(self.fn.__name__, dict(zip(self.arg_names, hosted, strict=False)) | hosted_kwargs)
        return hosted, hosted_kwargs

    def convert(value: Any) -> Any:
        converted = to_handle(value)
        if id(value) in checker.tags:
            checker.tag(value, converted)
        return converted

    def guarded(name: str, kind: str, pointer: int, mask: int | None) -> Any:
        original = getattr(builder, name)

        def access(self: Any, *args: Any, **kwargs: Any) -> Any:
            handles = list(args)
            handles[pointer] = checker.resolve(kind, args[pointer], None if mask is None else args[mask])
            return original(self, *handles, **kwargs)

        return mock.patch.object(builder, name, access)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(executor, "__call__", run))
        stack.enter_context(mock.patch.object(executor, "_init_args_hst", bind))
        stack.enter_context(mock.patch.object(interpreter, "_implicit_cvt", convert))
        stack.enter_context(guarded("create_masked_load", "load", 0, 1))
        stack.enter_context(guarded("create_masked_store", "store", 0, 2))
        stack.enter_context(guarded("create_atomic_rmw", "atomic", 1, 3))
        stack.enter_context(guarded("create_atomic_cas", "atomic", 0, None))
        yield checker.launched


@contextmanager
def random_program_order() -> Iterator[None]:
    """Run the programs of each launch in the block in a new random order: a GPU promises none."""
    builder = triton_interpreter.InterpreterBuilder
    choose, order = builder.set_grid_idx, list[int]()

    def choose_shuffled(self: Any, x: int, y: int, z: int) -> None:
        _, rows, columns = self.grid_dim
        if (x, y, z) == (0, 0, 0):
            order[:] = torch.randperm(self.grid_dim[0] * rows * columns).tolist()
        program = order[(x * rows + y) * columns + z]
        choose(self, program // (rows * columns), program // columns % rows, program % columns)

    with mock.patch.object(builder, "set_grid_idx", choose_shuffled):
        yield
