"""Inductor IR for `q_norm_rope`, `kv_rope_insert` and `q_norm_rope_kv_insert`: one kernel for q, one for kv.

q: a row sum over [T, H | D] and a pointwise body over [T, H, D]. kv: for `fp8_ds_mla` a row maximum over
[T, tiles | KV_TILE] and masked byte stores over [T, tiles, KV_TILE], the rope tile included so that both have one
iteration space and fuse; for row caches a masked store over [T, D]. Strided inputs are read where they are.
"""

from __future__ import annotations

from typing import Any

import torch

from .._compat import ir, ops
from ..decisions import Call, Decision
from ..layout import FP8_DS_MLA, FP8_DS_MLA_TILES, FP8_MAX, KV_AMAX_FLOOR, KV_TILE, NOPE_DIM, ROPE_DIM
from .ir_common import (
    I32,
    U8,
    Expr,
    Load,
    Slot,
    Store,
    Value,
    as_f32,
    bf16_bits,
    clamp,
    const,
    e4m3_byte,
    position_row,
    rotated,
    round_to,
    row_amax,
    row_sum,
    scatter,
    slot_of,
    static,
    ue8m0_byte,
    ue8m0_inverse,
    with_rope,
)
from .registry import lowers

_FUSES = "Inductor IR, fuses with what comes before and after"
_FIRST_FP8 = 89  # compute capability from which Triton converts to e4m3
_KV_TILES = FP8_DS_MLA_TILES + 1  # the tiles that carry a scale, and the rope dims


def _can_lower(call: Call, vector: str, fp8: bool) -> str:
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
    if fp8 and call.architecture.startswith("cuda sm_") and int(call.architecture[len("cuda sm_") :]) < _FIRST_FP8:
        return f"Triton converts to e4m3 from sm_{_FIRST_FP8} on, this is {call.architecture}"
    return ""


def can_lower_q(call: Call) -> Decision:
    """IR for static head and rope dims; e4m3 output on Triton only."""
    why_not = _can_lower(call, "q", call.arguments["q_scale"] is not None)
    if not why_not and call.arguments["padded_heads"] and not static(call.arguments["q"].shape[1]):
        why_not = "a dynamic number of heads cannot be padded"
    return call.choose("eager", why_not) if why_not else call.choose("ir", _FUSES)


def can_lower_kv(call: Call) -> Decision:
    """IR on Triton, where stores can be predicated."""
    fmt = call.arguments["cache_format"]
    if call.codegen == "cpp":
        return call.choose("eager", "the C++ backend cannot predicate stores")
    why_not = _can_lower(call, "kv", fmt != "plain")
    if not why_not and fmt == "fp8_ds_mla" and call.arguments["cos_sin_cache"].shape[1] != ROPE_DIM:
        why_not = f"an fp8_ds_mla row is lowered for a rope dim of {ROPE_DIM}"
    return call.choose("eager", why_not) if why_not else call.choose("ir", _FUSES)


def can_lower_both(call: Call) -> Decision:
    """IR where both halves have it."""
    kv = can_lower_kv(call)
    return kv if kv.impl != "ir" else can_lower_q(call)


@lowers("q_norm_rope", can_lower_q)
def lower_q(
    q: Any, positions: Any, cos_sin_cache: Any, eps: float, padded_heads: int = 0, q_scale: Any | None = None
) -> Any:
    """Build the IR of `q_norm_rope`."""
    tokens, heads, dim = q.get_size()
    dim, rope = int(dim), int(cos_sin_cache.get_size()[1])
    device = q.get_device()
    # Read for the norm and, in the rope dims, by two lanes: a long producer is better computed before.
    q.mark_reuse(2)
    load_q, load_position, load_table = q.make_loader(), positions.make_loader(), cos_sin_cache.make_loader()
    padded = padded_heads > heads if padded_heads else False
    out_heads = padded_heads if padded else heads

    def live(h: Expr, body: Any) -> Value:
        """`body()`, or 0 for a head that only pads."""
        if not padded:
            return body()
        return ops.masked(ops.lt(ops.index_expr(h, I32), ops.index_expr(heads, I32)), body, 0.0)

    def square(index: Any, d: Expr) -> Value:
        value = live(index[1], lambda: as_f32(load_q([*index, d])))
        return ops.mul(value, value)

    load_sum = row_sum(square, device, [tokens, out_heads], dim)
    inverse = _inverse_scale(q_scale)

    def normed(t: Expr, h: Expr) -> Load:
        def load(d: Expr) -> Value:
            mean = ops.truediv(load_sum([t, h]), const(dim))
            return ops.mul(as_f32(load_q([t, h, d])), ops.rsqrt(ops.add(mean, const(eps))))

        return load

    def element(index: Any) -> Value:
        t, h, d = index

        def body() -> Value:
            load = normed(t, h)
            value = _rope(load, load_position, load_table, cos_sin_cache.get_size()[0], t, d, dim, rope)
            if q_scale is not None:
                value = clamp(ops.mul(value, inverse()), const(-FP8_MAX), const(FP8_MAX))
            return value

        return ops.to_dtype(live(h, body), dtype)

    dtype = q.get_dtype() if q_scale is None else torch.float8_e4m3fn
    return ir.Pointwise.create(device=device, dtype=dtype, inner_fn=element, ranges=[tokens, out_heads, dim])


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
    dim = int(kv.get_size()[1])
    # Read once for the maximum and once for each store: a long producer is better computed before.
    kv.mark_reuse(2)
    load_kv, load_slot = kv.make_loader(), slot_mapping.make_loader()
    load_position, load_table = positions.make_loader(), cos_sin_cache.make_loader()
    table_rows, rope = cos_sin_cache.get_size()[0], int(cos_sin_cache.get_size()[1])
    num_blocks, tokens = k_cache.get_size()[0], slot_mapping.get_size()[0]

    def vector(t: Expr) -> Load:
        return lambda d: as_f32(load_kv([t, d]))

    def slot(t: Expr) -> Slot:
        return slot_of(load_slot, t, num_blocks, block_size)

    if cache_format == "fp8_ds_mla":

        def rope_element(t: Expr, d: Expr) -> Value:
            row = position_row(load_position, t, table_rows)
            return rotated(vector(t), load_table, row, d, NOPE_DIM, rope)

        _store_fp8_ds_mla(kv, k_cache, tokens, vector, rope_element, slot, block_size)
        return
    inverse = _inverse_scale(kv_scale)

    def value(index: Any) -> Value:
        t, d = index
        x = _rope(vector(t), load_position, load_table, table_rows, t, d, dim, rope)
        if cache_format == "plain":
            return ops.to_dtype(x, k_cache.get_dtype())
        return e4m3_byte(x if kv_scale is None else ops.mul(x, inverse()))

    store = Store(
        keep=lambda index: slot(index[0]).valid,
        target=lambda index: [slot(index[0]).block, slot(index[0]).offset, index[1]],
        value=value,
    )
    scatter(k_cache, [tokens, dim], [store])


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
    """Build the IR of both halves."""
    lower_kv(kv, k_cache, slot_mapping, positions, cos_sin_cache, block_size, cache_format, kv_scale)
    return lower_q(q, positions, cos_sin_cache, eps, padded_heads, q_scale)


