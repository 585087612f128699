"""Run a graph that was compiled in regions, each kind of layer once, and keep it in torch's cache of whole graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch.fx import Node

from .._compat import TracingContext, aot_autograd_result


class Region(NamedTuple):
    """A part of a graph: its inputs and outputs, nodes of the whole graph, and the function that runs it.

    `run` takes a list of inputs, which it may empty, and returns the outputs. Regions of one kind have one `run`.
    """

    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    run: Callable[[list[Any]], Sequence[Any]]


class Step(NamedTuple):
    """One region of a program: the index of its kind, and the slots of inputs, outputs and dead values."""

    kind: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    dead: tuple[int, ...]


class Program(aot_autograd_result.OutputCode):  # type: ignore[misc]
    """A compiled graph that runs its regions in order. It takes its inputs as a list, which it empties.

    To torch it is the output of Inductor, so it is saved and loaded with AOTAutograd's results, each kind once.
    """

    def __init__(self, regions: Sequence[Region], placeholders: Mapping[Node, int], output: Node) -> None:
        self._boxed_call = True  # in __dict__, which torch's wrappers copy
        places = dict(placeholders)
        for region in regions:
            for node in region.outputs:
                places[node] = len(places)
        result = output.args[0]
        assert isinstance(result, (tuple, list))
        self._returned = [places[value] if isinstance(value, Node) else None for value in result]
        self._constants = [None if isinstance(value, Node) else value for value in result]
        self._size = len(places)
        kinds = {id(region.run): region.run for region in regions}
        index = {identity: i for i, identity in enumerate(kinds)}
        self.kinds: list[Any] = list(kinds.values())
        last = {slot: i for i, region in enumerate(regions) for slot in (places[node] for node in region.inputs)}
        returned_slots = {slot for slot in self._returned if slot is not None}
        self.steps = tuple(
            Step(
                index[id(region.run)],
                tuple(places[node] for node in region.inputs),
                tuple(places[node] for node in region.outputs),
                tuple(slot for slot, at in last.items() if at == i and slot not in returned_slots),
            )
            for i, region in enumerate(regions)
        )

    def __call__(self, inputs: list[Any]) -> list[Any]:
        """Return the graph's outputs."""
        held = [*inputs, *[None] * (self._size - len(inputs))]
        inputs.clear()
        for step in self.steps:
            inputs_of_step = [held[slot] for slot in step.inputs]
            for slot in step.dead:
                held[slot] = None
            for slot, value in zip(step.outputs, self.kinds[step.kind](inputs_of_step), strict=True):
                held[slot] = value
        return [
            constant if slot is None else held[slot]
            for slot, constant in zip(self._returned, self._constants, strict=True)
        ]

    def prepare_for_serialization(self) -> None:
        """Put in place of each kind what torch saves of it. torch calls this on a copy."""
        self.kinds = [aot_autograd_result.BundledOutputCodeLoadable(kind) for kind in self.kinds]
        for kind in self.kinds:
            kind.pre_save()

    def post_compile(self, _: Sequence[Any], __: Any, graph_kwargs: Any) -> None:
        """Load each kind that was saved. torch calls this on objects from its cache, and never before."""
        with without_output_strides():
            # Examples would tell torch strides of outputs alone.
            self.kinds = [kind.post_compile(kind.load(()), graph_kwargs) for kind in self.kinds]


@contextmanager
def without_output_strides() -> Iterator[None]:
    """Do not report strides of outputs to AOTAutograd inside the block, where a graph is compiled or loaded in parts.

    It takes one report for a graph, which only graphs with a backward need.
    """
    context = TracingContext.try_get()
    if context is None:
        yield
        return
    reported, context.output_strides = context.output_strides, None
    try:
        yield
    finally:
        context.output_strides = reported
