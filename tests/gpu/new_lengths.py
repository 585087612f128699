"""New prompt lengths after warm-up wait for nothing: python tests/gpu/new_lengths.py --out results [--trust]

A V4-Flash of few layers with random weights is compiled and warmed up in a process with empty caches, with
`dsv4.strict="after_warmup"`. Then come random prompts of 1 to 4,096 tokens in batches of 1 to 8, each of another
length. Prints where the seconds of the start went, builds, compilations and captures after it, the slowest call with
the median of its bucket, and the first token of new lengths with the kernels' sum. Fails for late work, and for a
call slower than three times the median of its bucket.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a checkout that is not installed

from dsv4_compile import hf, progress
from dsv4_compile.backend import dsv4
from dsv4_compile.bench.nodes import nodes
from dsv4_compile.bench.record import environment, write_json
from dsv4_compile.debug import compile_log
from dsv4_compile.hf.tiny import FLASH, layers_in_turn, quiet_libraries, random_model, tiny_config
from dsv4_compile.runtime.bucket_sizes import chunk_tokens, prompt_steps
from dsv4_compile.selection import proven

MAX_BATCH, MAX_SEQ_LEN, MOST = 8, 16384, 4096
CALLS, REPEATS = 60, 5
NEW_LENGTHS = (64, 512, 2048, 8192)
FACTOR = 3.0
"""Times the median of its bucket that a call may take."""
SECONDS = 1500


def steps_of(rows: int, columns: int) -> tuple[int, ...]:
    """Return the buckets of a prompt's steps."""
    return prompt_steps(rows, columns, chunk_tokens(MAX_BATCH, MAX_SEQ_LEN))


class Caller:
    """Calls of a warmed-up model until the host has read their tokens."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self.model, self.device = model, device

    def prompt(self, rows: int, columns: int) -> Callable[[], Any]:
        """Return a call that computes the first new tokens of random prompts."""
        ids = torch.randint(1, self.model.config.vocab_size, (rows, columns), device=self.device)
        mask = torch.ones_like(ids)

        @torch.no_grad()
        def call() -> Any:
            return self.model(ids, attention_mask=mask, logits_to_keep=1).logits[:, -1].argmax(-1).tolist()

        return call

    def ms(self, call: Callable[[], Any]) -> float:
        """Return the milliseconds of a call until the host has its tokens."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e3


