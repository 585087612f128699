"""Parts that the sparse MLA kernels share: argument groups on the host, and Triton device functions for any GPU.

Keys are read in two steps, so that a kernel can work between them: `fetch_keys` loads the stored bytes, `decode_keys`
converts them to vectors. Queries may be normed and rotated when they are loaded, outputs rotated back and quantised
when they are stored, bit for bit as `q_norm_rope` (the order of its sum of squares aside), `inv_rope` and
`inv_rope_fp8_quant` do in separate launches.

An e4m3 code becomes a bfloat16 without a conversion instruction: its sign and its seven low bits, moved to the sign and
to bits 4 to 10, are a bfloat16 that is 2^-120 times the code's value, subnormals included. Two codes share a 32-bit
word, and one multiplication by 2^(120 + e) gives each value times its scale 2^e, exactly. For e above 7 that factor
is too large for a bfloat16, and a second factor takes the rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import layout
from ...ops.common.invariance import TOKENS
from ...reference.attention.sparse_mla_decode import DecodeArguments, DecodeQuantArguments, output_dtype
from ..device.grid_format import EXPONENT
from ..device.grid_format import e4m3_value as e4m3_value
from ..device.quant import FP8_MAX, MANTISSA_BITS, e4m3, tile_byte, ue8m0_inverse
from ..device.rope import Rope as Rope
from ..device.rope import load_cos_sin, rotate, table_row

GRIDS = "grids"
"""Format of the caches of a `DecodeCall` of DeepSeek-V4.1; no op takes it as an argument."""
CHANGING = {
    "do_not_specialize": [
        "splits", "min_blocks", "first_token", "tokens", "padded_tokens", "max_pos",
        "window_width", "extra_width", "window_capacity", "extra_capacity",
    ],
    # A piece of a batch begins anywhere.
    "do_not_specialize_on_alignment": ["p_window_lens", "p_extra_lens", "p_positions"],
}  # fmt: skip
"""Options of the decode kernels: arguments that change between calls, which therefore are in no tuple."""
SCALE_DTYPES = (torch.float32, torch.int32)
"""Dtypes of activation scales: one number each, or four UE8M0 bytes packed in a word."""

DATA_BYTES = tl.constexpr(layout.FP8_DS_MLA.data)
SCALE_BYTES = tl.constexpr(layout.FP8_DS_MLA.scale)
NOPE_BYTES = tl.constexpr(layout.NOPE_DIM)
TILE = tl.constexpr(layout.KV_TILE)
TILES = tl.constexpr(layout.FP8_DS_MLA_TILES)
UE8M0_BIAS = tl.constexpr(layout.UE8M0_BIAS)
LAST_BYTE = tl.constexpr(134)  # UE8M0 of 2^7, the largest scale whose factor is a bfloat16
SIGNS = tl.constexpr(0x80008000 - (1 << 32))
MAGNITUDES = tl.constexpr(0x07F007F0)
ACT_AMAX_FLOOR = tl.constexpr(layout.ACT_AMAX_FLOOR)
ACT_TILE = tl.constexpr(layout.ACT_TILE)
SCALE_ROW_ALIGN = tl.constexpr(layout.SCALE_ROW_ALIGN)
SCALES_PER_WORD = tl.constexpr(layout.SCALES_PER_WORD)


class PagedKeys(NamedTuple):
    """A paged cache, and the slots of it that each token attends: the first `lens` of a row, or all of them."""

    cache: Tensor
    indices: Tensor
    lens: Tensor | None
    block_size: int

    def pages(self, cache_format: str) -> Tensor:
        """Return the cache as kernels take it: formats with a page layout as bytes `[P, page_bytes]`."""
        if cache_format in layout.PAGE_LAYOUTS:
            return layout.byte_pages(self.cache, cache_format, self.block_size)
        return self.cache

    def len_stride(self) -> int:
        """Return the stride of `lens`, 0 without."""
        return 0 if self.lens is None else self.lens.stride(0)

    def slots(self) -> int:
        """Return the number of rows that may be read: none if no token has a column of slots."""
        return self.cache.shape[0] * self.block_size if self.indices.shape[1] else 0


class Epilogue(NamedTuple):
    """Compile-time options of the epilogue of an attention kernel.

    Attributes:
        rope: rotated dims of the RoPE table, 0 without one. The query prologue needs them, too.
        inverse: rotate outputs back.
        groups, group_heads: quantise outputs to e4m3 for so many groups of so many heads; 0 groups store them as is.
        packed: store four UE8M0 scales in an int32 instead of float32 scales.
        split: store partial results, which the combine kernel finishes; the only other field that may be set is `rope`.
    """

    rope: int = 0
    inverse: bool = False
    groups: int = 0
    group_heads: int = 0
    packed: bool = False
    split: bool = False


class FusedParts(NamedTuple):
    """Work fused before attention, on queries, and after it, on outputs; fields as the op's arguments."""

    positions: Tensor | None = None
    cos_sin_cache: Tensor | None = None
    q_norm_eps: float | None = None
    inverse_rope: bool = False
    n_groups: int = 0
    heads_per_group: int = 0
    packed_scales: bool = False

    def rope(self) -> tuple[Any, ...]:
        """Return positions, their stride, the table, its strides and its rows, as kernels take them; None if absent."""
        if self.positions is None or self.cos_sin_cache is None:
            return None, 0, None, (0, 0), 0
        table = self.cos_sin_cache
        return self.positions, self.positions.stride(0), table, table.stride(), table.shape[0]

    def epilogue(self, split: bool = False) -> Epilogue:
        """Return the compile-time options of a kernel; with `split`, of one that stores partial results."""
        rope = 0 if self.cos_sin_cache is None else self.cos_sin_cache.shape[1]
        if split:
            return Epilogue(rope, split=True)
        return Epilogue(rope, self.inverse_rope, self.n_groups, self.heads_per_group, self.packed_scales)


