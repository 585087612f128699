"""Scenario `decode_step`: the attention layers of a decode step of V4-Flash, as a user runs them, host time included.

The batch has requests of 16k tokens. Their groups `end` "together", all in this step, which is the most work that
compressors can have; or "apart", each request one token before the previous, so that one in R closes a group of ratio
R, as on a server. SWA, HCA and CSA are eight layers of one kind, with more weights than a cache holds; times are those
of one layer, including its share of the metadata refresh where a graph does it. `stack` is all 43 layers of V4-Flash.

`eager` runs the ops one by one; `stock` is torch.compile without options, `reduce-overhead` its mode of that name;
`dsv4` is this package's backend; `graph` and `eager graph` are a DecodeRunner over `dsv4` and over the eager ops: their
graphs refresh the metadata; `graph side stream` sets `aux_stream`. Layers are compiled one by one.

`us` is warm: steps run back to back. `cold_us`, of `graph`, is the sum over layers of event pairs inside a graph that
flushes the L2 cache before each layer: see `timing.ColdTimer`. `details` of a row on a GPU: host time of a step, median
and 99th percentile; tensors that ten steps allocate; nodes of a graph, copies from the host among them; for a kind of
layer the nodes of one layer by stage, with the stage's floor. Peers are the best kernels of other engines in one graph.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import layout
from ..backend import dsv4
from ..config import DeepseekV4Config
from ..parallel import Ranks, attention_config
from ..runtime import DecodeRunner
from ..selection import costs
from .decode_layers import DecodeStep, Forward, Layers, in_steps
from .decode_stages import stage_costs, stage_times, total
from .nodes import allocations, host_us, nodes, repeated
from .problem import Args, Only, Problem, keep
from .timing import ColdTime, ColdTimer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

OP = "decode_step"
COLUMNS = ("layer", "weights", "end", "tokens", "impl")
TOKENS = {"cuda": (1, 8, 32, 128, 512), "cpu": (2,)}
CONTEXT = {"cuda": 16384, "cpu": 256}
REPEATS = {"cuda": 8, "cpu": 1}
WEIGHTS = ("bfloat16", "fp8")
TOGETHER, APART = "together", "apart"
GRAPH, SIDE_STREAM = "graph", "graph side stream"
IMPLEMENTATIONS = ("eager", "eager graph", "stock", "reduce-overhead", "dsv4", GRAPH, SIDE_STREAM)
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
"""Microseconds of other engines' kernels chained in one graph, warm, the faster of one stream and four.
Which groups closed is not recorded, so they are compared with "together" alone, the most work for this package."""
PEERS_MACHINE = "H200"
"""Machine of `PEERS`."""

MEDIAN, EACH_TOKEN = 0.03, 0.08
"""Largest relative distance of a layer's result from the eager ops: median over tokens, and of each token. Attention
with bfloat16 on both ends is compared with 8e-2 by other engines."""
EXCHANGED, EXCHANGED_SHARE = 4, 1 / 8
"""Entries of nearly equal score that rounding may exchange in a token's selection, and the largest share of tokens that
exceed `EACH_TOKEN` by it. With K keys each exchange moves a result by sqrt(2 / K) of its norm."""


def problems(
    device: torch.device,
    only: Only,
    config: DeepseekV4Config | None = None,
    context: int | None = None,
    mesh: DeviceMesh | None = None,
) -> Iterator[Problem]:
    """Yield every kind of layer with both kinds of weights, by every implementation at every size.

    Rows of a rank's part of the layers, those that `mesh` splits, say how many "ranks" there are.
    """
    base, length = config or DeepseekV4Config.flash(), context or CONTEXT[device.type]
    later: list[Callable[[], None]] = []
    for layer, ratios in LAYERS.items():
        repeats = 1 if layer == STACK else REPEATS[device.type]
        pooled = device.type == "cuda" and any(ratio > 1 for ratio in ratios)
        ends = [end for end in ((TOGETHER, APART) if pooled else (TOGETHER,)) if keep(only, end=end)]
        for weights in WEIGHTS:
            sizes = [n for n in TOKENS[device.type] if keep(only, layer=layer, weights=weights, tokens=n)]
            if sizes:
                built = base.with_layers(*ratios * repeats)
                step = DecodeStep.build(built, weights == "fp8", sizes[-1], length, device, mesh)
                for impl in IMPLEMENTATIONS:
                    indexes = layout.CSA_RATIO in ratios
                    if keep(only, impl=impl) and (indexes or impl != SIDE_STREAM):
                        yield from _of_implementation(step, impl, layer, weights, ends, sizes, later, mesh)
            if layer == STACK:
                _run_all(later)  # frees this stack: two of them with their caches exceed a GPU's memory
    _run_all(later)


def _of_implementation(
    step: DecodeStep,
    impl: str,
    layer: str,
    weights: str,
    ends: list[str],
    sizes: list[int],
    later: list[Callable[[], None]],
    mesh: DeviceMesh | None,
) -> Iterator[Problem]:
    config, context = step.caches.config, step.context
    params: dict[str, int | str] = {"layer": layer, "weights": weights, "context": context}
    if mesh is not None:
        params["ranks"] = mesh.size()
        config = attention_config(config, Ranks.of(mesh), fp8=weights == "fp8")
    prepare, time_cold = _prepared(step, impl, sizes)
    repeats = config.num_layers // len(LAYERS[layer])
    for end, tokens in itertools.product(ends, sizes):
        apart, fp8 = end == APART, weights == "fp8"
        if apart and tokens == 1:
            continue  # one request is not apart from itself
        stages = [stage_costs(config, i, fp8, tokens, context, apart) for i in range(config.num_layers)]
        totals = [total(stages[i]) for i in range(config.num_layers // repeats)]

        def make(seed: int, tokens: int = tokens) -> Args:
            generator = torch.Generator(step.device).manual_seed(seed)
            return (torch.randn(tokens, step.width, device=step.device, generator=generator).bfloat16(),)

        def details(
            call: Callable[[], Any],
            size: tuple[int, bool] = (tokens, apart),
            floors: Mapping[str, costs.Cost] = {} if layer == STACK else stages[0],
        ) -> dict[str, Any]:
            # A rank without the others is asked for its kernels; the host's time takes a second a row.
            facts: dict[str, Any] = {} if mesh is not None else host_us(call)
            facts["allocations"] = allocations(call)
            if impl in (GRAPH, "eager graph"):
                # Profiled when everything has been timed: the profiler slows the host.
                later.append(partial(_profile, facts, partial(step.load, *size), call, repeats, floors))
            return facts

        yield Problem(
            op=OP,
            params={**params, "end": end, "tokens": tokens},
            make=make,
            written=(),
            cost=costs.Cost(sum(c.bytes for c in totals), sum(c.flops for c in totals), totals[0].operands),
            reference=step.call(step.layers, tokens, apart),
            implementations={impl: partial(prepare, tokens, apart)},
            published={} if mesh is not None else published(layer, weights, end, tokens, _name(step.device)),
            differs=partial(differs, keys=[selected_keys(config, i, context) for i in range(config.num_layers)]),
            cold=False,
            # Replays on a CPU are a stand-in that records no event.
            time_cold=partial(time_cold, tokens, apart) if time_cold and step.device.type == "cuda" else None,
            clock="stream",
            repeats=repeats,
            details=details,
        )


def published(layer: str, weights: str, end: str, tokens: int, machine: str) -> dict[str, float]:
    """Return the peers' time of a row, if it is comparable: measured on such a machine, with groups that end so."""
    peers = PEERS[layer, weights].get(tokens) if end == TOGETHER and PEERS_MACHINE in machine else None
    return {} if peers is None else {"peers": peers}


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def selected_keys(config: DeepseekV4Config, layer: int, context: int) -> int:
    """Return the keys that a token of `layer` attends if an indexer selects some of them, otherwise 0."""
    if config.ratio(layer) != layout.CSA_RATIO or context // layout.CSA_RATIO <= config.index_topk:
        return 0
    return config.sliding_window + config.index_topk


