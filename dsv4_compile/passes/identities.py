"""Keep `x * 1` and `x + 0` in a graph where they copy memory that is written, returned or read under other names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from .._compat import storage_identity

_aten: Any = torch.ops.aten
_ARITHMETIC = (_aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor)


def keeping_copies(remove_no_ops: Callable[..., None]) -> Callable[..., None]:
    """Return Inductor's `remove_no_ops` without its silent error: it replaces copies by the memory they copy.

    It takes `view * 1` for `view` unless an op writes that very view, and lets the view's fake tensor have the storage
    of the copy. A row that is copied before its cache is written then has the rows after the write, and a caller gets
    an alias of an input instead of a result. torch 2.14 does so with numbers, earlier versions with `ones` and `zeros`.
    """

    def removed(gm: GraphModule, zeros: Collection[Node], ones: Collection[Node]) -> None:
        copies = [(node, node.target) for node in copies_of_shared(gm.graph, {*zeros, *ones})]
        for node, _ in copies:
            node.target = _kept  # no target that it looks for
        try:
            remove_no_ops(gm, zeros, ones)
        finally:
            for node, target in copies:
                node.target = target

    return removed


def copies_of_shared(graph: Graph, constants: Collection[Node]) -> list[Node]:
    """Return sums and products of whose operands, `constants` aside, one must not stand for the result.

    Such an operand is an input, has views or is one, or is returned as the result is.
    """
    inputs = {_storage(node) for node in graph.nodes if node.op in ("placeholder", "get_attr")}
    names = Counter(map(_storage, graph.nodes))
    returned = {_storage(node) for node in graph.output_node().all_input_nodes}

    def is_shared(operand: Node, result: Node) -> bool:
        storage = _storage(operand)
        return storage in inputs or names[storage] > 1 or (storage in returned and _storage(result) in returned)

    sums_and_products = (node for node in graph.nodes if node.target in _ARITHMETIC)
    return [
        node
        for node in sums_and_products
        if any(is_shared(operand, node) for operand in node.all_input_nodes if operand not in constants)
    ]


def _storage(node: Node) -> object:
    """Return the identity of the memory of a node's tensor, or the node itself if it has no such memory."""
    value = node.meta.get("val")
    if isinstance(value, Tensor) and value.layout is torch.strided:
        return storage_identity(value)
    return node


def _kept(*operands: Any) -> Any:
    """Stand for the target of a node that stays."""
    raise AssertionError("a graph runs that Inductor has not finished")