NOT_FUSED = FusedParts()


class DecodeCall(NamedTuple):
    """A call of `sparse_mla_decode` or `sparse_mla_decode_quant`, its arguments in groups.

    Without a second cache, `extra` is the first one with rows of no columns. `batch_invariant` is a value of
    `dsv4.batch_invariant`, "" for "off". A call of `sparse_mla_mixed` has the cache format GRIDS: byte pages of mxfp8
    in the window, of nvfp4 in the second cache.
    """

    q: Tensor
    window: PagedKeys
    extra: PagedKeys
    cache_format: str
    scale: float
    sink: Tensor | None = None
    kv_scale: Tensor | None = None
    fused: FusedParts = NOT_FUSED
    batch_invariant: str = ""

    @property
    def caches(self) -> tuple[PagedKeys, ...]:
        """Every cache that the call attends, in the order of the kernels' parameters."""
        return self.window, self.extra


def decode_call(op: DecodeArguments | DecodeQuantArguments) -> DecodeCall:
    """Group the arguments of an op."""
    extra = PagedKeys(op.k_cache, op.indices[:, :0], op.lens, op.block_size)
    if op.extra_k_cache is not None and op.extra_indices is not None and op.extra_lens is not None:
        extra = PagedKeys(op.extra_k_cache, op.extra_indices, op.extra_lens, op.extra_block_size)
    window = PagedKeys(op.k_cache, op.indices, op.lens, op.block_size)
    fused = FusedParts(op.positions, op.cos_sin_cache, op.q_norm_eps, op.inverse_rope)
    if isinstance(op, DecodeQuantArguments):
        fused = FusedParts(*fused[:4], op.n_groups, op.group_heads(), op.packed_scales)
    caches = window, extra, op.cache_format
    return DecodeCall(op.q, *caches, op.scale, op.attn_sink, op.kv_scale, fused, TOKENS if op.batch_invariant else "")


