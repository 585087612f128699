"""Time one call of a compiled, captured model on the host, by its layers: python examples/benchmarks/host_time.py

A tiny DeepSeek-V4 of transformers is converted, compiled and captured; on a CPU the stand-in captures. Each row is a
number of layers, in us, medians: the whole call without the replay; in it the entry with the snapshot of the model and
its cache (door), guards and Dynamo's work around the graph (guards), the captured graph's search for its entry and
its copies (captured), and the rest. Replays are left out. With --replay they run, and on a GPU a call with a wait for
the GPU is timed too; they run references of all ops, so they take longer than a model's. With --cold, 192 MB
are written before each call, so that no cache holds its memory, as after a wait for a GPU. With --unchanged, calls
are in a block of `hf.unchanged`.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from dsv4_compile import hf
from dsv4_compile.hf.model import call_checks as entry
from dsv4_compile.hf.tiny import layers_in_turn, quiet_libraries, tiny_model
from dsv4_compile.runtime.compiled import CapturedGraph
from dsv4_compile.runtime.cuda_graphs import CudaGraphs
from dsv4_compile.runtime.standin import StandInGraphs

CALLS, WARM_UP = 400, 20
COLD_CALLS, COLD_BYTES = 100, 192 << 20


class Stopwatch:
    """Seconds of calls of wrapped functions, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call` with its times recorded."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = call(*args, **kwargs)
            self.seconds.setdefault(name, []).append(time.perf_counter() - begin)
            return result

        return timed

    def us(self, name: str) -> float:
        """Return the median of the calls after the warm-up."""
        return statistics.median(self.seconds[name][WARM_UP:]) * 1e6


def watch(watch_of: Stopwatch, skip: bool) -> None:
    """Time the parts of a call, and leave replays out if `skip`."""
    for graphs in (StandInGraphs, CudaGraphs):
        capture = graphs.capture

        def captured(self: Any, *args: Any, capture: Any = capture) -> Any:
            captured_step = capture(self, *args)
            return dataclasses.replace(
                captured_step, replay=watch_of.wrap("replay", (lambda: None) if skip else captured_step.replay)
            )

        graphs.capture = captured  # type: ignore[method-assign,assignment]
    CapturedGraph.__call__ = watch_of.wrap("captured", CapturedGraph.__call__)  # type: ignore[method-assign]
    enter, *others = entry.ON_HOST
    entry.ON_HOST = (watch_of.wrap("door", enter), *others)


def measure(
    layers: int, device: torch.device, stopwatch: Stopwatch, *, replay: bool, cold: bool, unchanged: bool
) -> dict[str, float]:
    """Return us of one call and of its parts."""
    model: Any = hf.convert(
        tiny_model(**layers_in_turn(layers), hc_sinkhorn_iters=2).to(device), max_batch_size=1, max_seq_len=4096
    )
    options: dict[str, Any] = {"dsv4.cudagraph": "full", "fallback_by_default": True, "dsv4.impl": "eager"}
    if device.type == "cpu":
        options["dsv4.cudagraph.graphs"] = "standin"
    model.compile(fullgraph=True, backend="dsv4", options=options)
    model.__dict__["_compiled_call_impl"] = stopwatch.wrap("compiled", model._compiled_call_impl)
    ids = torch.randint(1, 512, (1, 1), device=device)
    inputs: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "use_cache": True, "logits_to_keep": 1}
    cache = hf.new_cache(model)
    call = stopwatch.wrap("call", torch.no_grad()(lambda: model(ids, past_key_values=cache, **inputs)))
    other = torch.zeros(COLD_BYTES if cold else 0, dtype=torch.uint8)
    with hf.unchanged(model) if unchanged else nullcontext():
        for _ in range(WARM_UP + (COLD_CALLS if cold else CALLS)):
            other += 1
            call()
    us = {name: stopwatch.us(name) for name in ("call", "door", "compiled", "captured", "replay")}
    times = {
        "call": us["call"] - us["replay"],
        "door": us["door"],
        "guards": us["compiled"] - us["captured"],
        "captured": us["captured"] - us["replay"],
        "rest": us["call"] - us["door"] - us["compiled"],
        "replay": us["replay"],
    }
    if replay and device.type == "cuda":
        waiting = []
        for _ in range(CALLS):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            call()
            torch.cuda.synchronize()
            waiting.append(time.perf_counter() - begin)
        times["with_wait"] = statistics.median(waiting) * 1e6
    return {name: round(value) for name, value in times.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--layers", default="3,12,43", help="%(default)s")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="%(default)s")
    parser.add_argument("--replay", action="store_true", help="run the captured graphs too")
    parser.add_argument("--cold", action="store_true", help="write other memory before each call")
    parser.add_argument("--unchanged", action="store_true", help="compare the model once, not in each call")
    args = parser.parse_args(argv)
    quiet_libraries()
    torch.set_num_threads(1)
    stopwatch = Stopwatch()
    watch(stopwatch, skip=not args.replay)
    for layers in map(int, args.layers.split(",")):
        stopwatch.seconds.clear()
        how = {"replay": args.replay, "cold": args.cold, "unchanged": args.unchanged}
        row = measure(layers, torch.device(args.device), stopwatch, **how)
        print({"layers": layers, **row}, flush=True)
        torch.compiler.reset()
    return 0


if __name__ == "__main__":
    sys.exit(main())
