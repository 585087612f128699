"""wo_a quantises its result for wo_b: the product has the rows where they are rounded, and the next one reads half.

Where the kernel cannot do it in one launch, the quantisation is the launch of its own that it was in front of wo_b.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch
from torch.fx import Graph, Node

from ..layout import ACT_TILE
from ..ops.common.define import OPS
from ..selection.decisions import record
from . import quantised_product
from .merging import Apart, Merger
from .nodes import OpNode, called, read, value_of, walk
from .rewrite import insert, item

FIRST, SECOND, INTO = quantised_product.PRODUCT, quantised_product.LINEAR, "fp8_grouped_einsum_quant"
ARCHITECTURE = "cuda sm_90"
_VIEWS = (
    torch.ops.aten.view.default,
    torch.ops.aten.reshape.default,
    torch.ops.aten.squeeze.dim,
    torch.ops.aten.unsqueeze.default,
)


def run(graph: Graph, merger: Merger) -> None:
    """Let every fp8_grouped_einsum whose result is quantised by a fp8_linear quantise it itself."""
    for second in walk(graph, SECOND):
        path = _path(second)
        first = read(path[0])
        if first is not None and first.name == FIRST and second["quantize_input"]:
            merge = partial(_merge, graph, merger, first, second, path)
            record(merger.attempt((FIRST, SECOND), INTO, second.node, merge))


def _path(second: OpNode) -> list[Node]:
    """What the input of `second` is a view of, and the views, in order."""
    path = [second["x"]]
    while path[0].target in _VIEWS:
        path.insert(0, path[0].args[0])
    return path


def _merge(graph: Graph, merger: Merger, first: OpNode, second: OpNode, path: list[Node]) -> None:
    """Put a product that quantises, and one of what is quantised, in the place of the two, or raise `Apart`."""
    _check(first, second, path)
    given = dict(first.arguments)
    quantised = OPS[INTO](**value_of(given))
    then = [(OPS[FIRST], quantised_product.arguments(second, *quantised))]
    merger.check_wanted(OPS[INTO], given, [first, second], second.node, then)
    merger.check_architecture(second.node, ARCHITECTURE, "there few tokens are quantised within the second product")
    with graph.inserting_before(first.node):
        merged = insert(graph, OPS[INTO], given, quantised, first.node)
        operands = item(graph, merged.node, 0), item(graph, merged.node, 1)
    quantised_product.put(graph, second, *operands)
    for node in reversed(path):
        graph.erase_node(node)


def _check(first: OpNode, second: OpNode, path: list[Node]) -> None:
    """Raise `Apart` where somebody would be left without a value, or the two ops do not fit."""
    for node, user in pairwise((*path, second.node)):
        others = [other for other in node.users if other is not user]
        if others:
            raise Apart(f"the result of {FIRST} is used elsewhere too, by {called(others[0])}")
    quantised_product.check_alone(second)
    x, groups, rows = (value_of(node) for node in (second["x"], first["a"], first["b"]))
    if tuple(x.shape[1:]) != tuple(rows.shape[:1]):
        raise Apart(f"{SECOND} takes the groups of {FIRST} in another shape than [T, G * N]")
    if rows.shape[0] // groups.shape[1] % ACT_TILE != 0:
        raise Apart(f"groups of {rows.shape[0] // groups.shape[1]} rows do not divide into strips of {ACT_TILE}")
