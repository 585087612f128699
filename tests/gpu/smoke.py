"""Run every op on a GPU and compare it with the CPU: `python tests/gpu/smoke.py [--trust] [--jobs N] [--op NAME ...]`.

For each sample of each op: the result agrees with the CPU's; the call does not wait for the device; what it promises
about strides, aliasing, mutation and fresh memory holds there too; it can be captured into a CUDA graph, and the replay
gives the bytes of the eager call. Prints a table, writes smoke.json to $OUT (default: here), exits with 1 on a failure.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a checkout that is not installed

import dsv4_compile.ops  # noqa: F401  registers the ops
from dsv4_compile.bench.record import environment
from dsv4_compile.ops.common.define import OPS
from dsv4_compile.ops.common.kernels import KERNELS, runs_kernel
from dsv4_compile.selection import proven
from dsv4_compile.testing import assert_bitwise, check_op
from dsv4_compile.testing.agreement import assert_agrees, results_of, written_arguments
from dsv4_compile.testing.samples import BUILDERS, op_samples

Args = tuple[Any, ...]


@contextmanager
def no_synchronization(device: str) -> Iterator[None]:
    """Raise where a call waits for the device."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def run(name: str, args: Args) -> list[Tensor]:
    """Results, then the arguments that the op may have written."""
    return results_of(name, OPS[name](*args), args)


def check_graph(name: str, index: int, device: str, eager: list[Tensor]) -> None:
    """Capture the call, replay it, and compare with the eager results on the same device."""
    args = op_samples(name, device)[index]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(name, args)
    graph.replay()
    torch.cuda.synchronize()
    for got, want in zip(captured, eager, strict=True):
        assert_bitwise(got, want, label="graph replay")


def check_sample(name: str, index: int, device: str) -> None:
    """All checks of one sample. Raises on the first that fails."""
    before = written_arguments(name, op_samples(name)[index])
    want = run(name, op_samples(name)[index])
    run(name, op_samples(name, device)[index])  # loads kernels and libraries, which may wait
    args = op_samples(name, device)[index]
    with no_synchronization(device):
        got = run(name, args)
    assert_agrees(name, got, want, before, kernel=runs_kernel(name, torch.device(device)))
    check_op(OPS[name], [op_samples(name, device)[index]], utilities=False)
    if device == "cuda":
        check_graph(name, index, device, got)


def check_op_samples(name: str, device: str) -> dict[str, Any]:
    """One row of the table: the kernel of an op ran, or the reference, since it has none or it is not proven here."""
    started, count = time.perf_counter(), len(op_samples(name)) if name in BUILDERS else 0
    errors = [] if count else ["the op has no samples"]
    for index in range(count):
        try:
            check_sample(name, index, device)
        except Exception as fault:
            errors.append(f"sample {index}: {type(fault).__name__}: {fault}")
    seconds = time.perf_counter() - started
    unproven = "unproven" if device == "cuda" and name in KERNELS else "reference"
    impl = "kernel" if runs_kernel(name, torch.device(device)) else unproven
    row = {"op": name, "impl": impl, "samples": count, "failed": len(errors)}
    return row | {"seconds": round(seconds, 3), "errors": errors}


def check_ops(names: Sequence[str], device: str) -> list[dict[str, Any]]:
    """Rows of these ops, each printed when it is known."""
    rows = []
    for name in names:
        rows.append(row := check_op_samples(name, device))
        show(row)
    return rows


def show(row: dict[str, Any]) -> None:
    """Print a row of the table and its errors."""
    verdict = "ok" if not row["failed"] else f"{row['failed']} fail"
    print(f"{row['op']:32} {row['impl']:9} {row['samples']:7} {verdict:>8} {row['seconds']:7.2f}", flush=True)
    for error in row["errors"]:
        print("    " + error.replace("\n", "\n    "))


def check_apart(names: Sequence[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """The same, by `options.jobs` processes: most of the time goes into compiling."""
    command = [sys.executable, __file__, "--device", options.device, *(["--trust"] if options.trust else [])]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        running = {}
        for job in range(options.jobs):
            (out := Path(folder, str(job))).mkdir()
            selected = [word for name in names[job :: options.jobs] for word in ("--op", name)]
            if selected:
                quiet = {"env": os.environ | {"OUT": str(out)}, "stdout": subprocess.DEVNULL}
                running[out] = subprocess.Popen([*command, *selected], **quiet)
        for out, process in running.items():
            if process.wait() in (0, 1):
                rows += json.loads((out / "smoke.json").read_text())["ops"]
    lost = set(names) - {row["op"] for row in rows}
    none = {"impl": "", "samples": 0, "failed": 1, "seconds": 0.0, "errors": ["its process ended early"]}
    rows = sorted(rows + [{"op": name, **none} for name in lost], key=lambda row: row["op"])
    for row in rows:
        show(row)
    return rows


def main(argv: list[str] | None = None) -> int:
    """Check all ops; 0 when all pass, 1 when one fails, 2 without the device."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--trust", action="store_true", help="run kernels that have not been proven on this GPU too")
    parser.add_argument("--op", action="append", choices=sorted(OPS), help="check these ops only")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once (%(default)s)")
    options = parser.parse_args(argv)
    device, names = options.device, options.op or sorted(OPS)
    if device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device", file=sys.stderr)
        return 2
    said = " ".join(["python tests/gpu/smoke.py", *(sys.argv[1:] if argv is None else argv)])
    record: dict[str, Any] = {"scenario": "smoke", **environment(torch.device(device)), "command": said}
    warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
    warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # samples without tokens launch nothing
    print(f"{'op':32} {'runs':9} {'samples':>7} {'result':>8} {'s':>7}")
    if options.jobs > 1:
        rows = check_apart(names, options)
    else:
        with torch.inference_mode(), proven.trust() if options.trust else nullcontext():
            rows = check_ops(names, device)
    failed = sum(row["failed"] for row in rows)
    record.update(failed=failed, ops=rows)
    path = Path(os.environ.get("OUT", ".")) / "smoke.json"
    path.write_text(json.dumps(record, indent=1))
    print(f"{len(rows)} ops, {failed} failures, torch {torch.__version__}, {record['machine']}; written to {path}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
