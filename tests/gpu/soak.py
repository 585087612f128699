"""Decode for a long time, and record what stayed as it was: `python tests/gpu/soak.py [--setup NAME ...] [--steps N]`.

Three layers, one with a window alone, one of ratio 4 and one of ratio 128. In "decodes" requests join and leave
anywhere in a context, batches grow and shrink, and all that a replay must not read is poisoned before each step;
outputs and caches are compared bit by bit with the same step at the same padded shape without a graph, by metadata that
is built anew. "speculated" is the same with three tokens of each request, "mixed" with chunks of prompts next to
decodes, in a tenth of the steps. In "steady" the layers are compiled by the backend; decode steps and batches of random
sizes follow each other, and new compilations, captures and bytes are counted. Writes soak.json to $OUT (default:
here) after each of them, exits with 1 when something changed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a checkout that is not installed

from dsv4_compile._compat import counters
from dsv4_compile.backend import dsv4
from dsv4_compile.bench.decode_layers import fill
from dsv4_compile.bench.record import environment
from dsv4_compile.cache import CacheFormat
from dsv4_compile.config import DeepseekV4Config
from dsv4_compile.errors import DSV4Warning
from dsv4_compile.runtime import DecodeRunner
from dsv4_compile.selection import proven
from dsv4_compile.testing import assert_bitwise
from tests.runtime.engine import CAPACITY, MAX_SEQ_LEN, REQUESTS, SMALL, Engine, Setup, World, make_runner, make_world
from tests.runtime.test_replay import poison

SMALL_ON_GPU = replace(SMALL, device="cuda:0")
FLASH = replace(
    SMALL_ON_GPU,
    config=DeepseekV4Config.flash().with_layers(1, 4, 128),
    cache_format=CacheFormat.resolve("fp8_ds_mla"),
    dtype=torch.bfloat16,
)
SETUPS = {"small float32": SMALL_ON_GPU, "flash bfloat16": FLASH, "flash fp8": replace(FLASH, fp8=True)}
SPECULATED = 3
STEPS, DECODES, BATCHES = 5000, 2000, 200
FEWER = {"decodes": 1, "speculated": 10, "mixed": 10}
"""How many times fewer steps a kind of batch has."""
SHOWN = 250
"""Steps between two lines of progress."""
MARGIN = 1 << 20
"""Bytes that memory may grow meanwhile: blocks that the allocator cuts differently."""


def full_world(setup: Setup, compiled: bool = False) -> World:
    """Return a world with random rows in its caches, byte formats too; `compiled` layer by layer, by the backend."""
    world = make_world(setup=setup)
    for caches in (world.caches, world.eager_caches):
        for layer in caches.layers:
            for name, tensor in layer.tensors().items():
                if not tensor.is_floating_point():
                    fill(name, tensor)
    if compiled:
        layers: list[Any] = [torch.compile(layer, backend=dsv4, fullgraph=True) for layer in world.stack.layers]
        world.stack.layers = nn.ModuleList(layers)
    return world


def random_batches(kind: str, seed: int) -> Iterator[tuple[list[int], list[int]]]:
    """Query lengths and sequence lengths of step after step."""
    rng = random.Random(seed)
    engine = Engine(rng, SPECULATED if kind == "speculated" else 1)
    while kind != "mixed":
        yield engine.advance()
    while True:
        query_lens = [rng.choice((1, 1, 2, 5, 9)) for _ in range(rng.randint(1, 4))]
        while sum(query_lens) > CAPACITY:
            query_lens.pop()
        yield query_lens, [length + rng.choice((0, 1, 3, 11, 124, 127, 130, 250)) for length in query_lens]


def random_steps(setup: Setup, steps: int, seed: int, compiled: bool = False, kind: str = "decodes") -> dict[str, Any]:
    """Raise AssertionError where a replay, or a byte of a cache, differs from the same step without a graph."""
    world = full_world(setup, compiled)
    options = {"decodes": {}, "speculated": {"tokens_each": SPECULATED}, "mixed": {"buckets": (8, CAPACITY)}}
    runner = make_runner(world, **options[kind])
    before = {name: tensor.clone() for name, tensor in world.named_caches(world.caches).items()}
    runner.warm_up()
    for name, tensor in world.named_caches(world.caches).items():
        assert_bitwise(tensor, before[name], label=f"{name} after warm-up")
    sizes = set[int]()
    for step, (query_lens, seq_lens) in enumerate(itertools.islice(random_batches(kind, seed), steps)):
        sizes.add(sum(query_lens))
        if step % SHOWN == 0:
            print(f"{kind}: step {step} of {steps}", file=sys.stderr, flush=True)
        poison(world)
        hidden = world.load(query_lens, seq_lens)
        out = runner.step(sum(query_lens), hidden=hidden)
        expected = world.eager(hidden, query_lens, seq_lens, runner.buckets.fit(sum(query_lens)))
        if not torch.equal(out.view(torch.uint8), expected.view(torch.uint8)):  # on the device: one wait
            assert_bitwise(out, expected, label=f"step {step}")
    for name, tensor in world.named_caches(world.caches).items():
        assert_bitwise(tensor, world.named_caches(world.eager_caches)[name], label=name)
    assert runner.statistics.captures == len(runner.buckets), "a step was captured after warm-up"
    assert runner.statistics.replays == steps, "a step ran without its graph"
    return {"steps": steps, "batches of": sorted(sizes), "caches": len(before), "captures": len(runner.buckets)}


def steady(setup: Setup, decodes: int, batches: int, seed: int) -> dict[str, Any]:
    """Count compilations, captures and bytes after warm-up; the largest batches run uncaptured."""
    world = full_world(setup, compiled=True)
    runner = make_runner(world)
    runner.warm_up()
    rng = random.Random(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DSV4Warning)  # of the batches above the largest bucket
        for requests in range(1, REQUESTS + 1):
            _run_batch(world, runner, rng, requests, CAPACITY // REQUESTS)
        captures, held, memory = runner.statistics.captures, runner.graphs.memory(), _allocated()
        compiled = counters["stats"]["unique_graphs"]
        with torch.compiler.set_stance("fail_on_recompile"):
            for number in range(decodes + batches):
                _run_batch(world, runner, rng, rng.randint(1, REQUESTS), 1 if number < decodes else 4)
    counts = {
        "decodes": decodes,
        "batches": batches,
        "replays": runner.statistics.replays,
        "uncaptured": runner.statistics.uncaptured,
        "recompiles": counters["stats"]["unique_graphs"] - compiled,
        "captures": runner.statistics.captures - captures,
        "graph_bytes": runner.graphs.memory() - held,
        "allocated_bytes": _allocated() - memory,
    }
    assert runner.statistics.replays >= decodes, "a decode ran without its graph"
    assert counts["allocated_bytes"] <= MARGIN, f"memory grew by {counts['allocated_bytes']:,} bytes"
    changed = [name for name in ("recompiles", "captures", "graph_bytes") if counts[name]]
    assert not changed, f"{', '.join(changed)} in {counts}"
    return counts


def _run_batch(world: World, runner: DecodeRunner, rng: random.Random, requests: int, most: int) -> None:
    query_lens = [rng.randint(1, most) for _ in range(requests)]
    seq_lens = [rng.randint(length, MAX_SEQ_LEN) for length in query_lens]
    out = runner.step(sum(query_lens), hidden=world.load(query_lens, seq_lens))
    if rng.random() < 0.02:
        assert out.isfinite().all(), "an output is not finite"


def _allocated() -> int:
    torch.cuda.synchronize()
    return int(torch.cuda.memory_stats()["allocated_bytes.all.current"])


def _row(test: str, setup: str, check: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `check` found, and how it ended."""
    started = time.perf_counter()
    torch.compiler.reset()
    torch.manual_seed(0)
    try:
        outcome: dict[str, Any] = {"status": "ok", **check()}
    except AssertionError as fault:
        outcome = {"status": "changed", "note": str(fault)}
    except RuntimeError as fault:  # of CUDA; and of torch, for a recompilation
        outcome = {"status": "failed", "note": str(fault)}
    return {"test": test, "setup": setup, **outcome, "seconds": round(time.perf_counter() - started, 1)}