class Outputs(NamedTuple):
    """Tensors that a kernel writes: `out` `[T, H, D]` and `lse` `[T, H]`, or e4m3 `[G, T, K]` and `scale` `[G, n, Ta]`.

    Without a `scale` the dims of `out` and the heads of `lse` are contiguous; with one, everything is.
    """

    out: Tensor
    lse: Tensor | None
    scale: Tensor | None = None

    def pair(self) -> tuple[Tensor, Tensor]:
        """Return what the op returns."""
        if self.scale is not None:
            return self.out.transpose(0, 1), self.scale[..., : self.out.shape[1]].permute(2, 0, 1)
        assert self.lse is not None
        return self.out, self.lse

    def strides(self) -> tuple[int, int]:
        """Return the strides of `out` from token to token and from head to head; 0 where it is quantised."""
        return (self.out.stride(0), self.out.stride(1)) if self.scale is None else (0, 0)

    def lse_stride(self) -> int:
        """Return the stride of `lse` from token to token."""
        return 0 if self.lse is None else self.lse.stride(0)

    def tokens(self) -> int:
        """Return T."""
        return self.out.shape[0 if self.scale is None else 1]

    def padded_tokens(self) -> int:
        """Return Ta, the tokens that the layout of the scales has room for."""
        return 0 if self.scale is None else self.scale.shape[2]


def decode_arguments(
    call: DecodeCall,
    outputs: Sequence[Tensor | None],
    pages: Sequence[Tensor],
    widths: Sequence[int],
    strides: tuple[Any, ...],
    counts: Sequence[int],
    *more: Tensor | None,
) -> list[Any]:
    """Return the arguments of a decode kernel, without those that are compile-time.

    Args:
        outputs: `Outputs` or partial results. pages, widths: caches as the kernel takes them, and columns of slots.
        counts: most splits of a row, fewest blocks of a split, first token of the launch, T, and Ta of the scales.
        more: what the kernel takes after the sinks.
    """
    positions, _, table, _, max_pos = call.fused.rope()
    pairs = [*zip(call.caches, pages, strict=True)]
    keys = [x for cache, words in pairs for x in ((words, cache.indices), cache.lens)]
    capacities = [words.shape[0] * cache.block_size for cache, words in pairs]
    q = call.q.view(torch.uint8) if call.q.element_size() == 1 else call.q
    tensors = tuple(outputs), q, *keys, call.sink, *more, positions, table
    scales = call.scale * math.log2(math.e), call.fused.q_norm_eps
    return [*tensors, *scales, *counts, strides, max_pos, *widths, *capacities]


def new_outputs(q: Tensor) -> Outputs:
    """Allocate `out` and `lse` for the queries `[T, H, D]`."""
    out = torch.empty(q.shape, dtype=output_dtype(q), device=q.device)
    return Outputs(out, torch.empty(q.shape[:2], dtype=torch.float32, device=q.device))


def outputs_for(q: Tensor, fused: FusedParts) -> Outputs:
    """Allocate the outputs of attention of the queries `[T, H, D]` with these fused parts."""
    if fused.n_groups == 0:
        return new_outputs(q)
    groups, size = fused.n_groups, fused.heads_per_group * q.shape[2]
    count = layout.cdiv(size, layout.ACT_TILE * (layout.SCALES_PER_WORD if fused.packed_scales else 1))
    values = q.new_empty((groups, q.shape[0], size), dtype=torch.float8_e4m3fn)
    rows = layout.align_up(q.shape[0], layout.SCALE_ROW_ALIGN)
    return Outputs(values, None, q.new_empty((groups, count, rows), dtype=SCALE_DTYPES[fused.packed_scales]))


def operand_dtype(q: Tensor, cache: Tensor, cache_format: str) -> torch.dtype:
    """Return the dtype of the operands of both GEMMs: the keys' if the queries fit in it, else float32."""
    keys = cache.dtype if cache_format == "plain" else torch.bfloat16
    return keys if q.dtype in (keys, torch.float8_e4m3fn) else torch.float32


@triton.jit
def valid_slots(p_row, stride, o_column, length, bound):
    """Load int32 slots at columns `o_column` `[N]` of a row; -1 at or past `length` and outside [0, bound)."""
    slot = tl.load(p_row + o_column.to(tl.int64) * stride, mask=o_column < length, other=-1)
    return tl.where((slot >= 0) & (slot < bound), slot, -1).to(tl.int32)


