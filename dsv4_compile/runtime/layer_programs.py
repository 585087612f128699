"""Compile a model piece by piece from a trace with one layer of each kind: marks, and `build`, which reads them.

Dynamo, AOTAutograd and Inductor each take as long for the fortieth layer as for the first. A model that knows which of
its layers do the same marks the first one, and calls an op in place of the others:

    streams, pre, slots = begin([streams, pre, slots], tensors of layer 3, 3)
    ...                                              # layer 3, traced
    out = end([streams, pre], 3)
    out = repeat([*out, slots], out, 4, 3)

`build` cuts the graph at the marks. Each piece is compiled once, and `Program` calls that of layer 3 for layer 4 too,
with the tensors that the caller hands over in `layer_tensors`: Dynamo sees those of traced layers alone. Unlike
`repeated_layers`, which writes one graph of all layers, AOTAutograd sees each piece once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from .. import progress
from .._compat import TracingContext, pytree, storage_identity
from ..selection import decisions
from .layer_pieces import Call, Cut, Piece, begin, end, mark_of, repeat

__all__ = ["Program", "begin", "build", "compiles_layers_apart", "end", "has_marks", "layer_tensors", "repeat"]

layer_tensors: ContextVar[Mapping[int, Sequence[Tensor]]] = ContextVar("dsv4_layer_tensors")
"""Tensors of each layer that a trace repeats, in the order of the first one's: set for each call of the graph."""


class Compiled(NamedTuple):
    """A compiled piece, the symbols of its sizes, and assumptions about these from its compilation."""

    run: Callable[..., Any]
    symbols: tuple[Any, ...]
    guards: tuple[Any, ...]


pieces_so_far: ContextVar[dict[str, Compiled] | None] = ContextVar("dsv4_pieces", default=None)
"""Pieces of graphs that are compiled together, which share equal ones: set around their compilation."""


def compiles_layers_apart(backend: Any, options: Mapping[str, Any] | None) -> bool:
    """Return whether a backend of torch.compile, a function, compiles graphs with marks: its attribute says."""
    says = getattr(backend, "compiles_layers_apart", None)
    return bool(says is not None and says(options or {}))


class Program:
    """A compiled graph that calls its pieces in order."""

    def __init__(self, pieces: Sequence[Callable[..., Any]], calls: Sequence[Call], size: int, returned: Any) -> None:
        self.pieces, self.calls, self._size, self._returned = tuple(pieces), _with_dead(calls, returned), size, returned

    def __call__(self, *inputs: Any) -> Any:
        tensors = layer_tensors.get({})
        held = [*inputs, *[None] * (self._size - len(inputs))]
        for call in self.calls:
            layer_inputs = tensors[call.layer] if call.layer >= 0 else ()
            arguments = [layer_inputs[index] if of_layer else held[index] for of_layer, index in call.inputs]
            for slot in call.dead:
                held[slot] = None
            results = self.pieces[call.piece](*arguments)
            del arguments
            for slot, value in zip(call.outputs, results, strict=True):
                held[slot] = value
        return [held[value] if is_slot else value for is_slot, value in self._returned]


def has_marks(gm: GraphModule) -> bool:
    """Return whether a graph that Dynamo traced has marks of this module."""
    return any(mark_of(node) for node in gm.graph.nodes)


def build(gm: GraphModule, compile_piece: Callable[[GraphModule, list[Any]], Callable[..., Any]]) -> Program:
    """Compile the pieces of a graph that Dynamo traced, with progress, by `compile_piece`.

    Raises E208 for a traced layer that reads a tensor other than those of its marks.
    """
    cut = Cut(gm)
    counts = Counter(call.piece for call in cut.calls)
    known = pieces_so_far.get()
    known = {} if known is None else known
    pieces = []
    with progress.stage("compile kinds of layers", total=len(cut.pieces)) as work:
        for number, piece in enumerate(cut.pieces):
            work.note(f"{counts[number]} of {len(cut.calls)} calls")
            key, symbols = _key(piece)
            compiled = known.get(key)
            if compiled is None or not _holds(compiled, symbols):
                examples = [node.meta["example_value"] for node in piece.inputs]
                before = len(_guards())
                with decisions.times(counts[number]), _reports_apart():
                    run = compile_piece(GraphModule(gm, piece.graph), examples)
                compiled = known[key] = Compiled(run, symbols, tuple(guard.expr for guard in _guards()[before:]))
            pieces.append(compiled.run)
            work.advance()
    return Program(pieces, cut.calls, len(cut.slots), cut.returned)


