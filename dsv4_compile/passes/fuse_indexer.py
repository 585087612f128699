"""The indexer selects cache slots instead of entries, and rounds its weights where it reads them.

Neither is more work for a kernel that is there anyway; the map and the cast were launches of their own.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.fx import Graph, Node

from ..ops.common.define import OPS
from ..selection.decisions import record
from .merging import Apart, Merger, inputs_before
from .nodes import OpNode, called, read, walk
from .rewrite import erase, insert, item, replace

SELECT, MAP, INTO = "indexer_logits_topk", "global_topk", "indexer_topk_slots"
QUERIES, CAST = "indexer_q_rope_quant", "convert_element_type"


def run(graph: Graph, merger: Merger) -> None:
    """Merge every selection with the map of what it selects, and every rounding of weights with what reads them."""
    for queries in walk(graph, QUERIES):
        if _cast(queries) is not None:
            round_inside = partial(_round_inside, graph, merger, queries)
            record(merger.attempt((CAST, QUERIES), QUERIES, queries.node, round_inside))
    for choice in walk(graph, SELECT):
        slots = next(
            (call for user in choice.node.users if (call := read(user)) is not None and call.name == MAP), None
        )
        if slots is not None:
            record(merger.attempt((SELECT, MAP), INTO, choice.node, partial(_merge, graph, merger, choice, slots)))


def _merge(graph: Graph, merger: Merger, choice: OpNode, slots: OpNode) -> None:
    """Put one call in the place of the two, or raise `Apart`."""
    others = [user for user in choice.node.users if user is not slots.node]
    if others:
        raise Apart(f"the result of {SELECT} is used elsewhere too, by {called(others[0])}")
    if slots["token_to_req"] is not choice["token_to_req"]:
        raise Apart(f"{MAP} has token_to_req of its own")
    given = {
        **choice.arguments,
        "main_block_table": slots["block_table"],
        "is_valid_token": slots["is_valid_token"],
        "main_block_size": slots["block_size"],
    }
    members = [choice, slots]
    moved = inputs_before(graph, choice.node, given.values(), members)
    merger.check_wanted(OPS[INTO], given, members, choice.node)
    for node in moved:
        choice.node.prepend(node)
    with graph.inserting_before(choice.node):
        merged = insert(graph, OPS[INTO], given, tuple(slots.node.meta["val"]), choice.node)
        for index in range(2):
            old = slots.results(index)
            if old:
                replace(old, item(graph, merged.node, index))
    erase(graph, slots)
    erase(graph, choice)


def _cast(queries: OpNode) -> Node | None:
    """The rounding of float32 weights to the dtype of q, which `round_weights` does too."""
    weights: Any = queries["weights"]
    if weights.target is not torch.ops.prims.convert_element_type.default:
        return None
    wide, dtype = weights.args[0].meta["val"].dtype, weights.meta["val"].dtype
    rounds = wide is torch.float32 and dtype is queries["q"].meta["val"].dtype
    return weights if rounds and dtype is not wide else None


def _round_inside(graph: Graph, merger: Merger, queries: OpNode) -> None:
    """Give the weights as they were before, or raise `Apart`."""
    cast = _cast(queries)
    assert cast is not None
    others = [user for user in cast.users if user is not queries.node]
    if others:
        raise Apart(f"the rounded weights are used elsewhere too, by {called(others[0])}")
    given = {**queries.arguments, "weights": cast.args[0], "round_weights": True}
    merger.check_wanted(OPS[QUERIES], given, [queries], queries.node)
    with graph.inserting_before(queries.node):
        merged = insert(graph, OPS[QUERIES], given, tuple(queries.node.meta["val"]), queries.node)
    queries.node.replace_all_uses_with(merged.node)
    graph.erase_node(queries.node)
    graph.erase_node(cast)
