"""Inductor IR for `q_norm_rope`, `kv_rope_insert` and `q_norm_rope_kv_insert`: one kernel for q, one for kv.

q: a row sum over [T, H | D] and a pointwise body over [T, H, D]. kv: for `fp8_ds_mla` a row maximum over
[T, tiles | KV_TILE] and masked byte stores over [T, tiles, KV_TILE], the rope tile included so that both have one
iteration space and fuse; for row caches one masked store over [T, D]. Strided inputs are read where they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .._compat import codegen_of, ir, ops
from ..decisions import Call, Decision
from ..layout import FP8_DS_MLA, FP8_DS_MLA_TILES, FP8_MAX, KV_AMAX_FLOOR, KV_TILE, NOPE_DIM, ROPE_DIM
from .ir_common import (
    I32,
    U8,
    Expr,
    Load,
    Loader,
    Rope,
    Slot,
    Store,
    Value,
    as_f32,
    bf16_bits,
    clamp,
    const,
    e4m3_byte,
    round_to,
    row_amax,
    row_sum,
    scatter,
    slot_of,
    static,
    ue8m0_byte,
    ue8m0_inverse,
)
from .registry import call_reference, lowers

_FUSES = "Inductor IR, fuses with what comes before and after"
_FIRST_FP8 = 89  # compute capability from which Triton converts to e4m3
_TILES = FP8_DS_MLA_TILES + 1  # the tiles that carry a scale, and the rope dims


def _why_not(call: Call, vector: str, fp8: bool) -> str:
    """Why the vectors of argument `vector` cannot be lowered, or "" when they can."""
    dim, rope = call.arguments[vector].shape[-1], call.arguments["cos_sin_cache"].shape[-1]
    if call.codegen not in ("cpp", "triton"):
        return f"lowered for C++ and Triton, not for {call.codegen}"
    if not static(dim, rope):
        return "the head dim or the rope dim is dynamic"
    if dim % 2:
        return "the head dim is odd"
    if fp8 and call.codegen == "cpp":
        return "the C++ backend does not round to e4m3"
    _, _, capability = call.architecture.partition("sm_")
    if fp8 and capability and int(capability) < _FIRST_FP8:
        return f"Triton converts to e4m3 from sm_{_FIRST_FP8} on, this is {call.architecture}"
    return ""


def can_lower_q(call: Call) -> Decision:
    """IR for static head and rope dims; e4m3 output on Triton only."""
    why_not = _why_not(call, "q", call.arguments["q_scale"] is not None)
    if not why_not and call.arguments["padded_heads"] and not static(call.arguments["q"].shape[1]):
        why_not = "a dynamic number of heads cannot be padded"
    return call.choose("eager", why_not) if why_not else call.choose("ir", _FUSES)


def can_lower_kv(call: Call) -> Decision:
    """IR on Triton, where stores can be predicated."""
    fmt = call.arguments["cache_format"]
    if call.codegen == "cpp":
        return call.choose("eager", "the C++ backend cannot predicate stores")
    why_not = _why_not(call, "kv", fmt != "plain")
    if not why_not and fmt == "fp8_ds_mla" and call.arguments["cos_sin_cache"].shape[1] != ROPE_DIM:
        why_not = f"an fp8_ds_mla row is lowered for a rope dim of {ROPE_DIM}"
    return call.choose("eager", why_not) if why_not else call.choose("ir", _FUSES)


def can_lower_both(call: Call) -> Decision:
    """IR where q has it; kv too, but on C++, where no kernel could take both instead."""
    q, kv = can_lower_q(call), can_lower_kv(call)
    if q.impl != "ir" or kv.impl == "ir":
        return q
    return (
        call.choose("ir", f"Inductor IR for q; the reference inserts kv: {kv.reason}") if call.codegen == "cpp" else kv
    )


@lowers("q_norm_rope", can_lower_q)
def lower_q(
    q: Any, positions: Any, cos_sin_cache: Any, eps: float, padded_heads: int = 0, q_scale: Any | None = None
) -> Any:
    """Build the IR of `q_norm_rope`."""
    tokens, heads, dim = q.get_size()
    dim, padded = int(dim), bool(padded_heads and padded_heads > heads)
    out_heads = padded_heads if padded else heads
    dtype = q.get_dtype() if q_scale is None else torch.float8_e4m3fn
    # Read for the norm and, in the rope dims, by two lanes: a long producer is better computed before.
    q.mark_reuse(2)
    load_q, rope, inverse = q.make_loader(), Rope.of(positions, cos_sin_cache), _inverse_scale(q_scale)

    def live(h: Expr, body: Callable[[], Value]) -> Value:
        """`body()`, or 0 for a head that only pads."""
        if not padded:
            return body()
        return ops.masked(ops.lt(ops.index_expr(h, I32), ops.index_expr(heads, I32)), body, 0.0)

    def square(index: Sequence[Expr], d: Expr) -> Value:
        value = live(index[1], lambda: as_f32(load_q([*index, d])))
        return ops.mul(value, value)

    load_sum = row_sum(square, q.get_device(), [tokens, out_heads], dim)

    def normed(t: Expr, h: Expr) -> Load:
        def load(d: Expr) -> Value:
            mean = ops.truediv(load_sum([t, h]), const(dim))
            return ops.mul(as_f32(load_q([t, h, d])), ops.rsqrt(ops.add(mean, const(eps))))

        return load

    def element(index: Sequence[Expr]) -> Value:
        t, h, d = index

        def body() -> Value:
            value = rope.apply(normed(t, h), t, d, dim)
            if inverse is None:
                return value
            return clamp(ops.mul(value, inverse()), const(-FP8_MAX), const(FP8_MAX))

        return ops.to_dtype(live(h, body), dtype)

    return ir.Pointwise.create(device=q.get_device(), dtype=dtype, inner_fn=element, ranges=[tokens, out_heads, dim])


@lowers("kv_rope_insert", can_lower_kv)
def lower_kv(
    kv: Any,
    k_cache: Any,
    slot_mapping: Any,
    positions: Any,
    cos_sin_cache: Any,
    block_size: int,
    cache_format: str,
    kv_scale: Any | None = None,
) -> None:
    """Build the IR of `kv_rope_insert`."""
    # Read for the maximum and by several stores: a long producer is better computed before.
    kv.mark_reuse(2)
    insert = _Insert(
        cache=k_cache,
        load_kv=kv.make_loader(),
        load_slot=slot_mapping.make_loader(),
        rope=Rope.of(positions, cos_sin_cache),
        tokens=slot_mapping.get_size()[0],
        dim=int(kv.get_size()[1]),
        dtype=kv.get_dtype(),
        block_size=block_size,
    )
    if cache_format == "fp8_ds_mla":
        insert.tiles()
    else:
        insert.rows(cache_format, kv_scale)


@lowers("q_norm_rope_kv_insert", can_lower_both)
def lower_both(
    q: Any,
    kv: Any,
    k_cache: Any,
    slot_mapping: Any,
    positions: Any,
    cos_sin_cache: Any,
    eps: float,
    block_size: int,
    cache_format: str,
    padded_heads: int = 0,
    q_scale: Any | None = None,
    kv_scale: Any | None = None,
) -> Any:
    """Build the IR of both halves, or on C++ of q alone."""
    insert = functools.partial(call_reference, "kv_rope_insert") if codegen_of(q.get_device()) == "cpp" else lower_kv
    insert(kv, k_cache, slot_mapping, positions, cos_sin_cache, block_size, cache_format, kv_scale)
    return lower_q(q, positions, cos_sin_cache, eps, padded_heads, q_scale)


def _inverse_scale(scale: Any | None) -> Callable[[], Value] | None:
    """Function that gives 1 / scale of a one-element tensor."""
    if scale is None:
        return None
    load, zeros = scale.make_loader(), [0] * len(scale.get_size())
    return lambda: ops.truediv(const(1.0), load(zeros))


@dataclass(frozen=True)
class _Insert:
    """The stores of `tokens` vectors of `dim` elements in `dtype`. An iteration index begins with the token."""

    cache: Any
    load_kv: Loader
    load_slot: Loader
    rope: Rope
    tokens: Expr
    dim: int
    dtype: torch.dtype
    block_size: int

    def vector(self, t: Expr) -> Load:
        """The token's vector before RoPE."""
        return lambda d: as_f32(self.load_kv([t, d]))

    def slot(self, t: Expr) -> Slot:
        """Where the token goes."""
        return slot_of(self.load_slot, t, self.cache.get_size()[0], self.block_size)

    def rows(self, cache_format: str, kv_scale: Any | None) -> None:
        """Store whole rows: `plain` in the cache's dtype, `fp8` as e4m3 of the value over a per-tensor scale."""
        inverse = _inverse_scale(kv_scale)

        def target(index: Sequence[Expr]) -> list[Expr]:
            slot = self.slot(index[0])
            return [slot.block, slot.offset, index[1]]

        def value(index: Sequence[Expr]) -> Value:
            x = self.rope.apply(self.vector(index[0]), index[0], index[1], self.dim)
            if cache_format == "plain":
                return ops.to_dtype(x, self.cache.get_dtype())
            return e4m3_byte(x if inverse is None else ops.mul(x, inverse()))

        scatter(self.cache, [self.tokens, self.dim], [Store(lambda index: self.slot(index[0]).valid, target, value)])

    def tiles(self) -> None:
        """Store `fp8_ds_mla` rows: e4m3 tiles, bfloat16 rope dims, UE8M0 bytes; layout.PageLayout has the addresses."""

        def nope(t: Expr, tile: Expr, d: Expr) -> Value:
            value = self.vector(t)(tile * KV_TILE + d)
            return value if self.dtype is torch.bfloat16 else round_to(value, torch.bfloat16)

        device = self.cache.get_device()
        load_amax = row_amax(lambda index, d: nope(index[0], index[1], d), device, [self.tokens, _TILES], KV_TILE)

        def scale_byte(t: Expr, tile: Expr) -> Value:
            return ue8m0_byte(ops.maximum(load_amax([t, tile]), const(KV_AMAX_FLOOR)))

        def nope_byte(index: Sequence[Expr]) -> Value:
            return e4m3_byte(ops.mul(nope(*index), ue8m0_inverse(scale_byte(index[0], index[1]))))

        def rope_byte(which: int) -> Loader:
            def value(index: Sequence[Expr]) -> Value:
                t, _, d = index
                bits = bf16_bits(self.rope.rotated(self.vector(t), t, NOPE_DIM + d, NOPE_DIM))
                shifted = ops.bitwise_right_shift(bits, const(8 * which, I32))
                return ops.to_dtype(ops.bitwise_and(shifted, const(0xFF, I32)), U8)

            return value

        def stored_scale(index: Sequence[Expr]) -> Value:
            # The byte of the rope tile is the row's zero pad.
            return ops.to_dtype(ops.where(_in_rope(index), const(0, I32), scale_byte(index[0], index[1])), U8)

        def store(only: Callable[..., Value], column: Callable[..., Expr], value: Callable[..., Value]) -> Store:
            return Store(
                keep=lambda index: ops.logical_and(self.slot(index[0]).valid, only(index)),
                target=lambda index: self.address(index[0], lambda offset: column(offset, index[1], index[2])),
                value=value,
            )

        data, scale = FP8_DS_MLA.data_offset, FP8_DS_MLA.scale_offset
        stores = [
            store(_in_nope, lambda offset, tile, d: data(offset) + tile * KV_TILE + d, nope_byte),
            store(_in_rope, lambda offset, tile, d: data(offset) + NOPE_DIM + 2 * d, rope_byte(0)),
            store(_in_rope, lambda offset, tile, d: data(offset) + NOPE_DIM + 2 * d + 1, rope_byte(1)),
            store(_first_of_tile, lambda offset, tile, d: scale(offset, self.block_size) + tile, stored_scale),
        ]
        scatter(self.cache, [self.tokens, _TILES, KV_TILE], stores)

    def address(self, t: Expr, column: Callable[[Expr], Expr]) -> list[Expr]:
        """Index of a byte of the token's page; `column` turns the token's offset in the page into it.

        A page is bytes, whatever shape the cache gives it: the first and the last index are its address.
        """
        slot = self.slot(t)
        return [slot.block, *[0] * (len(self.cache.get_size()) - 2), column(slot.offset)]


def _in_rope(index: Sequence[Expr]) -> Value:
    return ops.eq(ops.index_expr(index[1], I32), const(FP8_DS_MLA_TILES, I32))


def _in_nope(index: Sequence[Expr]) -> Value:
    return ops.lt(ops.index_expr(index[1], I32), const(FP8_DS_MLA_TILES, I32))


def _first_of_tile(index: Sequence[Expr]) -> Value:
    return ops.eq(ops.index_expr(index[2], I32), const(0, I32))
