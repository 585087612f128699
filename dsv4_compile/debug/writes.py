"""Writes to persistent tensors: the step of the last write of each row, and its writer.

Ops of the thread that opened the block are seen by a dispatch mode, with rows and line. What other threads and
compiled code write is seen by the tensors' version counters, without rows and line.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from .._compat import OpOverload, version_of
from ..runtime.addresses import TensorRecord
from ..runtime.aliasing import byte_range, owner
from ..runtime.captures import TransparentMode
from .places import Place, is_standard, is_torch
from .replay.sources import op_name

_PACKAGE = Path(__file__).parent.parent
_EARLIER = "code before the witness"
UNSEEN = "code that the witness does not see, in place"


@dataclass(frozen=True, slots=True)
class Write:
    """One write: its number among all, the step that it was made for, and who made it."""

    serial: int = 0
    step: int = 1
    writer: str = _EARLIER

    def __str__(self) -> str:
        return f"for step {self.step} by {self.writer}"


@dataclass(slots=True)
class Source:
    """Tensor that a buffer was copied from: `target` is the part of the buffer, `record` the view of its owner."""

    owner: weakref.ref[Tensor]
    version: int
    record: TensorRecord
    offset: int
    target: Tensor

    @classmethod
    def of(cls, target: Tensor, given: Tensor) -> Source:
        """Remember that `given` was copied to `target` just now."""
        base = owner(given)
        record = TensorRecord.of("", given)
        return cls(weakref.ref(base), version_of(base), record, int(given.storage_offset()), target)

    def changed(self) -> Tensor | None:
        """Return the source as it is now if it is alive and was written since; None otherwise."""
        base = self.owner()
        if base is None or self.version < 0 or version_of(base) == self.version:
            return None
        return base.as_strided(self.record.shape, self.record.stride, self.offset)


@dataclass(slots=True, eq=False)
class Buffer:
    """A watched tensor `[N, ...]`. `rows` has the end of each range of rows and its last write, ascending.

    `kind` is "input", "batch", "starts", "table", "output", "cache" or "other": which rules hold for it.
    """

    name: str
    tensor: Tensor
    kind: str
    rows: list[tuple[int, Write]] = field(default_factory=list)
    source: Source | None = None
    version: int = -1
    pending: int = 0

    def __post_init__(self) -> None:
        self.rows = [(self.count, Write())]
        self.version = version_of(self.tensor)

    @property
    def count(self) -> int:
        """Number of rows, 1 for a scalar."""
        return self.tensor.shape[0] if self.tensor.dim() else 1

    def add(self, write: Write, first: int = 0, end: int | None = None) -> None:
        """Record that rows `first` to `end` were written."""
        end = self.count if end is None else end
        before = [(min(stop, first), last_write) for start, stop, last_write in self._ranges() if start < first]
        after = [(stop, last_write) for start, stop, last_write in self._ranges() if stop > end]
        self.rows = [*before, (end, write), *after] if end > first else self.rows

    def _ranges(self) -> Iterator[tuple[int, int, Write]]:
        start = 0
        for stop, write in self.rows:
            yield start, stop, write
            start = stop

    def oldest(self, first: int, end: int) -> tuple[int, int, Write]:
        """Return the range of rows within `first` to `end` that was written first, and its write."""
        inside = [(max(a, first), min(b, end), w) for a, b, w in self._ranges() if a < end and b > first]
        return min(inside, key=lambda each: each[2].serial)

    @property
    def last(self) -> Write:
        """The last write of any row."""
        return max((write for _, write in self.rows), key=lambda write: write.serial)

    def rows_of(self, tensor: Tensor) -> tuple[int, int]:
        """Return the rows that share bytes with `tensor`, a tensor of the same storage; (0, 0) if none does."""
        (low, high), (first, end) = byte_range(self.tensor), byte_range(tensor)
        if max(low, first) >= min(high, end):
            return 0, 0
        pitch = self.tensor.stride(0) * self.tensor.itemsize if self.tensor.dim() else 0
        if pitch == 0:
            return 0, self.count
        return max(0, (first - low) // pitch), min(self.count, -(-(end - low) // pitch))


class Writes(TransparentMode):
    """Dispatch mode that records writes to buffers.

    Args:
        buffers: all watched tensors.

    Attributes:
        step: number of the step that writes are made for.
    """

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        super().__init__()
        self.buffers, self.step = buffers, 1
        self._serial = 0
        self._by_storage: dict[int, list[Buffer]] = {}
        for buffer in buffers:
            self._by_storage.setdefault(buffer.tensor.untyped_storage().data_ptr(), []).append(buffer)
        self._pending: list[Buffer] = []
        self._paused = False

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`, and record what it writes."""
        kwargs = kwargs or {}
        if self._paused or not func._schema.is_mutable:
            return func(*args, **kwargs)
        self.settle()
        written = [(b, t) for t in written_by(func, args, kwargs) for b in self._of_storage(t)]
        for buffer, _ in written:
            self._compare(buffer)
        out = func(*args, **kwargs)
        if written:
            write = self.new(_writer(func))
            for buffer, tensor in written:
                self._record(buffer, tensor, write, args[1] if func is torch.ops.aten.copy_.default else None)
                # Of the op itself the counters grow when this call has returned.
                buffer.version, buffer.pending = version_of(buffer.tensor), buffer.pending + 1
            self._pending += {id(buffer): buffer for buffer, _ in written}.values()
        return out

    def _record(self, buffer: Buffer, tensor: Tensor, write: Write, source: Any) -> None:
        """Record a write to `tensor`, a copy of `source` if that is one."""
        rows = buffer.rows_of(tensor)
        if rows == (0, 0):
            return
        if buffer.last.step < write.step:
            buffer.source = None  # in the step of a copy, other ops fill what it leaves
        buffer.add(write, *rows)
        if isinstance(source, Tensor):
            buffer.source = Source.of(tensor, source)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing inside the block; what it writes is not taken for a write of others."""
        outer = self._paused
        if not outer:
            self.look()
        self._paused = True
        try:
            yield
        finally:
            self._paused = outer
            for buffer in self.buffers:
                buffer.version = version_of(buffer.tensor)

    def new(self, writer: str) -> Write:
        """Return the next write."""
        self._serial += 1
        return Write(self._serial, self.step, writer)

    def sharing(self, tensor: Tensor) -> list[Buffer]:
        """Return the buffers with rows in the memory of `tensor`."""
        return [buffer for buffer in self._of_storage(tensor) if buffer.rows_of(tensor) != (0, 0)]

    def _of_storage(self, tensor: Tensor) -> list[Buffer]:
        """Return the buffers in the storage of `tensor`; it may share their counters."""
        if type(tensor) not in (Tensor, nn.Parameter):  # a fake tensor of the compiler has no memory
            return []
        return self._by_storage.get(tensor.untyped_storage().data_ptr(), [])

    def settle(self) -> None:
        """Read the counters of buffers that this mode saw written; one that grew more was written by other code too."""
        for buffer in self._pending:
            self._compare(buffer)
        self._pending.clear()

    def look(self) -> None:
        """Record writes that only the counters tell."""
        self.settle()
        for buffer in self.buffers:
            self._compare(buffer)

    def _compare(self, buffer: Buffer) -> None:
        now = version_of(buffer.tensor)
        if now - buffer.version > buffer.pending:
            buffer.add(self.new(UNSEEN))
            buffer.source = None
        buffer.version, buffer.pending = now, 0


def written_by(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that a call of `func` writes."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            values = value if isinstance(value, (list, tuple)) else (value,)
            yield from (tensor for tensor in values if isinstance(tensor, Tensor))


def _writer(func: OpOverload) -> str:
    """Return the method of this package that the user's code called, or else the op, with the line of that code."""
    frame: FrameType | None = sys._getframe(2)
    inner = ""
    while frame is not None:
        code = frame.f_code
        if not is_torch(code.co_filename) and not is_standard(code.co_filename):
            if not Path(code.co_filename).is_relative_to(_PACKAGE):
                return f"{inner or op_name(func)} at {Place(code.co_filename, frame.f_lineno)}"
            method_owner = frame.f_locals.get("self")
            inner = f"{type(method_owner).__name__}.{code.co_name}" if method_owner is not None else code.co_name
        frame = frame.f_back
    return inner or op_name(func)
