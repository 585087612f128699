"""Files that other processes read: atomic replacement, and who else can write them.

A process that is killed while it replaces a file leaves the old one.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import platform
import random
import stat
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_log = logging.getLogger(__name__)
MOST_ENTRIES = 100_000
"""Entries of a folder that `why_unsafe` looks at: a second or two."""
LOCK_SECONDS = 10.0
"""Time that `locked` waits for other processes."""
AS_IT_IS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
"""Flags that open no link, and do not wait for the writer of a pipe."""
_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_READERS = stat.S_IRGRP | stat.S_IROTH
_ENTRY = stat.S_IXGRP | stat.S_IXOTH


def replace(path: Path, text: str, *, private: bool = False) -> None:
    """Replace the file at `path` with `text` and a final newline; of several processes, the last one's text stays.

    A private file is not written by others, whatever this process's umask.
    """
    replace_bytes(path, f"{text}\n".encode(), private=private)


def replace_bytes(path: Path, content: bytes, *, private: bool = False) -> None:
    """Replace the file at `path` with `content`, as `replace` does."""
    new = path.with_name(f".{path.name}.{platform.node()}-{os.getpid()}-{threading.get_ident()}.new")
    mode = stat.S_IRUSR | stat.S_IWUSR if private else stat.S_IRUSR | stat.S_IWUSR | _READERS | _OTHERS
    try:
        with open(new, "wb", opener=lambda name, flags: os.open(name, flags | AS_IT_IS, mode)) as file:
            file.write(content)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes out of blocks that name the same folder; after `LOCK_SECONDS` go on without.

    A process that is stopped while it holds the lock delays others, and no more.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        end = time.monotonic() + LOCK_SECONDS
        while fcntl is not None and time.monotonic() < end:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(random.uniform(0.0005, 0.003))
            except OSError:  # a file system without locks of folders
                break
        yield
    finally:
        os.close(descriptor)


def make_private_folder(folder: Path) -> None:
    """Make `folder` for this user alone; one of this user that a group can write is closed to it, which the log says.

    PermissionError if there is one that anyone can write, one of a different user, or a link. Files in a folder that
    was open before need a separate check: see `check_private`.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=stat.S_IRWXU)
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode):
        raise PermissionError(f"{folder} is a link or a file: remove it")
    if hasattr(os, "geteuid") and facts.st_uid == os.geteuid() and facts.st_mode & _OTHERS == stat.S_IWGRP:
        facts = _close(folder)
    if why := _why_shared(facts, folder):
        raise PermissionError(why)


def _close(folder: Path) -> os.stat_result:
    """Take the permissions of others from a folder, as a umask of 002 has left them, and return its new state."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | AS_IT_IS)
    try:
        if os.fstat(descriptor).st_uid == os.geteuid():
            os.fchmod(descriptor, stat.S_IRWXU)
            _log.warning("%s could be written by a group: it is now closed to others", folder)
        return os.fstat(descriptor)
    finally:
        os.close(descriptor)


def check_private(descriptor: int, path: Path) -> None:
    """Raise PermissionError unless the open file `path` is a plain one that nobody else can write."""
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode) or facts.st_nlink > 1:
        raise PermissionError(f"{path} is not a regular file, or has a second hard link")
    if why := _why_shared(facts, path):
        raise PermissionError(why)


def read_private(path: Path, most: int) -> bytes:
    """Return the content of a plain file that nobody else can write, at most `most` bytes. OSError for any other."""
    with os.fdopen(os.open(path, os.O_RDONLY | AS_IT_IS), "rb") as file:
        check_private(file.fileno(), path)
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(f"{path} has more than {most} bytes")
    return content


@contextmanager
def synced(path: Path) -> Iterator[int]:
    """Yield a descriptor of a file or folder after its content has reached the disk."""
    descriptor = os.open(path, os.O_RDONLY | AS_IT_IS)
    try:
        os.fsync(descriptor)
        yield descriptor
    finally:
        os.close(descriptor)


def replace_rows(path: Path, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Replace the file at `path` with `{name: rows}` as JSON, one row a line."""
    lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    replace(path, f'{{\n  "{name}": [\n{lines}\n  ]\n}}')


def why_unsafe(folder: Path) -> str:
    """Return who else can write `folder`, what is in it, or replace it, and the command against that; "" if nobody can.

    The superuser always can. A folder that does not exist is judged by those that it would be in.
    """
    if not hasattr(os, "geteuid"):  # permissions of Windows are not in a file's mode
        return ""
    asked, real = Path(os.path.abspath(folder)), folder.resolve()
    if real.exists() and (why := _why_writable(real)):
        return why
    # A link is replaced in its own folder, and leads to the real one.
    for child, parent in [*itertools.pairwise((asked, *asked.parents)), *itertools.pairwise((real, *real.parents))]:
        if parent.exists() and (why := _why_replaceable(child, parent)):
            return why
    if not real.is_dir() or not real.stat().st_mode & _ENTRY:
        return ""
    reasons = (why for path in _entries(real) if (why := _why_writable(path)))
    return next(reasons, "")


def _why_writable(path: Path) -> str:
    """Return who else can write a file or folder, or ""."""
    try:
        facts = path.lstat()
    except OSError:  # removed meanwhile, or inside a folder that this user cannot enter
        return ""
    return _why_shared(facts, path)


def _why_shared(facts: os.stat_result, path: Path) -> str:
    if not hasattr(os, "geteuid"):
        return ""
    if facts.st_uid not in _trusted():
        return f"{path} belongs to user {facts.st_uid}: choose a private folder"
    if stat.S_ISLNK(facts.st_mode) or not facts.st_mode & _OTHERS:
        return ""
    who, change = ("anyone", "go-w") if facts.st_mode & stat.S_IWOTH else (f"group {facts.st_gid}", "g-w")
    return f"{who} can write {path}: chmod -R {change}"


def _why_replaceable(child: Path, parent: Path) -> str:
    """Return who else can replace `child`, an entry of the folder `parent`, or ""."""
    facts = parent.stat()
    if facts.st_uid not in _trusted():
        return f"{parent} belongs to user {facts.st_uid}, who can replace {child.name}: choose a private folder"
    if not facts.st_mode & _OTHERS:
        return ""
    who = "anyone" if facts.st_mode & stat.S_IWOTH else f"group {facts.st_gid}"
    if not facts.st_mode & stat.S_ISVTX:
        return f"{who} can write {parent}, and so replace {child.name}: choose a different folder, or chmod +t"
    # In a sticky folder only the owner of an entry replaces it.
    owner = child.lstat().st_uid if child.exists() or child.is_symlink() else os.geteuid()
    return "" if owner in _trusted() else f"{child} belongs to user {owner}: choose a private folder"


def _entries(folder: Path) -> Iterator[Path]:
    """Yield up to `MOST_ENTRIES` files and folders below `folder`, folders of a level before their content."""
    left = MOST_ENTRIES
    for root, folders, files in os.walk(folder):
        for name in itertools.islice((*folders, *files), left):
            yield Path(root, name)
        left -= len(folders) + len(files)
        if left <= 0:
            return


def _trusted() -> set[int]:
    """Return the ids of the users who may write what this user runs."""
    return {os.geteuid(), 0}
