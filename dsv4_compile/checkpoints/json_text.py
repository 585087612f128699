"""Bounded reading of JSON: size, number of values, digits and nesting are limited before or while it is parsed."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from ..errors import DSV4Error, error
from .paths import open_inside, read_exactly, shown

MOST_TENSORS = 200_000
"""Tensors of the largest checkpoint: V4-Pro, experts stored one by one, has about 145,000."""
MOST_CONFIG = 4 << 20
"""Bytes of the longest configuration."""
MOST_INDEX = 64 << 20
"""Bytes of the longest index."""
_MOST_DIGITS = 20
"""Digits and sign of the longest integer: 64 bits."""
_MOST_FLOAT = 64


def parse(text: bytes, *, most_values: int, most_nested: int) -> dict[str, Any]:
    """Return the object that `text` holds, with at most so many values, and so many lists and objects.

    Raises ValueError for anything else: duplicate keys, NaN, infinities, integers beyond 64 bits, deep nesting.
    """
    # Commas and brackets are counted before parsing: a parsed value takes up to fifty times its text.
    if text.count(b",") > most_values or text.count(b"[") + text.count(b"{") > most_nested:
        raise ValueError(f"more than {most_values} values, or {most_nested} lists and objects")
    try:
        value = json.loads(
            text.decode("utf-8"),
            parse_int=_integer,
            parse_float=_real,
            parse_constant=_constant,
            object_pairs_hook=_object,
        )
    except RecursionError:
        raise ValueError("lists or objects nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"a {type(value).__name__}, not an object")
    return value


def read_json(folder: Path, file: Path, *, most_bytes: int = MOST_CONFIG) -> dict[str, Any]:
    """Return the object in a JSON file of `folder`, or raise E209."""
    try:
        descriptor = open_inside(folder, file)
        try:
            size = os.fstat(descriptor).st_size
            if size > most_bytes:
                raise ValueError(f"{size} bytes, of which at most {most_bytes} are read")
            text = read_exactly(descriptor, size)
        finally:
            os.close(descriptor)
        most = MOST_TENSORS if most_bytes >= MOST_INDEX else most_bytes
        return parse(text, most_values=most + 1000, most_nested=most)
    except DSV4Error:  # a ValueError too
        raise
    except OSError as fault:
        raise error("E209", got=f"{file} cannot be read", why=str(fault), fix="let this user read it") from None
    except ValueError as fault:
        raise error("E209", got=f"{file} is not JSON", why=str(fault), fix="download the file again") from None


def _integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


def _real(digits: str) -> float:
    value = float(digits) if len(digits) <= _MOST_FLOAT else math.inf
    if not math.isfinite(value):
        raise ValueError(f"the number {digits[:_MOST_FLOAT]}, too large or of too many digits")
    return value


def _constant(name: str) -> Any:
    raise ValueError(f"{name}, which is not JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {shown(twice)} twice")
    return value
