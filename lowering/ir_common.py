"""Pieces of Inductor IR that several lowerings share: RoPE, reductions over a row, rounding, UE8M0 scales.

Everything here runs while Inductor traces the body of an IR node. A value is an `ops` value; an index is a sympy
expression. The body of `ops.masked` is a block of its own that cannot use values made outside of it, so whatever is
needed inside one is passed as a function and made again; common subexpressions are merged later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .._compat import FloorDiv, ModularIndexing, ReductionHint, codegen_of, ir, ops
from ..layout import FP8_MAX, UE8M0_BIAS, UE8M0_MAX_BYTE
from ..reference.quant import E2M1_MIDPOINTS

Value = Any
Expr = Any
Loader = Callable[[Sequence[Expr]], Value]
"""What `make_loader` of an IR tensor gives: the element at an index."""
Load = Callable[[Expr], Value]
"""Element d of one vector, as float32."""
RowLoad = Callable[[Sequence[Expr], Expr], Value]
"""Element d of the row at an index."""

F32, I32, I64, U8 = torch.float32, torch.int32, torch.int64, torch.uint8
E4M3 = torch.float8_e4m3fn
_HALVES = (torch.bfloat16, torch.float16)
BF16_DROPS = 16  # mantissa bits that float32 has and bfloat16 has not
E2M1_SIGN = 8
MANTISSA_BITS = 23
MANTISSA_MASK = (1 << MANTISSA_BITS) - 1
SUBNORMAL_HALF = 1 << (MANTISSA_BITS - 1)  # bits of 2^-127, the inverse of the largest scale


def const(value: float, dtype: torch.dtype = F32) -> Value:
    """A constant of `dtype`."""
    return ops.constant(value, dtype)


def as_f32(value: Value) -> Value:
    """`value` widened to float32."""
    return ops.to_dtype(value, F32)


def load_f32(x: Any) -> Loader:
    """Loader of the elements of `x` in float32, as memory would hold them.

    What is computed in the same kernel, inlined or stored there, Inductor hands over as it was before it was rounded.
    """
    load, dtype, device = x.make_loader(), x.get_dtype(), x.get_device()
    if dtype not in _HALVES or _in_memory(x):
        return lambda index: as_f32(load(index))
    return lambda index: round_to(as_f32(load(index)), dtype, device)


def stored(value: Value, dtype: torch.dtype, device: torch.device) -> Value:
    """float32 `value` in `dtype`, a float of 16 or 32 bits, as a consumer reads it that is fused in."""
    return ops.to_dtype(round_to(value, dtype, device) if dtype in _HALVES else value, dtype)


def rounded(x: Any) -> Any:
    """`x` for a consumer that Inductor fuses with what computes it: its elements are rounded wherever they are."""
    if x.get_dtype() not in _HALVES or _in_memory(x):
        return x
    load, dtype, device = load_f32(x), x.get_dtype(), x.get_device()
    return ir.Pointwise.create(
        device=device, dtype=dtype, inner_fn=lambda index: ops.to_dtype(load(index), dtype), ranges=x.get_size()
    )


def _in_memory(x: Any) -> bool:
    """Whether `x` is an argument of the graph or comes from a kernel that no other is fused with."""
    while isinstance(x, (ir.MutableBox, ir.BaseView)):
        x = x.data
    return isinstance(x, (ir.InputBuffer, ir.ExternKernel))


def clamp(value: Value, low: Value, high: Value) -> Value:
    """`value` limited to [low, high]; NaN stays NaN."""
    return ops.minimum(ops.maximum(value, low), high)


def static(*sizes: Expr) -> bool:
    """Whether every size is known at compile time."""
    return all(isinstance(size, int) for size in sizes)


@dataclass(frozen=True, slots=True)
class Rope:
    """RoPE on the last `width` dims by a table of cosines and sines; see reference/rope.py.

    `load_position` and `load_table` are loaders of the positions and of the table, which has `rows` rows. `inverse`
    rotates by the negative angle.
    """

    load_position: Loader
    load_table: Loader
    rows: Expr
    width: int
    inverse: bool

    @classmethod
    def of(cls, positions: Any, cos_sin_cache: Any, *, inverse: bool = False) -> Rope:
        """From the IR of the op's arguments."""
        rows, width = cos_sin_cache.get_size()
        return cls(positions.make_loader(), cos_sin_cache.make_loader(), rows, int(width), inverse)

    def row(self, token: Expr) -> Expr:
        """Row of the table for `token`; positions outside the table read its nearest row."""
        position = ops.to_dtype(self.load_position([token]), I64)
        row = clamp(position, const(0, I64), ops.index_expr(self.rows - 1, I64))
        return ops.indirect_indexing(row, self.rows, check=False, wrap_neg=False)

    def rotated(self, load: Load, token: Expr, d: Expr, nope: int) -> Value:
        """Element `d` >= nope of the rotated vector, float32: e*cos - o*sin where d is even, o*cos + e*sin where odd,
        the signs exchanged for the inverse.

        `nope` is even. The partner's index is affine in `d`, so no value crosses a lane.
        """
        odd, pair, row = ModularIndexing(d, 1, 2), FloorDiv(d, 2) - nope // 2, self.row(token)
        cos, sin = self.load_table([row, pair]), self.load_table([row, pair + self.width // 2])
        signed = ops.where(ops.eq(ops.index_expr(odd, I32), const(int(self.inverse), I32)), ops.neg(sin), sin)
        return ops.add(ops.mul(load(d), cos), ops.mul(load(d + 1 - 2 * odd), signed))

    def apply(self, load: Load, token: Expr, d: Expr, dim: int) -> Value:
        """Element `d` of a vector of `dim` elements, rotated where it lies in the last `width`."""
        nope = dim - self.width
        if nope == 0:
            return self.rotated(load, token, d, nope)
        in_rope = ops.ge(ops.index_expr(d, I32), const(nope, I32))
        return ops.where(in_rope, ops.masked(in_rope, lambda: self.rotated(load, token, d, nope), 0.0), load(d))


def row_sum(load: RowLoad, device: torch.device, ranges: Sequence[Expr], n: Expr) -> Loader:
    """Loader of the float32 sum of `load(index, 0..n-1)` for every index in `ranges`."""
    return _row_reduction("sum", F32, load, device, ranges, n)


def row_amax(load: RowLoad, device: torch.device, ranges: Sequence[Expr], n: Expr) -> Loader:
    """Loader of the largest magnitude among `load(index, 0..n-1)` for every index in `ranges`."""
    return _row_reduction("max", F32, lambda index, r: ops.abs(load(index, r)), device, ranges, n)


def row_max(load: RowLoad, device: torch.device, ranges: Sequence[Expr], n: Expr) -> Loader:
    """Loader of the largest among `load(index, 0..n-1)`, float32, for every index in `ranges`."""
    return _row_reduction("max", F32, load, device, ranges, n)


def row_count(test: RowLoad, device: torch.device, ranges: Sequence[Expr], n: Expr) -> Loader:
    """Loader of the int32 number of true `test(index, 0..n-1)` for every index in `ranges`."""
    return _row_reduction("sum", I32, lambda index, r: ops.to_dtype(test(index, r), I32), device, ranges, n)


def _row_reduction(
    kind: str, dtype: torch.dtype, load: RowLoad, device: torch.device, ranges: Sequence[Expr], n: Expr
) -> Loader:
    result = ir.Reduction.create(
        device=device,
        dst_dtype=dtype,
        src_dtype=dtype,
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


def round_to(value: Value, dtype: torch.dtype, device: torch.device) -> Value:
    """float32 `value` rounded to `dtype`, as float32. Inductor would otherwise compute on in float32, unrounded."""
    if codegen_of(device) != "cpp" or dtype is F32:
        return as_f32(ops.to_dtype(value, dtype, src_dtype=F32, use_compute_types=False))
    # The C++ backend drops a conversion that it sees undone.
    if dtype is torch.bfloat16:
        return _round_to_bf16(value)
    bits = ops.to_dtype_bitcast(ops.to_dtype(value, dtype), torch.int16, dtype)
    return as_f32(ops.to_dtype_bitcast(bits, dtype, torch.int16))


def _round_to_bf16(value: Value) -> Value:
    """The same by its bits, which C++ vectorises."""
    bits = ops.to_dtype_bitcast(value, I32, F32)
    is_odd = ops.bitwise_and(ops.bitwise_right_shift(bits, const(BF16_DROPS, I32)), const(1, I32))
    dropped = (1 << BF16_DROPS) - 1
    nearest = ops.bitwise_and(ops.add(ops.add(bits, const(dropped >> 1, I32)), is_odd), const(~dropped, I32))
    return ops.where(ops.ne(value, value), value, ops.to_dtype_bitcast(nearest, F32, I32))


def ue8m0_byte(amax: Value, format_max: float = FP8_MAX) -> Value:
    """UE8M0 byte, int32, of the smallest power of two that brings `amax` > 0 into a format; see reference/quant.py."""
    bits = ops.to_dtype_bitcast(ops.mul(amax, const(1.0 / format_max)), I32, F32)
    exponent = ops.bitwise_and(ops.bitwise_right_shift(bits, const(MANTISSA_BITS, I32)), const(0xFF, I32))
    inexact = ops.ne(ops.bitwise_and(bits, const(MANTISSA_MASK, I32)), const(0, I32))
    return clamp(ops.add(exponent, ops.to_dtype(inexact, I32)), const(0, I32), const(UE8M0_MAX_BYTE, I32))


def ue8m0_scale(byte: Value) -> Value:
    """float32 scale 2^(byte - 127) of an int32 `byte` 1..254."""
    return ops.to_dtype_bitcast(ops.bitwise_left_shift(byte, const(MANTISSA_BITS, I32)), F32, I32)


def ue8m0_inverse(byte: Value) -> Value:
    """float32 inverse of the scale of `byte` 0..254, exact: 2^(127 - byte)."""
    exponent = ops.sub(const(2 * UE8M0_BIAS, I32), byte)
    bits = ops.bitwise_left_shift(exponent, const(MANTISSA_BITS, I32))
    return ops.to_dtype_bitcast(ops.maximum(bits, const(SUBNORMAL_HALF, I32)), F32, I32)


def to_e4m3(value: Value) -> Value:
    """float32 `value`, clamped to e4m3 and rounded to nearest even."""
    # Triton converts pairs: with `src_dtype` Inductor leaves each thread two elements at least.
    return ops.to_dtype(clamp(value, const(-FP8_MAX), const(FP8_MAX)), E4M3, src_dtype=F32)


def e4m3_byte(value: Value) -> Value:
    """uint8 bits of `to_e4m3`."""
    return ops.to_dtype_bitcast(to_e4m3(value), U8, E4M3)


def inverse_scale(scale: Any | None) -> Callable[[], Value] | None:
    """Function that gives 1 / scale of a one-element tensor."""
    if scale is None:
        return None
    load, zeros = scale.make_loader(), [0] * len(scale.get_size())
    return lambda: ops.truediv(const(1.0), load(zeros))


def e2m1_code(value: Value) -> Value:
    """4-bit e2m1 code, int32, of float32 `value`, rounded to nearest even and saturated; see reference/quant.py."""
    magnitude, code = ops.abs(value), const(len(E2M1_MIDPOINTS), I32)
    for below, midpoint in enumerate(E2M1_MIDPOINTS):
        stays = ops.le(magnitude, const(midpoint)) if below % 2 == 0 else ops.lt(magnitude, const(midpoint))
        code = ops.sub(code, ops.to_dtype(stays, I32))
    negative = ops.lt(ops.to_dtype_bitcast(value, I32, F32), const(0, I32))
    return ops.bitwise_or(code, ops.where(negative, const(E2M1_SIGN, I32), const(0, I32)))


def bf16_bits(value: Value) -> Value:
    """The 16 bits of float32 `value` rounded to bfloat16, in an int32."""
    rounded = ops.to_dtype(value, torch.bfloat16)
    bits = ops.to_dtype(ops.to_dtype_bitcast(rounded, torch.int16, torch.bfloat16), I32)
    return ops.bitwise_and(bits, const(0xFFFF, I32))
