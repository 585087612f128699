"""Gluon functions for UE8M0 scales and e4m3 values, bit-identical to device/quant.py."""

from __future__ import annotations

import struct

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ... import layout

ACT_AMAX_FLOOR_BITS = gl.constexpr(struct.unpack("<i", struct.pack("<f", layout.ACT_AMAX_FLOOR))[0])
FP8_MAX = gl.constexpr(layout.FP8_MAX)
UE8M0_BIAS = gl.constexpr(layout.UE8M0_BIAS)
UE8M0_MAX_BYTE = gl.constexpr(layout.UE8M0_MAX_BYTE)
MAGNITUDE = gl.constexpr(0x7FFFFFFF)
MANTISSA_BITS = gl.constexpr(23)
MANTISSA = gl.constexpr((1 << 23) - 1)
SUBNORMAL_HALF = gl.constexpr(1 << 22)
NAN_BITS = gl.constexpr(0x7FC00000)


@gluon.jit
def scale_value(byte):
    """Return the float32 scale 2^(byte - 127) of int32 `byte` 0..255: subnormal for 0, NaN for 255."""
    bits = gl.where(byte == 0, SUBNORMAL_HALF, byte << MANTISSA_BITS)
    return gl.where(byte == UE8M0_MAX_BYTE + 1, NAN_BITS, bits).to(gl.float32, bitcast=True)


@gluon.jit
def quantize_ue8m0(x, AXIS: gl.constexpr):
    """Quantize float32 `x` along AXIS to e4m3 with one scale per slice; return the values and int32 UE8M0 bytes."""
    magnitude = x.to(gl.int32, bitcast=True) & MAGNITUDE
    amax = gl.maximum(gl.max(magnitude, AXIS), ACT_AMAX_FLOOR_BITS).to(gl.float32, bitcast=True)
    bits = (amax * (1.0 / FP8_MAX)).to(gl.int32, bitcast=True)
    exponent = (bits >> MANTISSA_BITS) & 255
    byte = gl.minimum(exponent + ((bits & MANTISSA) != 0).to(gl.int32), UE8M0_MAX_BYTE)
    inverse = gl.maximum((2 * UE8M0_BIAS - byte) << MANTISSA_BITS, SUBNORMAL_HALF).to(gl.float32, bitcast=True)
    # The conversion saturates and keeps NaN.
    return (x * gl.expand_dims(inverse, AXIS)).to(gl.float8e4nv), byte


@gluon.jit
def quantize(x, AXIS: gl.constexpr):
    """Quantize float32 `x` along AXIS to e4m3 with one scale per slice; return the values and float32 scales."""
    values, byte = quantize_ue8m0(x, AXIS)
    return values, scale_value(byte)
