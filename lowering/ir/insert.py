"""Stores of one key/value vector per token into a paged cache; reference/kv_format.py says what a stored row means."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..._compat import ops
from ...layout import FP8_DS_MLA, FP8_DS_MLA_TILES, KV_AMAX_FLOOR, KV_TILE, NOPE_DIM
from .common import I32, U8, Expr, Load, Loader, Rope, Value, const, load_f32, round_to, row_amax
from .paging import Slot, Store, page_address, scatter, slot_of
from .quant import bf16_bits, e4m3_byte, inverse_scale, ue8m0_byte, ue8m0_inverse

_TILES = FP8_DS_MLA_TILES + 1  # the tiles that carry a scale, and the rope dims


@dataclass(frozen=True)
class Insert:
    """The stores of `tokens` vectors of `dim` elements in `dtype`. An iteration index begins with the token.

    `rope` is None for vectors that are rotated already.
    """

    cache: Any
    load_kv: Loader
    load_slot: Loader
    rope: Rope | None
    tokens: Expr
    dim: int
    dtype: torch.dtype
    block_size: int

    @classmethod
    def of(cls, kv: Any, cache: Any, slot_mapping: Any, rope: Rope | None, block_size: int) -> Insert:
        """From the IR of the op's arguments."""
        # Read for the maximum and by several stores: a long producer is better computed before.
        kv.mark_reuse(2)
        return cls(
            cache=cache,
            load_kv=load_f32(kv),
            load_slot=slot_mapping.make_loader(),
            rope=rope,
            tokens=slot_mapping.get_size()[0],
            dim=int(kv.get_size()[1]),
            dtype=kv.get_dtype(),
            block_size=block_size,
        )

    def vector(self, t: Expr) -> Load:
        """The token's vector before RoPE."""
        return lambda d: self.load_kv([t, d])

    def slot(self, t: Expr) -> Slot:
        """Where the token goes."""
        return slot_of(self.load_slot, t, self.cache.get_size()[0], self.block_size)

    def rows(self, cache_format: str, kv_scale: Any | None) -> None:
        """Store whole rows: `plain` in the cache's dtype, `fp8` as e4m3 of the value over a per-tensor scale."""
        inverse = inverse_scale(kv_scale)

        def target(index: Sequence[Expr]) -> list[Expr]:
            slot = self.slot(index[0])
            return [slot.block, slot.offset, index[1]]

        def value(index: Sequence[Expr]) -> Value:
            t, d = index
            x = self.rope.apply(self.vector(t), t, d, self.dim) if self.rope else self.vector(t)(d)
            if cache_format == "plain":
                return ops.to_dtype(x, self.cache.get_dtype())
            return e4m3_byte(x if inverse is None else ops.mul(x, inverse()))

        scatter(self.cache, [self.tokens, self.dim], [Store(lambda index: self.slot(index[0]).valid, target, value)])

    def tiles(self) -> None:
        """Store `fp8_ds_mla` rows: e4m3 tiles, bfloat16 rope dims, UE8M0 bytes; layout.PageLayout has the addresses.

        A row maximum over [T, tiles | KV_TILE] and byte stores over [T, tiles, KV_TILE]. The rope dims are a tile
        too, with an unused maximum: so both have one iteration space and fuse.
        """

        device = self.cache.get_device()

        def nope(t: Expr, tile: Expr, d: Expr) -> Value:
            value = self.vector(t)(tile * KV_TILE + d)
            return value if self.dtype is torch.bfloat16 else round_to(value, torch.bfloat16, device)

        load_amax = row_amax(lambda index, d: nope(index[0], index[1], d), device, [self.tokens, _TILES], KV_TILE)

        def scale_byte(t: Expr, tile: Expr) -> Value:
            return ue8m0_byte(ops.maximum(load_amax([t, tile]), const(KV_AMAX_FLOOR)))

        def nope_byte(index: Sequence[Expr]) -> Value:
            return e4m3_byte(ops.mul(nope(*index), ue8m0_inverse(scale_byte(index[0], index[1]))))

        def rope_byte(which: int) -> Loader:
            def value(index: Sequence[Expr]) -> Value:
                t, _, d = index
                load, element = self.vector(t), NOPE_DIM + d
                bits = bf16_bits(self.rope.rotated(load, t, element, NOPE_DIM) if self.rope else load(element))
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
        """Index of a byte of the token's page; `column` turns the token's offset in the page into it."""
        slot = self.slot(t)
        return page_address(self.cache, slot.block, column(slot.offset))


def _in_rope(index: Sequence[Expr]) -> Value:
    return ops.eq(ops.index_expr(index[1], I32), const(FP8_DS_MLA_TILES, I32))


def _in_nope(index: Sequence[Expr]) -> Value:
    return ops.lt(ops.index_expr(index[1], I32), const(FP8_DS_MLA_TILES, I32))


def _first_of_tile(index: Sequence[Expr]) -> Value:
    return ops.eq(ops.index_expr(index[2], I32), const(0, I32))
