"""Run the conformance cases on a device, write a record, and print the table of records.

    python tests/attention_backends/record.py [--device cuda] [--jobs 8] [--out examples/results]
    python tests/attention_backends/record.py --table examples/results/attention_backends_*.json

A row of a record is one backend with one cache in one phase. Its checks: exact in eager mode at every compress ratio;
exact as one graph of backend="dsv4"; for decodes on a GPU, exact when captured and replayed for other batches. Exits
with 1 on a failure.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, is_dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
import torch.fx.experimental._config
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a checkout that is not installed

import dsv4_compile.backend  # noqa: F401
from dsv4_compile._compat import device_architecture
from dsv4_compile.bench.record import environment
from dsv4_compile.testing import Tolerance
from dsv4_compile.testing import assert_close as compare
from dsv4_compile.testing.batch import Batch
from tests.attention_backends.systems import PHASES, Setup, any_case, any_layer, library_setups, setups

Record = dict[str, Any]
CHECKS = ("eager", "compiled", "captured")
SEED = 20261120
FEW_KEYS = Tolerance(abs=4e-3, rel=2.01 / 128, cosine=5e-6)
"""Tolerance of kernels that round softmax weights to bfloat16. Each weight is off by up to 2^-9; in short sequences few
keys are averaged, so a component that cancels is off by 2^-9 times the size of the keys, which is 2."""


def assert_close(out: Tensor, expected: Tensor) -> None:
    """Compare with the tolerance of an exact softmax on a CPU, and of the kernels on a GPU."""
    compare(out, expected, FEW_KEYS if out.is_cuda else "attention_bfloat16")


def tensors(value: Any) -> list[Tensor]:
    """Return every tensor in a call's arguments, in a fixed order."""
    if isinstance(value, Tensor):
        return [value]
    if is_dataclass(value):
        return [tensor for field in fields(value) for tensor in tensors(getattr(value, field.name))]
    return [tensor for item in value for tensor in tensors(item)] if isinstance(value, tuple) else []


def eager(setup: Setup, device: str) -> None:
    """Check that three batches are exact in eager mode."""
    rng = random.Random(SEED)
    layer = any_layer(setup, any_case(rng, setup), device)
    for _ in range(3):
        case = any_case(rng, setup)
        assert_close(layer.module(*layer.arguments(case)), case.expected())


def compiled(setup: Setup, device: str) -> None:
    """Check that five batches run one compiled graph and are exact."""
    torch.compiler.reset()
    rng = random.Random(SEED + 1)
    layer = any_layer(setup, any_case(rng, setup), device)
    call = torch.compile(layer.module, backend="dsv4", fullgraph=True, dynamic=True)
    with torch.fx.experimental._config.patch(use_duck_shape=False):
        for number in range(5):
            case = any_case(rng, setup)
            with torch._dynamo.config.patch(error_on_recompile=number > 0):
                assert_close(call(*layer.arguments(case)), case.expected())


