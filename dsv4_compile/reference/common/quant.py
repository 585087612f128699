"""Rounding to e4m3, UE8M0 and e2m1, exactly as the kernels must do it.

A UE8M0 byte b is the scale 2^(b-127). The scale of a tile is the smallest power of two that brings its largest
magnitude within the format: e = ceil(log2(amax / max)). It is read off the float's bits, never off a logarithm:
y = amax * fp32(1/max), e = unbiased exponent of y, plus one if y's mantissa is not zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...layout import (
    E2M1_MAX,
    FP8_MAX,
    MX_TILE,
    MXFP4_AMAX_FLOOR,
    NVFP4_AMAX_FLOOR,
    NVFP4_TILE,
    UE8M0_BIAS,
    UE8M0_MAX_BYTE,
)

E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Between the eight magnitudes of e2m1, ascending."""


def ue8m0_byte(amax: Tensor, format_max: float) -> Tensor:
    """UE8M0 byte, as int32, of 2^ceil(log2(amax / format_max)). `amax` is float32 and > 0."""
    bits = (amax * torch.tensor(1.0 / format_max, dtype=torch.float32)).view(torch.int32)
    byte = ((bits >> 23) & 0xFF) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
    return byte.clamp(0, UE8M0_MAX_BYTE)


def ue8m0_scale(byte: Tensor) -> Tensor:
    """float32 value 2^(byte-127) of UE8M0 bytes; byte 0 is the subnormal 2^-127, byte 255 is NaN."""
    byte = byte.to(torch.int32)
    normal = (byte << 23).view(torch.float32)
    return torch.where(byte == 0, 2.0**-UE8M0_BIAS, torch.where(byte == 255, torch.nan, normal))


def to_e4m3(x: Tensor) -> Tensor:
    """Clamp float32 `x` to the e4m3 range and round to nearest even. NaN stays NaN."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def quantize_tiles(x: Tensor, tile: int, amax_floor: float) -> tuple[Tensor, Tensor]:
    """Quantise the last dim of float32 `x` in tiles of `tile` that share one UE8M0 scale.

    Returns e4m3 of x's shape and int32 bytes `[..., n / tile]`.
    """
    tiles = x.unflatten(-1, (-1, tile))
    byte = ue8m0_byte(tiles.abs().amax(-1).clamp_min(amax_floor), FP8_MAX)
    # A power of two: dividing by the scale and multiplying by its inverse are the same number.
    values = to_e4m3(tiles / ue8m0_scale(byte)[..., None])
    return values.flatten(-2), byte


def dequantize_tiles(values: Tensor, byte: Tensor, tile: int) -> Tensor:
    """float32 `[..., n]` from e4m3 `[..., n]` and UE8M0 bytes `[..., n / tile]`."""
    return (values.float().unflatten(-1, (-1, tile)) * ue8m0_scale(byte)[..., None]).flatten(-2)


def e2m1_code(x: Tensor) -> Tensor:
    """4-bit e2m1 code, as uint8, of float32 `x`: nearest of {0,.5,1,1.5,2,3,4,6}, ties to even, saturating."""
    magnitude = x.abs()
    code = torch.zeros_like(x, dtype=torch.uint8)
    for below, midpoint in enumerate(E2M1_MIDPOINTS):
        # A tie goes to the even code: down where the code below is even, up where it is odd.
        stays = magnitude <= midpoint if below % 2 == 0 else magnitude < midpoint
        code += (~stays).to(torch.uint8)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def e2m1_value(code: Tensor) -> Tensor:
    """float32 value of 4-bit e2m1 codes."""
    magnitude = (code & 7).float()
    # Mantissa 2 or 3, times the power of two of the exponent field; codes 0 and 1 are subnormal.
    step = torch.where(magnitude < 4, 0.5, torch.where(magnitude < 6, 1.0, 2.0))
    value = torch.where(magnitude < 2, 0.5 * magnitude, (2 + (code & 1)) * step)
    return torch.where((code & 8) != 0, -value, value)


def quantize_mxfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """MXFP4 of float32 `x` `[..., n]`: uint8 pairs `[..., n/2]` (low nibble = even index), UE8M0 `[..., n/32]`."""
    tiles = x.unflatten(-1, (-1, MX_TILE))
    byte = ue8m0_byte(tiles.abs().amax(-1).clamp_min(MXFP4_AMAX_FLOOR), E2M1_MAX)
    return _pairs(e2m1_code(tiles / ue8m0_scale(byte)[..., None])), byte.to(torch.uint8)


def dequantize_mxfp4(packed: Tensor, byte: Tensor) -> Tensor:
    """float32 `[..., n]` from packed e2m1 `[..., n/2]` and UE8M0 bytes `[..., n/32]`."""
    return (_values(packed).unflatten(-1, (-1, MX_TILE)) * ue8m0_scale(byte)[..., None]).flatten(-2)


def quantize_nvfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """NVFP4 of float32 `x` `[..., n]`: uint8 pairs `[..., n/2]` (low nibble = even index), e4m3 scales `[..., n/16]`.

    The scale of 16 elements is amax / 6 rounded to e4m3, no power of two, at least 2^-9 and at most 448. There is no
    second scale.
    """
    tiles = x.unflatten(-1, (-1, NVFP4_TILE))
    six = torch.full((), E2M1_MAX, device=x.device)  # a tensor: dividing by a number may multiply by its inverse
    scale = to_e4m3(tiles.abs().amax(-1).clamp_min(NVFP4_AMAX_FLOOR) / six)
    return _pairs(e2m1_code(tiles / scale.float()[..., None])), scale


def dequantize_nvfp4(packed: Tensor, scale: Tensor) -> Tensor:
    """float32 `[..., n]` from packed e2m1 `[..., n/2]` and e4m3 scales `[..., n/16]`. Exact in bfloat16."""
    return (_values(packed).unflatten(-1, (-1, NVFP4_TILE)) * scale.float()[..., None]).flatten(-2)


def _pairs(codes: Tensor) -> Tensor:
    """uint8 `[..., n/2]` with two of the codes `[..., n/t, t]` in a byte, the even one in the low nibble."""
    codes = codes.flatten(-2)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def _values(packed: Tensor) -> Tensor:
    """float32 `[..., n]` of packed e2m1 `[..., n/2]`."""
    return e2m1_value(torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2))


def hadamard(x: Tensor) -> Tensor:
    """Orthonormal Hadamard transform of the last dim (a power of two), Sylvester order. float32 in and out.

    A butterfly of additions: a vector's bits depend on that vector alone, where a GEMM may sum one row and several in
    different orders.
    """
    n = x.shape[-1]
    y = x.float().reshape(-1, n).t().contiguous()  # vectors are columns: every addition is over contiguous memory
    for _ in range(n.bit_length() - 1):
        # Pairs n/2 apart become neighbours: after log2(n) stages the index bits are back in their order.
        low, high = y.unflatten(0, (2, -1)).unbind(0)
        y = torch.stack((low + high, low - high), dim=1).flatten(0, 1)
    return (y * n**-0.5).t().reshape(x.shape)


def rounded_hadamard(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`hadamard` between vectors held in `dtype`: `x` is rounded before and the result after. float32 in and out."""
    return hadamard(x.to(dtype)).to(dtype).float()
