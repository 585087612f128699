"""Everything between the projections of a layer's input and its caches becomes one `preprocess_insert`.

preprocess_group.py finds the calls and says which may be merged. The merged op stands where the norm stood, so that the
projection of q, which waits for it, still comes behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace as modified
from functools import partial

from torch.fx import Graph, Node

from ..ops.common.define import OPS
from ..selection.decisions import Fusion, record
from .merging import Apart, Merger
from .nodes import read_again, walk
from .preprocess_group import COMPRESS, NORM, SAVE, Compressor, Group, compressors_of, plan, store_of
from .rewrite import erase, insert, item, replace
from .split_insert import BOTH, KV_HALF, Q_HALF, as_half, half, split

INTO = "preprocess_insert"


def run(graph: Graph, merger: Merger) -> None:
    """Merge the group of every fused_q_kv_rmsnorm; where not all of it can be, without its indexer or compressors."""
    norms = list(walk(graph, NORM))
    nodes = list(graph.nodes)
    edges = [nodes.index(norm.node) for norm in norms] + [len(nodes)]
    taken: set[Node] = set()
    refused: dict[Node, Fusion] = {}
    for index, call in enumerate(norms):
        # What it takes may be the result of a norm that was merged since.
        norm = read_again(call)
        store = store_of(norm)
        if store is None:
            continue
        group = Group(norm, store)
        alone = merger.attempt(group.ops, INTO, norm.node, partial(plan, graph, group))
        if not alone.fused:
            record(alone)
            continue
        # A layer may well be written with its compressors in front of its norm.
        around = nodes[edges[index - 1] if index else 0 : edges[index + 1]]
        pairs = list(compressors_of(node for node in around if node not in taken))
        group, left = _with_compressors(graph, merger, group, pairs)
        taken |= {pair.save.node for pair in (group.main, group.indexer) if pair is not None}
        refused |= {save: fusion for save, fusion in left.items() if save not in refused}
        _merge_most(graph, merger, group)
    for node, fusion in refused.items():
        if node not in taken:
            record(fusion)


def _merge_most(graph: Graph, merger: Merger, group: Group) -> None:
    """Merge all of `group`, or less of it where the merged op takes no more."""
    smaller = [modified(group, indexer=None), modified(group, indexer=None, main=None)]
    tried: list[Fusion] = []
    for choice in (group, *(choice for choice in smaller if len(choice.members) < len(group.members))):
        if not (tried and tried[-1].fused):
            tried.append(merger.attempt(choice.ops, INTO, group.norm.node, partial(_merge, graph, merger, choice)))
    for fusion in (tried[0], *(fusion for fusion in tried[1:] if fusion.fused)):
        record(fusion)


def _with_compressors(
    graph: Graph, merger: Merger, group: Group, pairs: Sequence[Compressor]
) -> tuple[Group, dict[Node, Fusion]]:
    """`group` with those of `pairs` that may join, and what is to be said of the others, by their first call.

    A main one is looked for first: an indexer's is merged beside it only, and may be written in front of it.
    """
    left: dict[Node, Fusion] = {}
    for role in ("main", "indexer"):
        for pair in pairs:
            fits = role == "indexer" or (group.main is None and pair.stores_like(group.store))
            if fits and pair is not group.main and pair.save.node not in left:
                outcome = _joined(graph, merger, group, pair, role)
                if isinstance(outcome, Group):
                    group = outcome
                else:
                    left[pair.save.node] = outcome
    return group, left


def _joined(graph: Graph, merger: Merger, group: Group, pair: Compressor, role: str) -> Group | Fusion:
    """`group` with `pair` as its `role`, or what is to be said where it may not join."""
    larger = modified(group, main=pair) if role == "main" else modified(group, indexer=pair)

    def check() -> None:
        if role == "indexer" and group.indexer is not None:
            raise Apart("another compressor is merged already")
        plan(graph, larger)

    outcome = merger.attempt((SAVE, COMPRESS), INTO, pair.save.node, check)
    return larger if outcome.fused else outcome


def _merge(graph: Graph, merger: Merger, group: Group) -> None:
    """Put one call in the place of all members, or raise `Apart`."""
    norm, store = group.norm, group.store
    anchor, moved = plan(graph, group)
    given = group.arguments()
    members = [as_half(call, KV_HALF) if call is store else call for call in group.members]
    merger.check_wanted(OPS[INTO], given, members, norm.node)
    if store.name == BOTH:
        merger.check_remainder(store, OPS[Q_HALF], half(store, Q_HALF))
    for node in moved:
        anchor.prepend(node)
    olds = [norm.results(0)]
    if store.name == BOTH:
        _, store = split(graph, store)
        group = modified(group, store=store)
    owners = {cache.base: (call, name) for call in group.members for name, cache in call.caches().items()}
    with graph.inserting_before(anchor):
        merged = insert(graph, OPS[INTO], given, norm.node.meta["val"][0], norm.node)
        bases = list(dict.fromkeys(cache.base for cache in merged.caches().values()))
        olds += [call.versions(name) for call, name in (owners[base] for base in bases)]
        for index, old in enumerate(olds):
            if old:
                replace(old, item(graph, merged.node, index))
    for call in reversed(group.members):
        erase(graph, call)
    for rounding in {norm["qr"], norm["kv"]}:
        if not rounding.users and rounding.op != "placeholder":
            graph.erase_node(rounding)
