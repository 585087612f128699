"""Everything between the projections of a layer's input and its caches becomes one `preprocess_insert`.

The group starts at `fused_q_kv_rmsnorm`: with the insert of the normed kv, and with the compressors that follow, each a
`save_partial_states` and the `compress_norm_rope_insert` that reads what it saved. The merged op stands where the norm
stood, so that the projection of q, which waits for it, still comes behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from dataclasses import replace as modified
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, Node

from .. import layout
from ..decisions import Fusion, record
from ..ops._define import OPS
from .merging import Apart, Merger, check_caches, inputs_before
from .nodes import Cache, OpNode, erase, insert, item, read, replace, source_of, walk
from .split_insert import BOTH, KV_HALF, Q_HALF, as_half, half, split

INTO, NORM = "preprocess_insert", "fused_q_kv_rmsnorm"
SAVE, COMPRESS = "save_partial_states", "compress_norm_rope_insert"


@dataclass(frozen=True, slots=True, eq=False)
class _Compressor:
    """A compressor's two calls."""

    save: OpNode
    compress: OpNode

    def arguments(self, prefix: str, cache: str) -> dict[str, Any]:
        """What preprocess_insert is told of it, under names with `prefix`; the destination is called `cache`."""
        save, compress = self.save, self.compress
        return {
            f"{prefix}kv_score": save["kv_score"],
            f"{prefix}ape": save["ape"],
            f"{prefix}norm_weight": compress["norm_weight"],
            f"{prefix}state_cache": save["state_cache"],
            f"{prefix}state_slot_mapping": save["state_slot_mapping"],
            f"{prefix}state_block_table": compress["state_block_table"],
            f"{cache}_cache": compress["k_cache"],
            f"{cache}_slot_mapping": compress["slot_mapping"],
        }


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """The calls of one layer. `store` is the call that inserts the normed kv, alone or beside q's norm."""

    norm: OpNode
    store: OpNode
    main: _Compressor | None = None
    indexer: _Compressor | None = None

    @property
    def members(self) -> list[OpNode]:
        pairs = [pair for pair in (self.main, self.indexer) if pair is not None]
        return [self.norm, self.store, *(call for pair in pairs for call in (pair.save, pair.compress))]

    @property
    def ops(self) -> list[str]:
        """Names of the members; of a q_norm_rope_kv_insert only the half of kv is one."""
        return [KV_HALF if call is self.store else call.name for call in self.members]

    def arguments(self) -> dict[str, Any]:
        """What the merged op is called with."""
        norm, store = self.norm, self.store
        given = {
            "qr": _unrounded(norm["qr"], norm["q_weight"]),
            "kv": _unrounded(norm["kv"], norm["kv_weight"]),
            "q_weight": norm["q_weight"],
            "kv_weight": norm["kv_weight"],
            "positions": store["positions"],
            "cos_sin_cache": store["cos_sin_cache"],
            # Without a compressor nobody looks at it.
            "token_to_req": store["positions"] if self.main is None else self.main.compress["token_to_req"],
            "eps": norm["eps"],
            "cache_format": store["cache_format"],
            "window_cache": store["k_cache"],
            "window_slot_mapping": store["slot_mapping"],
            "window_block_size": store["block_size"],
            "kv_scale": store["kv_scale"],
        }
        if self.main is not None:
            given |= {"ratio": self.main.compress["ratio"], **self.main.arguments("", "compressed")}
        if self.indexer is not None:
            given |= self.indexer.arguments("indexer_", "indexer")
            given["indexer_cache_format"] = self.indexer.compress["cache_format"]
            given["hadamard"] = self.indexer.compress["hadamard"]
        return given


def run(graph: Graph, merger: Merger) -> None:
    """Merge the group of every fused_q_kv_rmsnorm; where not all of it can be, without its indexer or compressors."""
    norms = list(walk(graph, NORM))
    nodes = list(graph.nodes)
    edges = [nodes.index(norm.node) for norm in norms] + [len(nodes)]
    taken: set[Node] = set()
    refused: dict[Node, Fusion] = {}
    for index, norm in enumerate(norms):
        store = _store(norm)
        if store is None:
            continue
        group = _Group(norm, store)
        alone = merger.attempt(group.ops, INTO, norm.node, partial(_plan, graph, group))
        if not alone.merged:
            record(alone)
            continue
        # A layer may well be written with its compressors in front of its norm.
        around = nodes[edges[index - 1] if index else 0 : edges[index + 1]]
        for pair in _pairs(node for node in around if node not in taken):
            outcome = _joined(graph, merger, group, pair)
            if isinstance(outcome, _Group):
                group = outcome
                taken.add(pair.save.node)
            else:
                refused.setdefault(pair.save.node, outcome)
        _merge_most(graph, merger, group)
    for node, fusion in refused.items():
        if node not in taken:
            record(fusion)


def _merge_most(graph: Graph, merger: Merger, group: _Group) -> None:
    """Merge all of `group`, or less of it where the merged op takes no more."""
    smaller = [modified(group, indexer=None), modified(group, indexer=None, main=None)]
    tried: list[Fusion] = []
    for choice in (group, *(choice for choice in smaller if len(choice.members) < len(group.members))):
        if not (tried and tried[-1].merged):
            tried.append(merger.attempt(choice.ops, INTO, group.norm.node, partial(_merge, graph, merger, choice)))
    for fusion in (tried[0], *(fusion for fusion in tried[1:] if fusion.merged)):
        record(fusion)


