"""Render the tables of changes of the source that tests notice or do not: blocks of figures.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Row = Mapping[str, Any]


def scores(rows: Mapping[str, list[Row]]) -> tuple[list[list[str]], list[Row]]:
    """Return lines and rows of the table of changes of the source: of all seeds of an area, the last line of all."""
    lines = [["area", "seeds", "changes", "equivalent", "killed", "killed since, by a new test", "survive"]]
    areas = dict.fromkeys(row["area"] for row in rows["mutations"])
    for area in [*areas, "all"]:
        shown = [row for row in rows["mutations"] if area in (row["area"], "all")]
        left = [each for row in shown for each in row["survivors"]]
        same, since = sum(each["equivalent"] for each in left), sum("killed_at" in each for each in left)
        changes, killed = (sum(row[name] for row in shown) for name in ("changes", "killed"))
        seeds = ", ".join(str(seed) for seed in dict.fromkeys(row["seed"] for row in shown))
        counts = (changes, same, killed, since, len(left) - same - since)
        lines.append([area, seeds, *(str(count) for count in counts)])
    return lines, rows["mutations"]


def survivors(rows: Mapping[str, list[Row]]) -> tuple[list[list[str]], list[Row]]:
    """Return lines and rows of the table of changes that no test noticed when they were first made."""
    lines = [["file", "change", "reason"]]
    for row in rows["mutations"]:
        for each in row["survivors"]:
            state = "equivalent: " if each["equivalent"] else "a test since: " if "killed_at" in each else ""
            change = f"`{each['changed']}`".replace("|", "\\|")
            lines.append([f"`{each['file'].removeprefix('dsv4_compile/')}`", change, state + each["reason"]])
    return lines, rows["mutations"]
