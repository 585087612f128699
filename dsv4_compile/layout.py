"""Byte offsets, alignments, floors and sentinels of the DeepSeek-V4 caches. No other file contains these numbers.

A quantised page of `block_size` tokens is not an array of rows. It stores all data rows before all scale rows:

    [0,                    bs * data)             token t's data  at t * data
    [bs * data,            bs * (data + scale))   token t's scale at bs * data + t * scale
    [bs * (data + scale),  page_stride)           padding, never read or written

`data + scale` (584 for `fp8_ds_mla`) is the number of bytes a token, not a row stride. Pages are `stride(0)` apart,
which is at least the page's bytes rounded up to `align`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch

from .errors import check, fail

# Model geometry fixed by the architecture.
HEAD_DIM = 512
ROPE_DIM = 64
NOPE_DIM = HEAD_DIM - ROPE_DIM
INDEXER_HEAD_DIM = 128
V32_LATENT_DIM = 512  # keys of DeepSeek-V3.2 are the latent and ROPE_DIM more dims, values the latent
V32_HEAD_DIM = V32_LATENT_DIM + ROPE_DIM
V32_NOPE_HEAD_DIM = 128  # dims of a V3.2 query head before absorption into the latent
SLIDING_WINDOW = 128
CSA_RATIO = 4
HCA_RATIO = 128

# Sentinels. Padding points at no live row and is not counted.
PAD_SLOT = -1
PAD_INDEX = -1
PAD_LEN = 0

# Quantisation.
FP8_MAX = 448.0
E2M1_MAX = 6.0
UE8M0_BIAS = 127
UE8M0_MAX_BYTE = 254  # 255 is NaN in E8M0
KV_TILE = 64  # elements that share one scale in fp8_ds_mla
ACT_TILE = 128  # elements that share one scale in a linear's activation
WEIGHT_TILE = 128  # side of a weight block that shares one scale
MX_TILE = 32  # elements that share one scale in mxfp4 and mxfp8, and side of a block of V4.1's weights
NVFP4_TILE = 16  # elements that share one e4m3 scale in nvfp4
SCALE_ROW_ALIGN = 4  # token rows of transposed activation scales, so that a column of float32 is 16-byte aligned
SCALES_PER_WORD = 4  # UE8M0 bytes in one int32 of packed activation scales
KV_AMAX_FLOOR = 1e-4  # cache rows and indexer keys and queries
ACT_AMAX_FLOOR = 1e-10  # activations, quantised before a linear
MXFP4_AMAX_FLOOR = 6.0 * 2.0**-126
NVFP4_AMAX_FLOOR = 6.0 * 2.0**-9  # its scale is the smallest e4m3 above 0

# Paging, in tokens of the uncompressed sequence.
KV_BLOCK = 256  # tokens that one entry of a compressed block table covers
WINDOW_BLOCK = 64
V41_WINDOW_BLOCK = 32
V41_ENTRY_BLOCK = 64  # entries and index keys of a page, whatever the ratio
INDEX_ALIGN = 128  # width alignment of index rows
FLASHINFER_INDEX_ALIGN = 4  # for FlashInfer, which loads indices 16 bytes at a time


_Offset = TypeVar("_Offset", int, torch.Tensor)


def cdiv(a: int, b: int) -> int:
    """Return ceil(a / b)."""
    return -(-a // b)


def align_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is >= `value`."""
    return cdiv(value, multiple) * multiple


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Layout of a quantised page: bytes of data and of scales per token, and the alignment of a page."""

    data: int
    scale: int
    align: int = 576

    def page_bytes(self, block_size: int) -> int:
        """Return the bytes of a page without its padding."""
        return block_size * (self.data + self.scale)

    def page_stride(self, block_size: int) -> int:
        """Return the distance in bytes between two pages that this package allocates."""
        return align_up(self.page_bytes(block_size), self.align)

    def data_offset(self, offset: _Offset) -> _Offset:
        """Return the first data byte, within its page, of the token at `offset` (an int or a tensor)."""
        return offset * self.data

    def scale_offset(self, offset: _Offset, block_size: int) -> _Offset:
        """Return the first scale byte, within its page, of the token at `offset` (an int or a tensor)."""
        return block_size * self.data + offset * self.scale


FP8_DS_MLA = PageLayout(data=NOPE_DIM + 2 * ROPE_DIM, scale=8)
FP8_DS_MLA_TILES = NOPE_DIM // KV_TILE  # the eighth scale byte is a zero pad
INDEXER_FP8 = PageLayout(data=INDEXER_HEAD_DIM, scale=4)
INDEXER_MXFP4 = PageLayout(data=INDEXER_HEAD_DIM // 2, scale=INDEXER_HEAD_DIM // MX_TILE)

PAGE_LAYOUTS: dict[str, PageLayout] = {
    "fp8_ds_mla": FP8_DS_MLA,
    "indexer_fp8": INDEXER_FP8,
    "indexer_mxfp4": INDEXER_MXFP4,
}
"""Byte formats, `uint8 [P, page_bytes]`. The other formats are rows `[P, S, D]`: `plain` in the model's dtype and `fp8`
(per-tensor scale) as uint8."""

GRIDS = ("mxfp8", "nvfp4", "mxfp4")
"""Formats of DeepSeek-V4.1, for rows of any number of channels: window rows, compressed entries, index keys."""
ROW_FORMATS = (*GRIDS, "plain", "fp8_ds_mla")
"""Formats of V4.1's caches; `plain` rows hold values of a grid, and `fp8_ds_mla` is V4's record."""

KV_FORMATS = ("fp8_ds_mla", "plain", "fp8")
INDEXER_FORMATS = ("indexer_fp8", "indexer_mxfp4", "plain")


def grid_tile(grid: str) -> int:
    """Return the channels that share one scale byte in a format of `GRIDS`."""
    return NVFP4_TILE if grid == "nvfp4" else MX_TILE


def row_layout(grid: str, channels: int) -> PageLayout:
    """Return the page layout of rows of `channels` in a format of `GRIDS`, E205 if their scales do not cover them.

    Of 512 channels a row takes 528 bytes in mxfp8 and 288 in nvfp4; an index key of 128 takes 68 in mxfp4.
    """
    check(grid in GRIDS, "E202", got=repr(grid), fix=f"pass one of {', '.join(GRIDS)}")
    tile = grid_tile(grid)
    got = f"{grid} rows of {channels} channels"
    check(channels % tile == 0, "E205", got=got, rule=f"scales of {grid} cover {tile} channels", fix='use "plain" rows')
    eight_bits = grid == "mxfp8"
    return PageLayout(channels if eight_bits else channels // 2, channels // tile, align=512 if eight_bits else 256)


def storage_block_size(ratio: int) -> int:
    """Return the compressed entries in one page: 64 for ratio 4, 2 for ratio 128."""
    return KV_BLOCK // ratio


def state_block_size(ratio: int) -> int:
    """Return the tokens in one page of compressor state: 4 for ratio 4, 8 for ratio 128."""
    return 4 if ratio == CSA_RATIO else 8


def overlap_factor(ratio: int) -> int:
    """Return the groups of `ratio` tokens that one compressed entry pools: 2 for ratio 4 (overlap), else 1."""
    return 2 if ratio == CSA_RATIO else 1


def state_width(ratio: int, head_dim: int) -> int:
    """Return the width of a state row: kv, then score, each `overlap_factor * head_dim` float32 values."""
    return 2 * overlap_factor(ratio) * head_dim


def listed_width(ratio: int, max_model_len: int) -> int:
    """Return the row width of buffers that list every entry. All users must call this, or writes run past rows."""
    return align_up(cdiv(max_model_len, ratio), INDEX_ALIGN)


def c128a_width(max_model_len: int) -> int:
    """Return the row width of the C128A index buffers."""
    return listed_width(HCA_RATIO, max_model_len)


def page_layout(fmt: str, head_dim: int) -> PageLayout | None:
    """Return the layout of a format's pages for vectors of `head_dim`, or None for a format of rows."""
    return row_layout(fmt, head_dim) if fmt in GRIDS else PAGE_LAYOUTS.get(fmt)