def main(argv: Sequence[str] | None = None) -> int:
    """0 when nothing changed, 1 otherwise, 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--setup", action="append", choices=sorted(SETUPS), help="default: all")
    parser.add_argument("--test", action="append", choices=(*FEWER, "steady"), help="default: all")
    parser.add_argument("--compiled", action="store_true", help="replay layers compiled by the backend")
    parser.add_argument("--steps", type=int, default=STEPS, help='steps of "decodes" (%(default)s)')
    parser.add_argument("--decodes", type=int, default=DECODES, help='decode steps of "steady" (%(default)s)')
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trust", action="store_true", help="count every implementation as proven on this GPU")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("no CUDA device", file=sys.stderr)
        return 2
    said = shlex.join(["python", "tests/gpu/soak.py", *(sys.argv[1:] if argv is None else argv)])
    record: dict[str, Any] = {"scenario": "soak", **environment(torch.device("cuda")), "command": said, "rows": []}
    path = Path(os.environ.get("OUT", ".")) / "soak.json"
    checks: dict[str, Callable[[Setup], dict[str, Any]]] = {
        kind: partial(
            random_steps, steps=options.steps // fewer, seed=options.seed, compiled=options.compiled, kind=kind
        )
        for kind, fewer in FEWER.items()
    }
    checks["steady"] = partial(steady, decodes=options.decodes, batches=BATCHES, seed=options.seed)
    with proven.trust() if options.trust else nullcontext():
        for setup in options.setup or SETUPS:
            for test in options.test or checks:
                name = f"{test}, compiled" if test == "steady" or options.compiled else test
                record["rows"].append(_row(name, setup, partial(checks[test], SETUPS[setup])))
                print(json.dumps(record["rows"][-1]), flush=True)
                path.write_text(json.dumps(record, indent=1) + "\n")
    return int(any(row["status"] != "ok" for row in record["rows"]))


if __name__ == "__main__":
    sys.exit(main())
