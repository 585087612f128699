"""Replace an fp8_linear, which quantizes its input, by a GEMM on activations that are e4m3 already."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph

from ..ops.common.define import OPS
from .fusion import NotFusable
from .nodes import OpNode
from .rewrite import insert

LINEAR, GEMM = "fp8_linear", "fp8_grouped_einsum"


def check_no_second_layer(linear: OpNode) -> None:
    """Raise `NotFusable` if `linear` also computes a second layer: that one's input is not quantized."""
    if linear["beside"] is not None:
        raise NotFusable(f"{LINEAR} has a second layer (beside=), whose input is not quantized")


def arguments(linear: OpNode, values: Any, scale: Any) -> Mapping[str, Any]:
    """Return the arguments of the GEMM of e4m3 `values`, their `scale` and the weight of `linear`."""
    return {"a": values, "a_scale": scale, "b": linear["weight"], "b_scale": linear["weight_scale"]}


def replace_linear(graph: Graph, linear: OpNode, values: Any, scale: Any) -> None:
    """Replace `linear` by the GEMM of e4m3 `values` and their `scale`."""
    value = linear.node.meta["val"]
    with graph.inserting_before(linear.node):
        gemm = insert(graph, OPS[GEMM], arguments(linear, values, scale), value.unsqueeze(1), linear.node)
        result = graph.call_function(torch.ops.aten.squeeze.dim, (gemm.node, 1))
    result.meta["val"] = value
    linear.node.replace_all_uses_with(result)
    graph.erase_node(linear.node)
