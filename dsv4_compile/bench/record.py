"""What a number needs to mean anything: the machine, the versions, the date and the command. Records are plain JSON."""

from __future__ import annotations

import json
import platform
import shutil
import statistics
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from .._compat import device_architecture, triton_version
from .._files import replace
from ..errors import check
from .pictures import can_draw, draw
from .table import render, subject

Record = dict[str, Any]
"""`environment`, "scenario", "command", "copy_gb_s", and "rows": one dict per problem and implementation."""
_OF_A_RUN = ("date", "command", "copy_gb_s", "rows")


def environment(device: torch.device) -> Record:
    """Machine, versions and date."""
    return {
        "machine": _machine(device),
        "architecture": device_architecture(device),
        "driver": _driver(device),
        "torch": torch.__version__,
        "triton": triton_version(),
        "python": platform.python_version(),
        "dsv4_compile": __version__,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def merge(records: Sequence[Record]) -> Record:
    """One record of runs side by side: all commands and rows, the first date, and the median of the copy rates.

    A row of what the same implementation was measured for again takes the place of the former.
    E201 unless they are of one scenario, machine and set of versions.
    """
    check(bool(records), "E201", got="no record", rule="at least one record is merged")
    of_one = [{key: record[key] for key in record if key not in _OF_A_RUN} for record in records]
    strange = next((each for each in of_one if each != of_one[0]), of_one[0])
    differing = sorted(key for key in of_one[0] | strange if strange.get(key) != of_one[0].get(key))
    rule = "records that are merged are of one scenario, machine and set of versions"
    check(not differing, "E201", got=f"different {', '.join(differing)}", rule=rule, fix="merge runs of one machine")
    rates = [rate for record in records if (rate := record.get("copy_gb_s")) is not None]
    rows: dict[object, Any] = {}
    for row in (row for record in records for row in record["rows"]):
        rows[subject(row) if "impl" in row else len(rows)] = row
    return {
        **of_one[0],
        "date": min(record["date"] for record in records),
        "command": "; ".join(record["command"] for record in records),
        **({"copy_gb_s": statistics.median(rates)} if rates else {}),
        "rows": list(rows.values()),
    }


def save(record: Record, folder: str | Path) -> list[Path]:
    """Write `<scenario>.json`, `.txt` and, where matplotlib is, pictures into `folder`; return their paths."""
    return write(record, folder) + (draw(record, Path(folder)) if can_draw() else [])


def write(record: Record, folder: str | Path) -> list[Path]:
    """`save` without pictures."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record['scenario']}.json"
    replace(path, json.dumps(record, indent=1))
    replace(path.with_suffix(".txt"), render(record))
    return [path, path.with_suffix(".txt")]


def collect(record: Record, rows: Iterable[Record], folder: Path | None) -> Iterator[Record]:
    """`rows`, each when it is in `record` and, with a `folder`, in its `<scenario>.json`."""
    for row in rows:
        record["rows"].append(row)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            replace(folder / f"{record['scenario']}.json", json.dumps(record, indent=1))
        yield row


def _machine(device: torch.device) -> str:
    if device.type != "cuda":
        return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    facts = torch.cuda.get_device_properties(device)
    memory, l2 = facts.total_memory / 2**30, facts.L2_cache_size / 2**20
    return f"{facts.name}, {facts.multi_processor_count} multiprocessors, {memory:.0f} GiB, L2 {l2:.0f} MiB"


def _driver(device: torch.device) -> str:
    if device.type != "cuda":
        return "none"
    if torch.version.hip is not None:
        return f"HIP {torch.version.hip}"
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return f"unknown, CUDA {torch.version.cuda}"
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    found = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False).stdout.split()
    return f"{found[0] if found else 'unknown'}, CUDA {torch.version.cuda}"