def _store(norm: OpNode) -> OpNode | None:
    """The call that inserts the normed kv of `norm`."""
    users = [read(user) for kv in norm.results(1) for user in kv.users]
    return next((call for call in users if call is not None and call.name in (KV_HALF, BOTH)), None)


def _pairs(nodes: Iterable[Node]) -> Iterator[_Compressor]:
    """Compressors among `nodes`: a save, and the compression that reads what it has written."""
    for node in nodes:
        save = read(node)
        if save is not None and save.name == SAVE and save.known:
            users = [read(user) for version in save.versions("state_cache") for user in version.users]
            found = next((call for call in users if call is not None and call.name == COMPRESS), None)
            if found is not None:
                yield _Compressor(save, found)


def _joined(graph: Graph, merger: Merger, group: _Group, pair: _Compressor) -> _Group | Fusion:
    """`group` with `pair`, or what is to be said where it may not join."""
    dim = group.store["kv"].meta["val"].shape[1]
    main = group.main is None and pair.compress["norm_weight"].meta["val"].shape[0] == dim
    larger = modified(group, main=pair) if main else modified(group, indexer=pair)

    def check() -> None:
        if not main and group.indexer is not None:
            raise Apart("another compressor is merged already")
        _plan(graph, larger)

    outcome = merger.attempt((SAVE, COMPRESS), INTO, pair.save.node, check)
    return larger if outcome.merged else outcome


def _merge(graph: Graph, merger: Merger, group: _Group) -> None:
    """Put one call in the place of all members, or raise `Apart`."""
    norm, store = group.norm, group.store
    anchor, moved = _plan(graph, group)
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


def _plan(graph: Graph, group: _Group) -> tuple[Node, list[Node]]:
    """The node in front of which the merged op goes, and what must move there too; `Apart` if it may not go there."""
    _check_kv(group)
    for pair, role in ((group.main, "compressor"), (group.indexer, "indexer's compressor")):
        if pair is not None:
            _check_pair(group, pair, role)
    own = {call.node for call in group.members}
    anchor = next(node for node in graph.nodes if node in own)
    given = group.arguments()
    moved = inputs_before(graph, anchor, given.values(), group.members)
    check_caches(
        graph, anchor, {name: value for name, value in given.items() if isinstance(value, Cache)}, group.members
    )
    return anchor, moved


def _check_kv(group: _Group) -> None:
    norm, store = group.norm, group.store
    for call in group.members:
        if not call.known:
            raise Apart(f"{call.name} is not an auto_functionalized_v2 node")
    others = [user for kv in norm.results(1) for user in kv.users if user is not store.node]
    if others or source_of(store["kv"])[0] is None:
        raise Apart("the normed kv is used elsewhere too")


def _check_pair(group: _Group, pair: _Compressor, role: str) -> None:
    """Raise `Apart` unless the compressor shares with the rest of the group what the merged op takes once."""
    save, compress, store = pair.save, pair.compress, group.store
    main = group.main if group.main is not None else pair
    if role != "compressor" and group.main is None:
        raise Apart("an indexer's compressor is merged beside a main one only")
    shared = [
        (save["positions"], store["positions"], "positions"),
        (compress["positions"], store["positions"], "positions"),
        (compress["cos_sin_cache"], store["cos_sin_cache"], "cos_sin_cache"),
        (compress["token_to_req"], main.compress["token_to_req"], "token_to_req"),
        (compress["state_slot_mapping"], save["state_slot_mapping"], "state_slot_mapping"),
    ]
    if pair is group.main:
        shared.append((compress["kv_scale"], store["kv_scale"], "kv_scale"))
    for got, common, name in shared:
        if got is not common:
            raise Apart(f"the {role} has {name} of its own")
    ratio = main.compress["ratio"]
    equal = [
        (compress["eps"], group.norm["eps"], "eps"),
        (compress["ratio"], ratio, "ratio"),
        (save["block_size"], layout.state_block_size(ratio), "block_size of states"),
        (compress["state_block_size"], layout.state_block_size(ratio), "block_size of states"),
        (compress["block_size"], layout.storage_block_size(ratio), "block_size"),
    ]
    if pair is group.main:
        equal += [
            (compress["cache_format"], store["cache_format"], "cache_format"),
            (compress["hadamard"], False, "hadamard"),
        ]
    else:
        equal += [(compress["kv_scale"], None, "kv_scale")]
    for got, needed, name in equal:
        if got != needed:
            raise Apart(f"the {role} has {name} {got}, the merged op would have {needed}")
    if save["state_cache"].view or compress["state_cache"] not in save.versions("state_cache"):
        raise Apart(f"the {role}'s state_cache is a view")


def _unrounded(x: Node, weight: Node) -> Node:
    """What `preprocess_insert` rounds to `x` itself; `Apart` where it would round what is not rounded now."""
    value, dtype = x.meta["val"], weight.meta["val"].dtype
    if value.dtype is torch.float32 and dtype is not torch.float32:
        raise Apart(f"float32 projections would be rounded to {dtype}")
    if x.target is torch.ops.prims.convert_element_type.default and value.dtype is dtype:
        wide = x.args[0]
        if isinstance(wide, Node) and wide.meta["val"].dtype is torch.float32:
            return wide
    return x
