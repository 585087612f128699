"""Render the tables of changes of the source that tests notice or do not: blocks of figures.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Row = Mapping[str, Any]

_SAME, _ELSEWHERE, _SINCE = "equivalent: ", "a test that was not run: ", "a test since: "


def scores(rows: Mapping[str, list[Row]]) -> tuple[list[list[str]], list[Row]]:
    """Return lines and rows of the table of changes of the source: all seeds of an area, each seed, and all.

    A score is the share of killed changes among those that are not equivalent, by the tests that `make mutate` ran, and
    by all tests of today.
    """
    lines = [["area", "seeds", "changes", "equivalent", "killed", "by a test that was not run", "by a new test"]]
    lines[0] += ["survive", "score", "score today"]
    areas, seeds = (dict.fromkeys(row[name] for row in rows["mutations"]) for name in ("area", "seed"))
    shown = [(area, [row for row in rows["mutations"] if row["area"] == area]) for area in areas]
    shown += [("all", [row for row in rows["mutations"] if row["seed"] == seed]) for seed in sorted(seeds)]
    for area, area_rows in [*shown, ("all", rows["mutations"])]:
        left = [_state(survivor) for row in area_rows for survivor in row["survivors"]]
        changes, killed = (sum(row[name] for row in area_rows) for name in ("changes", "killed"))
        same, other, since, survive = (left.count(state) for state in (_SAME, _ELSEWHERE, _SINCE, ""))
        of = ", ".join(str(seed) for seed in dict.fromkeys(row["seed"] for row in area_rows))
        shares = (f"{100 * count / (changes - same):.0f} %" for count in (killed, killed + other + since))
        lines.append([area, of, *map(str, (changes, same, killed, other, since, survive)), *shares])
    return lines, rows["mutations"]


def survivors(rows: Mapping[str, list[Row]]) -> tuple[list[list[str]], list[Row]]:
    """Return lines and rows of the table of changes that no test noticed when they were first made."""
    lines = [["file", "change", "reason"]]
    for row in rows["mutations"]:
        for survivor in row["survivors"]:
            change = f"`{survivor['changed']}`".replace("|", "\\|")
            lines.append(
                [f"`{survivor['file'].removeprefix('dsv4_compile/')}`", change, _state(survivor) + survivor["reason"]]
            )
    return lines, rows["mutations"]


def _state(survivor: Row) -> str:
    """Return what became of a survivor, "" where it still survives."""
    if survivor["equivalent"]:
        return _SAME
    if survivor.get("elsewhere"):
        return _ELSEWHERE
    return _SINCE if "killed_at" in survivor else ""
