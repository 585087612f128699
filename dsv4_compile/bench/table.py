"""A record as text, one block for each op and model, and as a picture."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
_AXIS = "tokens"
"""The column that runs down a block and along a picture."""
_NOT_PARAMS = {"op", "impl", "published_us", "us", "cold_us", "clock", "sets", "launches", "status", "note"}
_NOT_PARAMS |= {"elements", "bytes", "gb_s", "of_copy", "tflop_s"}


def render(record: dict[str, Any]) -> str:
    """Machine, versions and command, then the blocks. A cell is "warm / cold" microseconds, or why there is none."""
    facts = ("machine", "driver", "torch", "triton", "python", "date", "command")
    head = [f"{name:<8} {record[name]}" for name in facts]
    head.append(f"{'copy':<8} {record['copy_gb_s']} GB/s, read and written: the ceiling below")
    blocks = [_block(title, rows) for title, rows in _groups(record["rows"])]
    return "\n".join([*head, *blocks])


def _groups(rows: list[Row]) -> Iterable[tuple[str, list[Row]]]:
    """Rows by op and by everything that sizes them but `tokens`, in order of appearance."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        sizes = [f"{name} {value}" for name, value in row.items() if name not in _NOT_PARAMS and name != _AXIS]
        groups.setdefault(", ".join([row["op"], *sizes]), []).append(row)
    return groups.items()


def _block(title: str, rows: list[Row]) -> str:
    impls = list(dict.fromkeys(row["impl"] for row in rows))
    published = list(dict.fromkeys(name for row in rows for name in row["published_us"]))
    rates = {"TFLOP/s": "tflop_s"} if any("tflop_s" in row for row in rows) else {"GB/s": "gb_s", "of copy": "of_copy"}
    lines = [[_AXIS, *impls, *published, "best", *rates]]
    for size in dict.fromkeys(row[_AXIS] for row in rows):
        here = {row["impl"]: row for row in rows if row[_AXIS] == size}
        others = next(iter(here.values()))["published_us"]
        cells = [_time(here[impl]) if impl in here else "" for impl in impls]
        lines.append([str(size), *cells, *(str(others.get(name, "")) for name in published)])
        lines[-1] += _best(here, list(rates.values()))
    counts = {impl: _range(row["launches"] for row in rows if row["impl"] == impl and row["us"]) for impl in impls}
    if any(counts.values()):
        lines.append(["launches", *counts.values(), *[""] * (len(published) + 1 + len(rates))])
    notes = dict.fromkeys(f"  {row['impl']}, {row['status']}: {row['note']}" for row in rows if row["note"])
    clock = next((row["clock"] for row in rows if row["us"]), "")
    unit = {"cuda graph": ": us warm / cold, CUDA graph", "wall clock": ": us, wall clock"}.get(clock, "")
    return "\n".join(["", f"{title}{unit}", *_align(lines), *notes])


def _time(row: Row) -> str:
    if row["us"] is None:
        return str(row["status"])
    cold = row.get("cold_us")
    return _us(row["us"]) if cold is None else f"{_us(row['us'])} / {_us(cold)}"


def _us(us: float) -> str:
    return f"{us:.2f}" if us < 100 else f"{us:.0f}"


def _best(here: dict[str, Row], rates: list[str]) -> list[str]:
    """The fastest implementation, by the cold time where there is one, and the rates it reaches."""
    timed = [row for row in here.values() if row["us"] is not None]
    if not timed:
        return [""] * (1 + len(rates))
    best = min(timed, key=lambda row: row.get("cold_us") or row["us"])
    return [best["impl"], *(f"{best[rate]:.0%}" if rate == "of_copy" else f"{best[rate]:.0f}" for rate in rates)]


def _range(counts: Iterable[int | None]) -> str:
    known = sorted({count for count in counts if count is not None})
    return "" if not known else str(known[0]) if len(known) == 1 else f"{known[0]} to {known[-1]}"


def _align(lines: list[list[str]]) -> list[str]:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def plot(record: dict[str, Any], path: Path) -> bool:
    """Draw microseconds over tokens, one panel for each block, into a PNG. False where matplotlib is not installed."""
    groups = [(title, timed) for title, rows in _groups(record["rows"]) if (timed := [r for r in rows if r["us"]])]
    if not groups or importlib.util.find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure

    columns = min(3, len(groups))
    lines = -(-len(groups) // columns)
    figure = Figure(figsize=(5 * columns, 3.6 * lines), layout="constrained")
    panels = list(figure.subplots(lines, columns, squeeze=False).flat)
    for panel, (title, rows) in zip(panels, groups, strict=False):
        _panel(panel, title, rows)
    for panel in panels[len(groups) :]:
        panel.set_visible(False)
    figure.suptitle(f"{record['scenario']} on {record['machine']}, {record['date'][:10]}")
    figure.savefig(path, dpi=120)
    return True


def _panel(panel: Any, title: str, rows: list[Row]) -> None:
    series: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        series.setdefault(row["impl"], []).append((row[_AXIS], row.get("cold_us") or row["us"]))
        for name, us in row["published_us"].items():
            series.setdefault(name, []).append((row[_AXIS], us))
    for name, points in series.items():
        sizes, times = zip(*sorted(set(points)), strict=True)
        published = any(name in row["published_us"] for row in rows)
        panel.plot(sizes, times, "k--" if published else "o-", label=name, markersize=4)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_title(title, fontsize=9)
    panel.set_xlabel("tokens")
    panel.set_ylabel("us")
    panel.legend(fontsize=7)