def measure(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Return the figures of one process."""
    begin = time.perf_counter()
    sizes = {} if args.tiny else FLASH | layers_in_turn(args.layers) | {"n_routed_experts": args.experts}
    model: Any = random_model(tiny_config(**sizes), device)
    hf.convert(model, max_batch_size=MAX_BATCH, max_seq_len=MAX_SEQ_LEN)
    options: dict[str, Any] = {"dsv4.cudagraph": "full", "dsv4.strict": "after_warmup"}
    if device.type == "cpu":
        options["dsv4.cudagraph.graphs"] = "standin"
    model.compile(fullgraph=True, backend=dsv4, options=options)
    with progress.listen(progress.lines(sys.stderr)), compile_log() as early:
        done = hf.warm_up(model)
    row: dict[str, Any] = {"start_s": round(time.perf_counter() - begin, 1), "warm_up": str(done)}
    row |= {"seconds": done.seconds, "captures": done.captures, "capture_bytes": done.capture_bytes}
    row["built_one_by_one"] = [entry.what for entry in early if entry.kind == "kernel" and not entry.early]
    caller, rng = Caller(model, device), random.Random(args.seed)
    lengths = rng.sample(range(1, MOST + 1), args.calls)
    calls = [(rng.randint(1, MAX_BATCH), length) for length in lengths]
    with compile_log() as late:
        first = [(steps_of(*size), size, caller.ms(caller.prompt(*size))) for size in calls]
        new = {}
        for length in NEW_LENGTHS:
            new[length] = min(caller.ms(caller.prompt(1, length - i)) for i in range(3))
    medians = {steps: [caller.ms(caller.prompt(*size)) for _ in range(REPEATS)] for steps, size, _ in first}
    for steps, _, ms in first:
        medians[steps].append(ms)
    row["late"] = [str(entry) for entry in late]
    row["calls"] = [
        {"size": size, "steps": steps, "ms": round(ms, 2), "median_ms": round(statistics.median(medians[steps]), 2)}
        for steps, size, ms in first
    ]
    row["new"] = {length: {"first_token_ms": round(ms, 2)} for length, ms in new.items()}
    if device.type == "cuda":  # after all times: the profiler slows the host
        for length in NEW_LENGTHS:
            kernels = nodes(caller.prompt(1, length))
            row["new"][length] |= {"kernels_ms": round(sum(k.us for k in kernels) / 1e3, 2), "kernels": len(kernels)}
        row["reserved_gib"] = round(torch.cuda.memory_reserved() / 2**30, 2)
    return row


def record(row: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of a process as a record: of all random sizes, and of the first token of each new length."""
    said = f"python tests/gpu/new_lengths.py --layers {args.layers} --experts {args.experts} --calls {args.calls}"
    contents = {"scenario": "new_lengths", **environment(torch.device(args.device)), "command": said}
    stamp = {"date": contents["date"], "commit": contents["commit"]}
    names = ("start_s", "seconds", "captures", "capture_bytes", "late", "built_one_by_one", "calls")
    figures = {name: row[name] for name in names}
    sizes = {"measured": "random sizes", "sizes": len(row["calls"]), "slowest": round(_slowness(_slowest(row)), 2)}
    rows = [{**stamp, **sizes, **figures}]
    rows += [{**stamp, "measured": "first token", "tokens": int(n), **new} for n, new in row["new"].items()]
    return {**contents, "rows": rows}


def _slowness(call: dict[str, Any]) -> float:
    return float(call["ms"] / call["median_ms"])


def _slowest(row: dict[str, Any]) -> Any:
    return max(row["calls"], key=_slowness)


def report(row: dict[str, Any], say: Callable[[str], Any]) -> int:
    """Print the figures and return 1 if a call waited."""
    say(f"start {row['start_s']} s, {row.get('reserved_gib', 0)} GiB reserved")
    say(row["warm_up"])
    say(f"{len(row['built_one_by_one'])} kernels built one by one in warm-up: {', '.join(row['built_one_by_one'])}")
    slow = _slowest(row)
    say(f"{len(row['calls'])} new sizes: {len(row['late'])} builds, compilations and captures")
    for line in row["late"]:
        say(f"  late: {line}")
    say(f"slowest in its bucket: {slow['size']} in {slow['steps']}, {slow['ms']} ms, median {slow['median_ms']} ms")
    for length, new in row["new"].items():
        say(f"new length {length}: first token {new['first_token_ms']} ms, kernels {new.get('kernels_ms', '-')} ms")
    return 1 if row["late"] or slow["ms"] > FACTOR * slow["median_ms"] else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--layers", type=int, default=4, help="%(default)s")
    parser.add_argument("--experts", type=int, default=64, help="%(default)s")
    parser.add_argument("--calls", type=int, default=CALLS, help="%(default)s")
    parser.add_argument("--seed", type=int, default=0, help="%(default)s")
    parser.add_argument("--out", metavar="FOLDER", help="write new_lengths.json there")
    parser.add_argument("--trust", action="store_true", help="count every implementation as proven on this GPU")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        quiet_libraries()
        with proven.trust() if args.trust else nullcontext():
            print(json.dumps(measure(args, torch.device(args.device))))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
        command = [sys.executable, __file__, *(sys.argv[1:] if argv is None else argv), "--child"]
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, timeout=SECONDS, check=False)
    if done.returncode:
        return done.returncode
    row = json.loads(done.stdout.splitlines()[-1])
    if args.out:
        write_json(record(row, args), args.out)
    return report(row, lambda line: print(line, flush=True))


if __name__ == "__main__":
    sys.exit(main())
