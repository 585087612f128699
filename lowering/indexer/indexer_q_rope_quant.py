"""Inductor IR for `indexer_q_rope_quant`.

A row maximum over the lanes of a scale and pointwise bodies of the same iteration space: one kernel for the queries,
[T, H | D] in `indexer_fp8` and [T, H, D / 32 | 16] in `indexer_mxfp4`, where a lane is a pair of elements. In
`indexer_fp8` the folded weights need the scale and are part of it; otherwise they are a separate pointwise body. With
the Hadamard transform two kernels come before, see ir_hadamard.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..._compat import ir, ops
from ...layout import MX_TILE
from ...selection.decisions import Call, Decision
from ..conditions import backend_lacks, cannot_rotate, cannot_transform, decision
from ..ir.common import E4M3, F32, U8, Expr, Loader, Rope, RowLoad, Value, const, load_f32, result, round_to, static
from ..ir.hadamard import rounded_hadamard
from ..ir.indexer import PAIRS, fp8_rows, mxfp4_rows
from ..ir.paging import strided_view, uninitialized
from ..ir.quant import to_e4m3, ue8m0_scale
from ..registry import lowers


def can_lower(call: Call) -> Decision:
    """IR for static heads and dims."""
    why_not = backend_lacks(call, fp8=call.arguments["cache_format"] == "indexer_fp8") or cannot_rotate(call, "q")
    why_not = why_not or cannot_transform(call)
    if not why_not and not static(call.arguments["q"].shape[1]):
        why_not = "the number of heads is dynamic"
    return decision(call, why_not)


def yields(call: Call) -> str:
    """A kernel transforms within; measurements are of calls without a transform."""
    return "in IR a Hadamard transform is two kernels more" if call.arguments["hadamard"] else ""


@lowers("indexer_q_rope_quant", can_lower, yields)
def lower(
    q: Any,
    positions: Any,
    cos_sin_cache: Any,
    weights: Any,
    cache_format: str,
    hadamard: bool = False,
    round_weights: bool = False,
) -> tuple[Any, Any, Any]:
    """Build the IR."""
    tokens, heads, dim = q.get_size()
    device, rows = q.get_device(), [tokens, int(heads)]
    plain = cache_format == "plain"
    weight = _weight(weights, q.get_dtype() if round_weights else None)
    dtype = q.get_dtype() if plain else torch.bfloat16
    vector = _rotated(q, positions, cos_sin_cache, dtype)
    if hadamard:
        vector = rounded_hadamard(vector, device, rows, int(dim), dtype)
    if plain:
        values = result(lambda index: vector(index[:2], index[2]), dtype, device, q.get_size())
        return values, uninitialized([*rows, 0], F32, device), _folded(weight, device, rows, int(dim))
    if cache_format == "indexer_fp8":
        return _fp8(vector, weight, rows, int(dim), device)
    return _mxfp4(vector, weight, rows, int(dim), device)


def _rotated(q: Any, positions: Any, cos_sin_cache: Any, dtype: torch.dtype) -> RowLoad:
    """Element of the rotated query at [token, head], rounded to `dtype`."""
    # Read by two lanes in the rope dims, and for a maximum: a long producer is better computed before.
    q.mark_reuse(2)
    load, rope, dim = load_f32(q), Rope.of(positions, cos_sin_cache), int(q.get_size()[2])

    def element(index: Sequence[Expr], d: Expr) -> Value:
        t, h = index
        return round_to(rope.apply(lambda e: load([t, h, e]), t, d, dim), dtype, q.get_device())

    return element


def _fp8(vector: RowLoad, weight: Loader, rows: Sequence[Expr], dim: int, device: torch.device) -> tuple[Any, Any, Any]:
    quantized = fp8_rows(vector, device, rows, dim)
    values = _pointwise(device, E4M3, [*rows, dim], lambda index: to_e4m3(quantized.scaled(index[:-1], index[-1])))
    folded = _folded(lambda row: ops.mul(weight(row), ue8m0_scale(quantized.byte(row))), device, rows, dim)
    return values, uninitialized([*rows, 0], F32, device), folded


def _mxfp4(
    vector: RowLoad, weight: Loader, rows: Sequence[Expr], dim: int, device: torch.device
) -> tuple[Any, Any, Any]:
    quantized, tiles = mxfp4_rows(vector, device, rows, dim), dim // MX_TILE
    values = _pointwise(device, U8, [*rows, tiles, PAIRS], lambda index: quantized.packed(index[:-1], index[-1]))
    tokens, heads = rows
    values = strided_view(values, [tokens, heads, dim // 2], [heads * (dim // 2), dim // 2, 1])
    scales = _pointwise(device, U8, [*rows, tiles], lambda tile: ops.to_dtype(quantized.byte(tile), U8))
    return values, scales, _folded(weight, device, rows, dim)


def _weight(weights: Any, dtype: torch.dtype | None) -> Loader:
    """Weight of [token, head] in float32, rounded to `dtype` if one is given."""
    load = load_f32(weights)
    return load if dtype is None else lambda row: round_to(load(row), dtype, weights.get_device())


def _folded(weight: Loader, device: torch.device, rows: Sequence[Expr], dim: int) -> Any:
    """IR of the weights times D^-0.5 and H^-0.5, in this order."""
    heads = int(rows[1])
    return _pointwise(
        device, F32, rows, lambda row: ops.mul(ops.mul(weight(row), const(dim**-0.5)), const(heads**-0.5))
    )


def _pointwise(device: torch.device, dtype: torch.dtype, ranges: Sequence[Expr], value: Loader) -> Any:
    return ir.Pointwise.create(device=device, dtype=dtype, inner_fn=value, ranges=list(ranges))
