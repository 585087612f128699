"""What passes that quantise in front of a fp8_linear have in common: the product of quantised operands in its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph

from ..ops.common.define import OPS
from .merging import Apart
from .nodes import OpNode
from .rewrite import insert

LINEAR, PRODUCT = "fp8_linear", "fp8_grouped_einsum"


def check_alone(linear: OpNode) -> None:
    """Raise `Apart` where the product has a part whose input is not quantised."""
    if linear["beside"] is not None:
        raise Apart(f"{LINEAR} has another layer beside it, whose input is not quantised")


def arguments(linear: OpNode, values: Any, scale: Any) -> Mapping[str, Any]:
    """The arguments of the product of quantised `values` and `scale` and the weight of `linear`."""
    return {"a": values, "a_scale": scale, "b": linear["weight"], "b_scale": linear["weight_scale"]}


def put(graph: Graph, linear: OpNode, values: Any, scale: Any) -> None:
    """Let that product stand where `linear` did, which is erased."""
    found = linear.node.meta["val"]
    with graph.inserting_before(linear.node):
        product = insert(graph, OPS[PRODUCT], arguments(linear, values, scale), found.unsqueeze(1), linear.node)
        result = graph.call_function(torch.ops.aten.squeeze.dim, (product.node, 1))
    result.meta["val"] = found
    linear.node.replace_all_uses_with(result)
    graph.erase_node(linear.node)
