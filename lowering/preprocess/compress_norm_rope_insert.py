"""Inductor IR for `compress_norm_rope_insert`: three kernels over all tokens, and two more for a Hadamard transform.

A softmax over the window for [T, D | W], a row sum over [T | D], and the stores of ir/insert.py or ir/indexer.py. A
token that closes no group reads no state and stores nothing, but has lanes; the hand-written kernel skips it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..._compat import FloorDiv, ir, ops
from ...layout import PAD_SLOT, PAGE_LAYOUTS, ROPE_DIM, overlap_factor
from ...selection.decisions import Call, Decision
from ..conditions import backend_lacks, cannot_rotate, decision
from ..ir.common import (
    F32,
    I64,
    Expr,
    Loader,
    Rope,
    RowLoad,
    Value,
    const,
    load_f32,
    round_to,
    row_max,
    row_sum,
    static,
)
from ..ir.hadamard import rounded_hadamard
from ..ir.indexer import IndexerInsert
from ..ir.insert import Insert
from ..ir.paging import Slot, load_i64, lookup_slot, place_of
from ..registry import lowers


def can_lower(call: Call) -> Decision:
    """Return the decision for `call`: IR in Triton, where stores can be predicated, for static dims."""
    fmt = call.arguments["cache_format"]
    why_not = backend_lacks(call, fp8=fmt not in ("plain", "indexer_mxfp4"), predicated=True)
    why_not = why_not or cannot_rotate(call, "norm_weight")
    if not why_not and fmt == "fp8_ds_mla" and call.arguments["cos_sin_cache"].shape[1] != ROPE_DIM:
        why_not = f"an fp8_ds_mla row is lowered for a rope dim of {ROPE_DIM}"
    if not why_not and not static(call.arguments["state_cache"].shape[2]):
        why_not = "the width of a state is dynamic"
    return decision(call, why_not)


def yields(_: Call) -> str:
    """Return why `auto` prefers a kernel: measurements go by the size of the first argument, which is a cache here."""
    return "IR computes an entry for every token, a kernel for those that close a group"


@lowers("compress_norm_rope_insert", can_lower, yields)
def lower(call: Any) -> None:
    """Build the IR. `call` is a `CompressArguments` of IR tensors."""
    cache, block_size, ratio, fmt = call.k_cache, call.block_size, call.ratio, call.cache_format
    (tokens,), (dim,) = call.state_slot_mapping.get_size(), call.norm_weight.get_size()
    load_saved, load_slot = load_i64(call.state_slot_mapping), load_i64(call.slot_mapping)
    load_position = load_i64(call.positions)

    def slot(index: Sequence[Expr]) -> Value:
        """Return the slot of a token's entry, padding unless the token closes a group."""
        position = load_position(index)
        # The remainder of a negative position is 0 or negative, so that the one of the next position is not enough.
        ends = ops.eq(ops.mod(ops.add(position, const(1, I64)), const(ratio, I64)), const(0, I64))
        saved = place_of(load_saved(index), call.state_cache.get_size()[0], call.state_block_size).valid
        closes = ops.logical_and(ops.logical_and(ops.ge(position, const(0, I64)), ends), saved)
        return ops.where(closes, load_slot(index), const(PAD_SLOT, I64))

    def closes(t: Expr) -> Value:
        return place_of(slot([t]), cache.get_size()[0], block_size).valid

    load = _normed(_Window.of(call, closes), tokens, int(dim), call.norm_weight, call.eps)
    # The angle is that of the first position of the group.
    rope = replace(
        Rope.of(call.positions, call.cos_sin_cache),
        load_position=lambda index: ops.sub(load_position(index), const(ratio - 1, I64)),
    )
    if fmt in ("indexer_fp8", "indexer_mxfp4") or call.hadamard:
        dtype = torch.bfloat16 if fmt in PAGE_LAYOUTS else cache.get_dtype()
        vector = _rotated(load, rope, int(dim), dtype, cache.get_device())
        if call.hadamard:
            vector = rounded_hadamard(vector, cache.get_device(), [tokens], int(dim), dtype)
        IndexerInsert(cache, vector, slot, tokens, int(dim), block_size).store(fmt)
        return
    insert = Insert(cache, load, slot, rope, tokens, int(dim), F32, block_size)
    if fmt == "fp8_ds_mla":
        insert.tiles()
    else:
        insert.rows(fmt, call.kv_scale)


