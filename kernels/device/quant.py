"""Triton functions for UE8M0 scales and e4m3 values, bit-identical to the reference (common/quant.py)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.target_info import current_target

from ...layout import FP8_MAX as _FP8_MAX
from ...layout import UE8M0_BIAS as _UE8M0_BIAS
from ...layout import UE8M0_MAX_BYTE as _UE8M0_MAX_BYTE

FP8_MAX = tl.constexpr(_FP8_MAX)
UE8M0_BIAS = tl.constexpr(_UE8M0_BIAS)
UE8M0_MAX_BYTE = tl.constexpr(_UE8M0_MAX_BYTE)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
MANTISSA_BITS = tl.constexpr(23)
MANTISSA = tl.constexpr((1 << 23) - 1)
SUBNORMAL_HALF = tl.constexpr(1 << 22)  # bits of 2^-127, the inverse of the largest scale
NAN_BITS = tl.constexpr(0x7FC00000)
FP8_CAPABILITY = (8, 9)  # the first NVIDIA GPUs with Triton's conversion to e4m3


@triton.jit
def tile_byte(x, FLOOR: tl.constexpr, FORMAT_MAX: tl.constexpr):
    """Return the int32 UE8M0 byte of the scale of each tile, a row of float32 `x` along its last dim.

    The scale is the smallest power of two that brings the tile's largest magnitude, at least FLOOR, within FORMAT_MAX.
    Magnitudes are compared as integers, so that NaN is the largest; a tile with a NaN gets byte 254.
    """
    magnitude = x.to(tl.int32, bitcast=True) & MAGNITUDE
    floor = tl.full((), FLOOR, tl.float32).to(tl.int32, bitcast=True)
    amax = tl.maximum(tl.max(magnitude, axis=len(x.shape) - 1), floor).to(tl.float32, bitcast=True)
    return amax_byte(amax, FORMAT_MAX)


@triton.jit
def amax_byte(amax, FORMAT_MAX: tl.constexpr):
    """Return the int32 UE8M0 byte of the scale for the largest magnitude `amax`; 254 for NaN."""
    bits = (amax * (1.0 / FORMAT_MAX)).to(tl.int32, bitcast=True)
    exponent = (bits >> MANTISSA_BITS) & 0xFF
    return tl.minimum(exponent + ((bits & MANTISSA) != 0).to(tl.int32), UE8M0_MAX_BYTE)


@triton.jit
def ue8m0_inverse(byte):
    """Return 2^(127 - byte) in float32, the exact inverse of the scale of int32 `byte` 0..254."""
    bits = (2 * UE8M0_BIAS - byte) << MANTISSA_BITS
    return tl.maximum(bits, SUBNORMAL_HALF).to(tl.float32, bitcast=True)


@triton.jit
def ue8m0_scale(byte):
    """Return the float32 scale 2^(byte - 127) of int32 `byte` 0..255: subnormal for 0, NaN for 255."""
    bits = tl.where(byte == 0, SUBNORMAL_HALF, byte << MANTISSA_BITS)
    return tl.where(byte == UE8M0_MAX_BYTE + 1, NAN_BITS, bits).to(tl.float32, bitcast=True)


@triton.jit
def e4m3(x):
    """Clamp float32 `x` to the e4m3 range and round to nearest even. NaN stays NaN."""
    return tl.clamp(x, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


@triton.constexpr_function
def _conversion_saturates() -> bool:
    """Return whether the target's conversion to e4m3 saturates, as NVIDIA's does."""
    target = current_target()
    return target is not None and target.backend == "cuda"


@triton.jit
def scaled_e4m3(x):
    """Convert float32 `x` to e4m3 with saturation; clamps only where the conversion does not saturate."""
    return x.to(tl.float8e4nv) if _conversion_saturates() else e4m3(x)


@triton.jit
def inverse_of(p_scale):
    """Return 1 / scale, correctly rounded to float32, for the scale at `p_scale`."""
    return tl.div_rn(1.0, tl.load(p_scale))


def why_unsupported_fp8(device: torch.device) -> str:
    """Return why Triton cannot convert to e4m3 on `device`, "" if it can."""
    if device.type != "cuda" or torch.version.hip is not None:
        return ""
    major, minor = torch.cuda.get_device_capability(device)
    return (
        "" if (major, minor) >= FP8_CAPABILITY else f"Triton converts to e4m3 from sm_89 on, this is sm_{major}{minor}"
    )
