"""Headers of safetensors files: each tensor with dtype, shape and place, compared with the size of the file."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import DSV4Error, error
from .json_text import MOST_TENSORS, parse
from .paths import Identity, is_name, open_inside, read_exactly, shown

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Dtypes of safetensors that a header is understood with."""
LENGTH = 8
"""Bytes before the header, which hold its length."""
_MOST_HEADER = 100_000_000
"""Bytes of the longest header that safetensors itself accepts."""
_MOST_DIMS, _MOST_DIM = 8, 1 << 40
_VALUES = 8
"""Commas of a tensor's entry: up to three dims, two offsets and three keys, and the next entry."""


class Stored(NamedTuple):
    """A tensor in a file: its name there, the file, dtype in safetensors' words, shape, and its bytes' place.

    `begin` counts from the end of the header.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.name} of {self.file.name}"


class Source(NamedTuple):
    """A file with a header that was read, and the facts that later reads compare."""

    folder: Path
    file: Path
    identity: Identity
    header: int
    digest: bytes

    @property
    def data(self) -> int:
        """Offset of the tensors' bytes in the file."""
        return LENGTH + self.header


def digest_of(text: bytes) -> bytes:
    """Return the digest of a header, which shows whether it has changed."""
    return hashlib.blake2b(text, digest_size=16).digest()


def read_header(folder: Path, file: Path) -> tuple[dict[str, Stored], Source | None, DSV4Error | None]:
    """Read the header of a safetensors file of `folder` and compare it with the size of the file.

    Returns tensors by name, the source to read them from, and the file's error, or None.
    """

    def damaged(got: str, why: str = "", fix: str = "download the file again") -> DSV4Error:
        return error("E209", got=f"{file}: {got}", why=why, fix=fix)

    try:
        descriptor = open_inside(folder, file)
        try:
            identity = Identity.of(descriptor)
            first = read_exactly(descriptor, LENGTH)
            length = int.from_bytes(first, "little")
            text = read_exactly(descriptor, length) if length <= min(_MOST_HEADER, identity.size) else b""
        finally:
            os.close(descriptor)
    except OSError as fault:
        return {}, None, damaged("cannot be read", str(fault), "let this user read it")
    except DSV4Error as fault:
        return {}, None, fault
    size = identity.size
    if first == b"version ":
        return {}, None, damaged("a Git LFS pointer instead of weights", fix="git lfs pull in that folder")
    if len(first) < LENGTH or len(text) < length or not length:
        why = "it is truncated, or has a different format"
        return {}, None, damaged(f"{size} bytes, too few for a safetensors header", why)
    try:
        header = parse(text, most_values=_VALUES * MOST_TENSORS, most_nested=3 * MOST_TENSORS)
        tensors, end = _tensors(file, header)
    except ValueError as fault:
        return {}, None, damaged("a damaged header", f"{type(fault).__name__}: {fault}")
    source = Source(folder, file, identity, length, digest_of(text))
    data = size - LENGTH - length
    if data == end:
        return tensors, source, None
    if data > end:
        return (
            tensors,
            source,
            damaged(f"{data - end} bytes after the last tensor", "the header is of a different file"),
        )
    cut = next(name for name, stored in tensors.items() if stored.begin + stored.nbytes > data)
    why = f"{cut} is the first tensor that is not whole"
    return tensors, source, damaged(f"truncated, {end - data} of {end + length + LENGTH} bytes are missing", why)


def _is_size(value: object, most: int) -> bool:
    return type(value) is int and 0 <= value <= most


def _entry(name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """Return dtype, shape, begin and end of a header's entry, or raise ValueError."""
    if not is_name(name):
        raise ValueError(f"a tensor named {shown(name)}")
    if not isinstance(entry, dict):
        raise ValueError(f"{name} is {shown(entry)}, not an object")
    dtype: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not is_name(dtype):
        raise ValueError(f"{name} of dtype {shown(dtype)}")
    dims = isinstance(shape, list) and len(shape) <= _MOST_DIMS and all(_is_size(dim, _MOST_DIM) for dim in shape)
    if not dims:
        raise ValueError(f"{name} of shape {shown(shape)}")
    are_offsets = (
        isinstance(offsets, list) and len(offsets) == 2 and all(_is_size(offset, 1 << 62) for offset in offsets)
    )
    if not are_offsets or offsets[0] > offsets[1]:
        raise ValueError(f"{name} with data_offsets {shown(offsets)}")
    return dtype, tuple(shape), offsets[0], offsets[1]


def _tensors(file: Path, header: Mapping[str, Any]) -> tuple[dict[str, Stored], int]:
    """Return the tensors of a header and the bytes that they take, or raise ValueError for one that cannot be."""
    metadata = header.get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"__metadata__ is {shown(metadata)}, not an object of texts")
    entries = [(name, *_entry(name, entry)) for name, entry in header.items() if name != "__metadata__"]
    tensors: dict[str, Stored] = {}
    end = 0
    for name, dtype, shape, begin, after in sorted(entries, key=lambda entry: entry[3:]):
        if begin != end:
            raise ValueError(f"{name} begins at {begin}, where the tensor before ends at {end}")
        if dtype in DTYPES and after - begin != math.prod(shape) * DTYPES[dtype].itemsize:
            raise ValueError(f"{name} has {after - begin} bytes, which {dtype} of shape {shape} does not take")
        end = after
        tensors[name] = Stored(name, file, dtype, shape, begin, after - begin)
    return tensors, end
