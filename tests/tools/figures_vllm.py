"""Render the tables of the plug-in inside vLLM on a GPU from their record."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
Tables = Mapping[str, list[Row]]
_MODELS = {"tiny": "small", "real": "V4-Flash's dimensions"}
_ENGINES = {"vllm": "vLLM as it is", "dsv4_compile": "1", "dsv4_compile all": "all"}
_OURS = "dsv4_compile"


def rows(records: Tables) -> tuple[list[list[str]], list[Row]]:
    """Return lines and rows of the table of attention rows against the layer alone: worst error of each layer."""
    shown = _of(records, "rows")
    lines = [["model", "`DSV4_VLLM`", "runs", "rows", "from prefixes", "worst row error by layer"]]
    for row in shown:
        how = f"one graph, CUDA graphs {row['cudagraph']}" if row["mode"] else "eager"
        counts = [f"{row[name]:,}" for name in ("rows", "reused")]
        worst = ", ".join(map(_error, row["worst"]))
        lines.append([_MODELS[row["model"]], _ENGINES[row["engine"]], how, *counts, worst])
    return lines, shown


def shadow(records: Tables) -> tuple[list[list[str]], list[Row]]:
    """Return lines and rows of the table of layers against vLLM's own attention: row errors by kind of row."""
    shown, kinds = _of(records, "shadow"), ("prefilled", "decoded", "selected")
    lines = [["layer", "ratio", "rows", "mean", *(f"{kind}, worst" for kind in kinds)]]
    for row in shown:
        worst = [_error(row[f"{kind}_worst"]) if f"{kind}_worst" in row else "-" for kind in kinds]
        lines.append([str(row["layer"]), str(row["ratio"]), f"{row['rows']:,}", _error(row["mean"]), *worst])
    return lines, shown


def replays(records: Tables) -> tuple[list[list[str]], list[Row]]:
    """Return lines and rows of the table of replays against the compiled step: bits that differ, blocks written."""
    shown = _of(records, "replay")
    lines = [["model", "`DSV4_VLLM`", "replays", "graphs of", "rows", "padding", "rows with other bits"]]
    lines[0] += ["steps with other caches", "blocks written", "of no request"]
    for row in shown:
        names = "rows", "padded", "other_rows", "other_caches", "writes", "strays"
        sizes = ", ".join(map(str, row["sizes"]))
        counts = [f"{row[name]:,}" for name in names]
        lines.append([_MODELS[row["model"]], _ENGINES[row["engine"]], str(row["steps"]), sizes, *counts])
    return lines, shown


def served(records: Tables) -> tuple[list[list[str]], list[Row]]:
    """Return lines and rows of the table of two ranks and of preempted requests: rows and outputs, worst errors."""
    shown = [row for what in ("preempted", "ranks") for row in _of(records, what)]
    lines = [["run", "preempted", "rows", "computed again", "from prefixes", "worst row error"]]
    lines[0] += ["worst difference of rows computed again", "outputs against a run with room, worst"]
    for row in shown:
        graphs = f"CUDA graphs {row['cudagraph']}" if row["mode"] else "eager"
        ranks = f"{row['ranks']} ranks" if "ranks" in row else f"{row['blocks']} blocks" if "blocks" in row else "room"
        counts = [f"{row[name]:,}" if name in row else "-" for name in ("preemptions", "rows", "again", "reused")]
        far = [_error(row[name]) if row.get(name) else "-" for name in ("drift", "outputs_worst")]
        lines.append([f"{ranks}, {graphs}", *counts, _error(max(row["worst"])), *far])
    return lines, shown


def times(records: Tables) -> tuple[list[list[str]], list[Row]]:
    """Return lines and rows of the table of times: of each engine, a decode step and a token with its prompts, ms."""
    shown = sorted(_of(records, "times"), key=lambda row: (row["requests"], row["hyper_connections"] != "PyTorch"))
    lines = [["requests", "`DSV4_VLLM`", "hyper-connections", "CUDA graphs", "step, ms", "token with prompts, ms"]]
    for row in shown:
        cells = [_median(row[name]) for name in ("step_ms", "with_prompts_ms")]
        how = "this package" if row["hyper_connections"] == _OURS else row["hyper_connections"]
        lines.append([str(row["requests"]), _ENGINES[row["engine"]], how, row["cudagraph"], *cells])
    return lines, shown


def _of(records: Tables, what: str) -> list[Row]:
    return [row for rows in records.values() for row in rows if row["what"] == what and row["status"] == "ok"]


def _error(error: float) -> str:
    return f"{error:.2e}".replace("e-0", "e-")


def _median(values: Sequence[float]) -> str:
    """Return a cell: the median, with the number of values and their range if there are several; "-" for none."""
    if not values:
        return "-"
    spread = f"{len(values)}: {min(values):.1f} to {max(values):.1f}" if len(values) > 1 else "1 value"
    return f"{statistics.median(values):.2f} ({spread})"
