"""Read the dsv4 op nodes of a functional graph. `rewrite` replaces them.

An op that mutates nothing is called directly. One that writes caches is an auto_functionalized_v2 node: it takes the
old version of each cache as a base and a view of it, and returns the results of the op, then the new version of every
base. Later ops take the new version, so the edges of the graph contain the order of all reads and writes.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from .._compat import OpOverload, codegen_of, device_architecture
from ..ops.common.arguments import tensors_in
from ..runtime.early_builds import Metadata, traced
from ..selection.decisions import Call

FUNCTIONALIZED_V2 = torch.ops.higher_order.auto_functionalized_v2
FUNCTIONALIZED = (torch.ops.higher_order.auto_functionalized, FUNCTIONALIZED_V2)
BASES = "_all_bases"
VIEWS = (
    torch.ops.aten.view.default,
    torch.ops.aten.reshape.default,
    torch.ops.aten.squeeze.default,
    torch.ops.aten.squeeze.dim,
    torch.ops.aten.squeeze.dims,
    torch.ops.aten.unsqueeze.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.clone.default,
)
"""Ops that keep all elements and their order. With equal last dims, the number of tokens is therefore equal too."""
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


@dataclass(frozen=True, slots=True)
class Cache:
    """A mutated argument: the old version of a buffer, and torch's arguments of the view of it (empty: all of it)."""

    base: Node
    view: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class OpNode:
    """A node that calls a dsv4 op.

    Attributes:
        arguments: by schema name, defaults filled in; a mutated argument is a `Cache`.
        known: whether every mutated argument is a `Cache`; false for nodes of the older auto_functionalized.
    """

    node: Node
    op: OpOverload
    arguments: Mapping[str, Any]
    known: bool = True

    @property
    def name(self) -> str:
        """Name of the op in torch.ops.dsv4."""
        return op_name(self.op)

    def __getitem__(self, argument: str) -> Any:
        return self.arguments[argument]

    def results(self, index: int) -> list[Node]:
        """Return the nodes of result `index` of the op."""
        if self.node.target not in FUNCTIONALIZED and len(self.op._schema.returns) == 1:
            return [self.node]
        return _items(self.node, index)

    def new_versions(self, argument: str) -> list[Node]:
        """Return the nodes of the buffer of cache `argument` after the op."""
        bases: Any = self.node.kwargs[BASES]
        position = bases.index(self.arguments[argument].base)
        return _items(self.node, max(1, len(self.op._schema.returns)) + position)

    def caches(self) -> dict[str, Cache]:
        """Return the mutated arguments that are given."""
        return {name: value for name, value in self.arguments.items() if isinstance(value, Cache)}


def op_name(op: OpOverload) -> str:
    """Return the name of a dsv4 op in torch.ops.dsv4."""
    return str(op._schema.name.removeprefix("dsv4::"))


