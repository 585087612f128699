"""Read hardware counters of sparse attention: python examples/benchmarks/sparse_mla_counters.py --out counters.json

Calls `sparse_mla_decode` and `sparse_mla_prefill`, and FlashMLA if it is installed, with the arguments of their
scenarios under Nsight Compute (`ncu`, part of the CUDA toolkit) without clock control. A row of the record is a kernel
of a call: its time, the utilisation of issue slots, tensor pipes, shared memory, L2 and DRAM in percent of their peaks,
and the reasons of stalls in warps per issued instruction.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from dsv4_compile.bench import flash_mla, sparse_mla_decode, sparse_mla_prefill
from dsv4_compile.bench.record import environment

CASES = tuple(f"{op}:{heads}:{tokens}" for op, heads, tokens in (
    ("decode", 64, 32), ("decode", 64, 128), ("decode", 64, 512), ("decode", 128, 128), ("decode", 128, 512),
    ("prefill", 64, 4096), ("prefill", 128, 4096),
))  # fmt: skip
_STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
METRICS = {
    "gpu__time_duration.sum": "ns",
    "sm__cycles_elapsed.avg.per_second": "clock_hz",
    "smsp__issue_active.avg.pct_of_peak_sustained_active": "issue_slots",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": "tensor_pipe",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_active": "shared_memory",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": "l2",
    "lts__t_sector_hit_rate.pct": "l2_hits",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "dram",
    "dram__bytes.sum": "dram_bytes",
    _STALL.format("long_scoreboard"): "waits_for_memory",
    _STALL.format("short_scoreboard"): "waits_for_shared_memory",
    _STALL.format("barrier"): "waits_at_barriers",
    _STALL.format("gmma"): "waits_for_tensor_cores",
    _STALL.format("wait"): "waits_for_arithmetic",
}
"""Counters of Nsight Compute and their names in the record."""


def launch(case: str, implementation: str) -> None:
    """Call the kernel of a case three times, the last time under the profiler."""
    op, heads, tokens = case.split(":")
    scenario = sparse_mla_decode if op == "decode" else sparse_mla_prefill
    columns = {"heads": {heads}, **({"fused": {"none"}} if op == "decode" else {"pattern": {"random"}})}
    (problem,) = scenario.problems(torch.device("cuda"), columns, (int(tokens),))
    call, args = problem.implementations[implementation](), problem.make(0)
    for _ in range(2):
        call(*args)
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call(*args)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def rows_of(lines: Iterable[str]) -> list[dict[str, float | str]]:
    """Return the kernels in the output of `ncu --csv --page raw`: its second row has units, numbers may have commas."""
    table = list(csv.reader(line for line in lines if line.startswith('"')))
    if len(table) < 3:
        return []
    columns, _, *kernels = table
    rows: list[dict[str, float | str]] = []
    for kernel in kernels:
        values = dict(zip(columns, kernel, strict=True))
        row: dict[str, float | str] = {"kernel": values["Kernel Name"]}
        row |= {name: float(values[metric].replace(",", "")) for metric, name in METRICS.items() if values.get(metric)}
        rows.append(row)
    return rows


def counters(ncu: str, case: str, implementation: str) -> list[dict[str, float | str]]:
    """Return a row for each kernel of one call.

    Raises:
        RuntimeError: the profiler saw no kernel.
    """
    options = [
        "--clock-control",
        "none",
        "--profile-from-start",
        "off",
        "--csv",
        "--page",
        "raw",
        "--print-units",
        "base",
    ]
    command = [
        ncu,
        *options,
        "--metrics",
        ",".join(METRICS),
        sys.executable,
        __file__,
        "--launch",
        case,
        implementation,
    ]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
    rows = rows_of(done.stdout.splitlines())
    if not rows:
        raise RuntimeError(f"{case} {implementation}: {done.stdout[-1000:]}{done.stderr[-1000:]}")
    op, heads, tokens = case.split(":")
    return [{"op": op, "heads": int(heads), "tokens": int(tokens), "impl": implementation, **row} for row in rows]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(description="Counters of sparse attention.")
    parser.add_argument("--case", nargs="+", default=CASES, metavar="OP:HEADS:TOKENS")
    parser.add_argument("--out", type=Path, default=Path("sparse_mla_counters.json"))
    parser.add_argument("--ncu", default=shutil.which("ncu") or "")
    parser.add_argument("--launch", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.launch:
        with torch.no_grad():
            launch(*args.launch)
        return 0
    if not args.ncu:
        print("ncu is not in PATH: it comes with the CUDA toolkit; pass --ncu")
        return 1
    record = {"command": "python examples/benchmarks/sparse_mla_counters.py", **environment(torch.device("cuda"))}
    rows: list[dict[str, float | str]] = []
    for case in args.case:
        ways = ["triton", *flash_mla.if_installed(flash_mla.decode, int(case.split(":")[1]))]
        for implementation in ways:
            rows += counters(args.ncu, case, implementation)
            args.out.write_text(json.dumps({**record, "rows": rows}, indent=1) + "\n", encoding="utf-8")
            print(rows[-1], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
