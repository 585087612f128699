"""Run a graph that was compiled in regions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch.fx import Node


class Region(NamedTuple):
    """A part of a graph: its inputs and outputs, nodes of the whole graph, and what runs it.

    `run` takes a list of inputs, which it may empty, and returns the outputs.
    """

    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    run: Callable[[list[Any]], Sequence[Any]]


class Step(NamedTuple):
    """One region of a program: what it runs, and the places of its inputs, its outputs and what is dead after it."""

    run: Callable[[list[Any]], Sequence[Any]]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    dead: tuple[int, ...]


class Program:
    """A compiled graph that runs its regions in order. It takes its inputs as a list, which it empties."""

    _boxed_call = True

    def __init__(self, regions: Sequence[Region], placeholders: Mapping[Node, int], output: Node) -> None:
        places = dict(placeholders)
        for region in regions:
            for node in region.outputs:
                places[node] = len(places)
        result = output.args[0]
        assert isinstance(result, (tuple, list))
        self._returned = [places[each] if isinstance(each, Node) else None for each in result]
        self._constants = [None if isinstance(each, Node) else each for each in result]
        self._size = len(places)
        last = {place: i for i, region in enumerate(regions) for place in (places[node] for node in region.inputs)}
        kept = {place for place in self._returned if place is not None}
        self.steps = tuple(
            Step(
                region.run,
                tuple(places[node] for node in region.inputs),
                tuple(places[node] for node in region.outputs),
                tuple(place for place, at in last.items() if at == i and place not in kept),
            )
            for i, region in enumerate(regions)
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
