"""Read tensors of a safetensors file into their memory with plain reads, by a header that was read before.

The file is not mapped: one that shrinks while it is read raises E209, where a mapping would end the process. Size,
inode, time and header of the open file are those seen before, so that every tensor has the shape that was planned.
Reads name their offset, so several threads may read one file at the same time.
"""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any

import torch
from torch import Tensor

from ..errors import check, error
from .header import DTYPES, LENGTH, Source, Stored, digest_of
from .paths import Identity, open_inside, read_exactly

Index = tuple[int | slice, ...]
CHUNK = 2 << 20
"""Bytes of the buffer for copies to a different device or dtype."""
_FIX = "download the file again, and load when nothing writes to the folder"


class Reader:
    """An open safetensors file. Raises E209 if it changed since its header was read, or changes until it is closed."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._chunk: Tensor | None = None
        self._one = threading.Lock()  # for systems where a read has no offset

    def __enter__(self) -> Reader:
        source = self.source
        try:
            descriptor = open_inside(source.folder, source.file)
        except OSError as fault:
            raise error("E209", got=f"{source.file} cannot be read", why=str(fault), fix=_FIX) from None
        # Without a buffer, reads go from the system's cache to the tensor.
        self._file = open(descriptor, "rb", buffering=0)
        try:
            self._check_unchanged()
            text = read_exactly(descriptor, LENGTH + source.header)
            check(
                digest_of(text[LENGTH:]) == source.digest and int.from_bytes(text[:LENGTH], "little") == source.header,
                "E209",
                got=f"{source.file} changed after its header was read",
                why="the header differs",
                fix=_FIX,
            )
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *fault: Any) -> None:
        self.close(compare=kind is None)

    def close(self, *, compare: bool = True) -> None:
        """Close the file; before it, raise E209 if the file has changed, unless a failure is under way."""
        try:
            if compare:
                self._check_unchanged()
        finally:
            self._file.close()

    def read(self, stored: Stored, part: Index = ()) -> Tensor:
        """Return a tensor of this file, or the part of it that `part` selects, in new memory on the CPU."""
        dtype = DTYPES[stored.dtype]
        if not part:
            return self.fill(torch.empty(stored.shape, dtype=dtype, device="cpu"), stored, 0)
        first, rest = part[0], part[1:]
        begin, count = rows_of(first, stored.shape[0])
        if rest and len(stored.shape) > 2 and count > 1:  # only the parts of each matrix are read
            return torch.stack([self.read(stored, (begin + i, *rest)) for i in range(count)])
        value = torch.empty((count, *stored.shape[1:]), dtype=dtype, device="cpu")
        self.fill(value, stored, begin * (stored.nbytes // stored.shape[0]))
        selected: Index = (0 if isinstance(first, int) else slice(None), *rest)
        return value[selected]

    def copy(self, stored: Stored, part: Index, destination: Tensor) -> None:
        """Copy a tensor, or the part of it that `part` selects, to `destination`, which has exactly its shape."""
        contiguous = not part or (len(part) == 1 and isinstance(part[0], slice))
        dtype = DTYPES[stored.dtype]
        rows = rows_of(part[0], stored.shape[0]) if part and contiguous else (0, stored.shape[0] if stored.shape else 1)
        shape = (rows[1], *stored.shape[1:]) if stored.shape else ()
        if not contiguous or not stored.nbytes:
            value = self.read(stored, part)
            _check_shape(stored, value.shape, destination)
            destination.copy_(value)
            return
        _check_shape(stored, shape, destination)
        height = stored.nbytes // (stored.shape[0] if stored.shape else 1)
        offset = rows[0] * height
        if destination.device.type == "cpu" and destination.dtype is dtype and destination.is_contiguous():
            self.fill(destination, stored, offset)
            return
        if not stored.shape or height > CHUNK:
            destination.copy_(self.read(stored, part))
            return
        step = CHUNK // height
        for row in range(0, rows[1], step):
            count = min(step, rows[1] - row)
            chunk = self._buffer(destination)[: count * height].view(dtype).view(count, *stored.shape[1:])
            destination[row : row + count].copy_(self.fill(chunk, stored, offset + row * height))

    def _buffer(self, destination: Tensor) -> Tensor:
        if self._chunk is None:
            pinned = destination.device.type == "cuda"
            self._chunk = torch.empty(CHUNK, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        return self._chunk

    def fill(self, tensor: Tensor, stored: Stored, offset: int) -> Tensor:
        """Read the bytes of `stored` from `offset` on into a contiguous tensor on the CPU; for any thread."""
        size = tensor.nbytes
        check(offset + size <= stored.nbytes, "E209", got=f"{stored}, of which {size} bytes are asked at {offset}")
        if not size:
            return tensor
        memory = memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")
        position = self.source.data + stored.begin + offset
        done = 0
        while done < size:
            try:
                count = self._read(memory[done:], position + done)
            except OSError as fault:
                raise error("E209", got=f"{stored} cannot be read", why=str(fault), fix=_FIX) from None
            if not count:
                raise error("E209", got=f"{stored} ends after {done} of {size} bytes", why="it shrank", fix=_FIX)
            done += count
        return tensor

    def _read(self, memory: memoryview, position: int) -> int:
        """Read bytes from `position` on and return their number, fewer than fit near the end of the file."""
        if hasattr(os, "preadv"):
            return os.preadv(self._file.fileno(), [memory], position)
        with self._one:
            self._file.seek(position)
            return self._file.readinto(memory) or 0

    def _check_unchanged(self) -> None:
        now, before = Identity.of(self._file.fileno()), self.source.identity
        changed = [name for name, new, old in zip(Identity._fields, now, before, strict=True) if new != old]
        check(
            not changed,
            "E209",
            got=f"{self.source.file} changed after its header was read",
            why=", ".join(f"its {name} was {getattr(before, name)} and is {getattr(now, name)}" for name in changed),
            fix=_FIX,
        )


def read_ahead(sources: list[Source]) -> None:
    """Let the operating system read files into its cache, where it can be asked to. May wait for the disk."""
    for source in sources:
        try:
            descriptor = open_inside(source.folder, source.file)
        except (OSError, ValueError):  # reported when the file is read
            continue
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
        except OSError:
            pass
        finally:
            os.close(descriptor)


def rows_of(index: int | slice, size: int) -> tuple[int, int]:
    """Return the first of the rows that `index` selects, and their number."""
    if isinstance(index, int):
        return index, 1
    begin, end, _ = index.indices(size)
    return begin, max(end - begin, 0)


def _check_shape(stored: Stored, shape: tuple[int, ...], destination: Tensor) -> None:
    """Raise E207 unless the shapes are equal: copying might broadcast."""
    needed = tuple(destination.shape)
    check(tuple(shape) == needed, "E207", got=f"{stored} of shape {tuple(shape)}", why=f"its place has {needed}")
