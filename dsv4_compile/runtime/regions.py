"""Compile a graph in regions, each kind of layer once, and run them one after another."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch.fx import GraphModule, Node

from .. import progress
from .._compat import without_output_strides
from ..passes import regions
from ..selection import decisions

_log = logging.getLogger("dsv4_compile.runtime")
WORTH_IT = 4
"""Fewest regions without a compilation of their own for which `auto` compiles in regions.

Below it, warm starts matter more: torch's cache of whole graphs does not take a graph in regions.
"""


class Regional:
    """Compiles the repeated layers of a graph once.

    Args:
        inner: compiles one graph, as Inductor's own.
        wanted: "auto" or "on"; with "auto" at least `WORTH_IT` compilations must be saved.
    """

    def __init__(self, inner: Callable[..., Any], wanted: str) -> None:
        self.inner, self.wanted = inner, wanted

    def compile(self, gm: GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
        """Compile `gm` as Inductor's `inner_compile`, whole if it is trained or has too few repeated layers."""
        if not options.get("is_inference"):
            return self.inner(gm, example_inputs, **options)
        static = frozenset(options.get("static_input_idxs") or ())
        try:
            found = regions.split(gm, static)
        except regions.NotSplit as error:
            _log.info("compiles a graph whole: %s", error)
            return self.inner(gm, example_inputs, **options)
        counts = regions.kinds(found)
        saved = len(found) - len(counts)
        if saved < (WORTH_IT if self.wanted == "auto" else 1):
            _log.info("compiles a graph whole: %s regions of %s kinds", len(found), len(counts))
            return self.inner(gm, example_inputs, **options)
        _log.info("compiles a graph of %s regions as %s kinds", len(found), len(counts))
        placeholders = {node: i for i, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
        compiled: dict[str, Any] = {}
        with progress.stage("compile kinds of layers", total=len(counts)) as work, without_output_strides():
            for region in found:
                if region.key in compiled:
                    continue
                work.note(f"{counts[region.key]} of {len(found)} regions")
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
        return Program(found, compiled, placeholders, gm.graph.output_node())


class Step(NamedTuple):
    """One region of a program: what it runs, and the places of its inputs, its outputs and what is dead after it."""

    run: Callable[[list[Any]], Sequence[Any]]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    dead: tuple[int, ...]


class Program:
    """A compiled graph that runs its regions in order. It takes its inputs as a list, which it empties."""

    _boxed_call = True

    def __init__(
        self,
        found: Sequence[regions.Region],
        compiled: dict[str, Any],
        placeholders: dict[Node, int],
        output: Node,
    ) -> None:
        places = dict(placeholders)
        for region in found:
            for node in region.outputs:
                places[node] = len(places)
        result = output.args[0]
        assert isinstance(result, (tuple, list))
        self._returned = [places[each] if isinstance(each, Node) else None for each in result]
        self._constants = [None if isinstance(each, Node) else each for each in result]
        self._size = len(places)
        last = {place: i for i, region in enumerate(found) for place in (places[node] for node in region.inputs)}
        kept = {place for place in self._returned if place is not None}
        self.steps = tuple(
            Step(
                compiled[region.key],
                tuple(places[node] for node in region.inputs),
                tuple(places[node] for node in region.outputs),
                tuple(place for place, at in last.items() if at == i and place not in kept),
            )
            for i, region in enumerate(found)
        )

    def __call__(self, inputs: list[Any]) -> list[Any]:
        """Return the graph's outputs."""
        held = [*inputs, *[None] * (self._size - len(inputs))]
        inputs.clear()
        for step in self.steps:
            given = [held[place] for place in step.inputs]
            for place in step.dead:
                held[place] = None
            for place, value in zip(step.outputs, step.run(given), strict=True):
                held[place] = value
        return [
            constant if place is None else held[place]
            for place, constant in zip(self._returned, self._constants, strict=True)
        ]
