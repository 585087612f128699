"""Renders a record as text: a block of cells for each op and model, and the facts of the run above them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Row = dict[str, Any]
AXIS = "tokens"
"""The column of a block's rows and of a picture's x axis."""
_FEW_KERNELS = 4
_CLOCKS = {"cuda graph": "CUDA graph", "wall clock": "wall clock", "stream": "consecutive calls"}
_NOT_PARAMS = {"op", "impl", "published_us", "us", "cold_us", "clock", "sets", "launches", "status", "note"}
_NOT_PARAMS |= {"elements", "bytes", "flops", "floor_us", "gb_s", "of_copy", "tflop_s", "details"}
_NOT_PARAMS |= {"result_bytes", "temporary_bytes", "kernels_us", "empty_pair_us", "date", "commit"}


def render(record: dict[str, Any]) -> str:
    """Return machine, versions and command, then the blocks. A cell is "warm / cold" microseconds, or a status."""
    facts = ("machine", "driver", "torch", "triton", "python", "commit", "date", "command")
    head = [f"{name:<8} {record.get(name, 'unknown')}".replace("; ", f";\n{'':8} ") for name in facts]
    days = sorted({row["date"][:10] for row in record["rows"] if "date" in row})
    if len(days) > 1:
        head.append(f"{'rows':<8} measured from {days[0]} to {days[-1]}")
    head.append(f"{'copy':<8} {record['copy_gb_s']} GB/s, read and written, of a large copy: the ceiling below")
    blocks = [_block(title, rows) for title, rows in groups(record["rows"])]
    return "\n".join([*head, *blocks])


def subject(row: Row) -> tuple[tuple[str, str], ...]:
    """Return names and values of a row's op, sizes and implementation, which identify it."""
    return tuple((name, str(x)) for name, x in row.items() if name in ("op", "impl") or name not in _NOT_PARAMS)


def groups(rows: list[Row]) -> Iterable[tuple[str, list[Row]]]:
    """Return rows by op and all sizes except `tokens`, in order of appearance."""
    rows_by_group: dict[str, list[Row]] = {}
    for row in rows:
        sizes = [f"{name} {value}" for name, value in row.items() if name not in _NOT_PARAMS and name != AXIS]
        rows_by_group.setdefault(", ".join([row["op"], *sizes]), []).append(row)
    return rows_by_group.items()


def _block(title: str, rows: list[Row]) -> str:
    impls = list(dict.fromkeys(row["impl"] for row in rows))
    published = list(dict.fromkeys(name for row in rows for name in row["published_us"]))
    rates = {"TFLOP/s": "tflop_s"} if any("tflop_s" in row for row in rows) else {"GB/s": "gb_s", "of copy": "of_copy"}
    floor = ["floor"] if all("floor_us" in row for row in rows) else []
    lines = [[AXIS, *impls, *published, *floor, "best", *rates]]
    for size in dict.fromkeys(row[AXIS] for row in rows):
        here = {row["impl"]: row for row in rows if row[AXIS] == size}
        others = next(iter(here.values()))["published_us"]
        cells = [_time(here[impl]) if impl in here else "" for impl in impls]
        lines.append([str(size), *cells, *(str(others.get(name, "")) for name in published)])
        lines[-1] += [_us(next(iter(here.values()))["floor_us"]) for _ in floor] + _best(here, list(rates.values()))
    counts = {impl: _range(row["launches"] for row in rows if row["impl"] == impl and row["us"]) for impl in impls}
    if any(counts.values()):
        lines.append(["launches", *counts.values(), *[""] * (len(published) + len(floor) + 1 + len(rates))])
    memory = {impl: _memory(row for row in rows if row["impl"] == impl and "result_bytes" in row) for impl in impls}
    if any(memory.values()):
        lines.append(["temporaries", *memory.values(), *[""] * (len(published) + len(floor) + 1 + len(rates))])
    clock = next((row["clock"] for row in rows if row["us"]), "")
    cold = " warm / cold" if clock == "cuda graph" or any(row.get("cold_us") for row in rows) else ""
    unit = f": us{cold}, {_CLOCKS[clock]}" if clock else ""
    others = {row["impl"]: f"  {row['impl']}: {_CLOCKS[row['clock']]}" for row in rows if row["us"]}
    others = {impl: line for impl, line in others.items() if not line.endswith(_CLOCKS[clock])}
    return "\n".join(["", f"{title}{unit}", *align(lines), *others.values(), *_notes(rows), *_details(rows)])


def _notes(rows: list[Row]) -> list[str]:
    """Return why cells have no time, one line for all implementations with the same reason."""
    impls: dict[str, dict[str, None]] = {}
    for row in rows:
        if row["note"]:
            impls.setdefault(f"{row['status']}: {row['note']}", {})[row["impl"]] = None
    return [f"  {', '.join(names)}, {reason}" for reason, names in impls.items()]


def _details(rows: list[Row]) -> list[str]:
    """Return further facts of rows: numbers, one line a row; stages with their floors; times of kernels."""
    lines = []
    for row in rows:
        facts: dict[str, Any] = row.get("details", {})
        if numbers := [f"{name} {value}" for name, value in facts.items() if isinstance(value, (int, float))]:
            lines.append(f"  {row['impl']}, {row[AXIS]}: {', '.join(numbers)}")
        if stages := facts.get("stages"):
            texts = (f"{name} {stage['us']:.1f} ({stage['floor_us']:.1f})" for name, stage in stages.items())
            lines.append(f"    us (floor): {', '.join(texts)}")
        # Implementations of many kernels are not broken down.
        if 1 < len(kernels := row.get("kernels_us", {})) <= _FEW_KERNELS:
            texts = (f"{name} {us:.2f}" for name, us in kernels.items())
            lines.append(f"  {row['impl']}, {row[AXIS]}: us, warm, of {', '.join(texts)}")
    return lines


def _time(row: Row) -> str:
    if row["us"] is None:
        return str(row["status"])
    cold = row.get("cold_us")
    return _us(row["us"]) if cold is None else f"{_us(row['us'])} / {_us(cold)}"


def _us(us: float) -> str:
    return f"{us:.2f}" if us < 100 else f"{us:.0f}"


def _best(here: dict[str, Row], rates: list[str]) -> list[str]:
    """Return the fastest implementation, by cold times if all have one, and the rates that it reaches."""
    timed = [row for row in here.values() if row["us"] is not None]
    if not timed:
        return [""] * (1 + len(rates))
    column = "cold_us" if all(row.get("cold_us") for row in timed) else "us"
    best = min(timed, key=lambda row: row[column])
    return [best["impl"], *(f"{best[rate]:.0%}" if rate == "of_copy" else f"{best[rate]:.0f}" for rate in rates)]


def _range(counts: Iterable[int | None]) -> str:
    known = sorted({count for count in counts if count is not None})
    return "" if not known else str(known[0]) if len(known) == 1 else f"{known[0]} to {known[-1]}"


def _memory(rows: Iterable[Row]) -> str:
    """Return the most temporary memory of a call as a multiple of its results, or, without results, in MiB."""
    sizes = [(row["temporary_bytes"], row["result_bytes"]) for row in rows]
    ratios = [extra / result for extra, result in sizes if result]
    alone = max((extra for extra, result in sizes if not result), default=0)
    return f"{max(ratios):.2f}x" if ratios else f"{alone / 2**20:.1f} MiB" if alone else "none" if sizes else ""


def align(lines: Sequence[Sequence[str]]) -> list[str]:
    """Return a line of text for each line of cells, in columns that are aligned to the right."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
