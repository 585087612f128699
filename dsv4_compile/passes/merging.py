"""What passes that merge ops have in common: whether to merge, whether it is allowed, and a record of either answer.

A pass is a function `run(graph, merger)` in a file of its own. It finds a group of ops, works out the call that would
do their work, asks `merger.check_wanted`, and rewrites the graph. Wherever a group turns out not to be mergeable it
raises `Apart`, before it has changed anything; `merger.attempt` makes a record of either end.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from .._compat import OpOverload, storage_identity
from ..lowering import registry
from ..options import FUSE_PASSES, Options
from ..selection.decisions import Call, Fusion
from .nodes import (
    FUNCTIONALIZED,
    Cache,
    OpNode,
    called,
    describe,
    first_version,
    op_name,
    read,
    source_of,
    value_of,
    where,
)


class Apart(Exception):
    """A group of ops stays as it is; the message says why, in one clause."""


class Merger:
    """One pass at work on one graph."""

    def __init__(self, graph: Graph, name: str, options: Options) -> None:
        self.graph = graph
        self.name = name
        self.options = options
        self._reason = ""

    def attempt(self, ops: Sequence[str], into: str, place: Node, merge: Callable[[], object]) -> Fusion:
        """Call `merge`, which merges the ops named `ops` or raises `Apart`, and return what became of them."""
        merged, self._reason = True, ""
        try:
            merge()
        except Apart as apart:
            merged, self._reason = False, str(apart)
        return Fusion(self.name, tuple(ops), into, merged, self._reason, where(place))

    def check_wanted(
        self,
        op: OpOverload,
        arguments: Mapping[str, Any],
        members: Sequence[OpNode],
        place: Node,
        then: Sequence[tuple[OpOverload, Mapping[str, Any]]] = (),
    ) -> None:
        """Raise `Apart` unless a call of `op` with `arguments`, and those of `then`, shall do the work of `members`.

        It shall not where an implementation is demanded of an op that would vanish. With "auto" it shall where each
        has an implementation of its own that would be used, unless the ops were measured to be faster apart.
        """
        calls = [describe(place, *each) for each in ((op, arguments), *then)]
        self._check_demands(members, calls[0])
        if self._always:
            self._reason = f'dsv4.fuse.{self.name}="on"'
            return
        foreseen = [registry.foresee(call, self.options) for call in calls]
        for decision in foreseen:
            if decision.impl == "eager":
                raise Apart(f"{decision.op} would run its reference: {decision.reason}")
        self._reason = f"{foreseen[0].impl}: {foreseen[0].reason}"
        together = self._microseconds(calls)
        apart = self._microseconds([describe(member.node, member.op, member.arguments) for member in members])
        # An op that merely takes more over is measured as it is without.
        if together is not None and apart is not None and op not in [member.op for member in members]:
            times = f"measured at such a size: {together:.1f} us, apart {apart:.1f} us"
            if together > apart:
                raise Apart(times)
            self._reason += f"; {times}"

    def _check_demands(self, members: Sequence[OpNode], merged: Call) -> None:
        """Raise `Apart` where a demand for one of `members` would be lost, or could not be met once it takes over more.

        With "on" too: a demand is met or refused, and is refused only for a call that somebody has written.
        """
        for member in members:
            for name in {member.name, called(member.node)} & set(self.options.demands):
                if name != merged.op:
                    raise Apart(f"dsv4.impl.{name} asks for that op itself")
        demand = self.options.demands.get(merged.op)
        if demand is not None and merged.op in [member.name for member in members]:
            foreseen = registry.foresee(merged, self.options)
            if foreseen.impl != demand:
                raise Apart(f"dsv4.impl.{merged.op}={demand!r} would not be met: {foreseen.reason}")

    def check_architecture(self, place: Node, wanted: str, why_not: str) -> None:
        """Raise `Apart` where the op at `place` runs on another device than `wanted`, unless merging is asked for."""
        call = read(place)
        assert call is not None
        architecture = describe(place, call.op).architecture
        if architecture != wanted and not self._always:
            raise Apart(f"{architecture}: {why_not}")

    def _microseconds(self, calls: Sequence[Call]) -> float | None:
        """Of `calls` one after the other, None where not all were measured."""
        each = [registry.microseconds(call, registry.foresee(call, self.options)) for call in calls]
        known = [us for us in each if us is not None]
        return sum(known) if len(known) == len(each) else None

    def check_remainder(self, whole: OpNode, rest: OpOverload, arguments: Mapping[str, Any]) -> None:
        """Raise `Apart` where a call of `rest`, which remains of `whole`, would lose an implementation of its own."""
        if self._always or registry.foresee(describe(whole.node, whole.op), self.options).impl == "eager":
            return
        foreseen = registry.foresee(describe(whole.node, rest, arguments), self.options)
        if foreseen.impl == "eager":
            raise Apart(f"{op_name(rest)}, left of {whole.name}, would run its reference: {foreseen.reason}")

    @property
    def _always(self) -> bool:
        return self.options.fuse_of(self.name) == "on"


def run(graph: Graph, options: Options) -> None:
    """Run every pass that `options` do not switch off."""
    for name in FUSE_PASSES:
        if options.fuse_of(name) != "off":
            _passes()[name](graph, Merger(graph, name, options))


def _passes() -> dict[str, Callable[[Graph, Merger], None]]:
    from . import fuse_attention, fuse_indexer, fuse_latent, fuse_output, merge_preprocess

    return {
        "merge_preprocess": merge_preprocess.run,
        "fuse_indexer": fuse_indexer.run,
        "fuse_attention": fuse_attention.run,
        "fuse_latent": fuse_latent.run,
        "fuse_output": fuse_output.run,
    }


def inputs_before(graph: Graph, anchor: Node, inputs: Iterable[Any], members: Sequence[OpNode]) -> list[Node]:
    """Nodes that must move in front of `anchor`, so that a node there can use `inputs`; in graph order.

    They are functional, so moving them changes no value. Of a `Cache` among `inputs` those count that say which part
    of its buffer it is; the buffer is for `check_caches`. Raises `Apart` where one depends on a member, which the new
    node replaces, and where one writes a buffer: then what reads it would change sides.
    """
    behind = _behind(graph, anchor)
    own = {member.node for member in members}
    found: set[Node] = set()
    pending = [node for value in inputs for node in _nodes_in(value)]
    while pending:
        node = pending.pop()
        if node in found or node not in behind:
            continue
        if node in own:
            raise Apart(f"what one of them takes depends on {called(node)}")
        if node.is_impure() or node.target in FUNCTIONALIZED:
            raise Apart(f"{called(node)} stands between and writes what they use")
        found.add(node)
        pending += node.all_input_nodes
    return [node for node in graph.nodes if node in found]


def _nodes_in(value: Any) -> list[Node]:
    """Nodes that an argument consists of, without the buffer of a `Cache`."""
    found: list[Node] = []
    torch.fx.map_arg(value.view if isinstance(value, Cache) else value, found.append)
    return found


def check_caches(graph: Graph, anchor: Node, caches: Mapping[str, Cache], members: Sequence[OpNode]) -> None:
    """Raise `Apart` unless a node at `anchor` can write all `caches` in place.

    Their buffers are distinct, in allocations of their own, and exist by then, and nobody but the members uses an old
    version behind it: a reader that came before the write must not come after it.
    """
    behind = _behind(graph, anchor)
    own = {member.node for member in members}
    owners: dict[Node, str] = {}
    for name, cache in caches.items():
        if cache.base in owners:
            raise Apart(f"{owners[cache.base]} and {name} are parts of one tensor")
        owners[cache.base] = name
        writer, _ = source_of(cache.base)
        if writer is not None and writer.node in own:
            raise Apart(f"{name} is part of a tensor that {writer.name} writes too")
        if cache.base in behind:
            raise Apart(f"{called(cache.base)} writes {name} in between")
        for reader in _readers(cache.base):
            if reader in behind and reader not in own and not _hands_back(reader, cache.base):
                raise Apart(f"{called(reader)} uses {name} in between")
    _check_allocations(caches)


def _check_allocations(caches: Mapping[str, Cache]) -> None:
    """Raise `Apart` where two of `caches` are views of one allocation, as engines make them, that do not overlap.

    Of what an op writes in one allocation torch puts one tensor back in place; the others it copies at every call.
    """
    owners: dict[int, str] = {}
    for name, cache in caches.items():
        owner = owners.setdefault(storage_identity(value_of(first_version(cache.base))), name)
        if owner != name:
            raise Apart(f"{owner} and {name} are views of one allocation")


def _behind(graph: Graph, anchor: Node) -> set[Node]:
    """`anchor` and the nodes behind it."""
    nodes = list(graph.nodes)
    return set(nodes[nodes.index(anchor) :])


def _readers(buffer: Node) -> Iterator[Node]:
    """Nodes that use `buffer` or a view of it; a view by itself uses nothing."""
    for user in buffer.users:
        if getattr(user.target, "is_view", False) or user.target is operator.getitem:
            yield from _readers(user)
        else:
            yield user


def _hands_back(node: Node, buffer: Node) -> bool:
    """Whether `node` is what gives the caller's own tensor its new value, at the end of the graph."""
    return node.target is torch.ops.aten.copy_.default and node.args[0] is buffer
