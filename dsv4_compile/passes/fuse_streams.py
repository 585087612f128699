"""Fuse the return of a sub-layer's output to the streams with the mix for the next sub-layer, or with the head's.

`mhc_boundary` also returns the new streams, for the next `mhc_post` and for recorded hidden states. `mhc_head` does
not: before it, streams with a second user stay a result of `mhc_post`. An all-reduce through symmetric memory, of a
sub-layer that is split over ranks, becomes a part of the boundary after it.
"""

from __future__ import annotations

from functools import partial
from itertools import chain, pairwise

import torch
from torch.fx import Graph, Node

from ..lowering import registry
from ..ops.common.define import OPS
from ..parallel import symmetric  # noqa: F401  defines the all-reduce
from ..selection.decisions import record
from .fusion import Fuser, NotFusable, inputs_to_move
from .nodes import VIEWS, OpNode, calls_of, describe, display_name, read, value_of
from .rewrite import erase, insert, item, replace_uses

REDUCE, REDUCED = "all_reduce", "all_reduce_mhc_boundary"
"""Ops of dsv4_collectives: the all-reduce, and the boundary after it that has it inside."""
FIRST, PRE, BOUNDARY, HEAD = "mhc_post", "mhc_pre", "mhc_boundary", "mhc_head"


def run(graph: Graph, fuser: Fuser) -> None:
    """Fuse every mhc_pre, and every mhc_head without a sub-layer's output, with the mhc_post before it."""
    for second in chain(calls_of(graph, PRE), calls_of(graph, HEAD)):
        if second.name == HEAD and second["output"] is not None:
            continue
        path = _path(second)
        first = _source(path[0])
        if first is not None:
            into, fuse = (HEAD, _fuse_head) if second.name == HEAD else (BOUNDARY, _fuse_boundary)
            attempt = partial(fuse, graph, fuser, first, second, path)
            record(fuser.attempt((FIRST, second.name), into, second.node, attempt))
    for call in calls_of(graph, BOUNDARY):
        reduced = _path(call, "output")
        if reduced[0].target is torch.ops.dsv4_collectives.all_reduce.default:
            attempt = partial(_fuse_reduce, graph, fuser, call, reduced)
            record(fuser.attempt((REDUCE, BOUNDARY), REDUCED, call.node, attempt))


def _path(second: OpNode, argument: str = "streams") -> list[Node]:
    """Return the node that an argument of `second` is a view of, then the views, in order."""
    path = [second[argument]]
    while path[0].target in VIEWS:
        path.insert(0, path[0].args[0])
    return path


def _source(streams: Node) -> OpNode | None:
    """Return the mhc_post that `streams` were computed from without other dsv4 ops in between, or None."""
    pending, seen = [streams], {streams}
    while pending:
        node = pending.pop()
        call = read(node)
        if call is None:
            pending += [input_node for input_node in node.all_input_nodes if input_node not in seen]
            seen.update(node.all_input_nodes)
        elif call.name == FIRST:
            return call
    return None


def _fuse_boundary(graph: Graph, fuser: Fuser, first: OpNode, second: OpNode, path: list[Node]) -> None:
    """Replace both calls by one that also returns the streams, or raise `NotFusable`."""
    _check_streams(first, second, path)
    arguments = {**first.arguments, **{name: value for name, value in second.arguments.items() if name != "streams"}}
    moved = inputs_to_move(graph, first.node, arguments.values(), [first, second])
    _check_wanted(fuser, BOUNDARY, arguments, first, second)
    for node in moved:
        first.node.prepend(node)
    # Others may use the streams before `second`.
    with graph.inserting_before(first.node):
        fused = insert(graph, OPS[BOUNDARY], arguments, (value_of(first.node), *value_of(second.node)), second.node)
        streams, *mixed = (item(graph, fused.node, index) for index in range(4))
    for index, result in enumerate(mixed):
        replace_uses(second.results(index), result)
    erase(graph, second)
    replace_uses([first.node], streams)
    for node in (*reversed(path[1:]), streams, *mixed, first.node):
        if not node.users:
            graph.erase_node(node)


def _fuse_head(graph: Graph, fuser: Fuser, first: OpNode, second: OpNode, path: list[Node]) -> None:
    """Give the arguments of `first` to the head, or raise `NotFusable`."""
    _check_streams(first, second, path)
    for node, user in pairwise((*path, second.node)):
        others = [other for other in node.users if other is not user]
        if others:
            raise NotFusable(f"{display_name(others[0])} also uses the streams, which {HEAD} does not return")
    arguments = {**second.arguments, **first.arguments}
    _check_wanted(fuser, HEAD, arguments, first, second)
    with graph.inserting_before(second.node):
        fused = insert(graph, OPS[HEAD], arguments, value_of(second.node), second.node)
    replace_uses([second.node], fused.node)
    for node in (second.node, *reversed(path)):
        graph.erase_node(node)


def _fuse_reduce(graph: Graph, fuser: Fuser, call: OpNode, path: list[Node]) -> None:
    """Replace an all-reduce and the boundary that alone uses it by one call, or raise `NotFusable`."""
    for node, user in pairwise((*path, call.node)):
        others = [other for other in node.users if other is not user]
        if others:
            raise NotFusable(f"{display_name(others[0])} also uses the sum of the ranks")
    chosen = registry.foresee(describe(call.node, call.op, call.arguments), fuser.options)
    if fuser.options.fuse_of(fuser.name) != "on" and chosen.impl != "triton":
        raise NotFusable(f"{BOUNDARY} is {chosen.impl}, and the kernel alone reads what other ranks have")
    local_sum, name = path[0].args
    if list(value_of(local_sum).shape) != list(value_of(call["output"]).shape):
        raise NotFusable(f"{BOUNDARY} reads the sum in another shape")
    arguments = {**call.arguments, "output": local_sum}
    with graph.inserting_before(call.node):
        fused = graph.call_function(
            torch.ops.dsv4_collectives.all_reduce_mhc_boundary.default, (*arguments.values(), name)
        )
    fused.meta |= call.node.meta | {"eager_input_vals": value_of((fused.args, {}))}
    call.node.replace_all_uses_with(fused)
    for node in (call.node, *reversed(path)):
        graph.erase_node(node)


def _check_streams(first: OpNode, second: OpNode, path: list[Node]) -> None:
    """Raise `NotFusable` unless `second` reads the result of `first`, as the same `[T, N, D]`."""
    if path[0] is not first.node:
        raise NotFusable(f"{display_name(path[0])} changes the streams between {FIRST} and {second.name}")
    returned, taken = (list(value_of(node).shape[1:]) for node in (first.node, path[-1]))
    if returned != taken:
        raise NotFusable(f"{second.name} reads streams of {taken} elements, {FIRST} returns {returned}")


def _check_wanted(fuser: Fuser, into: str, arguments: dict[str, object], first: OpNode, second: OpNode) -> None:
    """Raise `NotFusable` if the fused op would not be used, or if IR that nobody measured would replace a kernel."""
    fuser.check_wanted(OPS[into], arguments, [first, second], second.node)
    if fuser.options.fuse_of(fuser.name) == "on":
        return
    call = describe(second.node, OPS[into], arguments)
    separate, fused = (
        registry.foresee(candidate, fuser.options) for candidate in (describe(second.node, second.op), call)
    )
    if separate.impl == "triton" and fused.impl != "triton" and registry.microseconds(call, fused) is None:
        raise NotFusable(f"{second.name} has a kernel; {into} would be {fused.impl}, whose time was not measured")
