"""Run the GPU tests and record what passed: `python tests/gpu/prove.py [STEM ...] [--part 1/2] [--budget S]`.

`test_lowered_<stem>.py` proves the IR lowerings of a stem's ops, `test_<stem>.py` their kernels. The rows of this GPU
in dsv4_compile/selection/proven.json are written anew: what fails here, or has no test, is not chosen by `auto` here.
With names of files, only their rows are, and a file that the budget leaves out keeps its rows. A row of a kernel has
its fingerprint in the committed table; a kernel that the table lacks is not recorded.

Where one call must not take as long as all files do, `--part 1/2` and `--part 2/2` are two halves of them, about as
long as each other; the record keeps the rows of the other half. A second call in a different copy of the repository
needs the record of the first, $OUT/prove/proven.json, as its dsv4_compile/selection/proven.json.

Each file has a separate process, the longest have several, and a time limit: a kernel that hangs or faults takes
nothing else with it. Many run at once, on all GPUs that CUDA_VISIBLE_DEVICES leaves. What decoding needs comes first.
The record is complete after every file, so that a run may be cut short; logs, a table and a copy of the record are in
$OUT/prove (default: build/prove).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # runs from a checkout that is not installed

from dsv4_compile._compat import device_architecture, triton_version  # noqa: E402
from dsv4_compile._files import replace_rows  # noqa: E402
from dsv4_compile.lowering import registry  # noqa: E402
from dsv4_compile.ops.common.define import LOWERED  # noqa: E402
from dsv4_compile.ops.common.kernels import KERNELS  # noqa: E402
from dsv4_compile.selection import proven  # noqa: E402

PREFIX = "test_lowered_"
FIRST = (
    "sparse_mla_decode",
    "preprocess_insert",
    "preprocess_insert_quant",
    "fp8_linear",
    "sparse_mla_decode_quant",
    "indexer_topk_slots",
    "indexer_logits",
    "fp8_grouped_einsum",
    "fp8_grouped_einsum_quant",
    "sparse_mla_prefill",
    "q_norm_rope",
    "batch_metadata",
    "decode_runner",
    "compress_norm_rope_insert",
    "global_topk",
    "indexer_q_rope_quant",
    "inv_rope",
    "merged_layer",
    "save_partial_states",
    "attention_backends",
)
"""Stems in order of value, a decode step's largest shares in front; then the other kernels, then the lowerings."""
PARTS = {
    "attention_backends": 10,
    "chain_steady": 3,
    "decode_runner": 6,
    "fp8_grouped_einsum_quant": 2,
    "fp8_linear": 6,
    "indexer_logits_ragged": 2,
    "lowered_compress_norm_rope_insert": 5,
    "merged_layer": 3,
    "moe_experts": 5,
    "mx_experts": 6,
    "mx_linear": 4,
    "preprocess_insert": 6,
    "preprocess_insert_quant": 4,
    "side_stream": 4,
    "sparse_mla_decode": 6,
    "sparse_mla_decode_quant": 5,
    "sparse_mla_mixed": 4,
    "sparse_mla_prefill": 6,
    "v32_layer": 3,
}
"""Processes of a stem's file, 1 where it is not named: most of the time is that of one core, which compiles."""
THREADS = {"OMP_NUM_THREADS": "2", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
"""For each process, unless the environment says otherwise: together they have work for all cores."""
SHARED_TESTS = {"global_topk_ragged": "ragged_from_dense", "indexer_logits_topk_ragged": "indexer_logits_ragged"}
"""Ops that are tested in the file of a different op."""
SPENT, VERDICTS, POLL, MOST_FAILURES = "the budget was spent", ("passed", "not run", "HUNG", "FAILED"), 0.05, 5
"""After a fault on the device every further test of its process fails."""


class Outcome(NamedTuple):
    """What became of a test file: "passed", "FAILED", "HUNG" or "not run"; its tests and its seconds."""

    path: Path
    verdict: str
    tests: int = 0
    seconds: float = 0.0
    reason: str = ""


class Part(NamedTuple):
    """Part `index` of the tests of a file, which has `of`."""

    path: Path
    index: int = 0
    of: int = 1

    @property
    def name(self) -> str:
        return self.path.stem + (f"_{self.index + 1}of{self.of}" if self.of > 1 else "")


class Running(NamedTuple):
    """A part in its process, on a GPU."""

    part: Part
    process: subprocess.Popen[bytes]
    log: Path
    started: float
    gpu: str


def claims(path: Path) -> list[tuple[str, str]]:
    """(impl, op) that a test file proves when it passes."""
    if path.stem.startswith(PREFIX):
        stem = path.stem.removeprefix(PREFIX)
        return [("ir", op) for op, how in sorted(LOWERED.items()) if str(how).endswith(f".{stem}") or op == stem]
    stem = path.stem.removeprefix("test_")
    return [("triton", op) for op in sorted(KERNELS) if tested_by(op) == stem]


def tested_by(op: str) -> str:
    """Stem of the file that tests the kernels of `op`: the longest name that the op is or continues."""
    if op in SHARED_TESTS:
        return SHARED_TESTS[op]
    stems = [path.stem.removeprefix("test_") for path in every_file()]
    return max((stem for stem in stems if op == stem or op.startswith(f"{stem}_")), key=len, default="")


def every_file() -> list[Path]:
    """Return every test file of this folder and of its families."""
    return sorted(Path(__file__).parent.rglob("test_*.py"))


def by_value(paths: Sequence[Path]) -> list[Path]:
    """Test files, the most valuable first."""

    def rank(path: Path) -> tuple[bool, int, str]:
        stem = path.stem.removeprefix("test_")
        return path.stem.startswith(PREFIX), FIRST.index(stem) if stem in FIRST else len(FIRST), stem

    return sorted(paths, key=rank)


def share(paths: Sequence[Path], which: str) -> list[Path]:
    """Return the files of part `which`, "1/2", of a run in several calls: each file goes to the least of the parts."""
    index, of = map(int, which.split("/"))
    if not 1 <= index <= of:
        raise ValueError(f"no part {which}")
    shares: list[list[Path]] = [[] for _ in range(of)]
    weight = {path: PARTS.get(path.stem.removeprefix("test_"), 1) for path in paths}
    for path in sorted(by_value(paths), key=lambda path: -weight[path]):
        min(shares, key=lambda own: sum(weight[path] for path in own)).append(path)
    return shares[index - 1]


class Limits(NamedTuple):
    """Processes at once; seconds of one, of one without a test that begins or ends, and of the run."""

    jobs: int
    file: float
    stall: float
    budget: float


def parts_of(paths: Sequence[Path], parts: Mapping[str, int] = PARTS) -> list[Part]:
    """Return the parts that run in separate processes, in the order of the files."""
    counts = [(path, parts.get(path.stem.removeprefix("test_"), 1)) for path in paths]
    return [Part(path, index, of) for path, of in counts for index in range(of)]


def run_files(
    paths: Sequence[Path], logs: Path, limits: Limits, gpus: Sequence[str] = ("",), parts: Mapping[str, int] = PARTS
) -> Iterator[Outcome]:
    """Test the files in their order, each part on the GPU that has the fewest, and say how each file ended when it has.

    A part that exceeds its limit is killed; one that runs out of memory next to others runs again alone. A spent budget
    ends all.
    """
    waiting, running, alone = parts_of(paths, parts), list[Running](), set[Part]()
    end = time.monotonic() + limits.budget
    ended: dict[Path, list[Outcome]] = {path: [] for path in paths}

    def whole(part: Part, outcome: Outcome) -> Iterator[Outcome]:
        ended[part.path].append(outcome)
        if len(ended[part.path]) == part.of:
            yield together(ended[part.path])

    try:
        while waiting or running:
            now = time.monotonic()
            if now >= end:
                for part in waiting:
                    yield from whole(part, Outcome(part.path, "not run", reason=SPENT))
                waiting.clear()
            while waiting and len(running) < (1 if waiting[0] in alone else limits.jobs):
                gpu = min(gpus, key=[one.gpu for one in running].count)
                running.append(_start(waiting.pop(0), logs, limits, gpu))
            for one in list(running):
                overdue = SPENT if now >= end else _overdue(one, now, limits)
                if one.process.poll() is None and not overdue:
                    continue
                running.remove(one)
                outcome = _ended(one, overdue)
                if "out of memory" in outcome.reason and one.part not in alone:
                    waiting.append(one.part)
                    alone.add(one.part)
                else:
                    yield from whole(one.part, outcome)
            time.sleep(POLL)
    finally:
        for one in running:
            _kill(one.process)


def together(outcomes: Sequence[Outcome]) -> Outcome:
    """The outcome of a file from those of its parts: the worst, the tests of all, the seconds of the longest."""
    worst = max(outcomes, key=lambda outcome: VERDICTS.index(outcome.verdict))
    return worst._replace(
        tests=sum(outcome.tests for outcome in outcomes), seconds=max(outcome.seconds for outcome in outcomes)
    )


def _overdue(one: Running, now: float, limits: Limits) -> str:
    """Which limit a file has exceeded, "" for none."""
    if now - one.started >= limits.file:
        return f"killed after {limits.file:.0f} s"
    silent = time.time() - one.log.stat().st_mtime
    return f"killed after {silent:.0f} s without a sign of life" if silent >= limits.stall else ""


def _start(part: Part, logs: Path, limits: Limits, gpu: str) -> Running:
    log = logs / f"{part.name}.log"
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider"]
    # The Python stack of a test that takes half of its time limit goes to the log, and counts as a sign of life.
    command += [f"--maxfail={MOST_FAILURES}", "-o", f"faulthandler_timeout={limits.stall / 2}", str(part.path)]
    if part.of > 1:
        command += ["-p", "tests.gpu.slices", f"--slice={part.index}/{part.of}"]
    env = THREADS | os.environ | {"PYTHONUNBUFFERED": "1"} | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    return Running(part, process, log, time.monotonic(), gpu)


def _ended(one: Running, overdue: str) -> Outcome:
    """Return the outcome of a part after its process has ended, or must because it is overdue."""
    status, seconds = one.process.poll(), time.monotonic() - one.started
    _kill(one.process)
    text = one.log.read_text(errors="replace")
    tests = len(re.findall(r"^(?:\S+::.* )?PASSED", text, re.MULTILINE))  # a stack of a slow test splits its line
    if status is None:
        begun = re.findall(r"^(\S+::\S+)", text, re.MULTILINE)
        verdict = "not run" if overdue == SPENT else "HUNG"
        return Outcome(one.part.path, verdict, tests, seconds, f"{overdue} in {begun[-1] if begun else 'collection'}")
    if status == 0 and tests:
        return Outcome(one.part.path, "passed", tests, seconds)
    errors = re.findall(r"^(?:E  +|ERROR )(.*)", text, re.MULTILINE)
    return Outcome(
        one.part.path, "FAILED", tests, seconds, errors[0] if errors else f"exit status {status}, {tests} tests"
    )


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process with all that it has started. One that a driver holds is not waited for."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(10)


def write_record(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Replace the record by `rows`, in one step."""
    replace_rows(path, "proven", rows)


def row_of(impl: str, op: str, stamp: Mapping[str, str]) -> dict[str, str] | None:
    """Return the row of an implementation that passed; None for a kernel that the table of fingerprints lacks."""
    key, fingerprint = {"impl": impl, "op": op}, proven.fingerprint(op, stamp["architecture"])
    if impl == "ir":
        return key | dict(stamp)
    return key | {"fingerprint": fingerprint} | dict(stamp) if fingerprint else None


def prove(
    paths: Sequence[Path], every: bool, stamp: dict[str, str], record: Path, folder: Path, run: Callable[..., Any]
) -> list[Outcome]:
    """Run the files, print how each ended, and keep `record`, and its copy in `folder`, up to date.

    Rows of the stamp's architecture go, if they belong to one of the files or to `every` file; then rows that pass are
    added, and rows that were not run come back.
    """
    tested = {claim for path in paths for claim in claims(path)}
    rows, old = list[dict[str, Any]](), list[dict[str, Any]]()
    for row in json.loads(record.read_text())["proven"]:
        goes = row["architecture"] == stamp["architecture"] and (every or (row["impl"], row["op"]) in tested)
        (old if goes else rows).append(row)
    outcomes: list[Outcome] = []
    write_record(rows, record)
    for outcome in run(paths):
        outcomes.append(outcome)
        if outcome.verdict == "passed":
            rows_of_claims = {claim: row_of(*claim, stamp) for claim in claims(outcome.path)}
            rows += filter(None, rows_of_claims.values())
            for _, op in (claim for claim, row in rows_of_claims.items() if row is None):
                print(f"not recorded: {op} has no fingerprint; python tests/tools/fingerprint.py {op} --write")
        elif outcome.verdict == "not run":
            rows += [row for row in old if (row["impl"], row["op"]) in claims(outcome.path)]
        for copy in (record, folder / record.name):
            write_record(rows, copy)
        (folder / "table.txt").write_text(table(outcomes))
        print(f"{outcome.verdict:8}{outcome.seconds:6.0f} s  {outcome.path.name}  {outcome.reason[:120]}", flush=True)
    return outcomes


def table(outcomes: Sequence[Outcome]) -> str:
    """A line for each file: those that did not pass last, where a cut output still has them."""
    lines = [f"{'file':44} {'verdict':8} {'tests':>5} {'s':>5}  proves, or why not"]
    for path, verdict, tests, seconds, reason in sorted(outcomes, key=lambda outcome: outcome.verdict != "passed"):
        proves = ", ".join(" ".join(claim) for claim in claims(path)) or "-"
        what = proves if verdict == "passed" else reason[:160]
        lines.append(f"{path.stem:44} {verdict:8} {tests:5} {seconds:5.0f}  {what}")
    return "\n".join(lines) + "\n"


def visible_gpus() -> list[str]:
    """Names of the GPUs as CUDA_VISIBLE_DEVICES takes them."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(max(1, torch.cuda.device_count()))))
    return names.split(",")


def main(argv: list[str] | None = None) -> int:
    """0 if every file passed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("stems", nargs="*", help="test files, as sparse_mla_decode; default: all")
    gpus = visible_gpus()
    jobs = max(1, min(14 * len(gpus), 7 * (os.cpu_count() or 2) // 8))
    parser.add_argument("--part", metavar="I/N", default="1/1", help="the I-th of N parts of the files (%(default)s)")
    parser.add_argument("--jobs", type=int, default=jobs, help="processes at once (%(default)s)")
    parser.add_argument("--limit", type=float, default=400, help="seconds of a process (%(default)s)")
    parser.add_argument("--stall", type=float, default=120, help="seconds of a test, about (%(default)s)")
    parser.add_argument("--budget", type=float, default=1500, help="seconds of the run (%(default)s)")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("no CUDA device")
    registry.load()
    files = {path.stem.removeprefix("test_"): path for path in every_file()}
    missing = [stem for stem in options.stems if stem not in files]
    if missing:
        parser.error(f"no such test file: {', '.join(missing)}")
    if not re.fullmatch(r"[1-9]\d*/[1-9]\d*", options.part) or int.__gt__(*map(int, options.part.split("/"))):
        parser.error(f"--part {options.part}: 1/2 and 2/2 are the halves")
    paths = share([files[stem] for stem in options.stems or files], options.part)
    every = not options.stems and options.part == "1/1"
    stamp = {
        "architecture": device_architecture(torch.device("cuda")),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__.split("+")[0],
        "triton": triton_version().split("+")[0],
        "date": datetime.date.today().isoformat(),
    }
    folder = Path(os.environ.get("OUT") or ROOT / "build") / "prove"
    folder.mkdir(parents=True, exist_ok=True)
    # A run that is told to end still kills what it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    limits = Limits(options.jobs, options.limit, options.stall, options.budget)
    run = partial(run_files, logs=folder, limits=limits, gpus=gpus)
    outcomes = prove(by_value(paths), every, stamp, proven.RECORD, folder, run)
    print("\n" + table(outcomes), end="")
    unproven = [outcome.path.stem.removeprefix("test_") for outcome in outcomes if outcome.verdict != "passed"]
    passed = [outcome.path for outcome in outcomes if outcome.verdict == "passed"]
    print(f"{sum(len(claims(path)) for path in passed)} implementations proven on {stamp['architecture']}")
    if unproven:
        print(f"again: python tests/gpu/prove.py {' '.join(unproven)}")
    return 1 if unproven else 0


if __name__ == "__main__":
    raise SystemExit(main())