def _rope(
    load: Load, load_position: Any, load_table: Any, table_rows: Expr, t: Expr, d: Expr, dim: int, rope: int
) -> Value:
    """Element `d` of token `t`'s vector after RoPE on its last `rope` dims."""
    nope = dim - rope
    return with_rope(
        load,
        lambda e: rotated(load, load_table, position_row(load_position, t, table_rows), e, nope, rope),
        d,
        nope,
    )


def _inverse_scale(scale: Any | None) -> Any:
    """Function that gives 1 / scale of a one-element tensor."""
    if scale is None:
        return None
    load, zeros = scale.make_loader(), [0] * len(scale.get_size())
    return lambda: ops.truediv(const(1.0), load(zeros))


def _store_fp8_ds_mla(
    kv: Any, k_cache: Any, tokens: Expr, vector: Any, rope_element: Any, slot: Any, block_size: int
) -> None:
    """Store rows of e4m3 tiles, bfloat16 rope dims and UE8M0 bytes; see layout.PageLayout for the addresses."""
    needs_rounding = kv.get_dtype() is not torch.bfloat16

    def nope_element(t: Expr, tile: Expr, d: Expr) -> Value:
        value = vector(t)(tile * KV_TILE + d)
        return round_to(value, torch.bfloat16) if needs_rounding else value

    load_amax = row_amax(lambda index, r: nope_element(*index, r), kv.get_device(), [tokens, _KV_TILES], KV_TILE)

    def scale_byte(t: Expr, tile: Expr) -> Value:
        return ue8m0_byte(ops.maximum(load_amax([t, tile]), const(KV_AMAX_FLOOR)))

    def address(t: Expr, byte: Any) -> list[Expr]:
        where = slot(t)
        # A page is bytes, whatever the cache's shape calls them: only its first and last index address it.
        middle = [0] * (len(k_cache.get_size()) - 2)
        return [where.block, *middle, byte(where.offset)]

    def keep(index: Any, *conditions: Value) -> Value:
        result = slot(index[0]).valid
        for condition in conditions:
            result = ops.logical_and(result, condition)
        return result

    def in_rope(index: Any) -> Value:
        return ops.eq(ops.index_expr(index[1], I32), const(FP8_DS_MLA_TILES, I32))

    def rope_byte(which: int) -> Store:
        def value(index: Any) -> Value:
            bits = bf16_bits(rope_element(index[0], NOPE_DIM + index[2]))
            return ops.to_dtype(
                ops.bitwise_and(ops.bitwise_right_shift(bits, const(8 * which, I32)), const(0xFF, I32)), U8
            )

        return Store(
            keep=lambda index: keep(index, in_rope(index)),
            target=lambda index: address(
                index[0], lambda offset: FP8_DS_MLA.data_offset(offset) + NOPE_DIM + 2 * index[2] + which
            ),
            value=value,
        )

    nope_bytes = Store(
        keep=lambda index: keep(index, ops.logical_not(in_rope(index))),
        target=lambda index: address(
            index[0], lambda offset: FP8_DS_MLA.data_offset(offset) + index[1] * KV_TILE + index[2]
        ),
        value=lambda index: e4m3_byte(ops.mul(nope_element(*index), ue8m0_inverse(scale_byte(index[0], index[1])))),
    )
    scale_bytes = Store(
        # One lane per tile; the byte of the rope tile is the row's zero pad.
        keep=lambda index: keep(index, ops.eq(ops.index_expr(index[2], I32), const(0, I32))),
        target=lambda index: address(index[0], lambda offset: FP8_DS_MLA.scale_offset(offset, block_size) + index[1]),
        value=lambda index: ops.to_dtype(ops.where(in_rope(index), const(0, I32), scale_byte(index[0], index[1])), U8),
    )
    scatter(k_cache, [tokens, _KV_TILES, KV_TILE], [nope_bytes, rope_byte(0), rope_byte(1), scale_bytes])
