"""Helpers of the fusion passes: check that a group of ops can and should be fused, and record the outcome.

A pass is a function `run(graph, fuser)` in a separate file. It finds a group of ops, builds the arguments of the op
that replaces them, calls `fuser.check_wanted`, and rewrites the graph. If the group cannot be fused it raises
`NotFusable` before changing anything; `fuser.attempt` returns the record of either outcome.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from .._compat import OpOverload, storage_identity
from ..lowering import registry
from ..options import Options
from ..selection.decisions import Call, Fusion
from .nodes import (
    FUNCTIONALIZED,
    Cache,
    OpNode,
    describe,
    display_name,
    initial_version,
    op_name,
    producer_of,
    read,
    value_of,
    where,
)


class NotFusable(Exception):
    """Raised for a group of ops that is left as it is. The message is the reason, in one clause."""


class Fuser:
    """One fusion pass on one graph: checks groups of ops and records what became of them."""

    def __init__(self, name: str, options: Options) -> None:
        self.name = name
        self.options = options
        self._reason = ""

    def attempt(self, ops: Sequence[str], into: str, place: Node, fuse: Callable[[], object]) -> Fusion:
        """Call `fuse`, which fuses the ops named `ops` or raises `NotFusable`, and return the record of the outcome."""
        fused, self._reason = True, ""
        try:
            fuse()
        except NotFusable as error:
            fused, self._reason = False, str(error)
        return Fusion(self.name, tuple(ops), into, fused, self._reason, where(place))

    def check_wanted(
        self,
        op: OpOverload,
        arguments: Mapping[str, Any],
        members: Sequence[OpNode],
        place: Node,
        followed_by: Sequence[tuple[OpOverload, Mapping[str, Any]]] = (),
    ) -> None:
        """Raise `NotFusable` unless a call of `op`, and those in `followed_by`, should replace `members`.

        An op with a demanded implementation is never replaced. With "auto" each new call must have an implementation
        other than its reference, and must not be slower than `members` where both were measured.
        """
        calls = [describe(place, *op_and_arguments) for op_and_arguments in ((op, arguments), *followed_by)]
        self._check_demands(members, calls[0])
        if self._forced:
            self._reason = f'dsv4.fuse.{self.name}="on"'
            return
        foreseen = [registry.foresee(call, self.options) for call in calls]
        for decision in foreseen:
            if decision.impl == "eager":
                raise NotFusable(f"{decision.op} would run its reference: {decision.reason}")
        self._reason = f"{foreseen[0].impl}: {foreseen[0].reason}"
        fused_us = self._microseconds(calls)
        separate_us = self._microseconds([describe(member.node, member.op, member.arguments) for member in members])
        # An op that only gains options has one measured time, with and without them.
        if fused_us is not None and separate_us is not None and op not in [member.op for member in members]:
            times = f"measured at the nearest size: fused {fused_us:.1f} us, separate {separate_us:.1f} us"
            if fused_us > separate_us:
                raise NotFusable(times)
            self._reason += f"; {times}"

    def _check_demands(self, members: Sequence[OpNode], fused: Call) -> None:
        """Raise `NotFusable` if fusion removes an op with a demanded implementation, or makes a demand unavailable.

        This holds with "on" too: only a call in the user's code may raise E302.
        """
        for member in members:
            for name in {member.name, display_name(member.node)} & set(self.options.demands):
                if name != fused.op:
                    raise NotFusable(f"dsv4.impl.{name} demands an implementation of that op")
        demand = self.options.demands.get(fused.op)
        if demand is not None and fused.op in [member.name for member in members]:
            foreseen = registry.foresee(fused, self.options)
            if foreseen.impl != demand:
                raise NotFusable(f"dsv4.impl.{fused.op}={demand!r} would not be met: {foreseen.reason}")

    def check_architecture(self, place: Node, wanted: str, why_not: str) -> None:
        """Raise `NotFusable` unless the op at `place` runs on the architecture `wanted` or fusion is forced."""
        call = read(place)
        assert call is not None
        architecture = describe(place, call.op).architecture
        if architecture != wanted and not self._forced:
            raise NotFusable(f"{architecture}: {why_not}")

    def _microseconds(self, calls: Sequence[Call]) -> float | None:
        """Return the time of `calls` one after the other, None if not all were measured."""
        times = [registry.microseconds(call, registry.foresee(call, self.options)) for call in calls]
        known = [us for us in times if us is not None]
        return sum(known) if len(known) == len(times) else None

    def check_remainder(self, whole: OpNode, rest: OpOverload, arguments: Mapping[str, Any]) -> None:
        """Raise `NotFusable` if `whole` has an implementation and `rest`, the op that remains of it, has none."""
        if self._forced or registry.foresee(describe(whole.node, whole.op), self.options).impl == "eager":
            return
        foreseen = registry.foresee(describe(whole.node, rest, arguments), self.options)
        if foreseen.impl == "eager":
            raise NotFusable(f"{op_name(rest)}, the rest of {whole.name}, would run its reference: {foreseen.reason}")

    @property
    def _forced(self) -> bool:
        return self.options.fuse_of(self.name) == "on"


def inputs_to_move(graph: Graph, anchor: Node, inputs: Iterable[Any], members: Sequence[OpNode]) -> list[Node]:
    """Return the nodes to move before `anchor`, so that a node there can use `inputs`; in graph order.

    Moving them changes no value, as they are functional. Of a `Cache` only the nodes that compute its view count; see
    `check_caches` for its buffer. Raises `NotFusable` if one depends on a member, which the new node replaces, or
    writes a buffer: its readers would then see it earlier.
    """
    after = _nodes_from(graph, anchor)
    member_nodes = {member.node for member in members}
    moved: set[Node] = set()
    pending = [node for value in inputs for node in _nodes_in(value)]
    while pending:
        node = pending.pop()
        if node in moved or node not in after:
            continue
        if node in member_nodes:
            raise NotFusable(f"an input of the group depends on {display_name(node)}")
        if node.is_impure() or node.target in FUNCTIONALIZED:
            raise NotFusable(f"an input of the group depends on {display_name(node)}, which writes a buffer")
        moved.add(node)
        pending += node.all_input_nodes
    return [node for node in graph.nodes if node in moved]


def _nodes_in(value: Any) -> list[Node]:
    """Return the nodes of an argument, without the buffer of a `Cache`."""
    nodes: list[Node] = []
    torch.fx.map_arg(value.view if isinstance(value, Cache) else value, nodes.append)
    return nodes


def check_caches(graph: Graph, anchor: Node, caches: Mapping[str, Cache], members: Sequence[OpNode]) -> None:
    """Raise `NotFusable` unless a node at `anchor` can write all `caches` in place.

    Their buffers must exist there, be distinct and in separate allocations. After `anchor` only members may use an old
    version: a read before the write must not move after it.
    """
    after = _nodes_from(graph, anchor)
    member_nodes = {member.node for member in members}
    owners: dict[Node, str] = {}
    for name, cache in caches.items():
        if cache.base in owners:
            raise NotFusable(f"{owners[cache.base]} and {name} are parts of one tensor")
        owners[cache.base] = name
        writer, _ = producer_of(cache.base)
        if writer is not None and writer.node in member_nodes:
            raise NotFusable(f"{name} is part of a tensor that {writer.name} writes too")
        if cache.base in after:
            raise NotFusable(f"{display_name(cache.base)} writes {name} between the ops")
        for reader in _readers(cache.base):
            if reader in after and reader not in member_nodes and not _is_copy_back(reader, cache.base):
                raise NotFusable(f"{display_name(reader)} uses {name} between the ops")
    _check_allocations(caches)


def _check_allocations(caches: Mapping[str, Cache]) -> None:
    """Raise `NotFusable` if two of `caches` are views of one allocation, even if they do not overlap.

    If an op writes several tensors of one allocation, torch writes one in place and copies the others at every call.
    """
    owners: dict[int, str] = {}
    for name, cache in caches.items():
        owner = owners.setdefault(storage_identity(value_of(initial_version(cache.base))), name)
        if owner != name:
            raise NotFusable(f"{owner} and {name} are views of one allocation")


def _nodes_from(graph: Graph, anchor: Node) -> set[Node]:
    """Return `anchor` and all nodes after it."""
    nodes = list(graph.nodes)
    return set(nodes[nodes.index(anchor) :])


def _readers(buffer: Node) -> Iterator[Node]:
    """Yield the nodes that use `buffer` or a view of it; a view alone is not a use."""
    for user in buffer.users:
        if getattr(user.target, "is_view", False) or user.target is operator.getitem:
            yield from _readers(user)
        else:
            yield user


def _is_copy_back(node: Node, buffer: Node) -> bool:
    """Return whether `node` copies the new value into the caller's tensor at the end of the graph."""
    return node.target is torch.ops.aten.copy_.default and node.args[0] is buffer
