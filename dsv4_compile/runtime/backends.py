"""Capture backends: the choice for a device, and the meaning of `dsv4.cudagraph` for one compiled graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from ..errors import check
from ..options import Options
from .captures import Graphs
from .compiled import CapturedGraph, Policy
from .cuda_graphs import CudaGraphs
from .graph_inputs import inputs_in_place
from .standin import StandInGraphs, recordable

_NOT_CAPTURED = {"custom_should_partition_ops": ["transformers::grouped_mm_fallback"]}
"""Inductor settings that keep ops which read the device out of its CUDA graphs. This op, the experts in float32, loops
over the number of tokens of each expert."""
_STANDIN_OPTION = 'options={"dsv4.cudagraph": "full", "dsv4.cudagraph.graphs": "standin"}'


def graphs_for(device: torch.device, kind: str = "auto", standin: str = 'graphs_for(device, "standin")') -> Graphs:
    """Return a pool of captures on `device`.

    Args:
        device: where the calls run.
        kind: "auto" or "cuda" for CUDA graphs, "standin" for their stand-in on a CPU. E420 on the wrong device.
        standin: how the user asks the caller for the stand-in; part of that error.
    """
    if kind == "standin":
        check(
            device.type == "cpu",
            "E420",
            got=f"the stand-in on {device}",
            why="it replays on the CPU, to test there what a GPU would do",
            fix="ask for no stand-in on a GPU",
        )
        return StandInGraphs()
    rule, fix = "graphs is auto, cuda or standin", "pass one of them"
    check(kind in ("auto", "cuda"), "E420", got=f"graphs={kind!r}", rule=rule, fix=fix)
    check(
        device.type == "cuda",
        "E420",
        got=f"CUDA graphs on {device}",
        why="a CPU has no graphs to capture, and there is no silent fallback",
        fix=f"run on a GPU, or without graphs; in tests on a CPU ask for the stand-in: {standin}",
    )
    return CudaGraphs(device)


@functools.cache
def shared_graphs(device: torch.device, kind: str) -> Graphs:
    """Return the pool that all compiled graphs on `device` share."""
    return graphs_for(device, kind, _STANDIN_OPTION)


@dataclass(frozen=True, slots=True)
class Capturing:
    """Settings for Inductor, and a wrapper for the compiled graph, that capture one graph as its options ask."""

    inductor: Mapping[str, Any]
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]]

    @classmethod
    def plan(cls, options: Options, gm: GraphModule, devices: Collection[torch.device]) -> Capturing:
        """Return what `options.cudagraph` means for `gm`. Raise E420, before anything is compiled, if it cannot."""
        cuda = sorted((d for d in devices if d.type == "cuda"), key=str)
        device = cuda[0] if cuda else torch.device("cpu")
        if options.cudagraph == "trees":
            got, fix = 'dsv4.cudagraph="trees" for a graph on the CPU', 'run on a GPU, or pass dsv4.cudagraph="off"'
            check(bool(cuda), "E420", got=got, fix=fix)
            return cls({"triton.cudagraphs": True, **_NOT_CAPTURED}, lambda compiled: compiled)
        if options.cudagraph == "off":
            return cls({}, (lambda compiled: compiled) if cuda else recordable)
        settings = dict(options.capture)
        graphs = shared_graphs(device, settings.pop("graphs", "auto"))
        names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
        in_place, policy = inputs_in_place(gm), Policy(**settings, strict=options.strict != "off")

        def wrap(compiled: Callable[..., Any]) -> CapturedGraph:
            return CapturedGraph(compiled if cuda else recordable(compiled), names, in_place, graphs, policy)

        return cls({}, wrap)