def captured(setup: Setup, device: str) -> None:
    """Check that a CUDA graph captured for eight decodes, one of them padding, is exact for other batches of eight."""
    rng = random.Random(SEED + 2)

    def decodes() -> Any:
        return any_case(rng, setup, Batch((1,) * 7 + (0,), (*(rng.randint(1, 300) for _ in range(7)), 0), padding=1))

    case = decodes()
    layer = any_layer(setup, case, device)
    arguments = layer.arguments(case)
    layer.module(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer.module(*arguments)
    for _ in range(3):
        case = decodes()
        for mine, new in zip(tensors(arguments), tensors(layer.arguments(case)), strict=True):
            mine.copy_(new)
        graph.replay()
        assert_close(out, case.expected())


def outcome(check: Callable[[Setup, str], None], setup: Setup, device: str) -> str:
    """Return "passed", or the first line of the error message."""
    torch.manual_seed(SEED)
    try:
        with torch.inference_mode():
            check(setup, device)
    except Exception as error:
        traceback.print_exc()
        return f"failed: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    return "passed"


def outcomes(setup: Setup, device: str) -> dict[str, str]:
    """Return the outcome of each check that applies to `setup`."""
    results = {"eager": outcome(eager, setup, device)}
    if setup.ratio in (1, 4):
        results["compiled"] = outcome(compiled, setup, device)
        if setup.phase == "decode" and device == "cuda":
            results["captured"] = outcome(captured, setup, device)
    torch.compiler.reset()
    return results


def run(device: str, jobs: int = 1) -> Iterator[Record]:
    """Run all backends, caches and phases on one device in `jobs` processes; compilation takes most of the time.

    A library that supports the device has separate rows. Yields the record after every case, so that an interrupted run
    leaves a record; `cases` tells how complete it is.
    """
    every = [*library_setups(device_architecture(torch.device(device))), *setups()]
    rows: dict[tuple[str, str, str], Record] = {}
    command = f"python tests/attention_backends/record.py --device {device}"
    about = {**environment(torch.device(device)), "command": command}
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        for number, (setup, results) in enumerate(
            zip(every, pool.map(outcomes, every, repeat(device)), strict=True), 1
        ):
            print(f"{number}/{len(every)} {setup}: {', '.join(f'{k} {v}' for k, v in results.items())}", flush=True)
            row = rows.setdefault((setup.system, setup.kv_cache_dtype, setup.phase), {})
            # A row covers all ratios: it keeps the first failure.
            row.update({name: result for name, result in results.items() if row.get(name, "passed") == "passed"})
            yield {
                **about,
                "cases": f"{number} of {len(every)}",
                "rows": [{"system": a, "cache": b, "phase": c, **row} for (a, b, c), row in rows.items()],
            }


def failed(row: Record) -> bool:
    """Return whether a check of the row did not pass."""
    return any(row.get(name, "passed") != "passed" for name in CHECKS)


def table(records: Iterable[Record]) -> str:
    """Return a Markdown table: rows are backend and cache, columns are phases, cells are devices and dates."""
    cells: dict[tuple[str, str], dict[str, list[str]]] = {}
    for record in records:
        for row in record["rows"]:
            cell = cells.setdefault((row["system"], row["cache"]), {phase: [] for phase in PHASES})[row["phase"]]
            passed = ", ".join(name for name in CHECKS if row.get(name) == "passed")
            where = f"{record['architecture'].removeprefix('cuda ')} {record['date'][:10]}"
            cell.append(f"{where}: {'FAILED' if failed(row) else passed}")
    lines = [f"| system | cache | {' | '.join(PHASES)} |", "|---|---|" + "---|" * len(PHASES)]
    for (system, cache), phases in sorted(cells.items()):
        name, _, library = system.partition(", ")
        columns = [f"`{name}`{', ' if library else ''}{library}", cache]
        columns += ["<br>".join(phases[phase]) or "-" for phase in PHASES]
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Records of the attention backends' conformance suite.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    jobs = max(1, min(14, (os.cpu_count() or 2) - 2))
    parser.add_argument("--jobs", type=int, default=jobs, help="processes (%(default)s)")
    parser.add_argument("--out", default="examples/results", help="output folder")
    parser.add_argument("--table", nargs="*", metavar="RECORD", help="print the table of these records and exit")
    options = parser.parse_args()
    if options.table is not None:
        print(table(json.loads(Path(path).read_text()) for path in options.table))
        return 0
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    for record in run(options.device, options.jobs):
        architecture = record["architecture"].removeprefix("cuda ")
        path = folder / f"attention_backends_{architecture}_{record['date'][:10]}.json"
        path.write_text(json.dumps(record, indent=1) + "\n")
    print(table([record]))
    print(path)
    return int(any(failed(row) for row in record["rows"]))


if __name__ == "__main__":
    sys.exit(main())
