"""Inductor IR for `inv_rope` and `inv_rope_fp8_quant`.

`inv_rope` is a pointwise body over [T, H, D]. The quantised form is a row maximum over [T * G * n | ACT_TILE] tiles
and stores of values and scales by tile: one kernel on Triton. Packed scales, four tiles per word, are a separate
pointwise body over [G, n, Ta]. On C++ the references are lowered instead, see from_reference.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..._compat import FloorDiv, ModularIndexing, codegen_of, ir, ops
from ...layout import ACT_AMAX_FLOOR, ACT_TILE, SCALE_ROW_ALIGN, SCALES_PER_WORD, cdiv
from ...ops.common.define import REFERENCES
from ...selection.decisions import Call, Decision
from ..conditions import backend_lacks, cannot_rotate, decision
from ..from_reference import lower_from_reference
from ..ir.common import E4M3, F32, I32, I64, Expr, Loader, Rope, Value, const, load_f32, result, row_amax
from ..ir.paging import Store, align_up, scatter, strided_view, uninitialized
from ..ir.quant import to_e4m3, ue8m0_byte, ue8m0_inverse, ue8m0_scale
from ..registry import lowers


def can_lower(call: Call) -> Decision:
    """Decide whether `inv_rope` is lowered to IR: head and rope dims must be static."""
    return decision(call, backend_lacks(call) or cannot_rotate(call, "o"))


def can_lower_quant(call: Call) -> Decision:
    """Decide whether `inv_rope_fp8_quant` is lowered to IR: head and rope dims must be static."""
    return decision(call, backend_lacks(call, fp8=True) or cannot_rotate(call, "o"))


@lowers("inv_rope", can_lower)
def lower(o: Any, positions: Any, cos_sin_cache: Any) -> Any:
    """Build the IR of `inv_rope`."""
    if codegen_of(o.get_device()) == "cpp":
        return lower_from_reference(REFERENCES["inv_rope"], o, positions, cos_sin_cache)
    element = _rotated(o, positions, cos_sin_cache, int(o.get_size()[2]))
    return result(element, o.get_dtype(), o.get_device(), o.get_size())


@lowers("inv_rope_fp8_quant", can_lower_quant)
def lower_quant(
    o: Any,
    positions: Any,
    cos_sin_cache: Any,
    n_groups: int,
    heads_per_group: int,
    packed_scales: bool = False,
) -> tuple[Any, Any]:
    """Build the IR of `inv_rope_fp8_quant`."""
    if codegen_of(o.get_device()) == "cpp":
        shape = n_groups, heads_per_group, packed_scales
        return lower_from_reference(REFERENCES["inv_rope_fp8_quant"], o, positions, cos_sin_cache, *shape)
    tokens, _, dim = o.get_size()
    dim, size, device = int(dim), heads_per_group * int(dim), o.get_device()
    element = _rotated(o, positions, cos_sin_cache, dim)
    tiles = _Tiles(tokens, n_groups, size // ACT_TILE)

    def value(row: Sequence[Expr], d: Expr) -> Value:
        group, t, tile = tiles.place(row)
        k = tile * ACT_TILE + d
        return element([t, group * heads_per_group + FloorDiv(k, dim), ModularIndexing(k, 1, dim)])

    load_amax = row_amax(value, device, [tiles.total], ACT_TILE)

    def byte(row: Sequence[Expr]) -> Value:
        return ue8m0_byte(ops.maximum(load_amax(row), const(ACT_AMAX_FLOOR)))

    def quantized(index: Sequence[Expr]) -> Value:
        *row, d = index
        return to_e4m3(ops.mul(value(row, d), ue8m0_inverse(byte(row))))

    def target(index: Sequence[Expr]) -> list[Expr]:
        *row, d = index
        return [*tiles.place(row), d]

    values = uninitialized([n_groups, tokens, tiles.per_group, ACT_TILE], E4M3, device)
    scatter(values, [tiles.total, ACT_TILE], [Store(None, target, quantized)])
    values = strided_view(values, [tokens, n_groups, size], [size, tokens * size, 1])
    return values, _scales(tiles, byte, packed_scales, device)


def _rotated(o: Any, positions: Any, cos_sin_cache: Any, dim: int) -> Loader:
    """Return a loader of the float32 elements of `o`, rotated back."""
    # Each rope dim is read twice, and all dims for the maximum: a long producer is better computed before.
    o.mark_reuse(2)
    load, rope = load_f32(o), Rope.of(positions, cos_sin_cache, inverse=True)

    def element(index: Sequence[Expr]) -> Value:
        t, h, d = index
        return rope.apply(lambda e: load([t, h, e]), t, d, dim)

    return element


@dataclass(frozen=True)
class _Tiles:
    """The quantisation tiles of all tokens as one dim, so that all nodes over them have one loop order and fuse."""

    tokens: Expr
    groups: int
    per_group: int

    @property
    def total(self) -> Expr:
        """Number of tiles."""
        return self.tokens * (self.groups * self.per_group)

    def place(self, row: Sequence[Expr]) -> list[Expr]:
        """Return group, token and tile in the group."""
        (x,) = row
        token = FloorDiv(x, self.groups * self.per_group)
        return [ModularIndexing(x, self.per_group, self.groups), token, ModularIndexing(x, 1, self.per_group)]

    def row(self, group: Expr, token: Expr, tile: Expr) -> list[Expr]:
        """Return the row of a tile: the inverse of `place`."""
        return [(token * self.groups + group) * self.per_group + tile]


def _scales(tiles: _Tiles, byte: Loader, packed: bool, device: torch.device) -> Any:
    """Build the IR of the scales [T, G, n], contiguous [G, n, Ta] with zeros after the tokens, from their bytes."""
    tokens, rows = tiles.tokens, align_up(tiles.tokens, SCALE_ROW_ALIGN)
    count, dtype = (cdiv(tiles.per_group, SCALES_PER_WORD), I32) if packed else (tiles.per_group, F32)
    size = [tiles.groups, count, rows]
    if packed:
        element = _word(tiles, byte)

        def padded(index: Sequence[Expr]) -> Value:
            group, n, t = index
            is_token = ops.lt(ops.index_expr(t, I64), ops.index_expr(tokens, I64))
            return ops.masked(is_token, lambda: element(group, t, n), 0)

        buffer = ir.Pointwise.create(device=device, dtype=dtype, inner_fn=padded, ranges=size)
    else:
        buffer = uninitialized(size, dtype, device)
        scatter(buffer, [tiles.total], _scale_stores(tiles, byte, rows))
    return strided_view(buffer, [tokens, tiles.groups, count], [1, count * rows, rows])


def _scale_stores(tiles: _Tiles, byte: Loader, rows: Expr) -> list[Store]:
    """Return stores of the float32 scale of each tile, and of the zeros after the last token."""

    def target(after: int) -> Callable[[Sequence[Expr]], list[Expr]]:
        def index_of(row: Sequence[Expr]) -> list[Expr]:
            group, t, tile = tiles.place(row)
            return [group, tile, t + after]

        return index_of

    def is_padding(after: int) -> Loader:
        def keep(row: Sequence[Expr]) -> Value:
            _, t, _ = tiles.place(row)
            is_last = ops.eq(ops.index_expr(t, I64), ops.index_expr(tiles.tokens - 1, I64))
            return ops.logical_and(is_last, ops.lt(ops.index_expr(t + after, I64), ops.index_expr(rows, I64)))

        return keep

    zeros = [Store(is_padding(n), target(n), lambda row: const(0.0)) for n in range(1, SCALE_ROW_ALIGN)]
    return [Store(None, target(0), lambda row: ue8m0_scale(byte(row))), *zeros]


def _word(tiles: _Tiles, byte: Loader) -> Callable[[Expr, Expr, Expr], Value]:
    """Return a function of group, token and word: four bytes in an int32, lowest first, 0 for a missing tile."""

    def shifted(group: Expr, t: Expr, tile: Expr, shift: int) -> Value:
        exists = ops.lt(ops.index_expr(tile, I32), const(tiles.per_group, I32))
        load = functools.partial(byte, tiles.row(group, t, tile))
        return ops.masked(exists, lambda: ops.bitwise_left_shift(load(), const(shift, I32)), 0)

    def word(group: Expr, t: Expr, n: Expr) -> Value:
        byte_indices = range(SCALES_PER_WORD)
        parts = [shifted(group, t, SCALES_PER_WORD * n + byte_index, 8 * byte_index) for byte_index in byte_indices]
        return functools.reduce(ops.bitwise_or, parts)

    return word
