"""Trace one layer of each kind, and write the graph of the others by hand: `begin_layer` to `write_out`.

Dynamo takes as long for the fortieth layer as for the first, and some milliseconds for each tensor of a trace. A model
that knows which of its layers do the same calls an op in place of a layer of a kind that was traced before:

    streams = begin_layer(streams, weights of layer 2, caches of layer 2, tensors of all layers, 2)
    ...                                              # layer 2, traced
    streams = end_layer(streams, 2)
    streams = repeat_layer(streams, 3, 2)

`write_out` puts the nodes of layer 2 in place of the last line, with the tensors of layer 3, as if all had been traced.
The caller hands those over, when it compiles and in each call, in `handed`: Dynamo does not see them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from .._compat import WRAPPED_BACKEND, TracingContext
from ..errors import check, fail

_LIBRARY = torch.library.Library("dsv4_trace", "DEF")
_LIBRARY.define("begin_layer(Tensor streams, Tensor[] weights, Tensor[] caches, Tensor[] shared, int layer) -> Tensor")
_LIBRARY.define("end_layer(Tensor streams, int layer) -> Tensor")
_LIBRARY.define("repeat_layer(Tensor streams, int layer, int first) -> Tensor")

begin_layer: Any = torch.ops.dsv4_trace.begin_layer
end_layer: Any = torch.ops.dsv4_trace.end_layer
repeat_layer: Any = torch.ops.dsv4_trace.repeat_layer
_MARKS = (begin_layer, end_layer, repeat_layer)


class Handed(NamedTuple):
    """Tensors of all layers that a trace repeats, in the order of the layers: their weights, and their caches."""

    weights: Sequence[Tensor] = ()
    caches: Sequence[Tensor] = ()


_NONE = Handed()
handed: ContextVar[Handed] = ContextVar("dsv4_handed", default=_NONE)
"""Tensors that the caller of a graph hands over: as many, and in the same layouts, as when the graph was compiled."""


def writes_out(backend: Any, options: Mapping[str, Any] | None) -> bool:
    """Return whether a backend of torch.compile, a function, takes graphs with marks: its `writes_layers_out` says."""
    says = getattr(backend, "writes_layers_out", None)
    return bool(says is not None and says(options or {}))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def marks_are_written_out() -> bool:
    """Return, where Dynamo traces, whether the backend that is to compile the graph takes marks."""
    from .._compat import symbolic_convert

    backend = symbolic_convert.InstructionTranslator.current_tx().output.compiler_fn
    while inner := getattr(backend, WRAPPED_BACKEND, None):
        backend = inner
    # torch.compile puts a backend and its options in one object.
    options = getattr(backend, "kwargs", {}).get("options")
    return writes_out(getattr(backend, "compiler_fn", backend), options)


class Written(NamedTuple):
    """A graph with all layers: its module and example inputs, and how many of these the caller hands over."""

    gm: GraphModule
    example_inputs: Sequence[Any]
    more: int = 0

    def as_traced(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Return what takes the inputs of the trace, and passes them to `compiled` with those that are handed over."""
        if not self.more:
            return compiled

        def call(*args: Any) -> Any:
            weights, caches = handed.get()
            if len(weights) + len(caches) != self.more:
                got = f"{len(weights)} weights and {len(caches)} caches"
                _refuse_call(f"{got} were handed over, {self.more} tensors when it was compiled")
            return compiled(*args, *weights, *caches)

        return call


def _refuse_call(why: str) -> NoReturn:
    fail("E208", got="a call of a graph with repeated layers", why=why, fix="call the converted model, not its graph")


