"""Inductor IR for `compress_norm_rope_insert`: three kernels over all tokens, and two more for a Hadamard transform.

A softmax over the window for [T, D | W], a row sum over [T | D], and the stores of ir_insert.py or ir_indexer.py. A
token that closes no group reads no state and stores nothing, but has its lanes: the hand-written kernel looks for those
that do. On an H200, us by IR and by the kernel where every one of 1 / 128 tokens closes a group: ratio 4, 6.3 and 4.1 /
10.3 and 4.2; ratio 128, 8.2 and 5.1 / 65 and 26; of 4,096 tokens of a prompt 241 and 14; 2789 and 9
(`dsv4 bench indexer --only op=compress_norm_rope_insert --only impl=ir,triton`).
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """IR on Triton, where stores can be predicated, for static dims."""
    fmt = call.arguments["cache_format"]
    why_not = backend_lacks(call, fp8=fmt not in ("plain", "indexer_mxfp4"), predicated=True)
    why_not = why_not or cannot_rotate(call, "norm_weight")
    if not why_not and fmt == "fp8_ds_mla" and call.arguments["cos_sin_cache"].shape[1] != ROPE_DIM:
        why_not = f"an fp8_ds_mla row is lowered for a rope dim of {ROPE_DIM}"
    if not why_not and not static(call.arguments["state_cache"].shape[2]):
        why_not = "the width of a state is dynamic"
    return decision(call, why_not)


def yields(_: Call) -> str:
    """What is measured goes by the size of the first argument, which is a cache here."""
    return "IR computes an entry for every token, a kernel for those that close a group"


@lowers("compress_norm_rope_insert", can_lower, yields)
def lower(
    state_cache: Any,
    state_slot_mapping: Any,
    state_block_table: Any,
    token_to_req: Any,
    positions: Any,
    slot_mapping: Any,
    norm_weight: Any,
    cos_sin_cache: Any,
    k_cache: Any,
    eps: float,
    ratio: int,
    state_block_size: int,
    block_size: int,
    cache_format: str,
    hadamard: bool = False,
    kv_scale: Any | None = None,
) -> None:
    """Build the IR."""
    (tokens,), (dim,) = state_slot_mapping.get_size(), norm_weight.get_size()
    load_saved, load_slot, load_position = (load_i64(x) for x in (state_slot_mapping, slot_mapping, positions))

    def slot(index: Sequence[Expr]) -> Value:
        """Where the entry of a token goes, padding unless the token closes a group."""
        position = load_position(index)
        # Of a negative position the remainder is 0 or negative, so that of the next one alone says nothing.
        ends = ops.eq(ops.mod(ops.add(position, const(1, I64)), const(ratio, I64)), const(0, I64))
        saved = place_of(load_saved(index), state_cache.get_size()[0], state_block_size).valid
        closes = ops.logical_and(ops.logical_and(ops.ge(position, const(0, I64)), ends), saved)
        return ops.where(closes, load_slot(index), const(PAD_SLOT, I64))

    def closes(t: Expr) -> Value:
        return place_of(slot([t]), k_cache.get_size()[0], block_size).valid

    window = _Window.of(state_cache, state_block_table, token_to_req, positions, closes, ratio, state_block_size)
    load = _normed(window, tokens, int(dim), norm_weight, eps)
    # The angle is that of the first position of the group.
    rope = replace(
        Rope.of(positions, cos_sin_cache),
        load_position=lambda index: ops.sub(load_position(index), const(ratio - 1, I64)),
    )
    if cache_format in ("indexer_fp8", "indexer_mxfp4") or hadamard:
        dtype = torch.bfloat16 if cache_format in PAGE_LAYOUTS else k_cache.get_dtype()
        vector = _rotated(load, rope, int(dim), dtype, k_cache.get_device())
        if hadamard:
            vector = rounded_hadamard(vector, k_cache.get_device(), [tokens], int(dim), dtype)
        IndexerInsert(k_cache, vector, slot, tokens, int(dim), block_size).store(cache_format)
        return
    insert = Insert(k_cache, load, slot, rope, tokens, int(dim), F32, block_size)
    if cache_format == "fp8_ds_mla":
        insert.tiles()
    else:
        insert.rows(cache_format, kv_scale)


@dataclass(frozen=True)
class _Window:
    """The states that the entry of a token pools: `size` positions, the token's own the last of them."""

    load_state: Loader
    slot: RowLoad
    num_blocks: Expr
    block_size: int
    ratio: int
    device: torch.device

    @classmethod
    def of(
        cls, state_cache: Any, block_table: Any, token_to_req: Any, positions: Any, closes: Any, ratio: int, block: int
    ) -> _Window:
        """From the IR of the op's arguments; `closes` says of a token whether it has an entry."""
        load_position, load_request, look_up = (
            load_i64(positions),
            load_i64(token_to_req),
            lookup_slot(block_table, block),
        )
        last = overlap_factor(ratio) * ratio - 1

        def slot(index: Sequence[Expr], w: Expr) -> Value:
            (t,) = index

            def position() -> Value:
                return ops.add(load_position([t]), ops.index_expr(w - last, I64))

            return ops.masked(closes(t), lambda: look_up(lambda: load_request([t]), position), PAD_SLOT)

        return cls(load_f32(state_cache), slot, state_cache.get_size()[0], block, ratio, state_cache.get_device())

    @property
    def size(self) -> int:
        """Positions of the window."""
        return overlap_factor(self.ratio) * self.ratio

    def place(self, t: Expr, w: Expr) -> Slot:
        """Where the w-th position is in the cache; it is absent where this is not valid."""
        return place_of(self.slot([t], w), self.num_blocks, self.block_size)

    def read(self, index: Sequence[Expr], w: Expr, part: int, dim: int, absent: float) -> Value:
        """Value (part 0) or score (1) of channel d at the w-th position. Each group has columns of its own."""
        t, d = index
        groups = overlap_factor(self.ratio)

        def load() -> Value:
            place = self.place(t, w)
            return self.load_state([place.block, place.offset, (part * groups + FloorDiv(w, self.ratio)) * dim + d])

        return ops.masked(self.place(t, w).valid, load, absent)

    def pooled(self, tokens: Expr, dim: int) -> Loader:
        """Loader of the entries: per channel the sum of the window's values, weighted by the softmax of its scores.

        Zero where nothing is present.
        """
        ranges = [tokens, dim]

        def score(index: Sequence[Expr], w: Expr) -> Value:
            return self.read(index, w, 1, dim, -torch.inf)

        load_top = row_max(score, self.device, ranges, self.size)

        def weight(index: Sequence[Expr], w: Expr) -> Value:
            # Where nothing is present the top is infinite too: select, never subtract.
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
    """Loader of the pooled entries, normalised."""
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
    """Element of the rotated entry of a token, rounded to `dtype`."""

    def element(index: Sequence[Expr], d: Expr) -> Value:
        (t,) = index
        return round_to(rope.apply(lambda e: load([t, e]), t, d, dim), dtype, device)

    return element
