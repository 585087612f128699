"""Compile a graph in regions, each kind of layer once: `Regional`, an `inner_compile` of Inductor."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule

from .. import progress
from .._compat import functorch_config
from ..runtime.regions import Program, without_output_strides
from ..runtime.regions import Region as Compiled
from ..selection import decisions
from . import regions

_log = logging.getLogger("dsv4_compile.runtime")
WORTH_IT = 4
"""Fewest saved compilations to compile in regions with `auto`.

Each region is a separate call at every step, so few are not worth it.
"""


class Regional:
    """Compiles the repeated layers of a graph once. Each graph that it compiles has an entry in Inductor's own cache.

    Args:
        inner: compiles one graph, as Inductor's own.
        wanted: "auto" or "on"; with "auto" at least `WORTH_IT` compilations must be saved.
    """

    def __init__(self, inner: Callable[..., Any], wanted: str) -> None:
        self.inner, self.wanted = inner, wanted

    def compile(self, gm: GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
        """Compile `gm` as Inductor's `inner_compile`, whole if it is trained or has too few repeated layers."""
        if all(node.op in ("placeholder", "get_attr", "output") for node in gm.graph.nodes):
            # For a graph of nothing Inductor returns a function that AOTAutograd cannot cache, unless it is to cache.
            return self.inner(gm, example_inputs, **options)
        # Inductor caches nothing that AOTAutograd is to cache; other models may have the same kinds.
        with functorch_config.patch(bundled_autograd_cache=False):
            return self._compile(gm, example_inputs, **options)

    def _compile(self, gm: GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
        if not options.get("is_inference"):
            return self.inner(gm, example_inputs, **options)
        static = frozenset(options.get("static_input_idxs") or ())
        try:
            pieces = regions.split(gm, static)
        except regions.NotSplit as error:
            _log.info("compiles a graph whole: %s", error)
            return self.inner(gm, example_inputs, **options)
        counts = regions.kinds(pieces)
        saved = len(pieces) - len(counts)
        if saved < (WORTH_IT if self.wanted == "auto" else 1):
            _log.info("compiles a graph whole: %s regions of %s kinds", len(pieces), len(counts))
            return self.inner(gm, example_inputs, **options)
        _log.info("compiles a graph of %s regions as %s kinds", len(pieces), len(counts))
        placeholders = {node: i for i, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
        compiled: dict[str, Any] = {}
        with progress.stage("compile kinds of layers", total=len(counts)) as work, without_output_strides():
            for region in pieces:
                if region.key in compiled:
                    continue
                work.note(f"{counts[region.key]} of {len(pieces)} regions")
                examples = [
                    example_inputs[placeholders[node]] if node in placeholders else node.meta["val"]
                    for node in region.inputs
                ]
                fixed = [i for i, node in enumerate(region.inputs) if placeholders.get(node) in static]
                with decisions.times(counts[region.key]):
                    compiled[region.key] = self.inner(
                        GraphModule(gm, region.graph), examples, **options | {"static_input_idxs": fixed}
                    )
                work.advance()
        parts = [Compiled(region.inputs, region.outputs, compiled[region.key]) for region in pieces]
        return Program(parts, placeholders, gm.graph.output_node())
