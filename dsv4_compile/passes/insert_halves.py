"""Split q_norm_rope_kv_insert into its halves, for a pass that fuses one of them with other ops."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.fx import Graph

from ..ops.common.define import OPS
from .nodes import OpNode
from .rewrite import erase, insert, item, replace_uses

BOTH = "q_norm_rope_kv_insert"
Q_HALF, KV_HALF = "q_norm_rope", "kv_rope_insert"


def half(call: OpNode, name: str) -> Mapping[str, Any]:
    """Return the arguments of the half `name` of `call`; those of `call` itself if it is that half."""
    return {a.name: call[a.name] for a in OPS[name]._schema.arguments}


def as_half(call: OpNode, name: str) -> OpNode:
    """Return the half `name` of `call` as a separate call at the same node; `call` itself if it is that half."""
    return call if call.name == name else OpNode(call.node, OPS[name], half(call, name))


def unfuse(graph: Graph, call: OpNode) -> tuple[OpNode, OpNode]:
    """Replace `call`, a q_norm_rope_kv_insert, by its halves; return the q half and the kv half."""
    with graph.inserting_before(call.node):
        q = insert(graph, OPS[Q_HALF], half(call, Q_HALF), call.node.meta["val"][0], call.node)
        kv = insert(graph, OPS[KV_HALF], half(call, KV_HALF), None, call.node)
        cache = item(graph, kv.node, 1)
    replace_uses(call.results(0), q.node)
    replace_uses(call.new_versions("k_cache"), cache)
    erase(graph, call)
    return q, kv