def written_by(op: OpOverload) -> list[str]:
    """Return the names of the arguments that `op` mutates."""
    return [a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def public_op(node: Node) -> OpOverload | None:
    """Return the dsv4 op that `node` calls, directly or functionalized; None for any other node."""
    if node.op != "call_function":
        return None
    target = node.args[0] if node.target in FUNCTIONALIZED else node.target
    if isinstance(target, OpOverload) and target.namespace == "dsv4":
        return target
    return None


def read(node: Any) -> OpNode | None:
    """Return `node` as a call of a dsv4 op; None for anything else."""
    op = public_op(node) if isinstance(node, Node) else None
    if op is None:
        return None
    functional = node.target in FUNCTIONALIZED
    args = node.args[1:] if functional else node.args
    arguments: dict[str, Any] = {}
    for index, declared in enumerate(op._schema.arguments):
        if index < len(args):
            arguments[declared.name] = args[index]
        elif declared.name in node.kwargs:
            arguments[declared.name] = node.kwargs[declared.name]
        elif f"_{declared.name}_base_index" in node.kwargs:
            arguments[declared.name] = _cache(node, declared.name)
        elif declared.has_default_value():
            arguments[declared.name] = declared.default_value
    written = [arguments.get(name) for name in written_by(op)]
    return OpNode(node, op, arguments, known=all(value is None or isinstance(value, Cache) for value in written))


def reread(call: OpNode) -> OpNode:
    """Return `call` with the current arguments of its node, after a change of the graph."""
    call_now = read(call.node)
    assert call_now is not None
    return call_now


def _cache(node: Node, name: str) -> Cache | None:
    prefix = f"_{name}_"
    view: dict[str, Any] = {k.removeprefix(prefix): v for k, v in node.kwargs.items() if k.startswith(prefix)}
    index, bases = view.pop("base_index"), dict[str, Any](node.kwargs)[BASES]
    return None if index is None else Cache(bases[index], view)


def _items(node: Node, index: int) -> list[Node]:
    return [user for user in node.users if _is_item(user) and user.args[1] == index]


def _is_item(node: Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem


def producer_of(value: Any) -> tuple[OpNode | None, int]:
    """Return the dsv4 call that returns `value`, and the index of that result; (None, 0) for other values."""
    if not isinstance(value, Node):
        return None, 0
    if _is_item(value):
        source, index = value.args
        return read(source), index if isinstance(index, int) else 0
    return read(value), 0


def initial_version(buffer: Node) -> Node:
    """Return the buffer before any functionalized op wrote it, usually an input of the graph."""
    while (older := _older_version(buffer)) is not None:
        buffer = older
    return buffer


def _older_version(buffer: Node) -> Node | None:
    """Return the buffer before the op that wrote `buffer`; None if no op wrote it, or an op returned it as a result."""
    if not _is_item(buffer):
        return None
    arguments: Any = buffer.args
    writer, index = arguments
    if writer.target is not FUNCTIONALIZED_V2:
        return None
    bases: list[Node] = writer.kwargs[BASES]
    # Results of the op come before the new versions.
    position = index - (len(writer.meta["val"]) - len(bases))
    return bases[position] if position >= 0 else None


def display_name(node: Any) -> str:
    """Return the name of the op that `node` calls or takes a result of, for messages."""
    if node.op == "output":
        return "the caller"
    if node.op != "call_function":
        return str(node.name)
    if _is_item(node):
        return display_name(node.args[0])
    op = public_op(node)
    if op is not None:
        return op_name(op)
    target = node.args[0] if node.target in FUNCTIONALIZED else node.target
    return str(target).removesuffix(".default")


def value_of(argument: Any) -> Any:
    """Return `argument` with every node replaced by its fake value."""
    return torch.fx.map_arg(argument, lambda node: node.meta.get("val"))


def describe(node: Node, op: OpOverload, arguments: Mapping[str, Any] | None = None) -> Call:
    """Return the call that `node` makes, or the call of `op` with `arguments` in its place."""
    by_name = arguments if arguments is not None else read(node).arguments  # type: ignore[union-attr]
    values = {name: value_of(value) for name, value in by_name.items() if not isinstance(value, Cache)}
    device = next(tensors_in(values.values())).device
    return Call(
        op=op_name(op),
        arguments=values,
        device=device,
        codegen=codegen_of(device),
        architecture=device_architecture(device),
        node=node.name,
        where=where(node),
    )


def launch_arguments(node: Node) -> list[Any]:
    """Return what a dsv4 op is called with when `node` runs, in schema order: `Metadata` of tensors, plain values."""
    call = read(node)
    assert call is not None
    return [_launched(call.arguments.get(declared.name)) for declared in call.op._schema.arguments]


def _launched(argument: Any) -> Any:
    if isinstance(argument, (list, tuple)):
        return [_launched(value) for value in argument]
    cache = argument if isinstance(argument, Cache) else None
    value = value_of(argument if cache is None else cache.base)
    if not isinstance(value, torch.Tensor):
        return traced(value)
    metadata, view = Metadata.of(value), traced(value_of(dict(cache.view))) if cache is not None else {}
    if "storage_offset" in view:
        return metadata._replace(size=tuple(view["size"]), stride=tuple(view["stride"]), offset=view["storage_offset"])
    if "slice_dim" in view:
        return metadata.sliced(view["slice_dim"], view["slice_start"], view["slice_end"])
    return metadata


def where(node: Node) -> str:
    """Return "file:line" of the user's call, or ""."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    return ":".join(frames[-1]) if frames else ""


def calls_of(graph: Graph, op: str) -> Iterator[OpNode]:
    """Yield the calls of the dsv4 op named `op` in graph order; the graph may change meanwhile."""
    for node in list(graph.nodes):
        call = read(node)
        if call is not None and call.name == op:
            yield call
