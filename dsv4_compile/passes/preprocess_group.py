"""Which calls of a layer `merge_preprocess` may merge: those between the projections of its input and its caches.

A group starts at `fused_q_kv_rmsnorm`: with the insert of the normed kv, and with the compressors that follow, each a
`save_partial_states` and the `compress_norm_rope_insert` that reads what it saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from .. import layout
from .merging import Apart, check_caches, inputs_before
from .nodes import Cache, OpNode, read, source_of
from .split_insert import BOTH, KV_HALF

NORM, SAVE, COMPRESS = "fused_q_kv_rmsnorm", "save_partial_states", "compress_norm_rope_insert"


@dataclass(frozen=True, slots=True, eq=False)
class Compressor:
    """A compressor's two calls."""

    save: OpNode
    compress: OpNode

    def stores_like(self, store: OpNode) -> bool:
        """Whether it may be the main compressor beside `store`: not where its entries can only be an indexer's keys.

        Of keys and values are all formats that no indexer has; "plain" of vectors as long as those of `store`.
        """
        compress, kv = self.compress, store["kv"]
        if compress["cache_format"] not in layout.INDEXER_FORMATS:
            return True
        same = compress["cache_format"] == store["cache_format"] and not compress["hadamard"]
        return same and bool(compress["norm_weight"].meta["val"].shape[0] == kv.meta["val"].shape[1])

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
class Group:
    """The calls of one layer. `store` is the call that inserts the normed kv, alone or beside q's norm."""

    norm: OpNode
    store: OpNode
    main: Compressor | None = None
    indexer: Compressor | None = None

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


def store_of(norm: OpNode) -> OpNode | None:
    """The call that inserts the normed kv of `norm`."""
    users = [read(user) for kv in norm.results(1) for user in kv.users]
    return next((call for call in users if call is not None and call.name in (KV_HALF, BOTH)), None)


def compressors_of(nodes: Iterable[Node]) -> Iterator[Compressor]:
    """Compressors among `nodes`: a save, and the compression that reads what it has written."""
    for node in nodes:
        save = read(node)
        if save is not None and save.name == SAVE and save.known:
            users = [read(user) for version in save.versions("state_cache") for user in version.users]
            found = next((call for call in users if call is not None and call.name == COMPRESS), None)
            if found is not None:
                yield Compressor(save, found)


def plan(graph: Graph, group: Group) -> tuple[Node, list[Node]]:
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


def _check_kv(group: Group) -> None:
    norm, store = group.norm, group.store
    for call in group.members:
        if not call.known:
            raise Apart(f"{call.name} is not an auto_functionalized_v2 node")
    others = [user for kv in norm.results(1) for user in kv.users if user is not store.node]
    if others or source_of(store["kv"])[0] is None:
        raise Apart("the normed kv is used elsewhere too")


def _check_pair(group: Group, pair: Compressor, role: str) -> None:
    """Raise `Apart` unless the compressor shares with the rest of the group what the merged op takes once."""
    save, compress, store = pair.save, pair.compress, group.store
    main = group.main if group.main is not None else pair
    if role != "compressor" and group.main is None:
        raise Apart("an indexer's compressor is merged beside a main one only")
    if role != "compressor" and compress["cache_format"] not in layout.INDEXER_FORMATS:
        raise Apart("another compressor of keys and values is merged already")
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
