"""Compare the demo's models with eager transformers on a CPU: python examples/benchmarks/cpu_models.py --out results

Each model and number of threads has a separate process. Times are medians of rounds with both models in turn; a decode
step is the difference of a long and a short generation. Compile times are of a batch of 4, both graphs, with an empty
cache folder and once more with the same; CPU seconds count the compiler's processes too.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dsv4_compile.bench.record import environment, write_json
from dsv4_compile.hf import convert
from dsv4_compile.hf.demo import MODELS
from dsv4_compile.hf.tiny import quiet_libraries, tiny_model

BATCHES = (4, 1)
PROMPTS = (130, 512)
STEPS = 16
SECONDS = 3000


def cpu_seconds() -> float:
    """Return the time that this process and those it waited for have computed."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def generate(model: Any, ids: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return the ids with `tokens` greedy new ones."""
    mask = torch.ones_like(ids)
    tokens_out: torch.Tensor = model.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False)
    return tokens_out


def in_turn(calls: Sequence[Callable[[], float]], rounds: int) -> list[float]:
    """Return the median of each of `calls`, which return times, in ms."""
    times = [[call() * 1e3 for call in calls] for _ in range(rounds)]
    return [round(statistics.median(ms), 2) for ms in zip(*times, strict=True)]


def seconds(model: Any, ids: torch.Tensor, tokens: int) -> float:
    """Return how long a generation takes."""
    begin = time.perf_counter()
    generate(model, ids, tokens)
    return time.perf_counter() - begin


def measure(name: str, rounds: int, only_compile: bool) -> list[dict[str, Any]]:
    """Return the rows of one model with the threads that torch has."""
    quiet_libraries()
    eager: Any = tiny_model(0, **MODELS[name])
    model = convert(
        copy.deepcopy(eager), max_batch_size=max(BATCHES), max_seq_len=max(PROMPTS) + 2 * STEPS, attention_only=False
    )
    model.compile(fullgraph=True, backend="dsv4")
    ids = torch.randint(1, 512, (max(BATCHES), max(PROMPTS)), generator=torch.Generator().manual_seed(0))
    begin, computed = time.perf_counter(), cpu_seconds()
    generate(model, ids[:, : PROMPTS[0]], 3)
    rows: list[dict[str, Any]] = [
        {
            "measured": "compile",
            "wall_s": round(time.perf_counter() - begin, 1),
            "cpu_s": round(cpu_seconds() - computed, 1),
        }
    ]
    if only_compile:
        return rows
    for batch in BATCHES:
        for prompt in PROMPTS:
            prompt_ids = ids[:batch, :prompt]
            same = torch.equal(generate(eager, prompt_ids, STEPS), generate(model, prompt_ids, STEPS))
            both = [lambda m=m, ids=prompt_ids: seconds(m, ids, 1) for m in (eager, model)]  # type: ignore[misc]
            sizes = {"batch": batch, "prompt": prompt, "same_tokens": same}
            rows.append(_row("prefill", in_turn(both, rounds), sizes))
        prompt_ids = ids[:batch, : PROMPTS[0]]
        both = [
            lambda m=m, ids=prompt_ids: (seconds(m, ids, 2 + STEPS) - seconds(m, ids, 2)) / STEPS  # type: ignore[misc]
            for m in (eager, model)
        ]
        rows.append(_row("decode step", in_turn(both, rounds), {"batch": batch}))
    return rows


def _row(measured: str, ms: list[float], found: dict[str, Any]) -> dict[str, Any]:
    return {"measured": measured, **found, "eager_ms": ms[0], "dsv4_ms": ms[1], "ratio": round(ms[1] / ms[0], 2)}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(description="Models on a CPU against eager transformers.")
    parser.add_argument("--models", default=",".join(MODELS), help="%(default)s")
    parser.add_argument("--threads", default="1,2", help="%(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="%(default)s")
    parser.add_argument("--out", metavar="FOLDER", help="write cpu_models.json there")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        name, threads, what = args.child.split(",")
        torch.set_num_threads(int(threads))
        print(json.dumps(measure(name, args.rounds, what == "warm")))
        return 0
    said = f"python examples/benchmarks/cpu_models.py --models {args.models} --threads {args.threads}"
    record: dict[str, Any] = {"scenario": "cpu_models", **environment(torch.device("cpu")), "rows": []}
    record["command"] = f"{said} --rounds {args.rounds}"
    record["load"] = [round(load, 1) for load in os.getloadavg()]
    for name in args.models.split(","):
        for threads in args.threads.split(","):
            with tempfile.TemporaryDirectory() as folder:
                env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": folder}
                for cache in ("cold", "warm"):
                    command = [sys.executable, __file__, "--child", f"{name},{threads},{cache}"]
                    command += ["--rounds", str(args.rounds)]
                    done = subprocess.run(
                        command,
                        env=env,
                        capture_output=True,
                        encoding="utf-8",
                        errors="replace",
                        timeout=SECONDS,
                        check=False,
                    )
                    if done.returncode:
                        raise RuntimeError(done.stderr[-2000:])
                    for row in json.loads(done.stdout.splitlines()[-1]):
                        cache_column = {"cache": cache} if row["measured"] == "compile" else {}
                        stamp = {"date": record["date"], "commit": record["commit"]}
                        record["rows"].append({"model": name, "threads": int(threads), **row, **cache_column, **stamp})
                        print(record["rows"][-1], file=sys.stderr, flush=True)
                    if args.out:
                        write_json(record, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
