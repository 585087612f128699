"""Triton functions that round inputs to mxfp8 and scale weights of 32x32 blocks, as the reference does."""

from __future__ import annotations

import triton
import triton.language as tl

from ...layout import KV_AMAX_FLOOR as _KV_AMAX_FLOOR
from ...layout import MX_TILE as _MX_TILE
from .quant import FP8_MAX, e4m3, tile_byte, ue8m0_inverse, ue8m0_scale

MX_TILE = tl.constexpr(_MX_TILE)
MX_AMAX_FLOOR = tl.constexpr(_KV_AMAX_FLOOR)


@triton.jit
def rounded_mxfp8(tiles):
    """Round float32 `tiles` to e4m3 with one UE8M0 scale for each row of the last dim; return them in float32.

    The values are exact in bfloat16, too. A row with a NaN has it and zeros.
    """
    byte = tile_byte(tiles, MX_AMAX_FLOOR, FP8_MAX)
    inverse, scale = tl.expand_dims(ue8m0_inverse(byte), -1), tl.expand_dims(ue8m0_scale(byte), -1)
    return e4m3(tiles * inverse).to(tl.float32) * scale


@triton.jit
def scaled_blocks(weight, scale):
    """Return float32 of an e4m3 weight `[N, K]` times its scales `[N / 32, K / 32]`, float32 or int32 UE8M0 bytes."""
    N: tl.constexpr = weight.shape[0]
    K: tl.constexpr = weight.shape[1]
    blocks = tl.reshape(weight, (N // MX_TILE, MX_TILE, K // MX_TILE, MX_TILE))
    # By way of float16: the conversion at once takes sm_90 eight cycles a warp and value.
    wide = blocks.to(tl.float16).to(tl.float32) * scale[:, None, :, None]
    return tl.reshape(wide, (N, K))
