"""Fuse the grouped GEMM of wo_a with the quantization of its result: the GEMM of wo_b then reads half the bytes.

Where the kernel cannot quantize in its epilogue, the quantization stays a separate launch.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch
from torch.fx import Graph, Node

from ..layout import ACT_TILE
from ..ops.common.define import OPS
from ..selection.decisions import record
from . import prequantized_gemm
from .fusion import Fuser, NotFusable
from .nodes import OpNode, calls_of, display_name, read, value_of
from .rewrite import insert, item

FIRST, SECOND, INTO = prequantized_gemm.GEMM, prequantized_gemm.LINEAR, "fp8_grouped_einsum_quant"
ARCHITECTURE = "cuda sm_90"
_VIEWS = (
    torch.ops.aten.view.default,
    torch.ops.aten.reshape.default,
    torch.ops.aten.squeeze.dim,
    torch.ops.aten.unsqueeze.default,
)


def run(graph: Graph, fuser: Fuser) -> None:
    """Fuse every fp8_grouped_einsum with the quantization of its result by an fp8_linear."""
    for second in calls_of(graph, SECOND):
        path = _path(second)
        first = read(path[0])
        if first is not None and first.name == FIRST and second["quantize_input"]:
            fuse = partial(_fuse, graph, fuser, first, second, path)
            record(fuser.attempt((FIRST, SECOND), INTO, second.node, fuse))


def _path(second: OpNode) -> list[Node]:
    """Return the node that the input of `second` is a view of, then the views, in order."""
    path = [second["x"]]
    while path[0].target in _VIEWS:
        path.insert(0, path[0].args[0])
    return path


def _fuse(graph: Graph, fuser: Fuser, first: OpNode, second: OpNode, path: list[Node]) -> None:
    """Replace both calls by a GEMM that quantizes and one on its result, or raise `NotFusable`."""
    _check(first, second, path)
    arguments = dict(first.arguments)
    quantized = OPS[INTO](**value_of(arguments))
    gemm = [(OPS[FIRST], prequantized_gemm.arguments(second, *quantized))]
    fuser.check_wanted(OPS[INTO], arguments, [first, second], second.node, gemm)
    fuser.check_architecture(second.node, ARCHITECTURE, "with few tokens the second GEMM quantizes its input itself")
    with graph.inserting_before(first.node):
        fused = insert(graph, OPS[INTO], arguments, quantized, first.node)
        operands = item(graph, fused.node, 0), item(graph, fused.node, 1)
    prequantized_gemm.replace_linear(graph, second, *operands)
    for node in reversed(path):
        graph.erase_node(node)


def _check(first: OpNode, second: OpNode, path: list[Node]) -> None:
    """Raise `NotFusable` if fusion would remove a value that has other users, or the shapes do not fit."""
    for node, user in pairwise((*path, second.node)):
        others = [other for other in node.users if other is not user]
        if others:
            raise NotFusable(f"the result of {FIRST} is also used by {display_name(others[0])}")
    prequantized_gemm.check_no_second_layer(second)
    x, groups, rows = (value_of(node) for node in (second["x"], first["a"], first["b"]))
    if tuple(x.shape[1:]) != tuple(rows.shape[:1]):
        raise NotFusable(f"{SECOND} does not take the result of {FIRST} as [T, G * N]")
    group_rows = rows.shape[0] // groups.shape[1]
    if group_rows % ACT_TILE != 0:
        raise NotFusable(f"a group has {group_rows} rows, not a multiple of {ACT_TILE}, the elements of a scale")
