"""Marks of layers in a trace, and the pieces that they cut its graph into. See `layer_programs`."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ..errors import fail

_LIBRARY = torch.library.Library("dsv4_layer", "DEF")
_LIBRARY.define("begin(Tensor[] carried, Tensor[] tensors, int layer) -> Tensor[]")
_LIBRARY.define("end(Tensor[] carried, int layer) -> Tensor[]")
_LIBRARY.define("repeat(Tensor[] carried, Tensor[] like, int layer, int first) -> Tensor[]")

begin: Any = torch.ops.dsv4_layer.begin
end: Any = torch.ops.dsv4_layer.end
repeat: Any = torch.ops.dsv4_layer.repeat
_MARKS = (begin, end, repeat)


def _trace_only(*_: Any) -> NoReturn:
    fail("E208", got="a graph with marks of repeated layers", why="only v41.compile calls such a graph, by pieces")


def _like(values: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_like(value) for value in values]


def _fake_repeat(carried: Sequence[Tensor], like: Sequence[Tensor], layer: int, first: int) -> list[Tensor]:
    return _like(like)


for _name, _fake in {"begin": lambda carried, *_: _like(carried), "end": lambda carried, *_: _like(carried)}.items():
    torch.library.register_fake(f"dsv4_layer::{_name}", _fake, lib=_LIBRARY)
torch.library.register_fake("dsv4_layer::repeat", _fake_repeat, lib=_LIBRARY)
for _name in ("begin", "end", "repeat"):
    _LIBRARY.impl(_name, _trace_only, "CompositeExplicitAutograd")


class Piece(NamedTuple):
    """Nodes of a graph that are compiled together, as a separate graph of `inputs` that returns `outputs`."""

    graph: Graph
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]


class Call(NamedTuple):
    """A call of a compiled piece: slots of its inputs and outputs, and of values that no later call needs.

    Inputs that are `layer` tensors have their position among these in place of a slot: pairs (is a layer's, index).
    """

    piece: int
    inputs: tuple[tuple[bool, int], ...]
    outputs: tuple[int, ...]
    layer: int
    dead: tuple[int, ...] = ()


def mark_of(node: Node) -> Any:
    """Return the mark that a node is, None for all others."""
    packet = getattr(node.target, "overloadpacket", node.target)
    return next((mark for mark in _MARKS if packet is mark), None) if node.op == "call_function" else None


class Cut:
    """Pieces of a marked graph, and the calls that run it."""

    def __init__(self, gm: GraphModule) -> None:
        self.nodes = list(gm.graph.nodes)
        placeholders = [node for node in self.nodes if node.op == "placeholder"]
        self.sizes = [node for node in placeholders if _is_size(node)]
        self.slots: dict[Node, int] = {node: i for i, node in enumerate(placeholders)}
        self.pieces: list[Piece] = []
        self.calls: list[Call] = []
        self._aliases: dict[Node, Node] = {}
        self._layers: dict[int, tuple[int, Node, tuple[Any, ...]]] = {}
        self._segment_of: dict[Node, int] = {}
        segments = self._segments()
        for mark, nodes in segments:
            kind = None if mark is None else mark_of(mark)
            if kind is None:
                self._call_between(nodes)
            elif kind is end:
                self._call_traced(mark, nodes)
            else:
                self._call_repeat(mark)
        self.returned = [
            (True, self._slot(value)) if isinstance(value, Node) else (False, value)
            for value in _flat(self.nodes[-1].args[0])
        ]

    def _segments(self) -> list[tuple[Any, list[Node]]]:
        """Return runs of nodes with the mark that ends them, None between layers, in order."""
        segments: list[tuple[Any, list[Node]]] = []
        nodes: list[Node] = []
        for node in self.nodes:
            mark = mark_of(node)
            if mark is None:
                of_mark = node.target is operator.getitem and mark_of(node.args[0])
                if node.op in ("placeholder", "output") or of_mark:
                    continue
                self._segment_of[node] = len(segments)
                nodes.append(node)
                continue
            if mark is not end and nodes:
                segments.append((None, nodes))
                nodes = []
            if mark is not begin:
                segments.append((node, nodes))
                nodes = []
        if nodes:
            segments.append((None, nodes))
        return segments

    def _call_between(self, nodes: list[Node]) -> None:
        segment = self._segment_of[nodes[0]]
        outputs = [node for node in nodes if not _is_size(node) and self._leaves(node, segment)]
        piece = self._piece(nodes, outputs)
        self._add_call(piece, [(False, self._slot(node)) for node in piece.inputs], outputs, -1)

    def _call_traced(self, mark: Node, nodes: list[Node]) -> None:
        arguments: Any = mark.args
        results, layer = arguments
        begins: Any = next(node for node in self.nodes if mark_of(node) is begin and node.args[2] == layer)
        piece = self._piece(nodes, list(dict.fromkeys(results)))
        known = {*_items(begins), *begins.args[1], *self.sizes}
        for node in piece.inputs:
            if node not in known:
                fail(
                    "E208",
                    got=f"layer {layer}, which reads {node.name}",
                    why="its marks do not name it, and other layers may have another one",
                    fix='compile with options={"dsv4.regions": "off"}, which traces every layer',
                )
        self._name_results(begins, [self._resolve(node) for node in begins.args[0]])
        inputs = [(False, self._slot(node)) for node in piece.inputs]
        self._add_call(piece, inputs, piece.outputs, -1)
        self._name_results(mark, results)
        self._layers[layer] = len(self.pieces) - 1, begins, tuple(results)

    def _call_repeat(self, mark: Node) -> None:
        arguments: Any = mark.args
        carried, _, layer, first = arguments
        number, begins, results = self._layers[first]
        piece = self.pieces[number]
        items = {node: node.args[1] for node in _items(begins)}
        tensors: Any = begins.args[1]
        layer_inputs = {node: i for i, node in enumerate(tensors)}
        inputs = []
        for node in piece.inputs:
            position: Any = items.get(node)
            if position is not None:
                inputs.append((False, self._slot(carried[position])))
            else:
                inputs.append((True, layer_inputs[node]) if node in layer_inputs else (False, self._slot(node)))
        slots = {node: len(self.slots) + i for i, node in enumerate(piece.outputs)}
        for i, node in enumerate(piece.outputs):
            self.slots[_Result(mark, i)] = slots[node]  # type: ignore[index]
        for item in _items(mark):
            self.slots[item] = slots[results[item.args[1]]]  # type: ignore[index]
        self.calls.append(Call(number, tuple(inputs), tuple(slots.values()), layer))

    def _leaves(self, node: Node, segment: int) -> bool:
        return any(self._segment_of.get(user, -1) != segment for user in node.users)

    def _add_call(self, piece: Piece, inputs: Sequence[Any], outputs: Sequence[Node], layer: int) -> None:
        for node in outputs:
            self.slots.setdefault(node, len(self.slots))
        self.pieces.append(piece)
        slots = tuple(self.slots[node] for node in outputs)
        self.calls.append(Call(len(self.pieces) - 1, tuple(inputs), slots, layer))

    def _name_results(self, mark: Node, values: Sequence[Node]) -> None:
        for item in _items(mark):
            position: Any = item.args[1]
            self._aliases[item] = values[position]

    def _resolve(self, node: Node) -> Node:
        while node in self._aliases:
            node = self._aliases[node]
        return node

    def _slot(self, node: Node) -> int:
        return self.slots[self._resolve(node)]

    def _piece(self, nodes: list[Node], outputs: list[Node]) -> Piece:
        """Return the piece of `nodes`; sizes that were computed before are computed in it again."""
        inside = self._with_sizes(nodes)
        graph, copies, inputs = Graph(), dict[Node, Node](), list[Node]()
        members = set(inside)

        def copied(node: Node) -> Node:
            if node not in copies:
                assert node not in members
                inputs.append(node)
                copies[node] = graph.placeholder(f"in_{len(inputs)}")
                copies[node].meta = {"example_value": node.meta["example_value"]}
            return copies[node]

        read = [source for node in inside for source in node.all_input_nodes if source not in members]
        read += [node for node in outputs if node not in members]
        symbols = {symbol for node in read for symbol in _symbols(node.meta.get("example_value"))}
        # Integers give Inductor the sizes of all others. Placeholders come before all other nodes of a graph.
        for node in (*(node for node in self.sizes if _symbols(node.meta.get("example_value")) & symbols), *read):
            copied(node)
        for node in inside:
            copies[node] = graph.node_copy(node, copied)
        graph.output(tuple(copies[node] for node in outputs))
        return Piece(graph, tuple(inputs), tuple(outputs))

    def _with_sizes(self, nodes: list[Node]) -> list[Node]:
        needed, pending = set(nodes), list(nodes)
        while pending:
            for source in pending.pop().all_input_nodes:
                if source not in needed and source.op != "placeholder" and _is_size(source):
                    needed.add(source)
                    pending.append(source)
        return [node for node in self.nodes if node in needed]


class _Result(NamedTuple):
    """Result `position` of a mark, a key of slots where no node reads it."""

    mark: Node
    position: int


def _items(mark: Node) -> list[Node]:
    return [user for user in mark.users if user.target is operator.getitem]


def _flat(result: Any) -> Sequence[Any]:
    return result if isinstance(result, (tuple, list)) else (result,)


def _symbols(value: Any) -> set[Any]:
    """Return the symbols of a fake value's sizes, strides and offset."""
    if isinstance(value, Tensor):
        return {symbol for n in (*value.shape, *value.stride(), value.storage_offset()) for symbol in _symbols(n)}
    return set(value.node.expr.free_symbols) if isinstance(value, torch.SymInt) else set()


def _is_size(node: Node) -> bool:
    return not isinstance(node.meta.get("example_value"), (Tensor, tuple, list)) or isinstance(
        node.meta["example_value"], torch.Size
    )
