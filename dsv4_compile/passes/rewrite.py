"""Insert, replace and erase dsv4 op nodes of a functional graph. `nodes` reads them."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch.fx import Graph, Node

from .._compat import OpOverload, clone_preserve_strides
from .nodes import BASES, FUNCTIONALIZED, FUNCTIONALIZED_V2, OpNode, read, value_of, written_by


def retarget(node: Node, op: OpOverload) -> None:
    """Make `node` call `op`, which has the same schema as the op it calls now."""
    if node.target in FUNCTIONALIZED:
        node.args = (op, *node.args[1:])
    else:
        node.target = op


def insert(graph: Graph, op: OpOverload, arguments: Mapping[str, Any], values: Any, like: Node) -> OpNode:
    """Insert a node at the graph's insertion point that calls `op`, functionalized if the op mutates arguments.

    Args:
        arguments: by schema name; missing ones take their defaults.
        values: fake values of the op's results: one, or a tuple.
        like: the node that gives the new one its place in the user's code.
    """
    written = written_by(op)
    if written:
        node = _insert_functional(graph, op, arguments, values, written)
    else:
        node = graph.call_function(op, _positional(op, arguments))
        node.meta["val"] = values
    node.meta["eager_input_vals"] = value_of((node.args, node.kwargs))
    for name in ("stack_trace", "source_fn_stack", "from_node", "seq_nr"):
        if name in like.meta:
            node.meta[name] = like.meta[name]
    inserted = read(node)
    assert inserted is not None
    return inserted


def _positional(op: OpOverload, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return `arguments` in the order of the schema, up to the last one that is given."""
    declared = op._schema.arguments
    last = max(index for index, a in enumerate(declared) if a.name in arguments)
    return tuple(arguments.get(a.name, a.default_value) for a in declared[: last + 1])


def _insert_functional(
    graph: Graph, op: OpOverload, arguments: Mapping[str, Any], values: Any, written: Sequence[str]
) -> Node:
    caches = {name: arguments.get(name) for name in written}
    bases = list(dict.fromkeys(cache.base for cache in caches.values() if cache is not None))
    # torch passes every argument by name, defaults included.
    defaults = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}
    kwargs = {name: value for name, value in {**defaults, **arguments}.items() if name not in caches}
    for name, cache in caches.items():
        kwargs[f"_{name}_base_index"] = None if cache is None else bases.index(cache.base)
        kwargs |= {f"_{name}_{key}": value for key, value in (cache.view if cache is not None else {}).items()}
    node = graph.call_function(FUNCTIONALIZED_V2, (op,), {**kwargs, BASES: bases})
    results = values if isinstance(values, tuple) else (values,)
    node.meta["val"] = (*results, *(_next_version(base.meta["val"]) for base in bases))
    return node


def _next_version(value: Any) -> Any:
    """Return a fake like `value` in new storage: with shared storage, torch 2.11 copies the buffer at every call."""
    with value.fake_mode:
        return clone_preserve_strides(value)


def item(graph: Graph, node: Node, index: int) -> Node:
    """Insert a node for result `index` of `node`."""
    getitem = graph.call_function(operator.getitem, (node, index))
    getitem.meta["val"] = node.meta["val"][index]
    return getitem


def replace_uses(old: Sequence[Node], new: Node) -> None:
    """Replace all uses of the nodes `old` by `new`."""
    for node in old:
        node.replace_all_uses_with(new)


def erase(graph: Graph, call: OpNode) -> None:
    """Remove `call` and the nodes of its results, which have no users left."""
    for user in list(call.node.users):
        graph.erase_node(user)
    graph.erase_node(call.node)
