"""Pieces of Inductor IR that several lowerings share: RoPE, RMS norm, UE8M0 scales, masked stores into a paged cache.

Everything here runs while Inductor traces the body of an IR node. A value is an `ops` value; an index is a sympy
expression. The body of `ops.masked` is a block of its own that cannot use values made outside of it, so whatever is
needed inside one is passed as a function and made again; common subexpressions are merged later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .._compat import FloorDiv, ModularIndexing, ReductionHint, V, ir, ops
from ..layout import FP8_MAX, UE8M0_BIAS, UE8M0_MAX_BYTE

Value = Any
Expr = Any
Loader = Callable[[Sequence[Expr]], Value]
"""What `make_loader` of an IR tensor gives: the element at an index."""
Load = Callable[[Expr], Value]
"""Element d of one vector, as float32."""
RowLoad = Callable[[Sequence[Expr], Expr], Value]
"""Element d of the row at an index, as float32."""

F32, I32, I64, U8 = torch.float32, torch.int32, torch.int64, torch.uint8
MANTISSA_BITS = 23
MANTISSA_MASK = (1 << MANTISSA_BITS) - 1
SUBNORMAL_HALF = 1 << (MANTISSA_BITS - 1)  # bits of 2^-127, the inverse of the largest scale


def const(value: float, dtype: torch.dtype = F32) -> Value:
    """A constant of `dtype`."""
    return ops.constant(value, dtype)


def as_f32(value: Value) -> Value:
    """`value` widened to float32."""
    return ops.to_dtype(value, F32)


def clamp(value: Value, low: Value, high: Value) -> Value:
    """`value` limited to [low, high]; NaN stays NaN."""
    return ops.minimum(ops.maximum(value, low), high)


def static(*sizes: Expr) -> bool:
    """Whether every size is known at compile time."""
    return all(isinstance(size, int) for size in sizes)


@dataclass(frozen=True, slots=True)
class Rope:
    """RoPE on the last `width` dims by a table of cosines and sines; see reference/rope.py.

    `load_position` and `load_table` are loaders of the positions and of the table, which has `rows` rows.
    """

    load_position: Loader
    load_table: Loader
    rows: Expr
    width: int

    @classmethod
    def of(cls, positions: Any, cos_sin_cache: Any) -> Rope:
        """From the IR of the op's arguments."""
        rows, width = cos_sin_cache.get_size()
        return cls(positions.make_loader(), cos_sin_cache.make_loader(), rows, int(width))

    def row(self, token: Expr) -> Expr:
        """Row of the table for `token`; positions outside the table read its nearest row."""
        position = ops.to_dtype(self.load_position([token]), I64)
        row = clamp(position, const(0, I64), ops.index_expr(self.rows - 1, I64))
        return ops.indirect_indexing(row, self.rows, check=False, wrap_neg=False)

    def rotated(self, load: Load, token: Expr, d: Expr, nope: int) -> Value:
        """Element `d` >= nope of the rotated vector, float32: e*cos - o*sin where d is even, o*cos + e*sin where odd.

        `nope` is even. The partner's index is affine in `d`, so no value crosses a lane.
        """
        odd, pair, row = ModularIndexing(d, 1, 2), FloorDiv(d, 2) - nope // 2, self.row(token)
        cos, sin = self.load_table([row, pair]), self.load_table([row, pair + self.width // 2])
        signed = ops.where(ops.eq(ops.index_expr(odd, I32), const(0, I32)), ops.neg(sin), sin)
        return ops.add(ops.mul(load(d), cos), ops.mul(load(d + 1 - 2 * odd), signed))

    def apply(self, load: Load, token: Expr, d: Expr, dim: int) -> Value:
        """Element `d` of a vector of `dim` elements, rotated where it lies in the last `width`."""
        nope = dim - self.width
        if nope == 0:
            return self.rotated(load, token, d, nope)
        in_rope = ops.ge(ops.index_expr(d, I32), const(nope, I32))
        return ops.where(in_rope, ops.masked(in_rope, lambda: self.rotated(load, token, d, nope), 0.0), load(d))


def row_sum(load: RowLoad, device: torch.device, ranges: Sequence[Expr], n: int) -> Loader:
    """Loader of the float32 sum of `load(index, 0..n-1)` for every index in `ranges`."""
    return _row_reduction("sum", load, device, ranges, n)


def row_amax(load: RowLoad, device: torch.device, ranges: Sequence[Expr], n: int) -> Loader:
    """Loader of the largest magnitude among `load(index, 0..n-1)` for every index in `ranges`."""
    return _row_reduction("max", lambda index, r: ops.abs(load(index, r)), device, ranges, n)


def _row_reduction(kind: str, load: RowLoad, device: torch.device, ranges: Sequence[Expr], n: int) -> Loader:
    result = ir.Reduction.create(
        device=device,
        dst_dtype=F32,
        src_dtype=F32,
        inner_fn=lambda index, reduced: load(index, reduced[0]),
        ranges=list(ranges),
        reduction_ranges=[n],
        reduction_type=kind,
        # The row stays in registers between the reduction and its use, with a dynamic token dim too.
        reduction_hint=ReductionHint.INNER,
    )
    result.realize()
    loader: Loader = result.make_loader()
    return loader


def round_to(value: Value, dtype: torch.dtype) -> Value:
    """float32 `value` rounded to `dtype`, as float32. Inductor would otherwise compute on in float32, unrounded."""
    return as_f32(ops.to_dtype(value, dtype, src_dtype=F32, use_compute_types=False))


def ue8m0_byte(amax: Value) -> Value:
    """UE8M0 byte, int32, of the smallest power of two that brings `amax` > 0 into e4m3; see reference/quant.py."""
    bits = ops.to_dtype_bitcast(ops.mul(amax, const(1.0 / FP8_MAX)), I32, F32)
    exponent = ops.bitwise_and(ops.bitwise_right_shift(bits, const(MANTISSA_BITS, I32)), const(0xFF, I32))
    inexact = ops.ne(ops.bitwise_and(bits, const(MANTISSA_MASK, I32)), const(0, I32))
    return clamp(ops.add(exponent, ops.to_dtype(inexact, I32)), const(0, I32), const(UE8M0_MAX_BYTE, I32))


def ue8m0_inverse(byte: Value) -> Value:
    """float32 inverse of the scale of `byte` 0..254, exact: 2^(127 - byte)."""
    exponent = ops.sub(const(2 * UE8M0_BIAS, I32), byte)
    bits = ops.bitwise_left_shift(exponent, const(MANTISSA_BITS, I32))
    return ops.to_dtype_bitcast(ops.maximum(bits, const(SUBNORMAL_HALF, I32)), F32, I32)


def e4m3_byte(value: Value) -> Value:
    """uint8 bits of float32 `value`, clamped to e4m3 and rounded to nearest even."""
    limited = clamp(value, const(-FP8_MAX), const(FP8_MAX))
    return ops.to_dtype_bitcast(ops.to_dtype(limited, torch.float8_e4m3fn), U8, torch.float8_e4m3fn)


def bf16_bits(value: Value) -> Value:
    """The 16 bits of float32 `value` rounded to bfloat16, in an int32."""
    rounded = ops.to_dtype(value, torch.bfloat16)
    bits = ops.to_dtype(ops.to_dtype_bitcast(rounded, torch.int16, torch.bfloat16), I32)
    return ops.bitwise_and(bits, const(0xFFFF, I32))


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a token goes: `valid` is a boolean value, `block` and `offset` are indices that are legal in any case."""

    valid: Value
    block: Expr
    offset: Expr


def slot_of(load_slot: Loader, token: Expr, num_blocks: Expr, block_size: int) -> Slot:
    """The slot of `token`. A slot outside the cache is not valid and is addressed as slot 0."""
    capacity = num_blocks * block_size
    slot, zero = ops.to_dtype(load_slot([token]), I64), const(0, I64)
    valid = ops.logical_and(ops.ge(slot, zero), ops.lt(slot, ops.index_expr(capacity, I64)))
    index = ops.indirect_indexing(ops.where(valid, slot, zero), capacity, check=False, wrap_neg=False)
    return Slot(valid, FloorDiv(index, block_size), ModularIndexing(index, 1, block_size))


@dataclass(frozen=True, slots=True)
class Store:
    """A predicated store: functions of the iteration index that give predicate, target index and value."""

    keep: Loader
    target: Callable[[Sequence[Expr]], Sequence[Expr]]
    value: Loader


@ir.ir_dataclass
class MultiStore(ir.Scatter):
    """Several predicated stores into one mutated buffer, in one node.

    Separate scatters into one buffer are never fused, because the scheduler keeps mutations in order. Triton joins the
    mask of `ops.masked` to the store inside it; the C++ backend cannot.
    """

    stores: tuple[Store, ...] = ()

    def store_output(self, output_name: str | None, indexer: Any, vars: Sequence[Expr]) -> None:
        """Emit the stores. `indexer` turns an index of the target into an address."""
        for store in self.stores:
            address = indexer(store.target(vars))

            def body(store: Store = store, address: Expr = address) -> Value:
                ops.store(output_name or "unnamed", address, store.value(vars), mode=None)
                return const(0, I32)

            ops.masked(store.keep(vars), body, 0)


def scatter(target: Any, ranges: Sequence[Expr], stores: Sequence[Store]) -> None:
    """Mutate `target` by `stores`, each run over `ranges`."""
    target.realize()
    node = MultiStore(
        device=target.get_device(),
        dtype=target.get_dtype(),
        inner_fn=stores[0].value,
        ranges=list(ranges),
        output_indexer=lambda index: index,
        stores=tuple(stores),
    )
    buffer = ir.ComputedBuffer(name=None, layout=ir.MutationLayoutSHOULDREMOVE(target), data=node)
    buffer.name = V.graph.register_buffer(buffer)
    V.graph.register_operation(buffer)