def cache_shape(fmt: str, num_blocks: int, block_size: int, head_dim: int) -> tuple[int, ...]:
    """Return the shape of a cache: `[P, page_bytes]` for byte formats, `[P, S, D]` for rows."""
    page = page_layout(fmt, head_dim)
    if page is not None:
        return (num_blocks, page.page_bytes(block_size))
    check(fmt in KV_FORMATS, "E202", got=repr(fmt))
    return (num_blocks, block_size, head_dim)


def allocate_cache(
    fmt: str,
    num_blocks: int,
    block_size: int,
    head_dim: int = HEAD_DIM,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Allocate a zeroed cache in its `cache_shape`, with pages padded to their alignment.

    `dtype` is used by `plain` rows only; quantised formats are uint8.
    """
    shape = cache_shape(fmt, num_blocks, block_size, head_dim)
    page = page_layout(fmt, head_dim)
    if page is None:
        return torch.zeros(shape, dtype=dtype if fmt == "plain" else torch.uint8, device=device)
    stride = page.page_stride(block_size)
    backing = torch.zeros(num_blocks * stride, dtype=torch.uint8, device=device)
    return backing.as_strided(shape, (stride, 1))


def byte_pages(cache: torch.Tensor, fmt: str, block_size: int, op: str = "", head_dim: int = HEAD_DIM) -> torch.Tensor:
    """View a byte cache as `uint8 [P, page_bytes]`, from that shape or from `[P, S, data + scale]`.

    `head_dim` counts for `GRIDS` alone. Raises E203, which names `op`, if the tensor cannot be viewed so.
    """
    layout = page_layout(fmt, head_dim)
    assert layout is not None
    width = layout.data + layout.scale
    if cache.dtype is torch.uint8 and cache.stride(-1) == 1:
        if cache.dim() == 2 and cache.shape[1] == layout.page_bytes(block_size):
            return cache
        if cache.dim() == 3 and cache.shape[1:] == (block_size, width) and cache.stride(1) == width:
            return cache.flatten(1)
    got = f"shape {tuple(cache.shape)}, strides {cache.stride()}, dtype {cache.dtype}, block_size {block_size}"
    size = layout.page_bytes(block_size)
    fail(
        "E203",
        got=f"{op}: {got}" if op else got,
        rule=f"a {fmt} page of {block_size} tokens has {size} bytes: rows of {layout.data}, then {layout.scale} of "
        "scales for each; pages are stride(0) apart",
        fix=f"pass uint8 [P, {size}] or [P, {block_size}, {width}], as layout.allocate_cache makes them",
    )