@triton.jit
def fetch_keys(
    p_cache, strides, slot, page, offset, scale_start,
    FORMAT: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Load the bytes that a cache stores at `slot` `[N]`; zeros where `slot` is negative.

    Args:
        p_cache: bytes of `fp8_ds_mla` pages, or elements of rows. The strides of a page, a row and a dim count these.
        page, offset: `[N]`, page of a slot and its place there; any legal values where the slot is negative.
        scale_start: first scale byte in a page of `fp8_ds_mla`.
    """
    m_slot = slot >= 0
    p_page = p_cache + page.to(tl.int64) * strides[0]
    if FORMAT == "fp8_ds_mla":
        # The eighth tile is the rotated dims, stored as bfloat16.
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
        p_row = (p_page + offset.to(tl.int64) * strides[1])[:, None] + (o_dim * strides[2])[None, :]
        stored = tl.load(p_row, mask=m_slot[:, None] & (o_dim < D)[None, :], other=0)
    return stored


@triton.jit
def decode_keys(stored, p_kv_scale, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """Convert what `fetch_keys` loaded to vectors DTYPE `[N, BLOCK_D]`, rounded to bfloat16 unless `plain`."""
    if FORMAT == "fp8_ds_mla":
        k = _dequantized_tiles(stored[0], stored[1], stored[2])
    elif FORMAT == "fp8":
        k = e4m3_value(stored)
        k = (k if p_kv_scale is None else k * tl.load(p_kv_scale)).to(tl.bfloat16)
    else:
        k = stored
    return k.to(DTYPE)


@triton.jit
def _dequantized_tiles(word, byte, rope):
    """Return bfloat16 `[N, 512]` of codes in words `[N, 8, 16]`, UE8M0 `[N, 8]` and the rotated dims `[N, 64]`."""
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
    """Return the bfloat16 whose biased exponent is the int32 `exponent`."""
    return (exponent << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _scaled_halves(bits, first, second):
    """Return the bfloat16 in the low and in the high half of int32 `bits`, times both factors."""
    low = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    high = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return low * first * second, high * first * second


class OutputRows(NamedTuple):
    """Where a kernel stores output rows.

    Attributes:
        p_out, strides: `[T, H, D]` and its strides from token to token and head to head; or e4m3 `[groups, T, K]`.
        p_scale, tokens, padded_tokens: of e4m3, scales `[groups, n, Ta]`, T and Ta.
    """

    p_out: Any
    strides: Any
    p_scale: Any
    tokens: Any
    padded_tokens: Any


@triton.jit
def _rotate_to_position(x, token, rope, INVERSE: tl.constexpr, ROPE: tl.constexpr):
    """Rotate float32 `x` `[N, D]`, heads of one token, to the token's position or back."""
    row = table_row(tl.load(rope.p_positions + token * rope.position_stride), rope.max_pos)
    p_row = rope.p_table + row * rope.table_strides[0]
    cos, sin = load_cos_sin(p_row, rope.table_strides[1], True, x.shape[1], ROPE)
    return rotate(x, cos, -sin if INVERSE else sin, ROPE)


@triton.jit
def load_queries(
    heads, m_head, token, rope, eps, DTYPE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROPE: tl.constexpr
):
    """Load queries of `token`, DTYPE `[N, BLOCK_D]`; bytes are e4m3. They are normed and rotated if there is an `eps`.

    `heads`: pointers to the heads `[N]`, and the stride of their dims.
    """
    p_q, stride_dim = heads
    o_dim = tl.arange(0, BLOCK_D)
    m_q = m_head[:, None] & (o_dim < D)[None, :]
    q = tl.load(p_q[:, None] + (o_dim * stride_dim)[None, :], mask=m_q, other=0)
    if p_q.dtype.element_ty == tl.uint8:
        q = e4m3_value(q)
    elif eps is not None:
        x = q.to(tl.float32)
        x *= tl.rsqrt(tl.sum(x * x, axis=1) * (1.0 / D) + eps)[:, None]
        q = _rotate_to_position(x, token, rope, False, ROPE).to(p_q.dtype.element_ty)
    return q.to(DTYPE)


@triton.jit
def rotate_and_store_rows(y, rows, token, first_head, rope, H: tl.constexpr, D: tl.constexpr, EPILOGUE: tl.constexpr):
    """Rotate rows back if EPILOGUE asks for it, then `store_rows`."""
    if EPILOGUE.inverse:
        y = _rotate_to_position(y.to(tl.float32), token, rope, True, EPILOGUE.rope)
    store_rows(y, rows, token, first_head, H, D, EPILOGUE)


@triton.jit
def store_rows(y, rows, token, first_head, H: tl.constexpr, D: tl.constexpr, EPILOGUE: tl.constexpr):
    """Store the finished rows `y` `[N, BLOCK_D]` of `token`, heads from `first_head` on, quantised as EPILOGUE says.

    `y` has the dtype of attention's output, or is float32 if it was rotated; `rows` is an `OutputRows`.
    """
    N: tl.constexpr = y.shape[0]
    if EPILOGUE.groups == 0:
        head = first_head + tl.arange(0, N)
        o_dim = tl.arange(0, y.shape[1])
        p_row = rows.p_out + (token * rows.strides[0] + head.to(tl.int64) * rows.strides[1])[:, None] + o_dim[None, :]
        tl.store(p_row, y.to(rows.p_out.dtype.element_ty), mask=(head < H)[:, None] & (o_dim < D)[None, :])
    else:
        _store_quantized(y.to(tl.float32), rows, token, first_head, D, EPILOGUE)


@triton.jit
def _store_quantized(x, rows, token, first_head, D: tl.constexpr, EPILOGUE: tl.constexpr):
    """Store float32 rows `x` `[N, D]` as e4m3 with a scale for every ACT_TILE dims."""
    GROUP_HEADS: tl.constexpr = EPILOGUE.group_heads
    N: tl.constexpr = x.shape[0]
    HEAD_TILES: tl.constexpr = D // ACT_TILE
    o_tile = tl.arange(0, N * HEAD_TILES)
    head = first_head + o_tile // HEAD_TILES
    live = head < EPILOGUE.groups * GROUP_HEADS
    # [N * HEAD_TILES, ACT_TILE]
    x = tl.reshape(x, (N * HEAD_TILES, ACT_TILE))
    byte = tile_byte(x, ACT_AMAX_FLOOR, FP8_MAX)
    group, tile = (head // GROUP_HEADS).to(tl.int64), head % GROUP_HEADS * HEAD_TILES + o_tile % HEAD_TILES
    p_tile = rows.p_out + ((group * rows.tokens + token) * (GROUP_HEADS * HEAD_TILES) + tile)[:, None] * ACT_TILE
    tl.store(p_tile + tl.arange(0, ACT_TILE)[None, :], e4m3(x * ue8m0_inverse(byte)[:, None]), mask=live[:, None])
    if EPILOGUE.packed:
        WORDS: tl.constexpr = HEAD_TILES // SCALES_PER_WORD
        quads = tl.reshape(byte, (N * WORDS, SCALES_PER_WORD))
        scale = tl.sum(quads << (8 * tl.arange(0, SCALES_PER_WORD))[None, :], axis=1)
        o_word = tl.arange(0, N * WORDS)
        head = first_head + o_word // WORDS
        live = head < EPILOGUE.groups * GROUP_HEADS
        row = head * WORDS + o_word % WORDS
    else:
        scale = (byte << MANTISSA_BITS).to(tl.float32, bitcast=True)
        row = head * HEAD_TILES + o_tile % HEAD_TILES
    # Scale rows of all groups follow each other, as the tiles of all heads do.
    p_scale = rows.p_scale + row.to(tl.int64) * rows.padded_tokens
    tl.store(p_scale + token, scale, mask=live)
    if token == rows.tokens - 1:
        for pad in tl.static_range(1, SCALE_ROW_ALIGN):
            tl.store(p_scale + token + pad, tl.zeros_like(scale), mask=live & (token + pad < rows.padded_tokens))
