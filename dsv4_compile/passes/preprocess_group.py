"""The group of ops that `fuse_preprocess` fuses, and the checks that they can be fused.

A group is a `fused_q_kv_rmsnorm`, the insert of its normalized kv, and up to two compressors. A compressor is a
`save_partial_states` and the `compress_norm_rope_insert` that reads the saved states.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from .. import layout
from .fusion import NotFusable, check_caches, inputs_to_move
from .insert_halves import BOTH, KV_HALF
from .nodes import Cache, OpNode, producer_of, read

NORM, SAVE, COMPRESS = "fused_q_kv_rmsnorm", "save_partial_states", "compress_norm_rope_insert"


@dataclass(frozen=True, slots=True, eq=False)
class Compressor:
    """The two calls of a compressor."""

    save: OpNode
    compress: OpNode

    def can_be_main(self, store: OpNode) -> bool:
        """Return whether it can be the main compressor next to `store`: its entries are keys and values.

        They are in every format that no indexer has, and in "plain" if they are as long as the vectors of `store`.
        """
        compress, kv = self.compress, store["kv"]
        if compress["cache_format"] not in layout.INDEXER_FORMATS:
            return True
        same = compress["cache_format"] == store["cache_format"] and not compress["hadamard"]
        return same and bool(compress["norm_weight"].meta["val"].shape[0] == kv.meta["val"].shape[1])

    def arguments(self, prefix: str, cache: str) -> dict[str, Any]:
        """Return its arguments of preprocess_insert, named with `prefix`, or with `cache` for those of its cache."""
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
    """The ops of one layer. `store` inserts the normalized kv; it may apply norm and RoPE to q as well."""

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
        """Names of the members; only the kv half of a q_norm_rope_kv_insert is one."""
        return [KV_HALF if call is self.store else call.name for call in self.members]

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the fused op."""
        norm, store = self.norm, self.store
        fused = {
            **_rounded(norm),
            "q_weight": norm["q_weight"],
            "kv_weight": norm["kv_weight"],
            "positions": store["positions"],
            "cos_sin_cache": store["cos_sin_cache"],
            # Not read without a compressor.
            "token_to_req": store["positions"] if self.main is None else self.main.compress["token_to_req"],
            "eps": norm["eps"],
            "cache_format": store["cache_format"],
            "window_cache": store["k_cache"],
            "window_slot_mapping": store["slot_mapping"],
            "window_block_size": store["block_size"],
            "kv_scale": store["kv_scale"],
        }
        if self.main is not None:
            fused |= {"ratio": self.main.compress["ratio"], **self.main.arguments("", "compressed")}
        if self.indexer is not None:
            fused |= self.indexer.arguments("indexer_", "indexer")
            fused["indexer_cache_format"] = self.indexer.compress["cache_format"]
            fused["hadamard"] = self.indexer.compress["hadamard"]
        return fused


def store_of(norm: OpNode) -> OpNode | None:
    """Return the call that inserts the normalized kv of `norm`."""
    users = [read(user) for kv in norm.results(1) for user in kv.users]
    return next((call for call in users if call is not None and call.name in (KV_HALF, BOTH)), None)


def compressors_of(nodes: Iterable[Node]) -> Iterator[Compressor]:
    """Yield the compressors among `nodes`: a save, and the compression that reads the states it has written."""
    for node in nodes:
        save = read(node)
        if save is not None and save.name == SAVE and save.known:
            users = [read(user) for version in save.new_versions("state_cache") for user in version.users]
            compress = next((call for call in users if call is not None and call.name == COMPRESS), None)
            if compress is not None:
                yield Compressor(save, compress)


def placement(graph: Graph, group: Group) -> tuple[Node, list[Node]]:
    """Return the node before which the fused op goes, and the nodes to move there, or raise `NotFusable`."""
    _check_kv(group)
    for pair, role in ((group.main, "compressor"), (group.indexer, "indexer's compressor")):
        if pair is not None:
            _check_pair(group, pair, role)
    member_nodes = {call.node for call in group.members}
    anchor = next(node for node in graph.nodes if node in member_nodes)
    arguments = group.arguments()
    moved = inputs_to_move(graph, anchor, arguments.values(), group.members)
    check_caches(
        graph, anchor, {name: value for name, value in arguments.items() if isinstance(value, Cache)}, group.members
    )
    return anchor, moved


def _check_kv(group: Group) -> None:
    norm, store = group.norm, group.store
    for call in group.members:
        if not call.known:
            raise NotFusable(f"{call.name} is not an auto_functionalized_v2 node")
    others = [user for kv in norm.results(1) for user in kv.users if user is not store.node]
    if others or producer_of(store["kv"])[0] is None:
        raise NotFusable("the normalized kv has other users")


def _check_pair(group: Group, pair: Compressor, role: str) -> None:
    """Raise `NotFusable` unless the compressor agrees with the group in the arguments that the fused op takes once."""
    save, compress, store = pair.save, pair.compress, group.store
    main = group.main if group.main is not None else pair
    if role != "compressor" and group.main is None:
        raise NotFusable("an indexer's compressor is only fused together with a main compressor")
    if role != "compressor" and compress["cache_format"] not in layout.INDEXER_FORMATS:
        raise NotFusable("another compressor of keys and values is already fused")
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
            raise NotFusable(f"the {role} has a different {name}")
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
            raise NotFusable(f"the {role} has {name} {got}, the fused op {needed}")
    if save["state_cache"].view or compress["state_cache"] not in save.new_versions("state_cache"):
        raise NotFusable(f"the {role}'s state_cache is a view")


def _rounded(norm: OpNode) -> dict[str, Any]:
    """Return `qr` and `kv`, float32 where they were rounded from it, and the `dtype` that the fused op rounds them to.

    Raises `NotFusable` where they have different dtypes: the op has one.
    """
    dtypes = {name: norm[name].meta["val"].dtype for name in ("qr", "kv")}
    if len(set(dtypes.values())) > 1:
        raise NotFusable(f"qr is {dtypes['qr']} and kv {dtypes['kv']}")
    dtype = dtypes["qr"]
    weights = {norm[name].meta["val"].dtype for name in ("q_weight", "kv_weight")}
    rounded = {name: _unrounded(norm[name]) for name in dtypes}
    return {**rounded, "dtype": None if weights == {dtype} else dtype}


def _unrounded(x: Node) -> Node:
    """Return the float32 value that was rounded to `x`, or `x`."""
    if x.target is torch.ops.prims.convert_element_type.default:
        wide = x.args[0]
        if isinstance(wide, Node) and wide.meta["val"].dtype is torch.float32:
            return wide
    return x