def _trace_only(streams: Tensor, *_: Any) -> NoReturn:
    fail(
        "E208",
        got="a graph whose repeated layers were not written out",
        why='only backend="dsv4" compiles such a graph, whole',
        fix='compile with model.compile(fullgraph=True, backend="dsv4"), or with options={"dsv4.regions": "off"}',
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


def write_out(gm: GraphModule, example_inputs: Sequence[Any]) -> Written:
    """Return a graph that Dynamo has traced, with the layers that its marks stand for; `gm` stays as it is.

    Its inputs are those of the trace, then the weights and then the caches in `handed`.

    Raises E208 where a traced layer reads a tensor that is neither its own nor one of all layers, and for tensors that
    are handed over and are unlike those of the layer that was traced.
    """
    if not any(_mark_of(node) for node in gm.graph.nodes):
        return Written(gm, example_inputs)
    graph = _copied(gm)
    layers = _traced_layers(graph)
    for layer in layers.values():
        _check_closed(layer)
    marks: list[Any] = [node for node in graph.nodes if _mark_of(node) is repeat_layer]
    repeats: dict[Node, tuple[int, int]] = {mark: (mark.args[2], mark.args[1]) for mark in marks}
    more: list[Tensor] = []
    inputs_of_repeats: list[list[list[Node]]] = []
    begun: dict[int, Any] = {index: layer.begin.args for index, layer in layers.items()}
    for position, tensors in enumerate(handed.get(), 1):
        fakes = list(_faked(tensors))
        inputs_of_repeats.append(_add_inputs(graph, [(begun[i][position], i, j) for i, j in repeats.values()], fakes))
        more += fakes
    for (node, (first, index)), weights, caches in zip(repeats.items(), *inputs_of_repeats, strict=True):
        node.replace_all_uses_with(_copy(layers[first], node, [*weights, *caches], first, index))
        graph.erase_node(node)
    for layer in layers.values():
        for mark in (layer.end, layer.begin):
            streams: Any = mark.args[0]
            mark.replace_all_uses_with(streams)
            graph.erase_node(mark)
    return Written(_module(gm, graph), [*example_inputs, *more], len(more))


def _mark_of(node: Node) -> Any:
    """Return the mark that a node is, None for all others."""
    packet = getattr(node.target, "overloadpacket", node.target)
    return next((mark for mark in _MARKS if packet is mark), None) if node.op == "call_function" else None


def _copied(gm: GraphModule) -> Graph:
    """Return a copy of a graph that Dynamo traced, since Dynamo reads its own inputs from that."""
    graph, nodes = Graph(), dict[Node, Node]()
    result, _ = graph.graph_copy(gm.graph, nodes, return_output_node=True)  # type: ignore[misc]
    graph.output(result)
    for node, twin in nodes.items():
        vars(twin).update({name: value for name, value in vars(node).items() if name not in vars(twin)})
    return graph


def _module(gm: GraphModule, graph: Graph) -> GraphModule:
    """Return a module like `gm` with a new graph, and like it without generated code until that is needed."""
    copied = copy.copy(gm)
    gm.graph.owning_module = gm
    copied.graph = graph
    vars(copied).update({name: value for name, value in vars(gm).items() if name not in vars(copied)})
    return copied


def _traced_layers(graph: Graph) -> dict[int, _Layer]:
    layers: dict[int, _Layer] = {}
    begin: Node | None = None
    nodes: list[Node] = []
    for node in graph.nodes:
        mark = _mark_of(node)
        if mark is begin_layer:
            begin, nodes = node, []
        elif mark is end_layer:
            assert begin is not None
            index: Any = node.args[1]
            layers[index] = _Layer(begin, node, nodes)
            begin = None
        elif begin is not None:
            nodes.append(node)
    return layers


def _check_closed(layer: _Layer) -> None:
    """Raise E208 unless a layer depends on its streams and tensors alone, and nothing on it but its result."""
    arguments: tuple[Any, ...] = layer.begin.args
    _, weights, caches, shared, index = arguments
    inside = set(layer.nodes)
    known = {layer.begin, *weights, *caches, *shared}
    for node in layer.nodes:
        for source in node.all_input_nodes:
            # What was computed before the layer was computed for all layers.
            unknown = source not in inside and source not in known and source.op in ("placeholder", "get_attr")
            if unknown and not _is_number(source):
                _refuse(f"layer {index} reads {source.name}, which its kind does not name")
        if not _is_number(node) and any(user not in inside and user is not layer.end for user in node.users):
            _refuse(f"{node.name} of layer {index} is read outside of it")


def _faked(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield fake tensors like `tensors`, of the mode that the graph is compiled with."""
    context = TracingContext.try_get()
    check(context is not None, "E208", got="a graph with repeated layers outside of Dynamo")
    for tensor in tensors:
        yield context.fake_mode.from_tensor(tensor, static_shapes=True)


def _add_inputs(
    graph: Graph, twins: Iterable[tuple[Sequence[Node], int, int]], fakes: Sequence[Tensor]
) -> list[list[Node]]:
    """Add an input for each tensor of each repeated layer, and return those of each.

    Args:
        twins: for each layer, the inputs of the traced one, the index of that, and its own.
        fakes: as many tensors as there are twins.
    """
    *_, last = graph.find_nodes(op="placeholder")
    groups = []
    tensors = iter(fakes)
    for nodes, first, index in twins:
        group = []
        for twin in nodes:
            value = next(tensors, None)
            if value is None:
                _refuse_call(f"{len(fakes)} tensors are too few for layer {index}")
            if _described(value) != _described(twin.meta["example_value"]):
                _refuse(f"a tensor of layer {index} is no {twin.name} of layer {first}")
            name, old = str(twin.target).replace(f"_{first}_", f"_{index}_", 1), str(twin.target)
            with graph.inserting_after(last):
                last = graph.placeholder(name if name != old else f"{old}_{index}")
            meta = {key: value for key, value in twin.meta.items() if key != "grapharg"}
            last.meta = {**meta, "example_value": value}
            last._dynamo_source = None  # type: ignore[attr-defined]
            group.append(last)
        groups.append(group)
    if next(tensors, None) is not None:
        _refuse_call(f"{len(fakes)} tensors are more than its repeated layers have")
    return groups


def _copy(layer: _Layer, mark: Node, tensors: Sequence[Node], first: int, index: int) -> Node:
    """Copy a traced layer before `mark`, with the streams of `mark` and the tensors `tensors`; return its result."""
    _, weights, caches, *_ = layer.begin.args
    theirs: list[Any] = [*weights, *caches]  # type: ignore[misc]
    copies: dict[Node, Any] = {layer.begin: mark.args[0], **dict(zip(theirs, tensors, strict=True))}
    with mark.graph.inserting_before(mark):
        for node in layer.nodes:
            copies[node] = mark.graph.node_copy(node, lambda original: copies.get(original, original))
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


def _described(value: Tensor) -> Any:
    """Return what a graph knows of a tensor: two layers of a kind have equal ones."""
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
