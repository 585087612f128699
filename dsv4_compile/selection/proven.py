"""Implementations of ops that have passed their tests on a GPU: `auto` chooses nothing else there.

Kernels are tested everywhere in the interpreter and compiled ahead of time, which says nothing of races, alignment or
a compiler's mistakes on the chip. So tests on hardware are separate. `proven.json` is its record, written by
`python tests/gpu/prove.py` on the machine that ran it; an implementation that is not in it can still be asked for by
name. A CPU needs no entry: all that runs there is tested on every change.

A row of a kernel holds the fingerprint that `fingerprints.json` had when it was proven. A test compares that table
with the code, so a kernel with different fingerprints has changed since. A kernel that was proven with a different
Triton is used after a self-check here, see `checked`.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from .._compat import triton_version
from . import checked

RECORD = Path(__file__).with_name("proven.json")
TABLE = Path(__file__).with_name("fingerprints.json")

_trusted: ContextVar[bool] = ContextVar("dsv4_trusted", default=False)


@functools.cache
def _rows() -> Mapping[tuple[str, str, str], Mapping[str, str]]:
    """Rows of the record by implementation, op and architecture."""
    rows = json.loads(RECORD.read_text(encoding="utf-8"))["proven"]
    return {(row["impl"], row["op"], row["architecture"]): row for row in rows}


@functools.cache
def _table() -> Mapping[str, Any]:
    return dict(json.loads(TABLE.read_text(encoding="utf-8")))


@functools.cache
def table_digest() -> str:
    """Return a hash of the table of fingerprints: the state of all kernels."""
    return hashlib.sha256(TABLE.read_bytes()).hexdigest()[:16]


def fingerprint(op: str, architecture: str) -> str:
    """Return the fingerprint of the kernel of `op` on `architecture`, or "" if the table lacks it.

    An architecture without a column has the fingerprints of all columns together.
    """
    columns = {name: column for name, column in _table().items() if isinstance(column, dict)}
    target = architecture.split()[-1]
    if target in columns:
        return str(columns[target].get(op, ""))
    hashes = [column.get(op, "") for _, column in sorted(columns.items())]
    return hashlib.sha256(" ".join(hashes).encode()).hexdigest()[:16] if all(hashes) else ""


def tested_with(architecture: str) -> set[str]:
    """Return the versions of Triton that implementations have passed with on `architecture`."""
    return {row["triton"] for (_, _, where), row in _rows().items() if where == architecture}


def is_proven(impl: str, op: str, architecture: str) -> bool:
    """Return whether `auto` may use `impl` (`ir` or `triton`) of `op` on `architecture`."""
    return not why_unproven(impl, op, architecture)


def why_unproven(impl: str, op: str, architecture: str) -> str:
    """Return why `auto` does not use `impl` of `op` on `architecture`, or "". See `_compat.device_architecture`."""
    return "" if architecture == "cpu" or _trusted.get() else _why_unproven(impl, op, architecture)


@functools.cache
def _why_unproven(impl: str, op: str, architecture: str) -> str:
    row = _rows().get((impl, op, architecture))
    if row is None:
        return f"{impl} has not been tested on {architecture} yet"
    if impl == "ir":
        return ""  # Inductor generates its code anew, from a lowering that CI runs
    if row["fingerprint"] != fingerprint(op, architecture):
        return f"{impl} has changed since it was proven on {row['device']} ({architecture}), {row['date']}"
    if row["triton"] == _release(triton_version()):
        return ""
    return _why_unchecked(impl, op, architecture, row["triton"])


def _why_unchecked(impl: str, op: str, architecture: str, proven_with: str) -> str:
    """Return why a kernel that was proven with a different Triton is not used with this one, or ""."""
    why = checked.results(architecture, table_digest()).get(op)
    versions = f"proven with Triton {proven_with}, not with {_release(triton_version())}"
    if why is None:
        return f"{impl} is {versions}, and not checked here yet: compile on this GPU, or dsv4 doctor --prove"
    return f"{impl} is {versions}, and failed its self-check here: {why}" if why else ""


def to_check(architecture: str) -> list[str]:
    """Return the ops with kernels proven as they are with a different Triton and not checked here."""
    done = checked.results(architecture, table_digest())
    return [op for op in checkable(architecture) if op not in done]


def checkable(architecture: str) -> list[str]:
    """Return the ops with kernels proven as they are with a different Triton than the installed one."""
    installed = _release(triton_version())
    return sorted(
        op
        for (impl, op, where), row in _rows().items()
        if (impl, where) == ("triton", architecture) and row["triton"] != installed
        if row["fingerprint"] == fingerprint(op, architecture)
    )


def note_checked(architecture: str, found: Mapping[str, str]) -> None:
    """Keep what a self-check found, by op: why it failed, or ""."""
    checked.add(architecture, table_digest(), found)
    forget()


def forget() -> None:
    """Read the record, the table and the results of self-checks again."""
    for cached in (_rows, _table, table_digest, _why_unproven):
        cached.cache_clear()


def state(architecture: str) -> Any:
    """Return the state, apart from the package's files, that affects choices on `architecture`: a part of cache
    keys."""
    return _trusted.get(), sorted(checked.results(architecture, table_digest()).items())


def trusting() -> bool:
    """Return whether this runs inside `trust`."""
    return _trusted.get()


@contextmanager
def trust() -> Iterator[None]:
    """Count everything as proven inside the block: for the tests that are to prove it."""
    token = _trusted.set(True)
    try:
        yield
    finally:
        _trusted.reset(token)


def _release(version: str) -> str:
    return version.split("+")[0]
