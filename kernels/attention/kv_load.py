"""Device functions that read key/value vectors from paged caches, as reference/kv_format.py defines the formats.

Reading has two steps, so that a kernel can do other work in between: `fetch_keys` loads what is stored, `decode_keys`
makes it vectors.

An e4m3 code becomes a bfloat16 without a conversion instruction: its sign and its seven low bits, moved to the sign and
to bits 4 to 10, are a bfloat16 that is 2^-120 times the code's value, subnormals included. Two codes share a 32-bit
word, and one multiplication by 2^(120 + e) makes each the value times its scale 2^e, exactly. For e above 7 that factor
is too large for a bfloat16, and a second one takes the rest.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ... import layout

DATA_BYTES = tl.constexpr(layout.FP8_DS_MLA.data)
SCALE_BYTES = tl.constexpr(layout.FP8_DS_MLA.scale)
NOPE_BYTES = tl.constexpr(layout.NOPE_DIM)
TILE = tl.constexpr(layout.KV_TILE)
TILES = tl.constexpr(layout.FP8_DS_MLA_TILES)
UE8M0_BIAS = tl.constexpr(layout.UE8M0_BIAS)
EXPONENT = tl.constexpr(120)  # what the biases of bfloat16 and e4m3 differ by
LAST_BYTE = tl.constexpr(134)  # UE8M0 of 2^7, the largest scale whose factor is a bfloat16
SIGNS = tl.constexpr(0x80008000 - (1 << 32))
MAGNITUDES = tl.constexpr(0x07F007F0)


@triton.jit
def valid_slots(p_row, stride, o_column, length, bound):
    """int32 slots at columns `o_column` `[N]` of a row of indices; -1 at or past `length` and outside [0, bound)."""
    slot = tl.load(p_row + o_column.to(tl.int64) * stride, mask=o_column < length, other=-1)
    return tl.where((slot >= 0) & (slot < bound), slot, -1).to(tl.int32)


@triton.jit
def fetch_keys(
    p_cache,
    stride_page,
    stride_row,
    stride_dim,
    slot,
    page,
    offset,
    scale_start,
    FORMAT: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """What a cache stores at `slot` `[N]`; zeros where `slot` is negative.

    Args:
        p_cache: bytes of `fp8_ds_mla` pages, or elements of rows. Strides count these.
        page, offset: `[N]`, where a slot lies; anything legal where it is negative.
        scale_start: first scale byte in a page of `fp8_ds_mla`.
    """
    m_slot = slot >= 0
    p_page = p_cache + page.to(tl.int64) * stride_page
    if FORMAT == "fp8_ds_mla":
        # The eighth tile is the rotated dims, which are stored as they are.
        o_tile = tl.arange(0, TILES + 1)
        m_tile = m_slot[:, None] & (o_tile < TILES)[None, :]
        p_row = p_page + offset * DATA_BYTES
        # [N, 8, 16]
        p_word = p_row.to(tl.pointer_type(tl.int32))[:, None, None] + (o_tile * (TILE // 4))[None, :, None]
        word = tl.load(p_word + tl.arange(0, TILE // 4)[None, None, :], mask=m_tile[:, :, None], other=0)
        # [N, 8]
        p_byte = p_page + scale_start + offset * SCALE_BYTES
        byte = tl.load(p_byte[:, None] + o_tile[None, :], mask=m_tile, other=0)
        # [N, 64]
        p_rope = (p_row + NOPE_BYTES).to(tl.pointer_type(tl.bfloat16))[:, None] + tl.arange(0, TILE)[None, :]
        rope = tl.load(p_rope, mask=m_slot[:, None], other=0.0)
        stored = word, byte, rope
    else:
        o_dim = tl.arange(0, BLOCK_D)
        # [N, BLOCK_D]
        p_row = (p_page + offset.to(tl.int64) * stride_row)[:, None] + (o_dim * stride_dim)[None, :]
        stored = tl.load(p_row, mask=m_slot[:, None] & (o_dim < D)[None, :], other=0)
    return stored


@triton.jit
def decode_keys(stored, p_kv_scale, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """Vectors DTYPE `[N, BLOCK_D]` from what `fetch_keys` loaded, rounded to bfloat16 unless `plain`."""
    if FORMAT == "fp8_ds_mla":
        k = _dequantized_tiles(stored[0], stored[1], stored[2])
    elif FORMAT == "fp8":
        k = e4m3_value(stored)
        k = (k if p_kv_scale is None else k * tl.load(p_kv_scale)).to(tl.bfloat16)
    else:
        k = stored
    return k.to(DTYPE)


@triton.jit
def e4m3_value(code):
    """float32 value of uint8 e4m3 codes."""
    bits = code.to(tl.int32)
    value = (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True) * 2.0**EXPONENT
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def _dequantized_tiles(word, byte, rope):
    """bfloat16 `[N, 512]` from codes in words `[N, 8, 16]`, UE8M0 `[N, 8]` and the rotated dims `[N, 64]`."""
    N: tl.constexpr = word.shape[0]
    byte = byte.to(tl.int32)[:, :, None]
    first = _power_of_two(tl.minimum(byte, LAST_BYTE) + EXPONENT)
    second = _power_of_two(tl.maximum(byte, LAST_BYTE) - LAST_BYTE + UE8M0_BIAS)
    # Codes 0 and 2 of each word, then 1 and 3.
    value0, value2 = _scaled_halves(((word << 8) & SIGNS) | ((word << 4) & MAGNITUDES), first, second)
    value1, value3 = _scaled_halves((word & SIGNS) | ((word >> 4) & MAGNITUDES), first, second)
    # [N, 8, 64]
    nope = tl.reshape(tl.join(tl.join(value0, value2), tl.join(value1, value3)), (N, TILES + 1, TILE))
    is_rope = tl.arange(0, TILES + 1)[None, :, None] == TILES
    return tl.reshape(tl.where(is_rope, tl.expand_dims(rope, 1), nope), (N, (TILES + 1) * TILE))


@triton.jit
def _power_of_two(exponent):
    """bfloat16 whose biased exponent is the int32 `exponent`."""
    return (exponent << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _scaled_halves(bits, first, second):
    """The bfloat16 in the low and in the high half of int32 `bits`, times both factors."""
    low = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    high = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return low * first * second, high * first * second