def _guards() -> Sequence[Any]:
    """Return what the graph that is being compiled assumes of its sizes so far."""
    context = TracingContext.try_get()
    shape_env = None if context is None else context.fake_mode.shape_env
    return () if shape_env is None else shape_env.guards


def _holds(compiled: Compiled, symbols: Sequence[Any]) -> bool:
    """Return whether a piece of an earlier graph may run for these sizes, and assume what it assumes."""
    context = TracingContext.try_get()
    if context is None:
        return not compiled.guards
    renamed = dict(zip(compiled.symbols, symbols, strict=True))
    expressions = [guard.xreplace(renamed) for guard in compiled.guards]
    return all(bool(context.fake_mode.shape_env.evaluate_expr(expression)) for expression in expressions)


def _key(piece: Piece) -> tuple[str, tuple[Any, ...]]:
    """Return a text that is equal for pieces that compile to the same code, and the symbols of sizes in order."""
    numbers = {node: i for i, node in enumerate(piece.graph.nodes)}
    symbols: dict[Any, Any] = {}
    storages: dict[Any, int] = {}

    def size(value: Any) -> str:
        if not isinstance(value, torch.SymInt):
            return str(value)
        expression = value.node.expr
        for symbol in sorted(expression.free_symbols, key=str):
            symbols.setdefault(symbol, type(symbol)(f"n{len(symbols)}", integer=True))
        return str(expression.xreplace(symbols))

    def leaf(value: Any) -> str:
        if isinstance(value, Node):
            return f"%{numbers[value]}"
        return size(value) if isinstance(value, torch.SymInt) else repr(value)

    lines = []
    for node in piece.graph.nodes:
        if node.op == "placeholder":
            value = node.meta["example_value"]
            if isinstance(value, Tensor):
                storage = storages.setdefault(storage_identity(value), len(storages))
                sizes = [size(n) for n in (*value.shape, -1, *value.stride(), -1, value.storage_offset())]
                lines.append(f"{storage} {sizes} {value.dtype} {value.device} {value.requires_grad} {type(value)}")
            else:
                lines.append(size(value))
            continue
        arguments = pytree.tree_map(leaf, [list(node.args), dict(node.kwargs)])
        # A constant that the graph holds may differ in its value, which no text tells.
        target = f"{node.target} of {id(piece)}" if node.op == "get_attr" else f"{node.target}"
        lines.append(f"{node.op} {target} {arguments}")
    return "\n".join(lines), tuple(symbols)


def _reports_apart() -> Any:
    """Keep what AOTAutograd reports of a graph from the graphs around: a context."""
    if TracingContext.try_get() is None:
        return nullcontext()
    return TracingContext.patch(fw_metadata=None, output_strides=None)


def _with_dead(calls: Sequence[Call], returned: Sequence[tuple[bool, Any]]) -> tuple[Call, ...]:
    """Return the calls with the slots that each is the last to read."""
    last = {slot: i for i, call in enumerate(calls) for of_layer, slot in call.inputs if not of_layer}
    kept_slots = {value for is_slot, value in returned if is_slot}
    dead: list[list[int]] = [[] for _ in calls]
    for slot, i in last.items():
        if slot not in kept_slots:
            dead[i].append(slot)
    return tuple(call._replace(dead=tuple(slots)) for call, slots in zip(calls, dead, strict=True))
