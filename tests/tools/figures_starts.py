"""Render tables of compile times, starts, prompt lengths, loading and V4.1, some once their records are measured."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dsv4_compile.hf.start import MEANINGS
from tests.tools import figures_indexer as indexer
from tests.tools import figures_v41 as v41

Row = Mapping[str, Any]
Render = Callable[[Mapping[str, list[Row]]], tuple[list[list[str]], list[Row]]]


def compile_time(rows: Mapping[str, list[Row]]) -> tuple[list[list[str]], list[Row]]:
    """Return lines and rows of the table of compile times: whole models, seconds."""
    shown = rows["compile_time"]
    lines = [["layers", "caches empty, s", "filled, s", "host memory, GiB"]]
    for layers in dict.fromkeys(row["layers"] for row in shown):
        by_cache = {row["cache"]: row for row in shown if row["layers"] == layers}
        times = [f"{by_cache[cache]['compile_s']:.0f}" if cache in by_cache else "" for cache in ("cold", "warm")]
        lines.append([str(layers), *times, f"{next(iter(by_cache.values()))['host_mib'] / 1024:.1f}"])
    return lines, shown


def starts(rows: Mapping[str, list[Row]]) -> tuple[list[list[str]], list[Row]]:
    """Return lines and rows of the table of starts: seconds by kind of work, until the first token."""
    shown = rows["starts"]
    lines = [["layers", "start", *(f"{kind}, s" for kind in MEANINGS), "total, s", "without reading, s"]]
    for row in shown:
        seconds = [f"{row['seconds'][kind]:.1f}" for kind in MEANINGS]
        beyond = row["total"] - row["seconds"]["read"]
        lines.append([str(row["layers"]), row["start"], *seconds, f"{row['total']:.1f}", f"{beyond:.1f}"])
    return lines, shown


def _measured(rows: Sequence[Row], what: str) -> list[Row]:
    return [row for row in rows if row["measured"] == what]


def new_lengths(rows: Mapping[str, list[Row]]) -> tuple[list[list[str]], list[Row]]:
    """Return lines and rows of the table of first tokens of prompt lengths that were never seen."""
    shown = _measured(rows["new_lengths"], "first token")
    lines = [["tokens", "first token, ms", "kernels, ms", "kernels"]]
    for row in shown:
        kernels = [f"{row['kernels_ms']:.1f}" if "kernels_ms" in row else "-", str(row.get("kernels", "-"))]
        lines.append([f"{row['tokens']:,}", f"{row['first_token_ms']:.1f}", *kernels])
    return lines, shown


def late_work(rows: Mapping[str, list[Row]]) -> tuple[list[list[str]], list[Row]]:
    """Return lines and rows of the table of random sizes after warm-up: late work, and the slowest call."""
    shown = _measured(rows["new_lengths"], "random sizes")
    lines = [["sizes", "start, s", "captures", "held by captures, GiB", "builds, compilations, captures after it"]]
    lines[0].append("slowest call, times the median of its bucket")
    for row in shown:
        held = f"{row['capture_bytes'] / 2**30:.1f}"
        cells = [str(row["sizes"]), f"{row['start_s']:.0f}", str(row["captures"]), held, str(len(row["late"]))]
        lines.append([*cells, f"{row['slowest']:.1f}"])
    return lines, shown


def read_weights(rows: Mapping[str, list[Row]]) -> tuple[list[list[str]], list[Row]]:
    """Return lines and rows of the table of loading: GB/s, from the system's cache and from the disk."""
    shown = rows["read_weights"]
    lines = [["what", "cached, GB/s", "cold, GB/s"]]
    lines += [[row["what"], f"{row['cached_gb_s']:.2f}", f"{row['cold_gb_s']:.2f}"] for row in shown]
    return lines, shown


