"""Fuse the return of a sub-layer's output to the streams with the mix for the next sub-layer, or with the head's.

`mhc_boundary` also returns the new streams, for the next `mhc_post` and for recorded hidden states. `mhc_head` does
not: before it, streams with another user stay a result of `mhc_post`.
"""

from __future__ import annotations

from functools import partial
from itertools import chain, pairwise

from torch.fx import Graph, Node

from ..lowering import registry
from ..ops.common.define import OPS
from ..selection.decisions import record
from .fusion import Fuser, NotFusable, inputs_to_move
from .nodes import VIEWS, OpNode, calls_of, describe, display_name, read, value_of
from .rewrite import erase, insert, item, replace_uses

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


def _path(second: OpNode) -> list[Node]:
    """Return the node that the streams of `second` are a view of, then the views, in order."""
    path = [second["streams"]]
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
            pending += [each for each in node.all_input_nodes if each not in seen]
            seen.update(node.all_input_nodes)
        elif call.name == FIRST:
            return call
    return None


def _fuse_boundary(graph: Graph, fuser: Fuser, first: OpNode, second: OpNode, path: list[Node]) -> None:
    """Replace both calls by one that also returns the streams, or raise `NotFusable`."""
    _check_streams(first, second, path)
    given = {**first.arguments, **{name: value for name, value in second.arguments.items() if name != "streams"}}
    moved = inputs_to_move(graph, first.node, given.values(), [first, second])
    _check_wanted(fuser, BOUNDARY, given, first, second)
    for node in moved:
        first.node.prepend(node)
    # Others may use the streams before `second`.
    with graph.inserting_before(first.node):
        fused = insert(graph, OPS[BOUNDARY], given, (value_of(first.node), *value_of(second.node)), second.node)
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
    given = {**second.arguments, **first.arguments}
    _check_wanted(fuser, HEAD, given, first, second)
    with graph.inserting_before(second.node):
        fused = insert(graph, OPS[HEAD], given, value_of(second.node), second.node)
    replace_uses([second.node], fused.node)
    for node in (second.node, *reversed(path)):
        graph.erase_node(node)


def _check_streams(first: OpNode, second: OpNode, path: list[Node]) -> None:
    """Raise `NotFusable` unless `second` reads the result of `first`, as the same `[T, N, D]`."""
    if path[0] is not first.node:
        raise NotFusable(f"{display_name(path[0])} changes the streams between {FIRST} and {second.name}")
    returned, taken = (list(value_of(node).shape[1:]) for node in (first.node, path[-1]))
    if returned != taken:
        raise NotFusable(f"{second.name} reads streams of {taken} elements, {FIRST} returns {returned}")


def _check_wanted(fuser: Fuser, into: str, given: dict[str, object], first: OpNode, second: OpNode) -> None:
    """Raise `NotFusable` if the fused op would not be used, or if IR that nobody measured would replace a kernel."""
    fuser.check_wanted(OPS[into], given, [first, second], second.node)
    if fuser.options.fuse_of(fuser.name) == "on":
        return
    call = describe(second.node, OPS[into], given)
    separate, fused = (registry.foresee(each, fuser.options) for each in (describe(second.node, second.op), call))
    if separate.impl == "triton" and fused.impl != "triton" and registry.microseconds(call, fused) is None:
        raise NotFusable(f"{second.name} has a kernel; {into} would be {fused.impl}, whose time was not measured")
