"""Attention takes over what lies directly around it: q's norm and RoPE in front, inverse RoPE and quantisation behind.

Norm is one factor for each head of a token and RoPE touches a small part of it, so both fit where the kernel holds
the row of q anyway; the same goes for the finished row of the output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.fx import Graph

from ..ops.common.define import OPS
from ..selection.decisions import Fusion, record
from .merging import Apart, Merger, inputs_before
from .nodes import OpNode, called, read, read_again, source_of, walk
from .rewrite import erase, insert, item, replace
from .split_insert import BOTH, KV_HALF, Q_HALF, as_half, half, split

ATTENTION, QUANTISED = "sparse_mla_decode", "sparse_mla_decode_quant"
_BEHIND = ("inv_rope", "inv_rope_fp8_quant")
_ROPE = ("positions", "cos_sin_cache")


@dataclass(frozen=True, slots=True)
class _Around:
    """An attention call, and the calls in front of it and behind it that it may take over."""

    attention: OpNode
    front: OpNode | None = None
    back: OpNode | None = None

    @property
    def members(self) -> list[OpNode]:
        return [call for call in (self.front, self.attention, self.back) if call is not None]

    @property
    def ops(self) -> list[str]:
        """Names of the members; of a q_norm_rope_kv_insert only q's half is one."""
        return [Q_HALF if call is self.front else call.name for call in self.members]

    @property
    def into(self) -> str:
        return QUANTISED if self.back is not None and self.back.name == _BEHIND[1] else ATTENTION

    def arguments(self) -> Mapping[str, Any]:
        """What the attention that has taken over the others is called with."""
        given = dict(self.attention.arguments)
        if self.front is not None:
            norm = half(self.front, Q_HALF)
            given |= {"q": norm["q"], "q_norm_eps": norm["eps"], **{name: norm[name] for name in _ROPE}}
        if self.back is not None:
            given |= {"inverse_rope": True, **{name: self.back[name] for name in _ROPE}}
        if self.into == QUANTISED and self.back is not None:
            given |= {name: self.back[name] for name in ("n_groups", "heads_per_group", "packed_scales")}
        return given


def run(graph: Graph, merger: Merger) -> None:
    """Merge around every sparse_mla_decode of `graph`: on both sides, or else in front, or else behind."""
    for attention in walk(graph, ATTENTION):
        front, back = _front(attention), _back(attention)
        choices = [_Around(attention, front, back)] if front is not None or back is not None else []
        if front is not None and back is not None:
            choices += [_Around(attention, front), _Around(attention, back=back)]
        tried: list[Fusion] = []
        for choice in choices:
            if not (tried and tried[-1].fused):
                merge = partial(_merge, graph, merger, choice)
                tried.append(merger.attempt(choice.ops, choice.into, attention.node, merge))
        # What stands in the way of the most is worth a line; that less does not do either is not.
        for index, fusion in enumerate(tried):
            if fusion.fused or index == 0:
                record(fusion)


def _front(attention: OpNode) -> OpNode | None:
    """The call that normalises and rotates the q of `attention`."""
    call, index = source_of(attention["q"])
    return call if call is not None and call.name in (Q_HALF, BOTH) and index == 0 else None


def _back(attention: OpNode) -> OpNode | None:
    """The call that rotates the output of `attention` back."""
    users = [read(user) for out in attention.results(0) for user in out.users]
    return next((call for call in users if call is not None and call.name in _BEHIND), None)


def _merge(graph: Graph, merger: Merger, around: _Around) -> None:
    """Put one call in the place of all members, or raise `Apart`."""
    attention, front, back = around.attention, around.front, around.back
    anchor = attention.node
    _check(around)
    given = around.arguments()
    members = [as_half(call, Q_HALF) if call is front else call for call in around.members]
    merger.check_wanted(OPS[around.into], given, members, anchor)
    if front is not None and front.name == BOTH:
        merger.check_remainder(front, OPS[KV_HALF], half(front, KV_HALF))
    for node in inputs_before(graph, anchor, [given[name] for name in _ROPE], around.members):
        anchor.prepend(node)
    if front is not None and front.name == BOTH:
        front, _ = split(graph, front)
        # Of that call attention has read the cache too, which the half of kv leaves behind now.
        attention = read_again(attention)
        given = _Around(attention, front, back).arguments()

    olds = [attention.results(0), attention.results(1)]
    values = list(attention.node.meta["val"])
    if back is not None:
        olds[0], values[0] = back.results(0), back.node.meta["val"]
    if back is not None and around.into == QUANTISED:
        olds, values = [back.results(0), back.results(1)], list(back.node.meta["val"])
    with graph.inserting_before(anchor):
        merged = insert(graph, OPS[around.into], given, tuple(values), anchor)
        for index, old in enumerate(olds):
            if old:
                replace(old, item(graph, merged.node, index))
    for call in (back, attention, front):
        if call is not None:
            erase(graph, call)


def _check(around: _Around) -> None:
    """Raise `Apart` where taking over would change a value, or leave somebody without one."""
    attention, front, back = around.attention, around.front, around.back
    # An eps may be 0.
    if attention["q_norm_eps"] is not None or attention["inverse_rope"]:
        raise Apart(f"{ATTENTION} rotates already")
    if front is not None:
        norm = half(front, Q_HALF)
        heads = norm["q"].meta["val"].shape[1]
        if norm["q_scale"] is not None:
            raise Apart(f"{front.name} quantises q")
        if norm["padded_heads"] > heads:
            raise Apart(f"{front.name} pads {heads} heads to {norm['padded_heads']}")
        _only_user(front, Q_HALF, attention)
    if back is not None:
        _only_user(attention, ATTENTION, back)
        if around.into == QUANTISED and any(lse.users for lse in attention.results(1)):
            raise Apart("the log-sum-exp is used too, and sparse_mla_decode_quant returns none")
    if front is not None and back is not None and any(front[name] is not back[name] for name in _ROPE):
        raise Apart(f"{back.name} has another table or other positions than {front.name}")


def _only_user(call: OpNode, name: str, user: OpNode) -> None:
    others = [node for result in call.results(0) for node in result.users if node is not user.node]
    if others:
        raise Apart(f"the result of {name} is used elsewhere too, by {called(others[0])}")
