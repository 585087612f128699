"""The number formats of the caches in scalar Python: one element at a time, exact, and sharing no code with torch.

An oracle for kernels and for the reference alike. Inputs are Python floats that hold float32 values.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_right
from collections.abc import Sequence

from dsv4_compile import layout


def f32(x: float) -> float:
    """Nearest float32. A sum, difference or product of two float32, rounded by this, is float32 arithmetic."""
    return struct.unpack("<f", struct.pack("<f", x))[0]


def bf16_bits(x: float) -> int:
    """Bits of the nearest bfloat16 of a float32, ties to even. Not for NaN."""
    bits = struct.unpack("<I", struct.pack("<f", x))[0]
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


def bf16(x: float) -> float:
    """Nearest bfloat16."""
    return struct.unpack("<f", struct.pack("<I", bf16_bits(x) << 16))[0]


def e4m3_value(code: int) -> float:
    """Value of an e4m3 byte."""
    exponent, mantissa = (code >> 3) & 15, code & 7
    if code & 0x7F == 0x7F:
        return math.nan
    magnitude = math.ldexp(mantissa, -9) if exponent == 0 else math.ldexp(8 + mantissa, exponent - 10)
    return -magnitude if code & 0x80 else magnitude


_E4M3 = [e4m3_value(code) for code in range(0x7F)]
_E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def _nearest(x: float, grid: Sequence[float]) -> int:
    """Index of the value of an ascending `grid` that is nearest to `abs(x)`, ties to the even index, saturating."""
    magnitude = abs(x)
    below = bisect_right(grid, magnitude) - 1
    if below == len(grid) - 1:
        return below
    midpoint = (grid[below] + grid[below + 1]) / 2
    return below + (magnitude > midpoint or (magnitude == midpoint and below % 2 == 1))


def e4m3_code(x: float) -> int:
    """Byte of the nearest e4m3, ties to even, saturating at 448. Not for NaN."""
    return _nearest(x, _E4M3) | (0x80 if math.copysign(1, x) < 0 else 0)


def e2m1_code(x: float) -> int:
    """4-bit code of the nearest e2m1, ties to even, saturating at 6. Not for NaN."""
    return _nearest(x, _E2M1) | (8 if math.copysign(1, x) < 0 else 0)


def e2m1_value(code: int) -> float:
    """Value of a 4-bit e2m1 code."""
    return math.copysign(_E2M1[code & 7], -1 if code & 8 else 1)


def ue8m0_exponent(amax: float, format_max: float) -> int:
    """The smallest integer e with `amax <= format_max * 2^e`, without a logarithm or a division."""
    amax_mantissa, amax_exponent = math.frexp(amax)
    max_mantissa, max_exponent = math.frexp(format_max)
    return amax_exponent - max_exponent + (amax_mantissa > max_mantissa)


def quantize_tile(tile: Sequence[float], amax_floor: float) -> tuple[bytes, int]:
    """e4m3 bytes and the UE8M0 byte of elements that share a scale."""
    exponent = ue8m0_exponent(max(amax_floor, *map(abs, tile)), layout.FP8_MAX)
    return bytes(e4m3_code(math.ldexp(x, -exponent)) for x in tile), exponent + layout.UE8M0_BIAS


def rotate(x: Sequence[float], row: Sequence[float], *, inverse: bool = False) -> list[float]:
    """RoPE of the last `len(row)` elements by a row of `cos_sin_cache`, each product and sum rounded to float32."""
    nope, pairs = len(x) - len(row), len(row) // 2
    out = list(x)
    for i in range(pairs):
        even, odd = x[nope + 2 * i], x[nope + 2 * i + 1]
        cos, sin = row[i], -row[pairs + i] if inverse else row[pairs + i]
        out[nope + 2 * i] = f32(f32(even * cos) - f32(odd * sin))
        out[nope + 2 * i + 1] = f32(f32(even * sin) + f32(odd * cos))
    return out


def mla_row(x: Sequence[float]) -> tuple[bytes, bytes]:
    """The data and scale bytes of a `fp8_ds_mla` row, from its 512 rotated elements."""
    rounded = [bf16(v) for v in x]
    nope, rope = rounded[: layout.NOPE_DIM], rounded[layout.NOPE_DIM :]
    tiles = [
        quantize_tile(nope[i : i + layout.KV_TILE], layout.KV_AMAX_FLOOR)
        for i in range(0, layout.NOPE_DIM, layout.KV_TILE)
    ]
    data = b"".join(values for values, _ in tiles) + b"".join(struct.pack("<H", bf16_bits(v)) for v in rope)
    scale = bytes(byte for _, byte in tiles)
    return data, scale.ljust(layout.FP8_DS_MLA.scale, b"\0")


def store(memory: bytearray, fmt: str, page_stride: int, block_size: int, slot: int, data: bytes, scale: bytes) -> None:
    """Put the data and scale bytes of `slot` where a byte format keeps them, in a cache that starts at `memory[0]`."""
    geometry = layout.PAGE_LAYOUTS[fmt]
    page, offset = slot // block_size * page_stride, slot % block_size
    first = page + offset * geometry.data
    memory[first : first + geometry.data] = data
    first = page + block_size * geometry.data + offset * geometry.scale
    memory[first : first + geometry.scale] = scale
