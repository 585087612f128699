"""How long the implementations of an op took, by GPU and size: what `auto` goes by where it has a choice.

`measured.json` is the record: `dsv4 bench --tune` writes it anew for the GPU it runs on, and with a scenario the ops of
that alone. The size of a call is the number of elements of its first tensor; the measurement nearest to it, in the
logarithm, decides, among rows of as many heads where there are such. Without one, IR goes before a kernel. A dynamic
dim counts with the size it was traced with; a graph from torch's compile cache keeps the choice made then. Ops that
could be one op are merged unless the table knows all of them, and the merged one as slower than they are together.

An op is measured alone. Inductor IR may gain more from fusing with the ops before and after it than it loses here:
`dsv4.impl.<op>` says so for one op.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from .._files import replace_rows

RECORD = Path(__file__).with_name("measured.json")
CANDIDATES = ("ir", "triton")
"""The implementations that are compared; the reference is used only where there is no other."""


@functools.cache
def _entries() -> tuple[Mapping[str, Any], ...]:
    return tuple(json.loads(RECORD.read_text(encoding="utf-8"))["measured"])


def nearest(
    op: str,
    architecture: str,
    elements: int,
    tokens: int | None = None,
    impls: Collection[str] = CANDIDATES,
    within: float = math.inf,
) -> Mapping[str, float] | None:
    """Microseconds of each of `impls` at the measured size nearest to `elements`; None where not all were measured.

    Where `tokens`, the rows of that tensor, are known, sizes with rows as long as the call's (heads, dims) go first.
    None too where the nearest size is more than `within` times as large or as small.
    """
    sizes = [row for row in _entries() if (row["op"], row["architecture"]) == (op, architecture)]
    sizes = [row for row in sizes if all(f"{name}_us" in row for name in impls)]
    if tokens:
        alike = [row for row in sizes if row.get("tokens") and row["elements"] * tokens == elements * row["tokens"]]
        sizes = alike or sizes
    if not sizes:
        return None
    closest = min(sizes, key=lambda row: abs(math.log(row["elements"] / max(1, elements))))
    if not 1 / within <= closest["elements"] / max(1, elements) <= within:
        return None
    return {name: closest[f"{name}_us"] for name in impls}


def update(record: Mapping[str, Any]) -> int:
    """Put the rows of a record of `bench.run` into the table, in place of the rows of these ops on that machine.

    Returns how many sizes it has of both implementations. Sizes of one alone say whether merging ops pays.
    """
    times: dict[tuple[str, int, int | None], dict[str, float]] = {}
    for row in record["rows"]:
        if row["us"] is not None and row["impl"] in CANDIDATES:
            size = row["op"], row["elements"], row.get("tokens")
            times.setdefault(size, {})[f"{row['impl']}_us"] = row["us"]
    stamp = {name: record[name] for name in ("architecture", "torch", "triton", "date")}
    rows: list[dict[str, Any]] = []
    for (op, elements, tokens), us in times.items():
        width = {"tokens": tokens} if tokens else {}
        rows.append({"op": op, "elements": elements, **width, **us, **stamp})
    replaced = {(row["op"], row["architecture"]) for row in rows}
    # Read anew: runs side by side have written theirs since.
    _entries.cache_clear()
    remaining = [row for row in _entries() if (row["op"], row["architecture"]) not in replaced]
    # Half a table would stop whatever compiles.
    replace_rows(RECORD, "measured", [*remaining, *rows])
    _entries.cache_clear()
    return sum(len(us) == len(CANDIDATES) for us in times.values())
