"""Device functions that quantise and read indexer vectors, bit for bit as reference/common/kv_format.py."""

from __future__ import annotations

import triton
import triton.language as tl

from ..device.grid_format import KV_AMAX_FLOOR
from ..device.grid_format import dequantize_mxfp4 as dequantize_mxfp4
from ..device.grid_format import quantize_mxfp4 as quantize_mxfp4
from ..device.quant import FP8_MAX, MANTISSA_BITS, e4m3, tile_byte, ue8m0_inverse


@triton.jit
def quantize_fp8(x):
    """Quantise float32 `x` `[M, D]`, rounded to bfloat16: return bytes of e4m3 `[M, D]` and float32 scales `[M]`."""
    byte = tile_byte(x, KV_AMAX_FLOOR, FP8_MAX)
    values = e4m3(x * ue8m0_inverse(byte)[:, None]).to(tl.uint8, bitcast=True)
    return values, (byte << MANTISSA_BITS).to(tl.float32, bitcast=True)
