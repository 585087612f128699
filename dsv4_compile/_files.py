"""Atomic replacement of files that other processes read; a process that is killed leaves the old file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def replace(path: Path, text: str) -> None:
    """Replace the file at `path` with `text` and a final newline."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(f"{text}\n")
    new.replace(path)


def replace_rows(path: Path, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Replace the file at `path` with `{name: rows}` as JSON, one row a line."""
    lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    replace(path, f'{{\n  "{name}": [\n{lines}\n  ]\n}}')
