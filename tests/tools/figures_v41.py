"""Render the table of launches of a layer of DeepSeek-V4.1-Flash."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Row = Mapping[str, Any]


def layer(rows: Mapping[str, list[Row]]) -> tuple[list[list[str]], list[Row]]:
    """Return lines and rows of the table of launches of a layer: cold and floor, us, for each number of tokens."""
    shown = rows["v41_layer"]
    sizes = list(dict.fromkeys(row["tokens"] for row in shown))
    times = (("cold_us", "cold, us"), ("floor_us", "floor, us"), ("reference_us", "reference, us"))
    lines = [["part", "op", "layers", "tokens", *(label for _, label in times)]]
    for name in dict.fromkeys(row["part"] for row in shown):
        of_part = [row for row in shown if row["part"] == name]
        cells = [" / ".join(_time(row, column) for row in of_part) for column, _ in times]
        tokens = " / ".join(f"{row['tokens']:,}" for row in of_part)
        lines.append([name, f"`{of_part[0]['op']}`", of_part[0]["layers"], tokens, *cells])
    cells = []
    for column, _ in times:
        sums = [_sum(shown, size, column) for size in sizes]
        cells.append(" / ".join("-" if us is None else f"{us:,.0f}" for us in sums))
    lines.append(["sum of these", "", "every", " / ".join(f"{size:,}" for size in sizes), *cells])
    return lines, shown


def _time(row: Row, column: str) -> str:
    return f"{row[column]:,.1f}" if row.get(column) else "-"


def _sum(rows: list[Row], tokens: int, column: str) -> float | None:
    """The sum of the parts that every layer has, None if one was not measured."""
    times = [(row["times"], row.get(column)) for row in rows if row["tokens"] == tokens and row["layers"] == "every"]
    return None if any(us is None for _, us in times) else sum(count * us for count, us in times)