def _run_all(later: list[Callable[[], None]]) -> None:
    while later:
        later.pop(0)()


_TimeCold = Callable[[int, bool, Callable[..., Any], Args], ColdTime]


def _prepared(
    step: DecodeStep, impl: str, sizes: list[int]
) -> tuple[Callable[[int, bool], Callable[..., Any]], _TimeCold | None]:
    """Return how to prepare `impl` at a size, and how to time it cold if it can be; all sizes share what is built."""
    built: list[Any] = []
    layers: list[Layers] = []

    def backend_layers() -> Layers:
        layers.append(step.compiled(backend=dsv4))
        return layers[-1]

    ways: Mapping[str, Callable[[], Forward | DecodeRunner]] = {
        "eager": lambda: step.layers,
        "eager graph": lambda: step.runner(step.layers, sizes),
        "stock": step.compiled,
        "reduce-overhead": lambda: in_steps(step.compiled(mode="reduce-overhead")),
        "dsv4": backend_layers,
        GRAPH: lambda: step.runner(backend_layers(), sizes),
        SIDE_STREAM: lambda: step.with_side_stream().runner(backend_layers(), sizes),
    }
    cold: list[tuple[ColdTimer, DecodeRunner]] = []

    def prepare(tokens: int, apart: bool) -> Callable[..., Any]:
        if not built:
            built.append(ways[impl]())
        runner = built[0]
        return (step.replay if isinstance(runner, DecodeRunner) else step.call)(runner, tokens, apart)

    def time_cold(tokens: int, apart: bool, call: Callable[..., Any], args: Args) -> ColdTime:
        if not cold:
            timer = ColdTimer(step.device)
            cold.append((timer, step.runner(Layers(layers[0].layers, timer), sizes)))
        timer, runner = cold[0]
        flushed = step.replay(runner, tokens, apart)
        want = [tensor.clone() for tensor in call(*args)]
        if wrong := differs(flushed(*args), want):
            raise AssertionError(f"with flushes between layers, {wrong}")
        return timer.measure(partial(flushed, *args))

    return prepare, time_cold if impl == GRAPH else None


