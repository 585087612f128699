"""Files of a checkpoint folder: names that stay inside, links that stay inside, and descriptors of regular files.

A folder in the cache of the Hugging Face Hub holds links to `blobs` of its repository; these alone may leave it.
"""

from __future__ import annotations

import os
import reprlib
import stat
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import check, error

MOST_NAME = 1024
"""Characters of the longest name of a tensor or file."""
_MOST_PART = 255
"""Bytes of the longest file name that common file systems have."""
_FLAGS = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_CLOEXEC", "O_NONBLOCK", "O_NOFOLLOW", "O_BINARY"))
"""Neither a FIFO nor a link that replaced the file meanwhile is opened."""
_SHORT = reprlib.Repr()
_SHORT.maxstring, _SHORT.maxother = 200, 200


class Identity(NamedTuple):
    """Facts of an open file that a replaced or rewritten file does not share."""

    device: int
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, descriptor: int) -> Identity:
        """Return the identity of an open file."""
        facts = os.fstat(descriptor)
        return cls(facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns)


def shown(value: Any) -> str:
    """Return a value from a file as one short line of printable characters."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # an integer with more digits than Python writes
        return f"a {type(value).__name__} with thousands of digits"


def is_name(value: object) -> bool:
    """Return whether `value` can name a tensor: short, printable text."""
    return isinstance(value, str) and 0 < len(value) <= MOST_NAME and value.isprintable()


def why_bad_file_name(name: object) -> str:
    """Return why `name` does not name a file of the folder that mentions it, or ""."""
    if not isinstance(name, str) or not is_name(name):
        return f"names are printable text of at most {MOST_NAME} characters"
    components = name.split("/")
    if "\\" in name or any(len(component.encode()) > _MOST_PART for component in components):
        return f"names have no backslash, and parts of at most {_MOST_PART} bytes"
    return "it names files of its folder" if {"", ".", ".."} & set(components) else ""


def folder_of(path: str | os.PathLike[str]) -> Path:
    """Return the path of a folder or file that a caller passed, `~` expanded, or raise E209."""
    check(
        isinstance(path, (str, os.PathLike)) and isinstance(os.fspath(path), str),
        "E209",
        got=f"a {type(path).__name__}",
        rule="a path is text or a pathlib.Path",
    )
    try:
        return Path(path).expanduser()
    except RuntimeError as fault:  # a user that does not exist
        raise error("E209", got=f"no folder {shown(os.fspath(path))}", why=str(fault)) from None


def inside(folder: Path, file: Path) -> Path:
    """Return `file` without links, or raise E209 if it is outside of `folder` and the blobs of its repository."""
    root, real = Path(os.path.realpath(folder)), Path(os.path.realpath(file))
    if any(real.is_relative_to(allowed) for allowed in (root, *_blobs(root))):
        return real
    raise error(
        "E209",
        got=f"{file}, a link to {shown(str(real))}, outside of {root}",
        rule="a folder's links stay inside it, or lead from snapshots/ to blobs/ of one models--* folder of the Hub",
        why="a folder from elsewhere does not choose which files of this machine are read",
        fix="copy the file in place of the link (cp -L), or pass the folder that holds it",
    )


def _blobs(root: Path) -> list[Path]:
    """Return the folder of blobs that snapshots of the Hugging Face Hub's cache link to, if `root` is in one."""
    for parent in (root, *root.parents):
        if parent.name == "snapshots" and parent.parent.name.startswith("models--"):
            return [parent.parent / "blobs"]
    return []


def open_inside(folder: Path, file: Path) -> int:
    """Open a regular file of `folder` and return its descriptor; never waits for a FIFO.

    Raises E209 for a link out of the folder, OSError for a file that cannot be opened or is no regular file.
    """
    real = inside(folder, file)
    _check_regular(os.stat(real))  # opening a device may act on it
    descriptor = os.open(real, _FLAGS)
    try:
        _check_regular(os.fstat(descriptor))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _check_regular(facts: os.stat_result) -> None:
    if not stat.S_ISREG(facts.st_mode):
        raise OSError("a FIFO, device, socket or folder, not a regular file")


def read_exactly(descriptor: int, size: int) -> bytes:
    """Return the next `size` bytes, fewer at the end of the file."""
    chunks = []
    while size > 0 and (chunk := os.read(descriptor, size)):
        chunks.append(chunk)
        size -= len(chunk)
    return b"".join(chunks)
