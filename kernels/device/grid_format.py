"""Triton functions that round rows to the grids mxfp8, nvfp4 and mxfp4 and read them, bit for bit as the reference.

The reference is reference/common/row_format.py: a grid rounds all channels of a row, and 32 (mxfp8, mxfp4) or 16
(nvfp4) neighbours share a scale byte. Elements of four bits are pairs in a byte, the even channel in the low nibble.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...layout import E2M1_MAX as _E2M1_MAX
from ...layout import KV_AMAX_FLOOR as _KV_AMAX_FLOOR
from ...layout import MX_TILE as _MX_TILE
from ...layout import MXFP4_AMAX_FLOOR as _MXFP4_AMAX_FLOOR
from ...layout import NVFP4_AMAX_FLOOR as _NVFP4_AMAX_FLOOR
from ...layout import NVFP4_TILE as _NVFP4_TILE
from .quant import (
    FP8_MAX,
    MAGNITUDE,
    MANTISSA_BITS,
    SUBNORMAL_HALF,
    UE8M0_BIAS,
    e4m3,
    tile_byte,
    ue8m0_inverse,
    ue8m0_scale,
)

E2M1_MAX = tl.constexpr(_E2M1_MAX)
KV_AMAX_FLOOR = tl.constexpr(_KV_AMAX_FLOOR)
MX_TILE = tl.constexpr(_MX_TILE)
MXFP4_AMAX_FLOOR = tl.constexpr(_MXFP4_AMAX_FLOOR)
NVFP4_AMAX_FLOOR = tl.constexpr(_NVFP4_AMAX_FLOOR)
NVFP4_TILE = tl.constexpr(_NVFP4_TILE)
NAN_BYTE = tl.constexpr(255)
NAN_BITS = tl.constexpr(0x7FC00000)
HALF_BITS = tl.constexpr(0x3F000000)  # of 0.5
EXPONENT = tl.constexpr(120)  # difference of the exponent biases of bfloat16 and e4m3


@triton.jit
def e4m3_value(code):
    """Return the float32 values of uint8 e4m3 codes."""
    bits = code.to(tl.int32)
    value = (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True) * 2.0**EXPONENT
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def quantize_mxfp8(x):
    """Quantise float32 `x` `[M, D]`: return bytes of e4m3 `[M, D]` and UE8M0 scales `[M, D / 32]`, both uint8."""
    M: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1]
    # [M, tiles, MX_TILE]
    tiles = tl.reshape(x, (M, D // MX_TILE, MX_TILE))
    byte = tile_byte(tiles, KV_AMAX_FLOOR, FP8_MAX)
    values = e4m3(tiles * ue8m0_inverse(byte)[:, :, None]).to(tl.uint8, bitcast=True)
    return tl.reshape(values, (M, D)), byte.to(tl.uint8)


@triton.jit
def quantize_nvfp4(x):
    """Quantise float32 `x` `[M, D]`: return pairs of e2m1 `[M, D / 2]` and e4m3 scales `[M, D / 16]`, both uint8.

    A tile with a NaN has the scale NaN.
    """
    M: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1]
    # [M, tiles, NVFP4_TILE]
    tiles = tl.reshape(x, (M, D // NVFP4_TILE, NVFP4_TILE))
    # Compared as integers, so that NaN is the largest.
    magnitude = tiles.to(tl.int32, bitcast=True) & MAGNITUDE
    floor = tl.full((), NVFP4_AMAX_FLOOR, tl.float32).to(tl.int32, bitcast=True)
    amax = tl.maximum(tl.max(magnitude, axis=2), floor).to(tl.float32, bitcast=True)
    # Both divisions are rounded correctly: the scale is no power of two.
    byte = e4m3(tl.div_rn(amax, tl.full(amax.shape, E2M1_MAX, tl.float32))).to(tl.uint8, bitcast=True)
    scale = tl.broadcast_to(e4m3_value(byte)[:, :, None], tiles.shape)
    code = _e2m1_code(tl.div_rn(tiles, scale))
    even, odd = tl.split(tl.reshape(code, (M, D // 2, 2)))
    return (even | (odd << 4)).to(tl.uint8), byte


@triton.jit
def quantize_mxfp4(x):
    """Quantise float32 `x` `[M, D]`: return pairs of e2m1 and UE8M0 scales.

    Both are uint8, `[M, D / 2]` and `[M, D / 32]`.
    """
    M: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1]
    # [M, tiles, MX_TILE]
    tiles = tl.reshape(x, (M, D // MX_TILE, MX_TILE))
    byte = tile_byte(tiles, MXFP4_AMAX_FLOOR, E2M1_MAX)
    code = _e2m1_code(tiles * ue8m0_inverse(byte)[:, :, None])
    even, odd = tl.split(tl.reshape(code, (M, D // 2, 2)))
    return (even | (odd << 4)).to(tl.uint8), byte.to(tl.uint8)


@triton.jit
def _e2m1_code(x):
    """Return the int32 e2m1 code of float32 `x`: nearest, ties to even, saturating; NaN is the largest magnitude."""
    magnitude = tl.abs(x)
    # Count the midpoints that x does not pass. At a midpoint it stays below if the code below is even.
    stays = (magnitude <= 0.25).to(tl.int32) + (magnitude < 0.75).to(tl.int32) + (magnitude <= 1.25).to(tl.int32)
    stays += (magnitude < 1.75).to(tl.int32) + (magnitude <= 2.5).to(tl.int32) + (magnitude < 3.5).to(tl.int32)
    stays += (magnitude <= 5.0).to(tl.int32)
    return (7 - stays) | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def dequantize_mxfp4(packed, byte):
    """Return exact bfloat16 `[M, D]` from pairs of e2m1 uint8 `[M, D / 2]` and UE8M0 uint8 `[M, D / 32]`."""
    M: tl.constexpr = packed.shape[0]
    D: tl.constexpr = 2 * packed.shape[1]
    code = tl.reshape(tl.join(packed & 0xF, packed >> 4), (M, D // MX_TILE, MX_TILE)).to(tl.int32)
    magnitude = code & 7
    # Codes 0 and 1 are 0 and 0.5; from 2 on, two bits of exponent and one of mantissa.
    normal = (((magnitude >> 1) + (UE8M0_BIAS - 1)) << MANTISSA_BITS) | ((magnitude & 1) << (MANTISSA_BITS - 1))
    bits = tl.where(magnitude < 2, magnitude * HALF_BITS, normal) | ((code & 8) << 28)
    byte = byte.to(tl.int32)
    scale = tl.where(byte == 0, SUBNORMAL_HALF, tl.where(byte == NAN_BYTE, NAN_BITS, byte << MANTISSA_BITS))
    value = bits.to(tl.float32, bitcast=True) * scale.to(tl.float32, bitcast=True)[:, :, None]
    return tl.reshape(value, (M, D)).to(tl.bfloat16)


@triton.jit
def dequantize_mxfp8(code, byte):
    """Return exact bfloat16 `[M, D]` from e4m3 uint8 `[M, D]` and UE8M0 uint8 `[M, D / 32]`."""
    M: tl.constexpr = code.shape[0]
    D: tl.constexpr = code.shape[1]
    tiles = tl.reshape(e4m3_value(code), (M, D // MX_TILE, MX_TILE))
    return tl.reshape(tiles * ue8m0_scale(byte.to(tl.int32))[:, :, None], (M, D)).to(tl.bfloat16)


@triton.jit
def dequantize_nvfp4(packed, byte):
    """Return exact bfloat16 `[M, D]` from pairs of e2m1 uint8 `[M, D / 2]` and e4m3 uint8 `[M, D / 16]`."""
    M: tl.constexpr = packed.shape[0]
    D: tl.constexpr = 2 * packed.shape[1]
    code = tl.reshape(tl.join(packed & 0xF, packed >> 4), (M, D // NVFP4_TILE, NVFP4_TILE)).to(tl.int32)
    # Exponent and mantissa of e2m1 are those of a float32 that is 2^-126 of the value, subnormals included.
    bits = ((code & 7) << (MANTISSA_BITS - 1)) | ((code & 8) << 28)
    value = bits.to(tl.float32, bitcast=True) * 2.0**126
    return tl.reshape(value * e4m3_value(byte)[:, :, None], (M, D)).to(tl.bfloat16)


@triton.jit
def quantize(x, GRID: tl.constexpr):
    """Quantise float32 `x` `[M, D]`: return its data and its scales, uint8 `[M, bytes of a row]` each."""
    if GRID == "mxfp8":
        stored = quantize_mxfp8(x)
    elif GRID == "nvfp4":
        stored = quantize_nvfp4(x)
    else:
        stored = quantize_mxfp4(x)
    return stored


@triton.jit
def dequantize(data, scale, GRID: tl.constexpr):
    """Return exact bfloat16 `[M, D]` of data and scales as `quantize` returns them."""
    if GRID == "mxfp8":
        x = dequantize_mxfp8(data, scale)
    elif GRID == "nvfp4":
        x = dequantize_nvfp4(data, scale)
    else:
        x = dequantize_mxfp4(data, scale)
    return x
