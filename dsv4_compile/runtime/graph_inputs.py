"""Which inputs of a traced graph keep their address: parameters and buffers, marked tensors, and what it writes."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from .._compat import OpOverload, OpOverloadPacket, storage_identity

_IN_PLACE = {getattr(operator, name) for name in dir(operator) if name.startswith("i") and f"__{name}__" in dir(int)}
_IN_PLACE |= {operator.setitem}
_STATIC = "_dynamo_static_input_type"


def static_inputs(gm: GraphModule) -> frozenset[int]:
    """Positions of the inputs of `gm` that a capture takes where they are; all others are copied.

    What the graph writes is among them, marked or not: a copy would lose the write.
    """
    placeholders = list(gm.graph.find_nodes(op="placeholder"))
    marked = {i for i, node in enumerate(placeholders) if node.meta.get("tensor_dict", {}).get(_STATIC)}
    position = {address: i for i, node in enumerate(placeholders) for address in _storage(node)}
    written = {position[address] for node in gm.graph.nodes for address in _written(node) if address in position}
    return frozenset(marked | written)


def _storage(node: Any) -> Iterator[int]:
    """Identity of the storage that a node's fake tensor has; views share it."""
    value = node.meta.get("example_value") if isinstance(node, Node) else None
    if isinstance(value, torch.Tensor):
        yield storage_identity(value)


def _written(node: Node) -> Iterator[int]:
    """Storages that `node` writes, as far as its target says."""
    for argument in _written_arguments(node):
        yield from _storage(argument)


def _written_arguments(node: Node) -> list[Any]:
    target = node.target
    out = [node.kwargs["out"]] if "out" in node.kwargs else []
    if node.op == "call_method":
        return [*out, node.args[0]] if str(target).endswith("_") and not str(target).endswith("__") else out
    if node.op != "call_function":
        return out
    if isinstance(target, OpOverloadPacket):
        target = getattr(target, target.overloads()[0])
    if isinstance(target, OpOverload):
        schema = target._schema.arguments
        given = dict(zip((a.name for a in schema), node.args, strict=False)) | node.kwargs
        return [given[a.name] for a in schema if a.alias_info is not None and a.alias_info.is_write and a.name in given]
    name = str(getattr(target, "__name__", ""))
    if target in _IN_PLACE or (name.endswith("_") and not name.endswith("__")):
        return [*out, *node.args[:1]]
    if "triton_kernel_wrapper" in name:
        return list(node.all_input_nodes)  # which of them a user's kernel writes is not said
    return out
