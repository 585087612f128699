"""Fuse the indexer's top-k with the map from entries to cache slots, and its queries with the rounding of weights.

Both save a launch: the map and the cast become part of a kernel that runs anyway.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.fx import Graph, Node

from ..ops.common.define import OPS
from ..selection.decisions import record
from .fusion import Fuser, NotFusable, inputs_to_move
from .nodes import OpNode, calls_of, display_name, read
from .rewrite import erase, insert, item, replace_uses

SELECT, MAP, INTO = "indexer_logits_topk", "global_topk", "indexer_topk_slots"
QUERIES, CAST = "indexer_q_rope_quant", "convert_element_type"


def run(graph: Graph, fuser: Fuser) -> None:
    """Fuse every top-k with the map of its result, and every rounding of weights with the op that reads them."""
    for queries in calls_of(graph, QUERIES):
        if _cast(queries) is not None:
            fuse = partial(_fuse_rounding, graph, fuser, queries)
            record(fuser.attempt((CAST, QUERIES), QUERIES, queries.node, fuse))
    for topk in calls_of(graph, SELECT):
        slots = next((call for user in topk.node.users if (call := read(user)) is not None and call.name == MAP), None)
        if slots is not None:
            record(fuser.attempt((SELECT, MAP), INTO, topk.node, partial(_fuse_map, graph, fuser, topk, slots)))


def _fuse_map(graph: Graph, fuser: Fuser, topk: OpNode, slots: OpNode) -> None:
    """Replace both calls by one, or raise `NotFusable`."""
    others = [user for user in topk.node.users if user is not slots.node]
    if others:
        raise NotFusable(f"the result of {SELECT} is also used by {display_name(others[0])}")
    if slots["token_to_req"] is not topk["token_to_req"]:
        raise NotFusable(f"{MAP} has a different token_to_req")
    arguments = {
        **topk.arguments,
        "extra_block_table": slots["block_table"],
        "is_valid_token": slots["is_valid_token"],
        "extra_block_size": slots["block_size"],
    }
    members = [topk, slots]
    moved = inputs_to_move(graph, topk.node, arguments.values(), members)
    fuser.check_wanted(OPS[INTO], arguments, members, topk.node)
    for node in moved:
        topk.node.prepend(node)
    with graph.inserting_before(topk.node):
        fused = insert(graph, OPS[INTO], arguments, tuple(slots.node.meta["val"]), topk.node)
        for index in range(2):
            old = slots.results(index)
            if old:
                replace_uses(old, item(graph, fused.node, index))
    erase(graph, slots)
    erase(graph, topk)


def _cast(queries: OpNode) -> Node | None:
    """Return the rounding of float32 weights to the dtype of q, which `round_weights` replaces."""
    weights: Any = queries["weights"]
    if weights.target is not torch.ops.prims.convert_element_type.default:
        return None
    wide, dtype = weights.args[0].meta["val"].dtype, weights.meta["val"].dtype
    rounds = wide is torch.float32 and dtype is queries["q"].meta["val"].dtype
    return weights if rounds and dtype is not wide else None


def _fuse_rounding(graph: Graph, fuser: Fuser, queries: OpNode) -> None:
    """Pass the unrounded weights to the op, or raise `NotFusable`."""
    cast = _cast(queries)
    assert cast is not None
    others = [user for user in cast.users if user is not queries.node]
    if others:
        raise NotFusable(f"the rounded weights are also used by {display_name(others[0])}")
    arguments = {**queries.arguments, "weights": cast.args[0], "round_weights": True}
    fuser.check_wanted(OPS[QUERIES], arguments, [queries], queries.node)
    with graph.inserting_before(queries.node):
        fused = insert(graph, OPS[QUERIES], arguments, tuple(queries.node.meta["val"]), queries.node)
    queries.node.replace_all_uses_with(fused.node)
    graph.erase_node(queries.node)
    graph.erase_node(cast)
