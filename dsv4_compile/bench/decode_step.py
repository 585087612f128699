"""Scenario `decode_step`: the attention of a decode step of V4-Flash, as a user runs it, host time included.

A batch of requests with 16k tokens each. Their groups `end` "together", all of them in this step, the most that a step
can have to compress; or "apart", a request later than the one before it, so that one in 4 closes a group of ratio 4,
and one in 128 a group of ratio 128, as a server sees it. SWA, HCA and CSA are eight different layers of one kind, one
after the other, so that no layer finds its weights in a cache: times are those of one layer, a share of the step's
metadata included where a graph refreshes it. `stack` is all 43 of V4-Flash, and its times are those of the step. Many
steps run in a row: a time is what the GPU takes, or the host where that is slower.

`eager` runs the ops one by one; `stock` is torch.compile as it comes, `reduce-overhead` its mode of that name; `dsv4`
is this package's backend; `graph` and `eager graph` are a DecodeRunner over `dsv4` and over the ops as they are, whose
graphs refresh the metadata too; of `graph aside` the layers have `aux_stream`. The others find it built. Layers are
compiled one by one: three kinds, three graphs. Behind each layer of `graph cold` 256 MiB of other memory are read, as a
model reads what lies between two, so that no cache holds anything of a layer; of eight in a row it keeps what is small,
in one process more of it than in the next. The time of these reads, in a graph of nothing else, is taken off.

`details` of a row on a GPU: host time of a step, the median and of 99 in 100, and tensors that ten steps allocate; of a
graph also its nodes, how many of them copy from the host, and for a kind of layer the nodes of one layer and their
time, by stage, beside the stage's floor. The profiler counts these when everything has been timed. Peers are the best
kernels of other engines chained in one graph, the faster of one stream and four. It is not on record how many of their
requests closed a group, so they stand beside "together" alone, where ours have the most to do.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import layout
from ..backend import dsv4
from ..config import DeepseekV4Config
from ..runtime import DecodeRunner
from ..selection import costs
from . import timing
from .decode_layers import Forward, Layers, Step, in_steps, reads_of_others
from .decode_stages import stage_costs, stage_times, total
from .nodes import allocations, host_us, nodes, repeated
from .problem import Args, Only, Prepare, Problem, keep

OP = "decode_step"
COLUMNS = ("layer", "weights", "end", "tokens", "impl")
TOKENS = {"cuda": (1, 8, 32, 128, 512), "cpu": (2,)}
CONTEXT = {"cuda": 16384, "cpu": 256}
ALIKE = {"cuda": 8, "cpu": 1}
WEIGHTS = ("bfloat16", "fp8")
TOGETHER, APART = "together", "apart"
COLD = "graph cold"
IMPLEMENTATIONS = ("eager", "eager graph", "stock", "reduce-overhead", "dsv4", "graph", COLD, "graph aside")
STACK = "stack"
LAYERS: Mapping[str, tuple[int, ...]] = {
    "SWA": (1,),
    "HCA": (layout.HCA_RATIO,),
    "CSA": (layout.CSA_RATIO,),
    STACK: DeepseekV4Config.flash().compress_ratios[: DeepseekV4Config.flash().num_layers],
}
PEERS: Mapping[tuple[str, str], Mapping[int, float]] = {
    ("SWA", "bfloat16"): {1: 85, 8: 93, 32: 97, 128: 125, 512: 294},
    ("SWA", "fp8"): {1: 79, 8: 77, 32: 79, 128: 100, 512: 247},
    ("HCA", "bfloat16"): {1: 96, 8: 98, 32: 109, 128: 146, 512: 350},
    ("HCA", "fp8"): {1: 84, 8: 82, 32: 89, 128: 118, 512: 298},
    ("CSA", "bfloat16"): {1: 116, 8: 124, 32: 148, 128: 212, 512: 568},
    ("CSA", "fp8"): {1: 102, 8: 103, 32: 130, 128: 183, 512: 512},
    (STACK, "bfloat16"): {1: 4500, 32: 5500, 128: 7600, 512: 19500},
    (STACK, "fp8"): {1: 4000, 32: 4700, 128: 6400, 512: 17200},
}
WRONG = {"of half the tokens": 0.03, "of a token": 0.5}
"""Relative distance from the ops as they are, above which a step is wrong. Sums are in another order in every layer; of
a token whose indexer chose another of two entries with nearly the same score, the distance is larger."""


def problems(
    device: torch.device, only: Only, config: DeepseekV4Config | None = None, context: int | None = None
) -> Iterator[Problem]:
    """Every kind of layer with both kinds of weights, in every way at every size, of V4-Flash or another model."""
    base, length = config or DeepseekV4Config.flash(), context or CONTEXT[device.type]
    later: list[Callable[[], None]] = []
    for layer, ratios in LAYERS.items():
        alike = 1 if layer == STACK else ALIKE[device.type]
        pooled = device.type == "cuda" and any(ratio > 1 for ratio in ratios)
        ends = [end for end in ((TOGETHER, APART) if pooled else (TOGETHER,)) if keep(only, end=end)]
        for weights in WEIGHTS:
            sizes = [n for n in TOKENS[device.type] if keep(only, layer=layer, weights=weights, tokens=n)]
            if sizes:
                step = Step.build(base.with_layers(*ratios * alike), weights == "fp8", sizes[-1], length, device)
                for impl in IMPLEMENTATIONS:
                    indexes = layout.CSA_RATIO in ratios
                    if keep(only, impl=impl) and (indexes or impl != "graph aside"):
                        yield from _of_implementation(step, impl, layer, weights, ends, sizes, later)
            if layer == STACK:
                _do(later)  # two stacks and their caches are more than a GPU holds
    _do(later)


def _of_implementation(
    step: Step, impl: str, layer: str, weights: str, ends: list[str], sizes: list[int], later: list[Callable[[], None]]
) -> Iterator[Problem]:
    config, context = step.caches.config, step.context
    others = reads_of_others(step.device) if impl == COLD else None
    prepare = _prepared(step, impl, sizes, others)
    beside: Callable[[], Any] | None = None
    if others is not None:
        beside = partial(_times, others, config.num_layers)
        beside = timing.replays_of(beside) if step.device.type == "cuda" else beside
    alike = config.num_layers // len(LAYERS[layer])
    for end, tokens in itertools.product(ends, sizes):
        apart, fp8 = end == APART, weights == "fp8"
        if apart and tokens == 1:
            continue  # one request is not apart from itself
        stages = [stage_costs(config, i, fp8, tokens, context, apart) for i in range(config.num_layers)]
        whole = [total(stages[i]) for i in range(config.num_layers // alike)]

        def make(seed: int, tokens: int = tokens) -> Args:
            generator = torch.Generator(step.device).manual_seed(seed)
            return (torch.randn(tokens, step.width, device=step.device, generator=generator).bfloat16(),)

        def details(
            call: Callable[[], Any],
            size: tuple[int, bool] = (tokens, apart),
            floors: Mapping[str, costs.Cost] = {} if layer == STACK else stages[0],
        ) -> dict[str, Any]:
            facts: dict[str, Any] = {**host_us(call), "allocations": allocations(call)}
            if impl in ("graph", "eager graph", COLD):
                later.append(partial(_look_into, facts, partial(step.load, *size), call, alike, floors, beside))
            return facts

        yield Problem(
            op=OP,
            params={"layer": layer, "weights": weights, "context": context, "end": end, "tokens": tokens},
            make=make,
            written=(),
            cost=costs.Cost(sum(c.bytes for c in whole), sum(c.flops for c in whole), whole[0].operands),
            reference=step.call(step.layers, tokens, apart),
            implementations={impl: partial(prepare, tokens, apart)},
            published=published(layer, weights, end, tokens),
            differs=differs,
            cold=False,
            clock="stream",
            alike=alike,
            beside=beside,
            details=details,
        )


def published(layer: str, weights: str, end: str, tokens: int) -> dict[str, float]:
    """What peers take for a row, where that compares."""
    peers = PEERS[layer, weights].get(tokens) if end == TOGETHER else None
    return {} if peers is None else {"peers": peers}


def _do(later: list[Callable[[], None]]) -> None:
    while later:
        later.pop(0)()


def _times(call: Callable[[], Any], times: int) -> None:
    for _ in range(times):
        call()


def _prepared(
    step: Step, impl: str, sizes: list[int], others: Callable[[], Any] | None = None
) -> Callable[[int, bool], Prepare]:
    """How to get `impl` at a size, with `others` read between layers; what serves all sizes is made once."""
    made: list[Any] = []
    ways: Mapping[str, Callable[[], Forward | DecodeRunner]] = {
        "eager": lambda: step.layers,
        "eager graph": lambda: step.runner(step.layers, sizes),
        "stock": step.compiled,
        "reduce-overhead": lambda: in_steps(step.compiled(mode="reduce-overhead")),
        "dsv4": lambda: step.compiled(backend=dsv4),
        "graph": lambda: step.runner(step.compiled(backend=dsv4), sizes),
        COLD: lambda: step.runner(Layers(step.compiled(backend=dsv4).layers, others), sizes),
        "graph aside": lambda: step.aside().runner(step.compiled(backend=dsv4), sizes),
    }

    def prepare(tokens: int, apart: bool) -> Any:
        if not made:
            made.append(ways[impl]())
        own = made[0]
        return (step.replay if isinstance(own, DecodeRunner) else step.call)(own, tokens, apart)

    return prepare


def _look_into(
    facts: dict[str, Any],
    load: Callable[[], None],
    call: Callable[[], Any],
    alike: int,
    floors: Mapping[str, costs.Cost],
    beside: Callable[[], Any] | None,
) -> None:
    """Add to `facts` what the profiler sees of a replay, but for what it does `beside`; see the module."""
    load()
    others = {node.name for node in nodes(beside)} if beside else ()
    found = [node for node in nodes(call) if node.name not in others]
    facts |= {"nodes": len(found), "copies_from_host": sum("HtoD" in node.name for node in found)}
    first, length = repeated([node.name for node in found], alike)
    if floors and length:
        facts |= {"nodes_of_layer": length, "metadata_us": round(sum(node.us for node in found[:first]), 2)}
        facts["stages"] = {
            stage: {
                "us": round(sum(node.us for node in own), 2),
                "floor_us": round(costs.floor_us(floors.get(stage, costs.Cost(0, 0)), costs.H200), 2),
                "kernels": [[node.us, node.name[:80]] for node in own],
            }
            for stage, own in stage_times(found[-length:]).items()
        }
        return
    by_name: dict[str, list[float]] = defaultdict(list)
    for node in found:
        by_name[node.name[:80]].append(node.us)
    facts["kernels"] = {name: [len(times), round(sum(times), 2)] for name, times in by_name.items()}


def differs(got: list[Tensor], want: list[Tensor]) -> str:
    """Why the results are not those of the ops as they are, or "" when they are."""
    for actual, expected in zip(got, want, strict=True):
        if not bool(expected.isfinite().all()):
            return "the reference is not finite"
        distance = (actual.double() - expected.double()).norm(dim=-1) / expected.double().norm(dim=-1)
        found = {"of half the tokens": float(distance.median()), "of a token": float(distance.max())}
        for which, most in WRONG.items():
            if not found[which] <= most:
                return f"relative distance {which}: {found[which]:.3f}"
    return ""
