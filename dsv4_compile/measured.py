"""How long the implementations of an op took, by GPU and size: what `auto` goes by where it has a choice.

`measured.json` is the record, written by `dsv4 bench SCENARIO --tune`. The size of a call is the number of elements of
its first tensor; the measurement nearest to it, in the logarithm, decides. Without one, IR goes before a kernel. A
dynamic dim counts with the size it was traced with; a graph from torch's compile cache keeps the choice made then.

An op is measured alone. Inductor IR may gain more from fusing with what comes before and after than it loses here:
`dsv4.impl.<op>` says so for one op.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RECORD = Path(__file__).with_name("measured.json")
_CANDIDATES = ("ir", "triton")


@functools.cache
def _entries() -> tuple[Mapping[str, Any], ...]:
    return tuple(json.loads(RECORD.read_text(encoding="utf-8"))["measured"])


def nearest(op: str, architecture: str, elements: int) -> Mapping[str, float] | None:
    """Microseconds by implementation at the measured size nearest to `elements`; None where nothing was measured."""
    sizes = [row for row in _entries() if (row["op"], row["architecture"]) == (op, architecture)]
    if not sizes:
        return None
    found = min(sizes, key=lambda row: abs(math.log(row["elements"] / max(1, elements))))
    return {name: found[f"{name}_us"] for name in _CANDIDATES}


def update(record: Mapping[str, Any]) -> int:
    """Put what a record of `bench.run` says into the table, in place of what is known of these ops on that machine.

    Returns how many sizes it has of both implementations; others are left out.
    """
    times: dict[tuple[str, int], dict[str, float]] = {}
    for row in record["rows"]:
        if row["us"] is not None:
            times.setdefault((row["op"], row["elements"]), {})[row["impl"]] = row["us"]
    stamp = {name: record[name] for name in ("architecture", "torch", "triton", "date")}
    rows = [
        {"op": op, "elements": elements, **{f"{name}_us": us[name] for name in _CANDIDATES}, **stamp}
        for (op, elements), us in times.items()
        if all(name in us for name in _CANDIDATES)
    ]
    replaced = {(row["op"], row["architecture"]) for row in rows}
    kept = [row for row in _entries() if (row["op"], row["architecture"]) not in replaced]
    lines = ",\n".join(f"    {json.dumps(row)}" for row in [*kept, *rows])
    RECORD.write_text(f'{{\n  "measured": [\n{lines}\n  ]\n}}\n', encoding="utf-8")
    _entries.cache_clear()
    return len(rows)
