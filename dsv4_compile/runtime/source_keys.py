"""Hashes of torch's and Triton's sources, which begin the keys of torch's caches, for a later process.

torch reads every source file of both before it looks into its caches, also in a start that compiles nothing. `recorded`
returns the hashes with sizes and times of change of the files; a process takes the hashes from there if its files have
the same ones. Python trusts its compiled modules by the same two facts.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_SUFFIXES = (".py", ".so", ".cpp", ".ld")
"""Endings of the files that the hashes read, and of others near them."""


def recorded() -> dict[str, str]:
    """Return the hashes that this process uses, and the state of the files; empty where files have changed since.

    Reads the sources again: those in use may be older than the files.
    """
    from .._compat import codecache, triton_compat

    torch_key: Any = codecache.torch_key
    before, in_use = _state(), torch_key()
    torch_key.clear()
    now = torch_key()
    if now != in_use:
        torch_key.clear()
        torch_key.set(in_use)
        return {}
    keys = {"torch": now.hex()}
    if triton_compat.HAS_TRITON:
        keys["triton"] = inspect.unwrap(triton_compat.triton_key)()
        if keys["triton"] != triton_compat.triton_key():
            return {}
    return {**keys, "files": before} if before and _state() == before else {}


def take(keys: Any) -> bool:
    """Use the hashes of `recorded` in this process, and return whether that was done.

    It is not where a file differs, or torch has hashed its sources already.
    """
    from .._compat import codecache, triton_compat

    texts = isinstance(keys, dict) and all(isinstance(text, str) for text in keys.values())
    if not texts or keys.get("files") != (_state() or None) or ("triton" in keys) != bool(triton_compat.HAS_TRITON):
        return False
    try:
        codecache.torch_key.set(bytes.fromhex(keys["torch"]))
    except (AssertionError, RuntimeError, KeyError, ValueError):  # known already, or no hash
        return False
    if "triton" in keys:
        triton_compat.triton_key = functools.wraps(triton_compat.triton_key)(lambda: keys["triton"])
    return True


def _state() -> str:
    """Return a hash of names, sizes and times of change of torch's and Triton's source files, "" if one is gone now."""
    try:
        files = [facts for name in ("torch", "triton") if (folder := _folder(name)) for facts in _files(folder, "")]
    except OSError:
        return ""
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()


def _folder(package: str) -> str:
    """Return the folder of a package that is installed, or ""."""
    spec = importlib.util.find_spec(package)
    return "" if spec is None or spec.origin is None else str(Path(spec.origin).parent)


def _files(folder: str, name: str) -> Iterator[tuple[str, int, int]]:
    """Yield name, size and time of change of the source files below a folder, without headers and libraries."""
    with os.scandir(folder) as opened:
        entries = sorted(opened, key=lambda entry: entry.name)
    if not any(entry.name.endswith(_SUFFIXES) for entry in entries):
        return
    for entry in entries:
        path = f"{name}/{entry.name}"
        if entry.is_dir():
            yield from _files(entry.path, path)
        elif entry.name.endswith(_SUFFIXES):
            facts = entry.stat()
            yield path, facts.st_size, facts.st_mtime_ns
