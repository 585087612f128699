"""Inputs of a traced graph that a capture uses in place: parameters, buffers, marked tensors, and written tensors.

Memory is identified by a fake tensor's storage, which all its views share.
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
_WRITING_OPTIONS = {
    "inplace": ("input",),
    "max_norm": ("weight",),
    "training": ("running_mean", "running_var"),
    "use_input_stats": ("running_mean", "running_var"),
}
"""Options of functions in torch.nn.functional, and the arguments that a function writes if the option is set."""


def inputs_in_place(gm: GraphModule) -> frozenset[int]:
    """Return the positions of the inputs of `gm` that a capture uses in place; all others are copied.

    Inputs that the graph writes are in place, marked or not, because a copy would lose the write. So is every other
    view of memory that is written or marked, because a copy would miss the write.
    """
    placeholders = list(gm.graph.find_nodes(op="placeholder"))
    marked = {i for i, node in enumerate(placeholders) if node.meta.get("tensor_dict", {}).get(_STATIC)}
    storages = [set(_storages_of(node)) for node in placeholders]
    written_or_marked = _written_storages(gm).union(*(storages[i] for i in marked))
    return frozenset(marked | {i for i, input_storages in enumerate(storages) if input_storages & written_or_marked})


def _written_storages(gm: GraphModule) -> set[int]:
    """Return the identities of the storages that `gm` writes, as far as the targets of its nodes tell."""
    return {storage for node in gm.graph.nodes for storage in _storages_of(_written_by(node))}


def _storages_of(argument: Any) -> Iterator[int]:
    """Yield the storage identities of a node's fake tensors, or of all nodes in a nested argument."""
    for node in pytree.tree_leaves(argument):
        if isinstance(node, Node):
            for value in pytree.tree_leaves(node.meta.get("example_value")):
                if isinstance(value, torch.Tensor):
                    yield storage_identity(value)


def _written_by(node: Node) -> list[Any]:
    """Return the arguments that `node` writes. A rule that does not apply to it finds none."""
    if node.op not in ("call_function", "call_method"):
        return []
    out = node.kwargs.get("out")
    return [out, *_by_schema(node), *_by_name(node), *_by_option(node), *_by_subgraph(node)]


def _by_schema(node: Node) -> Iterator[Any]:
    """Yield the arguments that an op's schema marks as written; for a name with several overloads, those of all."""
    target: Any = node.target
    if isinstance(target, BuiltinFunctionType):
        target = getattr(torch.ops.aten, target.__name__, None)
    overloads = [target] if isinstance(target, OpOverload) else []
    if isinstance(target, OpOverloadPacket):
        overloads = [getattr(target, name) for name in target.overloads()]
    for overload in overloads:
        arguments = overload._schema.arguments
        arguments_by_name = dict(zip((argument.name for argument in arguments), node.args, strict=False)) | node.kwargs
        for argument in arguments:
            if argument.alias_info is not None and argument.alias_info.is_write and argument.name in arguments_by_name:
                yield arguments_by_name[argument.name]


def _by_name(node: Node) -> list[Any]:
    """Return the first argument of `x.add_(y)`, `torch.relu_(input=x)` or `x += y`, and all of a Triton kernel."""
    name = str(node.target if node.op == "call_method" else getattr(node.target, "__name__", ""))
    if "triton_kernel_wrapper" in name:
        return list(node.all_input_nodes)  # the node does not tell which of them the kernel writes
    in_place = name.endswith("_") and not name.endswith("__")
    if in_place or node.target in _IN_PLACE or (node.op == "call_method" and name in _IN_PLACE_METHODS):
        return [*node.args, *node.kwargs.values()][:1]
    return []


def _by_option(node: Node) -> list[Any]:
    """Return the arguments that a Python function writes because of `inplace=True` or a similar option."""
    if not isinstance(node.target, FunctionType):
        return []
    try:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
    except (TypeError, ValueError):
        return []
    bound.apply_defaults()
    values = bound.arguments
    names = {name for option, names in _WRITING_OPTIONS.items() if _is_set(values.get(option)) for name in names}
    return [values.get(name) for name in names]


def _is_set(value: Any) -> bool:
    return value is not None and value is not False


def _by_subgraph(node: Node) -> Iterator[Any]:
    """Yield the arguments that the subgraphs of a branch, a loop or a nested compile region write.

    The arguments after the subgraphs are the subgraphs' inputs, in order. If their numbers differ, any may be written.
    """
    leaves = pytree.tree_leaves((node.args, node.kwargs))
    graphs = {i: graph for i, leaf in enumerate(leaves) if (graph := _graph_of(leaf)) is not None}
    operands = [leaf for leaf in leaves[max(graphs, default=-1) + 1 :] if not isinstance(leaf, str)]
    for graph in graphs.values():
        written = _written_storages(graph)
        inputs = list(graph.graph.find_nodes(op="placeholder"))
        for position, argument in enumerate(inputs):
            if written.intersection(_storages_of(argument)):
                yield operands[position] if len(operands) == len(inputs) else list(node.all_input_nodes)


def _graph_of(leaf: Any) -> GraphModule | None:
    """Return the graph that an argument names, or None."""
    if not isinstance(leaf, Node) or leaf.op != "get_attr" or leaf.graph.owning_module is None:
        return None
    attribute = functools.reduce(getattr, str(leaf.target).split("."), leaf.graph.owning_module)
    return attribute if isinstance(attribute, GraphModule) else None
