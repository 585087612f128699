"""Vectors of the indexer in Inductor IR: how queries and keys are quantised, and the stores of one key per token.

reference/kv_format.py says what a stored row means. Vectors come rounded to bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..._compat import ops
from ...layout import E2M1_MAX, KV_AMAX_FLOOR, MX_TILE, MXFP4_AMAX_FLOOR, PAGE_LAYOUTS
from .common import I32, U8, Expr, Loader, RowLoad, Value, const, row_amax
from .paging import Store, page_address, place_of, scatter
from .quant import e2m1_code, e4m3_byte, ue8m0_byte, ue8m0_inverse, ue8m0_scale

PAIRS = MX_TILE // 2
"""Bytes of an MXFP4 tile."""
_SCALE_BYTES = PAGE_LAYOUTS["indexer_fp8"].scale


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """Rows with one scale each: its UE8M0 byte, int32, and element d over the scale, float32."""

    byte: Loader
    scaled: RowLoad


def fp8_rows(vector: RowLoad, device: torch.device, rows: Sequence[Expr], dim: int) -> Fp8Rows:
    """`indexer_fp8` of the vectors at `rows`."""
    load_amax = row_amax(vector, device, rows, dim)

    def byte(row: Sequence[Expr]) -> Value:
        return ue8m0_byte(ops.maximum(load_amax(row), const(KV_AMAX_FLOOR)))

    return Fp8Rows(byte, lambda row, d: ops.mul(vector(row, d), ue8m0_inverse(byte(row))))


@dataclass(frozen=True, slots=True)
class Mxfp4Rows:
    """Tiles with one scale each, indexed by [*row, tile]: the UE8M0 byte, int32, and two elements in a uint8."""

    byte: Loader
    packed: RowLoad


def mxfp4_rows(vector: RowLoad, device: torch.device, rows: Sequence[Expr], dim: int) -> Mxfp4Rows:
    """`indexer_mxfp4` of the vectors at `rows`. A lane is a pair of elements."""

    def element(tile: Sequence[Expr], pair: Expr, which: int) -> Value:
        *row, n = tile
        return vector(row, n * MX_TILE + 2 * pair + which)

    def larger(tile: Sequence[Expr], pair: Expr) -> Value:
        return ops.maximum(ops.abs(element(tile, pair, 0)), ops.abs(element(tile, pair, 1)))

    load_amax = row_amax(larger, device, [*rows, dim // MX_TILE], PAIRS)

    def byte(tile: Sequence[Expr]) -> Value:
        return ue8m0_byte(ops.maximum(load_amax(tile), const(MXFP4_AMAX_FLOOR)), E2M1_MAX)

    def packed(tile: Sequence[Expr], pair: Expr) -> Value:
        low, high = (e2m1_code(ops.mul(element(tile, pair, i), ue8m0_inverse(byte(tile)))) for i in range(2))
        return ops.to_dtype(ops.bitwise_or(low, ops.bitwise_left_shift(high, const(4, I32))), U8)

    return Mxfp4Rows(byte, packed)


@dataclass(frozen=True)
class IndexerInsert:
    """The stores of `tokens` keys of `dim` elements. `load_slot` gives the int64 slot of a token."""

    cache: Any
    vector: RowLoad
    load_slot: Loader
    tokens: Expr
    dim: int
    block_size: int

    def store(self, cache_format: str) -> None:
        """Store the keys in any format of the indexer."""
        {"indexer_fp8": self._fp8, "indexer_mxfp4": self._mxfp4, "plain": self._plain}[cache_format]()

    def _plain(self) -> None:
        def value(index: Sequence[Expr]) -> Value:
            return ops.to_dtype(self.vector(index[:1], index[1]), self.cache.get_dtype())

        def target(index: Sequence[Expr]) -> list[Expr]:
            where = place_of(self.load_slot(index[:1]), self.cache.get_size()[0], self.block_size)
            return [where.block, where.offset, index[1]]

        scatter(self.cache, [self.tokens, self.dim], [Store(self._valid, target, value)])

    def _fp8(self) -> None:
        """Values by element; the four bytes of the float32 scale by the first lanes."""
        rows = fp8_rows(self.vector, self.cache.get_device(), [self.tokens], self.dim)
        page = PAGE_LAYOUTS["indexer_fp8"]

        def scale_byte(index: Sequence[Expr]) -> Value:
            t, d = index
            bits = ops.to_dtype_bitcast(ue8m0_scale(rows.byte([t])), I32, torch.float32)
            shift = ops.mul(ops.index_expr(d, I32), const(8, I32))
            return ops.to_dtype(ops.bitwise_and(ops.bitwise_right_shift(bits, shift), const(0xFF, I32)), U8)

        data = self._store(lambda o, i: page.data_offset(o) + i[1], lambda i: e4m3_byte(rows.scaled(i[:1], i[1])))
        scale = self._store(
            lambda o, i: page.scale_offset(o, self.block_size) + i[1],
            scale_byte,
            lambda i: ops.lt(ops.index_expr(i[1], I32), const(_SCALE_BYTES, I32)),
        )
        scatter(self.cache, [self.tokens, self.dim], [data, scale])

    def _mxfp4(self) -> None:
        """A byte of two elements by each lane; the scale of a tile by its first."""
        rows = mxfp4_rows(self.vector, self.cache.get_device(), [self.tokens], self.dim)
        page = PAGE_LAYOUTS["indexer_mxfp4"]
        data = self._store(lambda o, i: page.data_offset(o) + i[1] * PAIRS + i[2], lambda i: rows.packed(i[:2], i[2]))
        scale = self._store(
            lambda o, i: page.scale_offset(o, self.block_size) + i[1],
            lambda i: ops.to_dtype(rows.byte(i[:2]), U8),
            lambda i: ops.eq(ops.index_expr(i[2], I32), const(0, I32)),
        )
        scatter(self.cache, [self.tokens, self.dim // MX_TILE, PAIRS], [data, scale])

    def _valid(self, index: Sequence[Expr]) -> Value:
        return place_of(self.load_slot(index[:1]), self.cache.get_size()[0], self.block_size).valid

    def _store(
        self, column: Callable[[Expr, Sequence[Expr]], Expr], value: Loader, only: Loader | None = None
    ) -> Store:
        """Store of `value` where `only` says so, at a byte of the page by the offset of the slot and the index."""

        def target(index: Sequence[Expr]) -> list[Expr]:
            where = place_of(self.load_slot(index[:1]), self.cache.get_size()[0], self.block_size)
            return page_address(self.cache, where.block, column(where.offset, index))

        def keep(index: Sequence[Expr]) -> Value:
            valid = self._valid(index)
            return valid if only is None else ops.logical_and(valid, only(index))

        return Store(keep, target, value)
