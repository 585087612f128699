"""Run the fusion passes on the functional graph of a function, without generating code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule, Node

from dsv4_compile._compat import storage_identity
from dsv4_compile.lowering import registry
from dsv4_compile.ops.common.define import OPS
from dsv4_compile.options import Options
from dsv4_compile.passes import pipeline
from dsv4_compile.passes.nodes import OpNode, read
from dsv4_compile.selection import decisions
from dsv4_compile.selection.decisions import Fusion


@dataclass
class Fused:
    """A function compiled up to the fusion passes, and its last graph after them.

    `shared` names ops with the new version of a cache in the storage of the old one, so that torch confuses them.
    """

    call: Callable[..., Any]
    ops: Counter[str] = field(default_factory=Counter)
    targets: Counter[str] = field(default_factory=Counter)
    fusions: list[Fusion] = field(default_factory=list)
    shared: list[str] = field(default_factory=list)
    joined: int = 0
    """Number of fp8_linear calls that also compute a second layer."""

    @property
    def reasons(self) -> list[str]:
        """Reasons of the groups that were not fused."""
        return [fusion.reason for fusion in self.fusions if not fusion.fused]


def fused(fn: Callable[..., Any], options: dict[str, Any] | None = None, *, dynamic: bool | None = None) -> Fused:
    """Return `fn` compiled, to be called without gradients: its functional graph runs after the fusion passes."""
    registry.load()
    parsed = Options.parse(None, options if options is not None else {"dsv4.fuse": "on"}, ops=OPS)
    result = Fused(fn)

    def compiler(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        gm.graph.eliminate_dead_code()
        with decisions.collect() as collected:
            pipeline.run(gm.graph, parsed)
        gm.graph.lint()
        result.fusions = collected.fusions
        calls = [call for node in gm.graph.nodes if (call := read(node)) is not None]
        result.ops = Counter(call.name for call in calls)
        result.targets = Counter(_target(node) for node in gm.graph.nodes if node.op == "call_function")
        result.joined = sum(call.name == "fp8_linear" and call["beside"] is not None for call in calls)
        result.shared = [call.name for call in calls if _shares_storage(call)]
        gm.recompile()
        return gm

    backend = aot_autograd(
        fw_compiler=compiler,
        inference_compiler=compiler,
        decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
    )
    torch.compiler.reset()
    result.call = torch.compile(fn, backend=backend, fullgraph=True, dynamic=dynamic)
    return result


def _shares_storage(call: OpNode) -> bool:
    """Return whether the fake of a cache's new version shares storage with the old one."""
    return any(
        storage_identity(new.meta["val"]) == storage_identity(cache.base.meta["val"])
        for name, cache in call.caches().items()
        for new in call.new_versions(name)
    )


def _target(node: Node) -> str:
    """Return the name of an op without its namespace and overload: `mm`, `convert_element_type`."""
    parts = str(node.target).split(".")
    return parts[1] if len(parts) == 3 else parts[0]
