"""Render the tables of the plug-in inside vLLM on a GPU from their record."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
Tables = Mapping[str, list[Row]]
_MODELS = {"tiny": "small", "real": "V4-Flash's dimensions"}
_ENGINES = {"vllm": "vLLM as it is", "dsv4_compile": "with the plug-in"}


def rows(records: Tables) -> tuple[list[list[str]], list[Row]]:
    """Return lines and rows of the table of rows of attention beside the layer alone: the worst error of each layer."""
    shown = _of(records, "rows")
    lines = [["model", "`DSV4_VLLM`", "runs", "rows", "from prefixes", "worst row error by layer"]]
    for row in shown:
        how = f"one graph, CUDA graphs {row['cudagraph']}" if row["mode"] else "eager"
        counts = [f"{row[name]:,}" for name in ("rows", "reused")]
        plugin = "all" if row["engine"].endswith(" all") else "1"
        lines.append([_MODELS[row["model"]], plugin, how, *counts, ", ".join(map(_error, row["worst"]))])
    return lines, shown


def shadow(records: Tables) -> tuple[list[list[str]], list[Row]]:
    """Return lines and rows of the table of layers beside vLLM's own attention: row errors by kind of row."""
    shown, kinds = _of(records, "shadow"), ("prefilled", "decoded", "selected")
    lines = [["layer", "ratio", "rows", "mean", *(f"{kind}, worst" for kind in kinds)]]
    for row in shown:
        worst = [_error(row[f"{kind}_worst"]) if f"{kind}_worst" in row else "-" for kind in kinds]
        lines.append([str(row["layer"]), str(row["ratio"]), f"{row['rows']:,}", _error(row["mean"]), *worst])
    return lines, shown


def times(records: Tables) -> tuple[list[list[str]], list[Row]]:
    """Return lines and rows of the table of times: of each engine, a decode step and a token with its prompts, ms."""
    shown = _of(records, "times")
    lines = [["requests", "", "CUDA graphs", "step, ms", "token with prompts, ms"]]
    for row in sorted(shown, key=lambda row: int(row["requests"])):
        cells = [_median(row[name]) for name in ("step_ms", "with_prompts_ms")]
        lines.append([str(row["requests"]), _ENGINES[row["engine"]], row["cudagraph"], *cells])
    return lines, shown


def _of(records: Tables, what: str) -> list[Row]:
    return [row for row in records["vllm"] if row["what"] == what and row["status"] == "ok"]


def _error(error: float) -> str:
    return f"{error:.2e}".replace("e-0", "e-")


def _median(values: Sequence[float]) -> str:
    """Return a cell: the median, with the number of values and their range if there are several; "-" for none."""
    if not values:
        return "-"
    spread = f"{len(values)}: {min(values):.1f} to {max(values):.1f}" if len(values) > 1 else "1 value"
    return f"{statistics.median(values):.2f} ({spread})"
