"""Fuse attention with the norm and RoPE of q before it, and with the inverse RoPE and quantization after it.

The attention kernel holds whole rows of q and of its output, so norm, RoPE and quantization there need no additional
memory traffic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.fx import Graph

from ..ops.common.define import OPS
from ..selection.decisions import Fusion, record
from .fusion import Fuser, NotFusable, inputs_to_move
from .insert_halves import BOTH, KV_HALF, Q_HALF, as_half, half, unfuse
from .nodes import OpNode, calls_of, display_name, producer_of, read, reread
from .rewrite import erase, insert, item, replace_uses

ATTENTION, QUANTIZED = "sparse_mla_decode", "sparse_mla_decode_quant"
_EPILOGUES = ("inv_rope", "inv_rope_fp8_quant")
_ROPE = ("positions", "cos_sin_cache")


@dataclass(frozen=True, slots=True)
class _Group:
    """An attention call, and the calls before and after it that may be fused with it."""

    attention: OpNode
    before: OpNode | None = None
    after: OpNode | None = None

    @property
    def members(self) -> list[OpNode]:
        return [call for call in (self.before, self.attention, self.after) if call is not None]

    @property
    def ops(self) -> list[str]:
        """Names of the members; only the q half of a q_norm_rope_kv_insert is one."""
        return [Q_HALF if call is self.before else call.name for call in self.members]

    @property
    def into(self) -> str:
        return QUANTIZED if self.after is not None and self.after.name == _EPILOGUES[1] else ATTENTION

    def arguments(self) -> Mapping[str, Any]:
        """Return the arguments of the fused op."""
        fused = dict(self.attention.arguments)
        if self.before is not None:
            norm = half(self.before, Q_HALF)
            fused |= {"q": norm["q"], "q_norm_eps": norm["eps"], **{name: norm[name] for name in _ROPE}}
        if self.after is not None:
            fused |= {"inverse_rope": True, **{name: self.after[name] for name in _ROPE}}
        if self.into == QUANTIZED and self.after is not None:
            fused |= {name: self.after[name] for name in ("n_groups", "heads_per_group", "packed_scales")}
        return fused


def run(graph: Graph, fuser: Fuser) -> None:
    """Fuse every sparse_mla_decode with the calls before and after it, or only before, or only after."""
    for attention in calls_of(graph, ATTENTION):
        before, after = _call_before(attention), _call_after(attention)
        choices = [_Group(attention, before, after)] if before is not None or after is not None else []
        if before is not None and after is not None:
            choices += [_Group(attention, before), _Group(attention, after=after)]
        tried: list[Fusion] = []
        for choice in choices:
            if not (tried and tried[-1].fused):
                fuse = partial(_fuse, graph, fuser, choice)
                tried.append(fuser.attempt(choice.ops, choice.into, attention.node, fuse))
        # Only the reason against the largest group is recorded.
        for index, fusion in enumerate(tried):
            if fusion.fused or index == 0:
                record(fusion)


def _call_before(attention: OpNode) -> OpNode | None:
    """Return the call that applies norm and RoPE to the q of `attention`."""
    call, index = producer_of(attention["q"])
    return call if call is not None and call.name in (Q_HALF, BOTH) and index == 0 else None


def _call_after(attention: OpNode) -> OpNode | None:
    """Return the call that applies the inverse RoPE to the output of `attention`."""
    users = [read(user) for out in attention.results(0) for user in out.users]
    return next((call for call in users if call is not None and call.name in _EPILOGUES), None)


def _fuse(graph: Graph, fuser: Fuser, group: _Group) -> None:
    """Replace all members by one call, or raise `NotFusable`."""
    attention, before, after = group.attention, group.before, group.after
    anchor = attention.node
    _check(group)
    arguments = group.arguments()
    members = [as_half(call, Q_HALF) if call is before else call for call in group.members]
    fuser.check_wanted(OPS[group.into], arguments, members, anchor)
    if before is not None and before.name == BOTH:
        fuser.check_remainder(before, OPS[KV_HALF], half(before, KV_HALF))
    for node in inputs_to_move(graph, anchor, [arguments[name] for name in _ROPE], group.members):
        anchor.prepend(node)
    if before is not None and before.name == BOTH:
        before, _ = unfuse(graph, before)
        # Attention also reads the cache of that call; the kv half now returns its new version.
        attention = reread(attention)
        arguments = _Group(attention, before, after).arguments()

    olds = [attention.results(0), attention.results(1)]
    values = list(attention.node.meta["val"])
    if after is not None:
        olds[0], values[0] = after.results(0), after.node.meta["val"]
    if after is not None and group.into == QUANTIZED:
        olds, values = [after.results(0), after.results(1)], list(after.node.meta["val"])
    with graph.inserting_before(anchor):
        fused = insert(graph, OPS[group.into], arguments, tuple(values), anchor)
        for index, old in enumerate(olds):
            if old:
                replace_uses(old, item(graph, fused.node, index))
    for call in (after, attention, before):
        if call is not None:
            erase(graph, call)


def _check(group: _Group) -> None:
    """Raise `NotFusable` if fusion would change a value, or remove one that has other users."""
    attention, before, after = group.attention, group.before, group.after
    # An eps may be 0.
    if attention["q_norm_eps"] is not None or attention["inverse_rope"]:
        raise NotFusable(f"{ATTENTION} already applies RoPE")
    if before is not None:
        norm = half(before, Q_HALF)
        heads = norm["q"].meta["val"].shape[1]
        if norm["q_scale"] is not None:
            raise NotFusable(f"{before.name} quantizes q")
        if norm["padded_heads"] > heads:
            raise NotFusable(f"{before.name} pads {heads} heads to {norm['padded_heads']}")
        _only_user(before, Q_HALF, attention)
    if after is not None:
        _only_user(attention, ATTENTION, after)
        if group.into == QUANTIZED and any(lse.users for lse in attention.results(1)):
            raise NotFusable("the log-sum-exp is used, and sparse_mla_decode_quant does not return it")
    if before is not None and after is not None and any(before[name] is not after[name] for name in _ROPE):
        raise NotFusable(f"{after.name} and {before.name} have different positions or RoPE tables")


def _only_user(call: OpNode, name: str, user: OpNode) -> None:
    others = [node for result in call.results(0) for node in result.users if node is not user.node]
    if others:
        raise NotFusable(f"the result of {name} is also used by {display_name(others[0])}")