@dataclass(frozen=True)
class _Window:
    """States that the entry of a token pools: `size` positions that end with the token's own."""

    load_state: Loader
    slot: RowLoad
    num_blocks: Expr
    block_size: int
    ratio: int
    device: torch.device

    @classmethod
    def of(cls, call: Any, closes: Callable[[Expr], Value]) -> _Window:
        """Return the windows of a call; `closes` returns whether a token has an entry."""
        load_position, load_request = load_i64(call.positions), load_i64(call.token_to_req)
        look_up = lookup_slot(call.state_block_table, call.state_block_size)
        states, last = call.state_cache, overlap_factor(call.ratio) * call.ratio - 1

        def slot(index: Sequence[Expr], w: Expr) -> Value:
            (t,) = index

            def position() -> Value:
                return ops.add(load_position([t]), ops.index_expr(w - last, I64))

            return ops.masked(closes(t), lambda: look_up(lambda: load_request([t]), position), PAD_SLOT)

        pages, device = states.get_size()[0], states.get_device()
        return cls(load_f32(states), slot, pages, call.state_block_size, call.ratio, device)

    @property
    def size(self) -> int:
        """Number of positions of a window."""
        return overlap_factor(self.ratio) * self.ratio

    def place(self, t: Expr, w: Expr) -> Slot:
        """Return the place of the w-th position in the cache, which is not valid if the position is absent."""
        return place_of(self.slot([t], w), self.num_blocks, self.block_size)

    def read(self, index: Sequence[Expr], w: Expr, part: int, dim: int, absent: float) -> Value:
        """Load the value (part 0) or score (1) of channel d at the w-th position. Groups have separate columns."""
        t, d = index
        groups = overlap_factor(self.ratio)

        def load() -> Value:
            slot = self.place(t, w)
            return self.load_state([slot.block, slot.offset, (part * groups + FloorDiv(w, self.ratio)) * dim + d])

        return ops.masked(self.place(t, w).valid, load, absent)

    def pooled(self, tokens: Expr, dim: int) -> Loader:
        """Return a loader of entries: per channel, values of the window weighted by the softmax of their scores.

        Channels with nothing present are 0.
        """
        ranges = [tokens, dim]

        def score(index: Sequence[Expr], w: Expr) -> Value:
            return self.read(index, w, 1, dim, -torch.inf)

        load_top = row_max(score, self.device, ranges, self.size)

        def weight(index: Sequence[Expr], w: Expr) -> Value:
            # With nothing present the maximum is -inf: select, never subtract.
            top = load_top(index)
            return ops.where(ops.eq(top, const(-torch.inf)), const(0.0), ops.exp(ops.sub(score(index, w), top)))

        load_total = row_sum(weight, self.device, ranges, self.size)
        load_sum = row_sum(
            lambda index, w: ops.mul(weight(index, w), self.read(index, w, 0, dim, 0.0)), self.device, ranges, self.size
        )

        def entry(index: Sequence[Expr]) -> Value:
            total = load_total(index)
            return ops.where(ops.eq(total, const(0.0)), const(0.0), ops.truediv(load_sum(index), total))

        entries = ir.Pointwise.create(device=self.device, dtype=F32, inner_fn=entry, ranges=ranges)
        entries.realize()
        loader: Loader = entries.make_loader()
        return loader


def _normed(window: _Window, tokens: Expr, dim: int, norm_weight: Any, eps: float) -> Loader:
    """Return a loader of the pooled and normalized entries."""
    load, load_weight = window.pooled(tokens, dim), load_f32(norm_weight)

    def square(index: Sequence[Expr], d: Expr) -> Value:
        value = load([*index, d])
        return ops.mul(value, value)

    load_sum = row_sum(square, window.device, [tokens], dim)

    def element(index: Sequence[Expr]) -> Value:
        t, d = index
        inverse = ops.rsqrt(ops.add(ops.truediv(load_sum([t]), const(dim)), const(eps)))
        return ops.mul(ops.mul(load(index), inverse), load_weight([d]))

    return element


def _rotated(load: Loader, rope: Rope, dim: int, dtype: torch.dtype, device: torch.device) -> RowLoad:
    """Return a function that gives an element of a token's rotated entry, rounded to `dtype`."""

    def element(index: Sequence[Expr], d: Expr) -> Value:
        (t,) = index
        return round_to(rope.apply(lambda e: load([t, e]), t, d, dim), dtype, device)

    return element
