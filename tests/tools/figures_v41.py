"""Render the tables of DeepSeek-V4.1-Flash: launches of a layer, and steps, kernels and prompts of the model."""

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
    for name, layers in dict.fromkeys((row["part"], row["layers"]) for row in shown):
        of_part = [row for row in shown if (row["part"], row["layers"]) == (name, layers)]
        cells = [" / ".join(_time(row, column) for row in of_part) for column, _ in times]
        tokens = " / ".join(f"{row['tokens']:,}" for row in of_part)
        lines.append([name, f"`{of_part[0]['op']}`", layers, tokens, *cells])
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


def steps(rows: Mapping[str, list[Row]]) -> tuple[list[list[str]], list[Row]]:
    """Return lines and rows of the table of decode steps: ms of each backend and floor, by context and batch."""
    shown = _of(rows, "step")
    backends = list(dict.fromkeys(row["backend"] for row in shown))
    lines = [["context", "batch", *(f"{backend}, ms" for backend in backends), "floor, ms", "GB read"]]
    for context, batch in dict.fromkeys((row["context"], row["batch"]) for row in shown):
        here = {row["backend"]: row for row in shown if (row["context"], row["batch"]) == (context, batch)}
        some = next(iter(here.values()))
        cells = [f"{here[backend]['ms']:.2f}" if backend in here else "-" for backend in backends]
        lines.append([f"{context:,}", str(batch), *cells, f"{some['floor_ms']:.2f}", f"{some['gb']:.1f}"])
    return lines, shown


def kinds(rows: Mapping[str, list[Row]]) -> tuple[list[list[str]], list[Row]]:
    """Return lines and rows of the table of kernels of a step: launches, and ms of each kind."""
    shown = [row for row in _of(rows, "kernels") if row.get("us_by_kind")]
    names = list(dict.fromkeys(kind for row in shown for kind in row["us_by_kind"]))
    lines = [["backend", "context", "batch", "launches", *(f"{name}, ms" for name in names), "sum, ms"]]
    for row in shown:
        cells = [f"{row['us_by_kind'].get(name, 0.0) / 1e3:.2f}" for name in names]
        head = [row["backend"], f"{row['context']:,}", str(row["batch"]), f"{row['launches']:,}"]
        lines.append([*head, *cells, f"{row['kernels_ms']:.2f}"])
    return lines, shown


def prompts(rows: Mapping[str, list[Row]]) -> tuple[list[list[str]], list[Row]]:
    """Return lines and rows of the table of prompts: ms of one chunk, layers after the last source on all or a tail."""
    shown = _of(rows, "prompt")
    lines = [["backend", "tokens", "layers after the last source", "ms", "tokens a second", "TFLOP/s"]]
    for row in shown:
        speed = f"{1e3 * row['tflops'] / row['ms']:,.0f}"
        rate = f"{1e3 * row['tokens'] / row['ms']:,.0f}"
        lines.append([row["backend"], f"{row['tokens']:,}", row["mode"], f"{row['ms']:,.1f}", rate, speed])
    return lines, shown


def _of(rows: Mapping[str, list[Row]], what: str) -> list[Row]:
    return [row for row in rows["v41_model"] if row["what"] == what]
