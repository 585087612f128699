"""The graph pass of the backend: fuse dsv4 ops, choose an implementation for each, and key Inductor's caches.

Inductor's cache key does not cover the lowerings of other packages, so a graph with an edited lowering would be a cache
hit with old results. A CustomGraphPass adds its `uuid` to the key; this pass is therefore always installed, in graphs
without dsv4 ops too.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph

from .._compat import CustomGraphPass, device_architecture, run_graph_pass, triton_version
from ..lowering import registry
from ..lowering.invariant import dependence
from ..lowering.linear import mm
from ..options import Options
from ..runtime import early_builds
from ..selection import call_costs, decisions, proven
from . import invariant_nodes, pipeline
from .nodes import describe, launch_arguments, public_op
from .rewrite import retarget

MEASURED_WITHIN = 2.0
"""Largest factor between the size of a call and the nearest measured size, which gives its time in reports."""


class ChooseImplementations(CustomGraphPass):
    """Runs the user's post-grad passes, fuses dsv4 ops, then chooses an implementation for each and retargets its node.

    All fusions and choices are recorded, see `decisions`.
    """

    def __init__(self, options: Options, user_passes: Sequence[Any], devices: Iterable[torch.device]) -> None:
        self.options = options
        self.user_passes = tuple(user_passes)
        self.architectures = tuple(sorted({device_architecture(device) for device in devices}))

    def __call__(self, graph: Graph) -> None:
        """Rewrite `graph` in place. Raises E302 if a demanded implementation is not available."""
        for user_pass in self.user_passes:
            run_graph_pass(user_pass, graph)
        pipeline.run(graph, self.options)
        builds, level = early_builds.active(), self.options.batch_invariant
        for node in graph.nodes:
            op = public_op(node)
            if op is not None:
                call = describe(node, op)
                decision = registry.decide(call, self.options)
                decisions.record(_with_times(decision, call) if decisions.collecting() else decision)
                if level == "off" and decisions.collecting() and (why := dependence(call, decision)):
                    decisions.record(decisions.Dependence(call.op, why, call.where))
                target = registry.target_of(decision, call, level)
                if builds is not None and decision.impl == "triton" and target is not op:
                    pinned = {} if level == "off" else {"invariant": level}
                    builds.add(call.op, functools.partial(launch_arguments, node), **pinned)
                retarget(node, target)
        if level == "off" and decisions.collecting():
            for dependent in invariant_nodes.dependent_nodes(graph):
                decisions.record(dependent)
        if level != "off":
            invariant_nodes.make_invariant(graph, level)
        elif "cpu" in self.architectures:
            mm.retarget(graph)

    def uuid(self) -> Any | None:
        """Return a key of everything that determines generated code, or None, which makes Inductor bypass its caches.

        It is None if a pass of the user has no uuid, and while decisions are collected: a cache hit decides nothing.
        """
        users = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in self.user_passes]
        if decisions.collecting() or any(user is None for user in users):
            return None
        ours = (
            source_digest(),
            self.options.cache_key(),
            self.architectures,
            [proven.state(architecture) for architecture in self.architectures],
            torch.__version__,
            triton_version(),
        )
        return (hashlib.sha256(repr(ours).encode()).hexdigest(), *users)


def _with_times(decision: decisions.Decision, call: decisions.Call) -> decisions.Decision:
    """Return `decision` with the cost of the call, and its time if that was measured."""
    us = registry.microseconds(call, decision, within=MEASURED_WITHIN)
    return replace(decision, cost=call_costs.of(call.op, call.arguments), measured_us=us)


@functools.cache
def source_digest() -> str:
    """Return a hash of every source file of this package, computed once so that it matches the loaded code."""
    digest = hashlib.sha256()
    for name, path in sorted(sources()):
        digest.update(f"{name}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def sources() -> set[tuple[str, Path]]:
    """Return all source files by path in the package; lowering/ and kernels/ may be in a different folder."""
    named_files: set[tuple[str, Path]] = set()
    package = Path(__file__).parents[1]
    roots = [("", package)]
    for name in ("lowering", "kernels"):
        module = importlib.import_module(f"dsv4_compile.{name}")
        roots += [(name, Path(path)) for path in module.__path__]
    for prefix, root in roots:
        files = (path for pattern in ("*.py", "*.json") for path in root.rglob(pattern))
        named_files |= {(f"{prefix}/{path.relative_to(root).as_posix()}", path) for path in files}
    return named_files
