"""Lines of user code: read them from torch's tracebacks, and pick the one to show."""

from __future__ import annotations

import linecache
import re
import site
import sysconfig
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

_FRAME = re.compile(r'^ *File "(.+?)", line (\d+), in (.+)\n(?: +(.*))?', re.MULTILINE)
_DECORATOR_LINES = 20
"""Number of lines searched below a first decorator for the `def` line."""


@dataclass(frozen=True, slots=True)
class Place:
    """A line of code. `source` is its text, stripped; fields are empty or 0 where torch does not report them.

    `str` shortens the path: relative to the working directory, or to the folder of installed packages.
    """

    file: str = ""
    line: int = 0
    function: str = ""
    source: str = ""

    def __str__(self) -> str:
        if not self.file:
            return "unknown place"
        path = Path(self.file)
        roots = (Path.cwd(), Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("platlib")))
        shown = next((path.relative_to(root) for root in roots if path.is_relative_to(root)), path)
        return f"{shown}:{self.line}"


def read_stack(text: str) -> list[Place]:
    """Return the frames of a traceback printed by torch, outermost first."""
    return [Place(f, int(n), function_name(fn), source or "") for f, n, fn, source in _FRAME.findall(text)]


def function_name(name: str) -> str:
    """Return the user's function that a frame runs; a function that resumes after a break contains its name."""
    match = re.fullmatch(r"(?:torch_dynamo_)?resume_in_(.+)_at_\d+", name)
    return match[1] if match else name


def innermost(stack: list[Place]) -> Place:
    """Return the innermost frame outside torch and the standard library, or else the innermost frame."""
    for frame in reversed(stack):
        if not is_ours_or_torch(frame.file) and not is_standard(frame.file):
            return frame
    return stack[-1] if stack else Place()


def library_called(stack: list[Place], place: Place) -> str:
    """Return the standard-library module that `place` calls into further down the stack, or ""."""
    inner = stack[stack.index(place) + 1 :] if place in stack else []
    frame = next((frame for frame in inner if is_standard(frame.file)), None)
    if frame is None:
        return ""
    module = Path(frame.file).relative_to(sysconfig.get_path("stdlib")).with_suffix("").parts
    return ".".join(name for name in module if name != "__init__")


def with_source(place: Place) -> Place:
    """Return `place` with the full text of its line, which torch's traceback may truncate or colour."""
    line = linecache.getline(place.file, place.line).strip()
    return replace(place, source=line or place.source)


def definition(place: Place) -> Place:
    """Return the `def` line of a function. Its code object starts at `place`, the line of its first decorator."""
    for line in range(place.line, place.line + _DECORATOR_LINES):
        source = linecache.getline(place.file, line).strip()
        if re.match(r"(async )?def |.*\blambda\b", source):
            return replace(place, line=line, source=source)
        if not source:
            break
    return with_source(place)


def is_torch(file: str) -> bool:
    """Return whether `file` belongs to torch."""
    return Path(file).is_relative_to(Path(torch.__file__).parent)


def is_installed(file: str) -> bool:
    """Return whether `file` belongs to an installed package."""
    return any(Path(file).is_relative_to(root) for root in _site_packages())


def is_ours_or_torch(file: str) -> bool:
    """Return whether `file` belongs to torch or to this package's `explain`."""
    return is_torch(file) or Path(file).is_relative_to(Path(__file__).parent)


@cache
def _site_packages() -> tuple[Path, ...]:
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()}
    return tuple(Path(path) for path in paths if path)


def is_standard(file: str) -> bool:
    """Return whether `file` belongs to the standard library."""
    return Path(file).is_relative_to(sysconfig.get_path("stdlib")) and not is_installed(file)
