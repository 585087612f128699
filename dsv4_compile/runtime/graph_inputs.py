"""Which inputs of a traced graph keep their address: parameters and buffers, marked tensors, and what it writes.

Memory is known by the identity of a fake tensor's storage, which all its views share.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch.fx import GraphModule, Node

from .._compat import OpOverload, OpOverloadPacket, pytree, storage_identity

_STATIC = "_dynamo_static_input_type"
_OPERATORS = dir(operator)
_IN_PLACE_METHODS = {"__setitem__", *(n for n in _OPERATORS if n.startswith("__i") and f"__{n[3:]}" in _OPERATORS)}
_IN_PLACE = {getattr(operator, name) for name in _IN_PLACE_METHODS}
_ON_REQUEST = {
    "inplace": ("input",),
    "max_norm": ("weight",),
    "training": ("running_mean", "running_var"),
    "use_input_stats": ("running_mean", "running_var"),
}
"""Options of torch.nn.functional, and the arguments that a function which has them writes if they are set."""


def static_inputs(gm: GraphModule) -> frozenset[int]:
    """Positions of the inputs of `gm` that a capture takes where they are; all others are copied.

    What the graph writes is among them, marked or not: a copy would lose the write. So is every other view of memory
    that is written or marked: a copy would not see the write, and be made anew at every call.
    """
    placeholders = list(gm.graph.find_nodes(op="placeholder"))
    marked = {i for i, node in enumerate(placeholders) if node.meta.get("tensor_dict", {}).get(_STATIC)}
    storages = [set(_storages_of(node)) for node in placeholders]
    kept = _written_storages(gm).union(*(storages[i] for i in marked))
    return frozenset(marked | {i for i, own in enumerate(storages) if own & kept})


def _written_storages(gm: GraphModule) -> set[int]:
    """Identities of the storages that `gm` writes, as far as the targets of its nodes say."""
    return {storage for node in gm.graph.nodes for storage in _storages_of(_written_by(node))}


def _storages_of(argument: Any) -> Iterator[int]:
    """Identities of the storages of a node's fake tensors; of all nodes in an argument that is a list or tuple."""
    for node in pytree.tree_leaves(argument):
        if isinstance(node, Node):
            for value in pytree.tree_leaves(node.meta.get("example_value")):
                if isinstance(value, torch.Tensor):
                    yield storage_identity(value)


def _written_by(node: Node) -> list[Any]:
    """The arguments that `node` writes. A rule that does not apply to it finds none."""
    if node.op not in ("call_function", "call_method"):
        return []
    out = node.kwargs.get("out")
    return [out, *_by_schema(node), *_by_name(node), *_on_request(node), *_inside(node)]


def _by_schema(node: Node) -> Iterator[Any]:
    """By the annotations of an op; of a name that stands for several signatures, by those of all."""
    target: Any = node.target
    if isinstance(target, BuiltinFunctionType):
        target = getattr(torch.ops.aten, target.__name__, None)
    overloads = [target] if isinstance(target, OpOverload) else []
    if isinstance(target, OpOverloadPacket):
        overloads = [getattr(target, name) for name in target.overloads()]
    for overload in overloads:
        arguments = overload._schema.arguments
        given = dict(zip((argument.name for argument in arguments), node.args, strict=False)) | node.kwargs
        for argument in arguments:
            if argument.alias_info is not None and argument.alias_info.is_write and argument.name in given:
                yield given[argument.name]


def _by_name(node: Node) -> list[Any]:
    """`x.add_(y)`, `torch.relu_(input=x)`, `x += y`: the first argument. Of a user's Triton kernel, any."""
    name = str(node.target if node.op == "call_method" else getattr(node.target, "__name__", ""))
    if "triton_kernel_wrapper" in name:
        return list(node.all_input_nodes)  # which of them a user's kernel writes is not said
    in_place = name.endswith("_") and not name.endswith("__")
    if in_place or node.target in _IN_PLACE or (node.op == "call_method" and name in _IN_PLACE_METHODS):
        return [*node.args, *node.kwargs.values()][:1]
    return []


def _on_request(node: Node) -> list[Any]:
    """By `inplace=True` and the like, of functions that are written in Python."""
    if not isinstance(node.target, FunctionType):
        return []
    try:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
    except (TypeError, ValueError):
        return []
    bound.apply_defaults()
    names = {name for option, names in _ON_REQUEST.items() if _is_set(bound.arguments.get(option)) for name in names}
    return [bound.arguments.get(name) for name in names]


def _is_set(value: Any) -> bool:
    return value is not None and value is not False


def _inside(node: Node) -> Iterator[Any]:
    """What the graphs write that a branch, a loop or a region compiled once has for arguments.

    Its other arguments behind these graphs are theirs, in order. Where their number differs, any may be written.
    """
    leaves = pytree.tree_leaves((node.args, node.kwargs))
    graphs = {i: graph for i, leaf in enumerate(leaves) if (graph := _graph_of(leaf)) is not None}
    operands = [leaf for leaf in leaves[max(graphs, default=-1) + 1 :] if not isinstance(leaf, str)]
    for graph in graphs.values():
        written = _written_storages(graph)
        inputs = list(graph.graph.find_nodes(op="placeholder"))
        for position, own in enumerate(inputs):
            if written.intersection(_storages_of(own)):
                yield operands[position] if len(operands) == len(inputs) else list(node.all_input_nodes)


def _graph_of(leaf: Any) -> GraphModule | None:
    """The graph that an argument names, if it names one."""
    if not isinstance(leaf, Node) or leaf.op != "get_attr" or leaf.graph.owning_module is None:
        return None
    found = functools.reduce(getattr, str(leaf.target).split("."), leaf.graph.owning_module)
    return found if isinstance(found, GraphModule) else None