def split_prompts(rows: Mapping[str, list[Row]]) -> tuple[list[list[str]], list[Row]]:
    """Return lines and rows of the table of first tokens of new lengths of a split model."""
    shown = _measured(rows["split_prompts"], "first token")
    lines = [["tokens", "first token, ms", "kernels, ms", "late builds, compilations, captures"]]
    for row in shown:
        lines.append(
            [f"{row['tokens']:,}", f"{row['first_token_ms']:.1f}", f"{row['kernels_ms']:.1f}", str(len(row["late"]))]
        )
    return lines, shown


def split_long(rows: Mapping[str, list[Row]]) -> tuple[list[list[str]], list[Row]]:
    """Return lines and rows of the table of long prompts of a split model."""
    shown = _measured(rows["split_prompts"], "long prompt")
    lines = [["tokens", "chunk", "s", "tokens a second", "memory of a rank, GB"]]
    for row in shown:
        rate = f"{row['tokens'] / row['seconds']:,.0f}"
        lines.append(
            [f"{row['tokens']:,}", f"{row['chunk']:,}", f"{row['seconds']:.2f}", rate, f"{row['memory_gb']:.0f}"]
        )
    return lines, shown


def split_decode(rows: Mapping[str, list[Row]]) -> tuple[list[list[str]], list[Row]]:
    """Return lines and rows of the table of decode steps of a split model at growing contexts."""
    shown = _measured(rows["split_prompts"], "decode")
    lines = [["context", "step, ms", "times the first", "kernels", "indexer, ms", "attention, ms"]]
    for row in shown:
        kinds_ms = [
            sum(us for name, _, us in row["kernels"] if re.search(names, name)) / 1e3
            for names in ("index|topk|select", "sparse_mla|combine")
        ]
        times = f"{row['step_ms'] / shown[0]['step_ms']:.2f}"
        lines.append(
            [
                f"{row['context']:,}",
                f"{row['step_ms']:.2f}",
                times,
                str(row["nodes"]),
                *(f"{ms:.2f}" for ms in kinds_ms),
            ]
        )
    return lines, shown


_V41_MODEL = "python examples/benchmarks/v41_model.py --out examples/results"
_PROMPT_CHUNKS = "python examples/benchmarks/prompt_chunks.py"
_SPLIT = "torchrun --nproc-per-node 2 examples/benchmarks/split_prompts.py --layers 43"
_TABLES: Mapping[str, tuple[Render, str, str]] = {
    "v41_layer": (v41.layer, "v41_layer", "python examples/benchmarks/v41_layer.py --out examples/results"),
    "v41_steps": (v41.steps, "v41_model", _V41_MODEL),
    "v41_kernels": (v41.kinds, "v41_model", _V41_MODEL),
    "v41_prompts": (v41.prompts, "v41_model", _V41_MODEL),
    "long_prompts": (indexer.long_prompts, "prompt_chunks", f"{_PROMPT_CHUNKS} --seconds 150"),
    "split_prompts": (split_prompts, "split_prompts", _SPLIT),
    "split_long": (split_long, "split_prompts", _SPLIT),
    "split_decode": (split_decode, "split_prompts", _SPLIT),
    "starts": (starts, "starts", "python examples/benchmarks/starts.py --out examples/results"),
    "new_lengths": (new_lengths, "new_lengths", "python tests/gpu/new_lengths.py --out examples/results"),
    "late_work": (late_work, "new_lengths", "python tests/gpu/new_lengths.py --out examples/results"),
    "read_weights": (read_weights, "read_weights", "python examples/benchmarks/read_weights.py --out examples/results"),
}
"""By the name of a block: its renderer, its record, and the command that measures it."""


def measured(results: Path) -> dict[str, str]:
    """Return the files of records that exist in the folder `results`, by the record's name."""
    return {record: f"{record}.json" for _, record, _ in _TABLES.values() if (results / f"{record}.json").exists()}


def tables(records: Mapping[str, str]) -> dict[str, tuple[Render, Sequence[str], str]]:
    """Return renderer, records and command of each block that `records` are enough for."""
    return {
        name: (render, (record,), command) for name, (render, record, command) in _TABLES.items() if record in records
    }
