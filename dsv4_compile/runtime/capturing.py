"""What `dsv4.cudagraph` means for one graph: settings for Inductor, and what is put around what it compiles."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from ..errors import check
from ..options import Options
from .compiled import CapturedGraph, Policy
from .graph_inputs import static_inputs
from .graphs import Graphs, graphs_for
from .standin import recordable

_OUTSIDE = {"custom_should_partition_ops": ["transformers::grouped_mm_fallback"]}
"""Ops that read the device: Inductor captures what lies between them. This one, of experts in float32, loops over the
tokens that each expert got."""
_STANDIN = 'options={"dsv4.cudagraph": "full", "dsv4.cudagraph.graphs": "standin"}'


@dataclass(frozen=True, slots=True)
class Capturing:
    """How one graph is captured: settings for Inductor, and what is put around the compiled graph."""

    inductor: Mapping[str, Any]
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]]

    @classmethod
    def plan(cls, options: Options, gm: GraphModule, devices: Collection[torch.device]) -> Capturing:
        """What `options.cudagraph` means for `gm`. Raises E420, before anything is compiled, where it cannot be had."""
        cuda = sorted((d for d in devices if d.type == "cuda"), key=str)
        device = cuda[0] if cuda else torch.device("cpu")
        if options.cudagraph == "trees":
            got, fix = 'dsv4.cudagraph="trees" for a graph on the CPU', 'run on a GPU, or pass dsv4.cudagraph="off"'
            check(bool(cuda), "E420", got=got, fix=fix)
            return cls({"triton.cudagraphs": True, **_OUTSIDE}, lambda compiled: compiled)
        if options.cudagraph == "off":
            return cls({}, (lambda compiled: compiled) if cuda else recordable)
        chosen = dict(options.capture)
        graphs = shared_graphs(device, chosen.pop("graphs", "auto"))
        names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
        static, policy = static_inputs(gm), Policy(**chosen)

        def wrap(compiled: Callable[..., Any]) -> CapturedGraph:
            return CapturedGraph(compiled if cuda else recordable(compiled), names, static, graphs, policy)

        return cls({}, wrap)


@functools.cache
def shared_graphs(device: torch.device, kind: str) -> Graphs:
    """Captures of compiled graphs on `device`: one pool for all of them."""
    return graphs_for(device, kind, _STANDIN)
