"""The `dsv4 bench` command: checks its arguments, runs scenarios, and prints, writes and tunes from their records."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from .. import bench
from ..selection import measured, proven

_locks: dict[str, int] = {}
"""Open lock files of `--turn`, by path."""


def run(args: argparse.Namespace) -> int:
    """Run the command and return the exit status: 1 for wrong or failed implementations, 2 for unusable arguments."""
    if args.scenario is None and not args.tune:
        width = max(map(len, bench.SCENARIOS))
        print("\n".join(f"{name:{width}}  {what}" for name, what in bench.SCENARIOS.items()))
        return 0
    try:
        only = bench.limits(args.only)
    except ValueError as fault:
        print(fault, file=sys.stderr)
        return 2
    if args.scenario is None and only:
        print("--only limits a scenario, and --tune alone measures every choice: name one of both", file=sys.stderr)
        return 2
    if args.scenario is None and args.json:
        print("--json prints one record, and --tune alone makes several: name a scenario or use --out", file=sys.stderr)
        return 2
    if args.png:
        bench.require_drawing()
    if wrong := _why_unwritable(args):
        print(wrong, file=sys.stderr)
        return 2
    choices = {args.scenario: only} if args.scenario else bench.choices()
    return max(_measure(args, scenario, columns) for scenario, columns in choices.items())


def _why_unwritable(args: argparse.Namespace) -> str:
    """Return which file the run could not write later, and why, or ""."""
    folder = args.out or ("." if args.png else "")
    try:
        if folder:
            os.makedirs(folder, exist_ok=True)
    except OSError as fault:
        return f"--out {folder}: {fault.strerror}"
    if folder and not os.access(folder, os.W_OK):
        return f"--out {folder}: nothing can be written there"
    try:
        if args.turn:
            os.close(_open_lock(args.turn))
    except OSError as fault:
        return f"--turn {args.turn}: {fault.strerror}"
    if args.tune and not os.access(measured.RECORD, os.W_OK):
        return f"--tune writes to {measured.RECORD}, which is read-only: install the package with pip install -e"
    return ""


def _measure(args: argparse.Namespace, scenario: str, only: Mapping[str, Collection[str]]) -> int:
    """Run one scenario, print and write its record, and return the exit status."""
    if wrong := bench.why_unsupported(scenario, only):
        print(wrong, file=sys.stderr)
        return 2
    if args.device == "cuda" and not torch.cuda.is_available():
        print("--device cuda: torch finds no GPU", file=sys.stderr)
        return 2
    with proven.trust() if args.trust else nullcontext():
        record = bench.run(
            scenario,
            only=only,
            device=torch.device(args.device) if args.device else None,
            so_far=partial(bench.write, folder=args.out) if args.out else None,
            turn=partial(_take_turn, args.turn) if args.turn else None,
        )
    if not record["rows"]:
        print(f"nothing is left to measure after --only {' --only '.join(args.only)}", file=sys.stderr)
        return 2
    if args.only and (missed := _missed(only, record["rows"])):
        print(f"nothing was measured of {', '.join(missed)}", file=sys.stderr)
    print(json.dumps(record, indent=1) if args.json else bench.render(record))
    if args.out or args.png:
        bench.save(record, args.out or ".")
    if args.tune:
        print(f"{measured.update(record)} sizes of both ir and triton written to {measured.RECORD}", file=sys.stderr)
    return int(any(row["status"] in bench.FAULTS for row in record["rows"]))


def _missed(only: Mapping[str, Collection[str]], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return values of `--only` that no row has: typing errors, mostly."""
    asked = ((column, value) for column, values in only.items() for value in sorted(values))
    return [f"{column}={value}" for column, value in asked if all(str(row.get(column)) != value for row in rows)]


def _take_turn(path: str) -> None:
    """Wait for the lock of the file, and hold it while this process lives."""
    import fcntl  # not on every platform

    # One lock per process: a second scenario would wait for the first's for ever.
    if path not in _locks:
        file = _open_lock(path)
        fcntl.flock(file, fcntl.LOCK_EX)
        _locks[path] = file


def _open_lock(path: str) -> int:
    return os.open(path, os.O_CREAT | os.O_RDWR)