def _profile(
    facts: dict[str, Any],
    load: Callable[[], None],
    call: Callable[[], Any],
    repeats: int,
    floors: Mapping[str, costs.Cost],
) -> None:
    """Add to `facts` what the profiler finds in a replay; see the module."""
    load()
    replayed = nodes(call)
    facts |= {"nodes": len(replayed), "copies_from_host": sum("HtoD" in node.name for node in replayed)}
    first, length = repeated([node.name for node in replayed], repeats)
    if floors and length:
        facts |= {"nodes_of_layer": length, "metadata_us": round(sum(node.us for node in replayed[:first]), 2)}
        facts["stages"] = {
            stage: {
                "us": round(sum(node.us for node in stage_nodes), 2),
                "floor_us": round(costs.floor_us(floors.get(stage, costs.Cost(0, 0)), costs.H200), 2),
                "kernels": [[node.us, node.name[:80]] for node in stage_nodes],
            }
            for stage, stage_nodes in stage_times(replayed[-length:]).items()
        }
        return
    by_name: dict[str, list[float]] = defaultdict(list)
    for node in replayed:
        by_name[node.name[:80]].append(node.us)
    facts["kernels"] = {name: [len(times), round(sum(times), 2)] for name, times in by_name.items()}


def differs(got: list[Tensor], want: list[Tensor], keys: Sequence[int] = ()) -> str:
    """Return why the layers' results disagree with those of the eager ops, or "".

    Args:
        keys: by layer, what `selected_keys` gives; default: no layer has an indexer.
    """
    for layer, (actual, expected) in enumerate(zip(got, want, strict=True)):
        if not bool(expected.isfinite().all()):
            return f"layer {layer}: the reference is not finite"
        distance = (actual.double() - expected.double()).norm(dim=-1) / expected.double().norm(dim=-1)
        selected = keys[layer] if keys else 0
        most = (EACH_TOKEN**2 + (2 * EXCHANGED / selected if selected else 0)) ** 0.5
        # Negated, so that NaN is wrong.
        wrong, far = ~(distance <= most), int((distance > EACH_TOKEN).sum())
        if bool(wrong.any()):
            token = int(wrong.int().argmax())
            return f"layer {layer}: the relative distance of token {token} is {distance[token]:.3f}, at most {most:.3f}"
        if far > EXCHANGED_SHARE * distance.numel():
            return f"layer {layer}: the relative distance of {far} tokens is over {EACH_TOKEN}"
        if float(distance.median()) > MEDIAN:
            return f"layer {layer}: the median relative distance is {float(distance.median()):.3f}, at most {MEDIAN}"
    return ""
