"""The rows of a replay from an observed capture: nodes with their op, line, cost and time."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from ... import ops
from ...selection import costs
from ...selection.costs import Cost
from .captures import ObservedCapture
from .driver import DriverNode, function_name
from .observe import Launch
from .rows import BY_TENSORS, Node, Replay
from .sources import Source, layer_of
from .times import assign, launch_times, node_times

_Replay = TypeVar("_Replay", bound=Replay)

_PART_OF_FAMILY = {
    "attention": "attention",
    "indexer": "attention",
    "preprocess": "attention",
    "metadata": "attention",
    "moe": "experts",
    "hyper_connections": "hyper-connections",
}
"""Parts by family of a dsv4 op. A GEMM belongs to the part of the module that calls it."""
_PARTS = (
    ("collectives", re.compile(r"c10d|nccl|symm_mem|all_?reduce|all_?gather|reduce_?scatter")),
    ("hyper-connections", re.compile(r"(?:^|[._/])(?:m?hc|hyper)(?:[._/]|$)|hyper_connection|attn_hc|ffn_hc")),
    ("experts", re.compile(r"mlp|expert|moe|ffn|router|(?:^|\.)gate(?:\.|$)")),
    ("attention", re.compile(r"attn|attention|indexer|compressor|dsv4_compile/modules/|metadata/")),
)
"""Parts by words in an op, a module's path or the path of a file, looked for in this order."""


def assemble(seen: ObservedCapture, kind: type[_Replay], whole_us: float | None = None, **about: Any) -> _Replay:
    """Return the rows of a capture.

    Args:
        seen: a capture that was observed and replayed.
        kind: `Replay` or a class derived from it.
        whole_us: time of a replay without a profiler; None for the sum over its nodes.
        about: further fields of `Replay`.
    """
    cuda = seen.kind == "cuda"
    device = torch.cuda.get_device_name(seen.device) if cuda else "cpu"
    replay = kind(
        what=seen.capture.what,
        torch=torch.__version__,
        device=device,
        graphs=seen.kind,
        timed_apart=whole_us is not None,
        **about,
    )
    if cuda:
        times, why = node_times(seen.nodes, seen.spans)
        replay.nodes = list(_gpu_nodes(seen))
        for index, time in times.items():
            node_row = replay.nodes[index]
            node_row.start_us, node_row.us, node_row.gap_us = (round(value, 3) for value in time)
        if why:
            replay.notes.append(f"{why}.")
        unknown = sum(node.op == "unknown" for node in replay.nodes)
        if unknown:
            replay.notes.append(f"{unknown} nodes came from code that no op and no generated line called.")
    else:
        replay.nodes = [_node(i, i, "call", launch) for i, launch in enumerate(seen.launches)]
        start = 0.0
        for index, us in launch_times(seen.launches, seen.reruns).items():
            node_row = replay.nodes[index]
            node_row.start_us, node_row.us = round(start, 3), round(us, 3)
            start += us
        replay.notes.append("A stand-in for CUDA graphs on the CPU: times are the host's, floors an H200's.")
    _share_costs(replay.nodes, seen.launches)
    if cuda:
        _add_driver_bytes(replay.nodes, seen.nodes)
    total_us = whole_us if whole_us is not None else replay.us
    replay.replay_us = None if total_us is None else round(total_us, 3)
    return replay


def _gpu_nodes(seen: ObservedCapture) -> Iterator[Node]:
    """Yield a row for each of the driver's nodes, in the order of their creation."""
    owners = {handle: (i, launch) for i, launch in enumerate(seen.launches) for handle in launch.handles}
    nobody = len(seen.launches), Launch(Source("unknown"), "unknown")
    names = _full_names(seen)
    for index, driver in enumerate(seen.nodes):
        call, launch = owners.get(driver.handle, nobody)
        node = _node(index, call, driver.kind, launch)
        node.name = names.get(index) or function_name(driver.name) or driver.kind
        node.after = sorted(driver.after, key=lambda edge: edge.node)
        node.grid, node.block = list(driver.grid), list(driver.block)
        node.shared_bytes, node.registers = driver.shared_bytes, driver.registers
        node.part = part_of(launch.source, node.name)
        yield node


def _full_names(seen: ObservedCapture) -> dict[int, str]:
    """Return the profiler's names of kernels, which have their template arguments, by position."""
    for spans in seen.spans:
        order = assign(seen.nodes, spans)
        if order is not None:
            return {node: span.name for node, span in zip(order, spans, strict=True)}
    return {}


def _node(index: int, call: int, kind: str, launch: Launch) -> Node:
    source = launch.source
    return Node(
        index=index,
        kind=kind,
        name=launch.kernel,
        op=source.op,
        ops=list(source.ops or (source.op,)),
        place=source.place,
        caller=source.caller,
        where=[str(location) for location in source.where or (source.place,) if location.file],
        module=source.module,
        layer=layer_of(source.module),
        part=part_of(source, launch.kernel),
        stage=launch.stage,
        call=call,
        stream=launch.stream,
        shapes=list(launch.shapes),
        basis=launch.basis,
    )


def _share_costs(nodes: Sequence[Node], launches: Sequence[Launch]) -> None:
    """Give each node its share of its call's cost, by time; equal shares where a time is missing."""
    of_call: dict[int, list[Node]] = {}
    for node in nodes:
        of_call.setdefault(node.call, []).append(node)
    for call, call_nodes in of_call.items():
        cost = launches[call].cost if call < len(launches) else None
        if cost is None:
            continue
        times = [node.us or 0.0 for node in call_nodes]
        total_us = sum(times) if all(times) else 0.0
        for node, us in zip(call_nodes, times, strict=True):
            share = us / total_us if total_us else 1 / len(call_nodes)
            _add_cost(node, Cost(cost.bytes * share, cost.flops * share, cost.operands))


def _add_cost(node: Node, cost: Cost) -> None:
    node.bytes, node.flops = int(cost.bytes), int(cost.flops)
    node.floor_us = round(costs.floor_us(cost, costs.H200), 3)


def _add_driver_bytes(nodes: Sequence[Node], drivers: Sequence[DriverNode]) -> None:
    """Give copies and fills without a known cost the bytes that the driver reports."""
    for node, driver in zip(nodes, drivers, strict=True):
        if node.bytes is None and driver.bytes is not None:
            _add_cost(node, Cost(driver.bytes, 0))
            node.basis = BY_TENSORS


@functools.cache
def _families() -> dict[str, str]:
    """Return the family of every file of ops by its name, which begins the names of its ops."""
    folder = Path(ops.__file__).parent
    return {path.stem: path.parent.name for path in folder.glob("*/*.py") if path.stem != "__init__"}


def part_of(source: Source, kernel: str) -> str:
    """Return the part of the model that a launch belongs to, one of `rows.PARTS`."""
    namespace, _, op = source.op.partition(".")
    if namespace == "dsv4":
        homes = [stem for stem in _families() if op == stem or op.startswith(f"{stem}_")]
        family = _families()[min(homes, key=len)] if homes else ""
        if family in _PART_OF_FAMILY:
            return _PART_OF_FAMILY[family]
    if _PARTS[0][1].search(source.op) or _PARTS[0][1].search(kernel):
        return _PARTS[0][0]
    for text in (source.module, source.place.file, source.caller.file):
        for name, words in _PARTS[1:]:
            if words.search(text):
                return name
    return "other"
