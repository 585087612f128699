"""Trace one layer of each kind, and write the graph of the others by hand: `begin_layer` to `write_out`.

Dynamo takes as long for the fortieth layer as for the first. A model that knows which of its layers do the same calls
an op in place of a layer of a kind that was traced before, with the tensors of that layer:

    streams = begin_layer(streams, tensors of layer 2, tensors of all layers, 2)
    ...                                              # layer 2, traced
    streams = end_layer(streams, 2)
    streams = repeat_layer(streams, tensors of layer 3, 3, 2)

`write_out` puts the nodes of layer 2 in place of the last line, with the tensors of layer 3, as if all had been traced.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ..errors import check, fail

_LIBRARY = torch.library.Library("dsv4_trace", "DEF")
_LIBRARY.define("begin_layer(Tensor streams, Tensor[] own, Tensor[] shared, int layer) -> Tensor")
_LIBRARY.define("end_layer(Tensor streams, int layer) -> Tensor")
_LIBRARY.define("repeat_layer(Tensor streams, Tensor[] own, int layer, int first) -> Tensor")

begin_layer: Any = torch.ops.dsv4_trace.begin_layer
end_layer: Any = torch.ops.dsv4_trace.end_layer
repeat_layer: Any = torch.ops.dsv4_trace.repeat_layer
_MARKS = (begin_layer, end_layer, repeat_layer)


def _trace_only(streams: Tensor, *_: Any) -> NoReturn:
    fail(
        "E208",
        got="a graph whose repeated layers were not written out",
        why='only backend="dsv4" compiles such a graph',
        fix='compile with model.compile(backend="dsv4")',
    )


def _like(streams: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(streams)


for _mark in _MARKS:
    _LIBRARY.impl(_mark._qualified_op_name.partition("::")[2], _trace_only, "CompositeExplicitAutograd")
    torch.library.register_fake(_mark._qualified_op_name, _like, lib=_LIBRARY)


class _Layer(NamedTuple):
    """A layer that was traced: its first and last mark, and the nodes between them, in order."""

    begin: Node
    end: Node
    nodes: list[Node]


def write_out(gm: GraphModule) -> None:
    """Replace the marks of a graph that Dynamo has traced, in place, by the layers that they stand for.

    Raises E208 where a traced layer reads a tensor that is neither its own nor one of all layers.
    """
    layers = _traced_layers(gm)
    if not layers:
        return
    for layer in layers.values():
        _check_closed(layer)
    repeats = [node for node in gm.graph.nodes if _mark_of(node) is repeat_layer]
    for node in repeats:
        index: Any = node.args[2]
        first: Any = node.args[3]
        node.replace_all_uses_with(_copy(layers[first], node, first, index))
        gm.graph.erase_node(node)
    for layer in layers.values():
        for mark in (layer.end, layer.begin):
            streams: Any = mark.args[0]
            mark.replace_all_uses_with(streams)
            gm.graph.erase_node(mark)
    gm.recompile()


def _mark_of(node: Node) -> Any:
    """Return the mark that a node is, None for all others."""
    packet = getattr(node.target, "overloadpacket", node.target)
    return next((mark for mark in _MARKS if packet is mark), None) if node.op == "call_function" else None


def _traced_layers(gm: GraphModule) -> dict[int, _Layer]:
    found: dict[int, _Layer] = {}
    begin: Node | None = None
    nodes: list[Node] = []
    for node in gm.graph.nodes:
        mark = _mark_of(node)
        if mark is begin_layer:
            begin, nodes = node, []
        elif mark is end_layer:
            assert begin is not None
            index: Any = node.args[1]
            found[index] = _Layer(begin, node, nodes)
            begin = None
        elif begin is not None:
            nodes.append(node)
    return found


def _check_closed(layer: _Layer) -> None:
    """Raise E208 unless a layer depends on its streams and tensors alone, and nothing on it but its result."""
    arguments: tuple[Any, ...] = layer.begin.args
    _, own, shared, index = arguments
    inside = set(layer.nodes)
    known = {layer.begin, *own, *shared}
    for node in layer.nodes:
        for source in node.all_input_nodes:
            # What was computed before the layer was computed for all layers.
            unknown = source not in inside and source not in known and source.op in ("placeholder", "get_attr")
            if unknown and not _is_number(source):
                _refuse(f"layer {index} reads {source.name}, which its kind does not name")
        if not _is_number(node) and any(user not in inside and user is not layer.end for user in node.users):
            _refuse(f"{node.name} of layer {index} is read outside of it")


def _copy(layer: _Layer, mark: Node, first: int, index: int) -> Node:
    """Copy a traced layer before `mark`, with the streams and tensors of `mark`; return its result."""
    own: Any = mark.args[1]
    theirs: Any = layer.begin.args[1]
    copies: dict[Node, Any] = {layer.begin: mark.args[0]}
    check(len(own) == len(theirs), "E208", got=f"{len(own)} tensors of layer {index}, {len(theirs)} of layer {first}")
    for mine, their in zip(own, theirs, strict=True):
        if _described(mine) != _described(their) or copies.setdefault(their, mine) is not mine:
            _refuse(f"{mine.name} of layer {index} is no {their.name} of layer {first}")
    with mark.graph.inserting_before(mark):
        for node in layer.nodes:
            copies[node] = mark.graph.node_copy(node, lambda each: copies.get(each, each))
            copies[node].meta["nn_module_stack"] = _moved(node.meta.get("nn_module_stack") or {}, first, index)
    result: Any = layer.end.args[0]
    return copies[result]  # type: ignore[no-any-return]


def _moved(stack: Mapping[str, Any], first: int, index: int) -> dict[str, Any]:
    """Return where a node was traced, in layer `index` in place of layer `first`."""
    outer, inner = "", dict[str, Any]()
    for key, (path, kind) in stack.items():
        if not outer and path.endswith(f".{first}"):
            outer = path
        if outer:
            key, path = f"{key} {index}", f"{outer.removesuffix(str(first))}{index}{path.removeprefix(outer)}"
        inner[key] = (path, kind)
    return inner


def _described(node: Node) -> Any:
    """Return what a graph knows of a tensor: two layers of a kind have equal ones."""
    value = node.meta["example_value"]
    return value.shape, value.stride(), value.dtype, value.device, value.requires_grad, type(value)


def _is_number(node: Node) -> bool:
    """Return whether a node is a size, or a number of a module, which dynamic graphs take as float64 of no dims."""
    value = node.meta.get("example_value")
    if isinstance(value, Tensor):
        return value.dim() == 0 and value.dtype is torch.float64 and value.device.type == "cpu"
    return isinstance(value, (torch.SymInt, torch.SymFloat, int, float))


def _refuse(why: str) -> NoReturn:
    fail(
        "E208",
        got="a layer that cannot stand for others of its kind",
        why=why,
        fix='compile with options={"dsv4.regions": "off"}, which traces every layer',
    )
