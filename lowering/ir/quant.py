"""Quantised values and their scales in Inductor IR: e4m3, e2m1, UE8M0; reference/quant.py defines them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..._compat import ops
from ...layout import FP8_MAX, UE8M0_BIAS, UE8M0_MAX_BYTE
from ...reference.common.quant import E2M1_MIDPOINTS
from .common import E4M3, F32, I32, U8, Value, clamp, const

E2M1_SIGN = 8
MANTISSA_BITS = 23
MANTISSA_MASK = (1 << MANTISSA_BITS) - 1
SUBNORMAL_HALF = 1 << (MANTISSA_BITS - 1)  # bits of 2^-127, the inverse of the largest scale


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
