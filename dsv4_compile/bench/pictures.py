"""Draws a record: times and floors over tokens, and a roofline of GEMMs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import fail, is_installed
from .table import AXIS, Row, groups

ROUNDED_US = 1.0
"""Least floor with enough digits, at three recorded decimals, to compute a rate."""


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return is_installed("matplotlib")


def require_drawing() -> None:
    """Raise E101 unless matplotlib is installed."""
    if not can_draw():
        fail("E101", got="no matplotlib, which draws the pictures of a record", fix="pip install matplotlib")


def draw(record: dict[str, Any], folder: Path, name: str = "") -> list[Path]:
    """Draw `<name>.png` and, if GEMMs were timed, `<name>_roofline.png`; return their paths.

    The default name is the scenario's. A record without times draws nothing. E101 if matplotlib is not installed.
    """
    require_drawing()
    timed = [(title, rows) for title, every in groups(record["rows"]) if (rows := [r for r in every if r["us"]])]
    if not timed:
        return []
    name = name or record["scenario"]
    paths = [_times(record, timed, folder / f"{name}.png")]
    if any(row.get("flops") for _, rows in timed for row in rows):
        paths.append(_roofline(record, timed, folder / f"{name}_roofline.png"))
    return paths


def _times(record: dict[str, Any], timed: list[tuple[str, list[Row]]], path: Path) -> Path:
    from matplotlib.figure import Figure

    columns = min(3, len(timed))
    lines = -(-len(timed) // columns)
    figure = Figure(figsize=(5 * columns, 3.6 * lines), layout="constrained")
    panels = list(figure.subplots(lines, columns, squeeze=False).flat)
    for panel, (title, rows) in zip(panels, timed, strict=False):
        _panel(panel, title, rows)
    for panel in panels[len(timed) :]:
        panel.set_visible(False)
    figure.suptitle(_title(record))
    figure.savefig(path, dpi=120)
    return path


def _panel(panel: Any, title: str, rows: list[Row]) -> None:
    series: dict[str, set[tuple[int, float]]] = {}
    styles: dict[str, str] = {}
    for row in rows:
        drawn = {row["impl"]: ("o-", row.get("cold_us") or row["us"])}
        drawn |= {name: ("k--", us) for name, us in row["published_us"].items()}
        if row.get("floor_us"):
            drawn["floor"] = ("k:", row["floor_us"])
        for name, (style, us) in drawn.items():
            series.setdefault(name, set()).add((row[AXIS], us))
            styles[name] = style
    for name, points in series.items():
        sizes, times = zip(*sorted(points), strict=True)
        panel.plot(sizes, times, styles[name], label=name, markersize=4)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_title(title, fontsize=9)
    panel.set_xlabel("tokens")
    panel.set_ylabel("us")
    panel.legend(fontsize=7)


def _roofline(record: dict[str, Any], timed: list[tuple[str, list[Row]]], path: Path) -> Path:
    """Draw TFLOP/s over flops per byte, under the copy rate and the rates of the tensor cores."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    panel = figure.subplots()
    series: dict[str, list[tuple[float, float]]] = {}
    for _, rows in timed:
        for row in rows:
            if row.get("flops"):
                reached = row["flops"] / (row.get("cold_us") or row["us"]) / 1e6
                series.setdefault(f"{row['op']}, {row['impl']}", []).append((row["flops"] / row["bytes"], reached))
    for name, points in series.items():
        panel.plot(*zip(*points, strict=True), "o", label=name, markersize=4)
    intensities = sorted(x for points in series.values() for x, _ in points)
    ends = [intensities[0] / 2, intensities[-1] * 2]
    panel.plot(ends, [x * record["copy_gb_s"] / 1e3 for x in ends], "k:", label="copy rate")
    for roof in flat_roofs(record):
        panel.axhline(roof, color="k", linestyle="--", linewidth=0.8, label=f"tensor cores, {roof:.0f} TFLOP/s")
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlabel("flops per byte")
    panel.set_ylabel("TFLOP/s")
    panel.set_title(_title(record), fontsize=10)
    panel.legend(fontsize=7)
    figure.savefig(path, dpi=120)
    return path


def flat_roofs(record: dict[str, Any]) -> list[float]:
    """Return the tensor-core limits of the rows of a record in TFLOP/s, one for each dtype of operands.

    They follow from the floors; those of a microsecond or less are rounded too much.
    """
    bound = [row for row in record["rows"] if row.get("flops") and (row.get("floor_us") or 0) > ROUNDED_US]
    rates = ((row["flops"] / row["floor_us"] / 1e6, row["flops"] / row["bytes"]) for row in bound)
    return sorted({float(f"{rate:.3g}") for rate, x in rates if rate < 0.99 * x * record["copy_gb_s"] / 1e3})


def _title(record: dict[str, Any]) -> str:
    return f"{record['scenario']} on {record['machine']}, {record['date'][:10]}"
