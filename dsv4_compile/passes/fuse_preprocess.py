"""Fuse all ops between the projections of a layer's input and its caches into one `preprocess_insert`.

`preprocess_group` finds the ops and checks which can be fused. The fused op is inserted before the first of them, so
that the projection of q, which needs its result, still comes after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace as modified
from functools import partial

from torch.fx import Graph, Node

from ..ops.common.define import OPS
from ..selection.decisions import Fusion, record
from .fusion import Fuser, NotFusable
from .insert_halves import BOTH, KV_HALF, Q_HALF, as_half, half, unfuse
from .nodes import calls_of, reread
from .preprocess_group import COMPRESS, NORM, SAVE, Compressor, Group, compressors_of, placement, store_of
from .rewrite import erase, insert, item, replace_uses

INTO = "preprocess_insert"


def run(graph: Graph, fuser: Fuser) -> None:
    """Fuse the group of every fused_q_kv_rmsnorm, if necessary without its indexer or its compressors."""
    norms = list(calls_of(graph, NORM))
    nodes = list(graph.nodes)
    edges = [nodes.index(norm.node) for norm in norms] + [len(nodes)]
    taken: set[Node] = set()
    not_fused: dict[Node, Fusion] = {}
    for index, call in enumerate(norms):
        # The fusion of an earlier norm may have changed its arguments.
        norm = reread(call)
        store = store_of(norm)
        if store is None:
            continue
        group = Group(norm, store)
        alone = fuser.attempt(group.ops, INTO, norm.node, partial(placement, graph, group))
        if not alone.fused:
            record(alone)
            continue
        # The user may have written the compressors before the norm.
        around = nodes[edges[index - 1] if index else 0 : edges[index + 1]]
        pairs = list(compressors_of(node for node in around if node not in taken))
        group, left = _with_compressors(graph, fuser, group, pairs)
        taken |= {pair.save.node for pair in (group.main, group.indexer) if pair is not None}
        not_fused |= {save: fusion for save, fusion in left.items() if save not in not_fused}
        _fuse_largest(graph, fuser, group)
    for node, fusion in not_fused.items():
        if node not in taken:
            record(fusion)


def _fuse_largest(graph: Graph, fuser: Fuser, group: Group) -> None:
    """Fuse all of `group`, or else without its indexer, or else without compressors."""
    smaller = [modified(group, indexer=None), modified(group, indexer=None, main=None)]
    tried: list[Fusion] = []
    for choice in (group, *(choice for choice in smaller if len(choice.members) < len(group.members))):
        if not (tried and tried[-1].fused):
            tried.append(fuser.attempt(choice.ops, INTO, group.norm.node, partial(_fuse, graph, fuser, choice)))
    for fusion in (tried[0], *(fusion for fusion in tried[1:] if fusion.fused)):
        record(fusion)


def _with_compressors(
    graph: Graph, fuser: Fuser, group: Group, pairs: Sequence[Compressor]
) -> tuple[Group, dict[Node, Fusion]]:
    """Return `group` with the compressors that can be fused, and the records of the others by their first call.

    The main compressor is searched first: an indexer's is only fused with one, and may come before it in the graph.
    """
    left: dict[Node, Fusion] = {}
    for role in ("main", "indexer"):
        for pair in pairs:
            fits = role == "indexer" or (group.main is None and pair.can_be_main(group.store))
            if fits and pair is not group.main and pair.save.node not in left:
                outcome = _add_compressor(graph, fuser, group, pair, role)
                if isinstance(outcome, Group):
                    group = outcome
                else:
                    left[pair.save.node] = outcome
    return group, left


def _add_compressor(graph: Graph, fuser: Fuser, group: Group, pair: Compressor, role: str) -> Group | Fusion:
    """Return `group` with `pair` as its `role`, or the record if that cannot be fused."""
    larger = modified(group, main=pair) if role == "main" else modified(group, indexer=pair)

    def check() -> None:
        if role == "indexer" and group.indexer is not None:
            raise NotFusable("another compressor is already fused")
        placement(graph, larger)

    outcome = fuser.attempt((SAVE, COMPRESS), INTO, pair.save.node, check)
    return larger if outcome.fused else outcome


def _fuse(graph: Graph, fuser: Fuser, group: Group) -> None:
    """Replace all members by one call, or raise `NotFusable`."""
    norm, store = group.norm, group.store
    anchor, moved = placement(graph, group)
    arguments = group.arguments()
    members = [as_half(call, KV_HALF) if call is store else call for call in group.members]
    fuser.check_wanted(OPS[INTO], arguments, members, norm.node)
    if store.name == BOTH:
        fuser.check_remainder(store, OPS[Q_HALF], half(store, Q_HALF))
    for node in moved:
        anchor.prepend(node)
    olds = [norm.results(0)]
    if store.name == BOTH:
        _, store = unfuse(graph, store)
        group = modified(group, store=store)
    owners = {cache.base: (call, name) for call in group.members for name, cache in call.caches().items()}
    with graph.inserting_before(anchor):
        fused = insert(graph, OPS[INTO], arguments, norm.node.meta["val"][0], norm.node)
        bases = list(dict.fromkeys(cache.base for cache in fused.caches().values()))
        olds += [call.new_versions(name) for call, name in (owners[base] for base in bases)]
        for index, old in enumerate(olds):
            if old:
                replace_uses(old, item(graph, fused.node, index))
    for call in reversed(group.members):
        erase(graph, call)
    for rounding in {norm["qr"], norm["kv"]}:
        if not rounding.users and rounding.op != "placeholder":
            graph.erase_node(rounding)
