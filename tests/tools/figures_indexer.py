"""Render the tables of the indexer at long contexts and of long prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Row = Mapping[str, Any]
COPY_BYTES_PER_US = 4.24e6
"""Copy rate of the H200 of indexer_h200.json."""


def long_contexts(rows: Mapping[str, list[Row]]) -> tuple[list[list[str]], list[Row]]:
    """Return lines and rows of the table of selections at long contexts, us."""
    shown = rows["indexer_long"]
    lines = [["context x requests", "keys at the rate of a copy", "selects from", "us", "cold"]]
    lines[0] += ["its score", "its selection alone"]
    for row in shown:
        score = next(us for kernel, us in row["kernels_us"].items() if "score" in kernel)
        times = [row["us"], row["cold_us"], score, row["select_us"]]
        floor = f"{row['bytes'] / COPY_BYTES_PER_US:.1f}"
        lines.append([row["size"], floor, row["configuration"], *(f"{us:.1f}" for us in times)])
    return lines, shown


def long_prompts(rows: Mapping[str, list[Row]]) -> tuple[list[list[str]], list[Row]]:
    """Return lines and rows of the table of long prompts in chunks: seconds, ms of kernels by kind, and memory."""
    shown = sorted(rows["prompt_chunks"], key=lambda row: (row["prompt"], row["chunk"]))
    kinds = ("experts", "GEMMs", "attention", "indexer", "hyper-connections")
    lines = [["prompt", "chunk", "s", "first, last chunk, ms", *(f"{kind}, ms" for kind in kinds), "memory, GiB"]]
    for row in shown:
        floors = row["floors_ms"]
        times = [f"{row['ms'][kind]:.0f}" + (f" ({floors[kind]:.0f})" if kind in floors else "") for kind in kinds]
        chunks = f"{row['first_ms']:.0f}, {row['last_ms']:.0f}"
        lines.append([f"{row['prompt']:,}", f"{row['chunk']:,}", f"{row['seconds']:.2f}", chunks, *times])
        lines[-1].append(f"{row['most_gib']:.1f}")
    return lines, shown
