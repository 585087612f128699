"""Files that others read while they are written anew: replaced in one step, so that a process that is killed leaves the
former."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def replace(path: Path, text: str) -> None:
    """Write `text` and the end of its last line."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(f"{text}\n")
    new.replace(path)


def replace_rows(path: Path, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write `{name: rows}` as JSON, a row to a line."""
    lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    replace(path, f'{{\n  "{name}": [\n{lines}\n  ]\n}}')
