"""Pieces of Inductor IR that several lowerings share: loads and results, RoPE, reductions over a row, rounding.

Everything here runs while Inductor traces the body of an IR node. A value is an `ops` value; an index is a sympy
expression. The body of `ops.masked` is a separate block that cannot use values computed outside: it gets functions
and computes their values again. Common subexpressions are merged later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..._compat import FloorDiv, ModularIndexing, ReductionHint, V, codegen_of, ir, ops, torch_release

Value = Any
Expr = Any
Loader = Callable[[Sequence[Expr]], Value]
"""Result of `make_loader` of an IR tensor: the element at an index."""
Load = Callable[[Expr], Value]
"""Element d of one vector, as float32."""
RowLoad = Callable[[Sequence[Expr], Expr], Value]
"""Element d of the row at an index."""

F32, I32, I64, U8 = torch.float32, torch.int32, torch.int64, torch.uint8
E4M3 = torch.float8_e4m3fn
HALVES = (torch.bfloat16, torch.float16)
_CPP_ROUNDS = (2, 13)
"""From this torch on C++ rounds between two loops that it fuses, where it is told to."""
BF16_DROPS = 16  # mantissa bits that float32 has and bfloat16 has not


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
    if codegen_of(x.get_device()) == "cpp":
        x = rounded(x)
    load, dtype, device = x.make_loader(), x.get_dtype(), x.get_device()
    if dtype not in HALVES or _in_memory(x):
        return lambda index: as_f32(load(index))
    return lambda index: round_to(as_f32(load(index)), dtype, device)


def rounded(x: Any) -> Any:
    """`x` for C++ to read, where rounding by bits would take longer than a separate loop that stores it."""
    if x.get_dtype() in HALVES and not _in_memory(x):
        x.realize()
        V.graph.no_fuse_buffer_names.add(x.get_name())
    return x


def result(value: Loader, dtype: torch.dtype, device: torch.device, ranges: Sequence[Expr]) -> Any:
    """IR of float32 `value` in `dtype`, a float of 16 or 32 bits, as a consumer must read it that is fused in."""
    on_cpp = codegen_of(device) == "cpp"

    def element(index: Sequence[Expr]) -> Value:
        if dtype in HALVES and not on_cpp:
            return ops.to_dtype(round_to(value(index), dtype, device), dtype)
        return ops.to_dtype(value(index), dtype, src_dtype=F32, use_compute_types=False)

    node = ir.Pointwise.create(device=device, dtype=dtype, inner_fn=element, ranges=list(ranges))
    if on_cpp and dtype in HALVES:
        node.realize()
        if torch_release() < _CPP_ROUNDS:
            V.graph.no_fuse_buffer_names.add(node.get_name())
    return node


def _in_memory(x: Any) -> bool:
    """Whether `x` is an argument of the graph or comes from a kernel that no other is fused with."""
    while isinstance(x, (ir.MutableBox, ir.BaseView)):
        x = x.data
    if isinstance(x, (ir.InputBuffer, ir.ExternKernel)):
        return True
    return isinstance(x, ir.Buffer) and x.get_name() in V.graph.no_fuse_buffer_names


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
    """Round float32 to bfloat16 by its bits, which C++ vectorises."""
    bits = ops.to_dtype_bitcast(value, I32, F32)
    is_odd = ops.bitwise_and(ops.bitwise_right_shift(bits, const(BF16_DROPS, I32)), const(1, I32))
    dropped = (1 << BF16_DROPS) - 1
    nearest = ops.bitwise_and(ops.add(ops.add(bits, const(dropped >> 1, I32)), is_odd), const(~dropped, I32))
    return ops.where(ops.ne(value, value), value, ops.to_dtype_bitcast(nearest, F32, I32))
