"""Records of measurements: rows with machine, versions, commit, date, command and fingerprints, as plain JSON.

A record has the keys of `environment`, "scenario", "command", "copy_gb_s", "fingerprints" (by op, of the machine code
that was timed) and "rows": a dict per problem and implementation, with its own "date" and "commit". In a row "us" is
warm: the same arguments in every call. "cold_us" is cold: see `timing`.
"""

from __future__ import annotations

import json
import os
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
ROOT = Path(__file__).resolve().parents[2]
FINGERPRINTS = Path(__file__).resolve().parents[1] / "selection" / "fingerprints.json"
"""Hashes of the machine code of each op, `{target: {op: hash}}`, with the versions that compiled it."""
COMMIT = "DSV4_COMMIT"
"""Environment variable that names the commit of a copy of the code without its git folder."""
_OF_A_RUN = ("date", "command", "commit", "copy_gb_s", "fingerprints", "rows")


def environment(device: torch.device) -> Record:
    """Return machine, versions, commit and date."""
    return {
        "machine": _machine(device),
        "architecture": device_architecture(device),
        "driver": _driver(device),
        "torch": torch.__version__,
        "triton": triton_version(),
        "python": platform.python_version(),
        "dsv4_compile": __version__,
        "commit": commit(),
        "date": now(),
    }


def now() -> str:
    """Return the time to stamp a row with, in UTC to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def commit(root: Path = ROOT) -> str:
    """Return the commit of the code at `root`, "+changes" appended if tracked files differ from it, or "unknown"."""
    if named := os.environ.get(COMMIT):
        return named
    git = ["git", "-c", "safe.directory=*", "-C", str(root)]
    # Without a git folder here, git would answer for a repository around an installed package.
    if not (root / ".git").exists() or shutil.which("git") is None:
        return "unknown"
    try:
        head = _output([*git, "rev-parse", "--short=12", "HEAD"])
        changed = _output([*git, "status", "--porcelain", "--untracked-files=no"])
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return f"{head}+changes" if changed else head


def fingerprints(ops: Iterable[str], architecture: str) -> dict[str, str]:
    """Return the fingerprint of each of `ops` on `architecture`, a `_compat.device_architecture`.

    Names that are not ops of the table (a whole decode step, a chain) stand for all ops of it. Empty without a table.
    """
    try:
        table = json.loads(FINGERPRINTS.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    hashes_by_op = table.get(architecture.split()[-1], {})
    wanted, known = set(ops), {op for hashes in table.values() if isinstance(hashes, dict) for op in hashes}
    return {op: hashes_by_op[op] for op in sorted(known if wanted - known else wanted) if op in hashes_by_op}


def merge(records: Sequence[Record]) -> Record:
    """Return one record of several runs: all commands and rows, the last date and the median of the copy rates.

    Each row keeps the date and commit of its run. A row replaces an earlier one of the same op, sizes and
    implementation. E201 unless the records are of one scenario, machine, set of versions and, where they name
    fingerprints, machine code.
    """
    check(bool(records), "E201", got="no record", rule="at least one record is merged")
    shared = [{key: record[key] for key in record if key not in _OF_A_RUN} for record in records]
    strange = next((settings for settings in shared if settings != shared[0]), shared[0])
    differing = sorted(key for key in shared[0] | strange if strange.get(key) != shared[0].get(key))
    prints: dict[str, str] = {}
    for record in records:
        for op, fingerprint in record.get("fingerprints", {}).items():
            if prints.setdefault(op, fingerprint) != fingerprint:
                differing.append(f"machine code of {op}")
    rule = "records that are merged are of one scenario, machine, set of versions and machine code"
    fix = "merge runs of one machine and commit, or measure all rows again"
    check(not differing, "E201", got=f"different {', '.join(differing)}", rule=rule, fix=fix)
    rates = [rate for record in records if (rate := record.get("copy_gb_s")) is not None]
    rows: dict[object, Any] = {}
    for record in records:
        stamp = {"date": record["date"], "commit": record.get("commit", "unknown")}
        for row in record["rows"]:
            rows[subject(row) if "impl" in row else len(rows)] = row | {k: row.get(k, v) for k, v in stamp.items()}
    return {
        **records[0],
        "commit": "; ".join(dict.fromkeys(str(row["commit"]) for row in rows.values())),
        "date": max(record["date"] for record in records),
        "command": "; ".join(dict.fromkeys(record["command"] for record in records)),
        **({"copy_gb_s": statistics.median(rates)} if rates else {}),
        **({"fingerprints": prints} if prints else {}),
        "rows": list(rows.values()),
    }


def save(record: Record, folder: str | Path) -> list[Path]:
    """Write `<scenario>.json`, `.txt` and, if matplotlib is installed, pictures to `folder`; return their paths."""
    return write(record, folder) + (draw(record, Path(folder)) if can_draw() else [])


def write(record: Record, folder: str | Path) -> list[Path]:
    """Write `<scenario>.json` and `.txt` to `folder`; return their paths."""
    path = write_json(record, folder)
    replace(path.with_suffix(".txt"), render(record))
    return [path, path.with_suffix(".txt")]


def write_json(record: Record, folder: str | Path) -> Path:
    """Write `<scenario>.json` to `folder`, which is made if it is missing; return its path."""
    path = Path(folder) / f"{record['scenario']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    replace(path, json.dumps(record, indent=1))
    return path


def collect(record: Record, rows: Iterable[Record], folder: Path | None) -> Iterator[Record]:
    """Yield each of `rows` once it is in `record` with its date and, given a `folder`, in its `<scenario>.json`."""
    for row in rows:
        row |= {"date": now(), "commit": record.get("commit", "unknown")}
        record["rows"].append(row)
        if folder is not None:
            write_json(record, folder)
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
    lines = subprocess.run(
        query, capture_output=True, encoding="utf-8", errors="replace", timeout=20, check=False
    ).stdout.split()
    return f"{lines[0] if lines else 'unknown'}, CUDA {torch.version.cuda}"


def _output(command: Sequence[str]) -> str:
    return subprocess.run(
        command, capture_output=True, encoding="utf-8", errors="replace", timeout=20, check=True
    ).stdout.strip()
