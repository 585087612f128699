"""The caches of a DeepSeek-V4 layer as vLLM pages them: tokens of a block, bytes of a page, and conditions.

Each block-table group of `metadata.BlockTables` is one group of caches in vLLM, and page formats are equal byte for
byte. vLLM keeps the pages of all layers in one storage, side by side in a block: pages of a cache are a block apart,
about 1 MB for V4-Flash, so their byte offsets pass 2^31 after about 2,100 blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ... import layout
from ...config import DeepseekV4Config
from ...errors import check
from ...sources import Group, source_groups, window_group

PAGE_ALIGN = 16
"""Bytes that pages begin at a multiple of: TMA copies need it, and vectorised loads of the kernels."""


@dataclass(frozen=True, slots=True)
class CacheKind:
    """One cache of a layer.

    name: role of its group, see `sources.Group`; group: the group's name.
    block_tokens: tokens of the sequence that a page covers; tokens_per_row: of them one row holds.
    row: elements of a row, in `dtype`. window: tokens after which vLLM may free a page, None for never.
    """

    name: str
    group: str
    block_tokens: int
    tokens_per_row: int
    row: int
    dtype: torch.dtype
    window: int | None = None

    @property
    def rows(self) -> int:
        """Rows of a page."""
        return self.block_tokens // self.tokens_per_row

    @property
    def head_size(self) -> int:
        """Dims of the vector that a row stands for; rows of keys and values hold them in fewer bytes."""
        return layout.HEAD_DIM if self.name in ("window", "entries") else self.row

    def pages_of(self, views: Tensor) -> Tensor:
        """Return vLLM's views `[P, 1, rows, row]` as this package's pages, without a copy.

        Byte formats become `[P, rows * row]`, states stay `[P, rows, row]`. E803 for any other shape, dtype or address.
        """
        got = f"{self.name} cache {views.dtype} {list(views.shape)}, strides {list(views.stride())}"
        fine = (
            views.dtype is self.dtype
            and views.dim() == 4
            and tuple(views.shape[1:]) == (1, self.rows, self.row)
            and tuple(views.stride()[2:]) == (self.row, 1)
        )
        rule = f"pages are {self.dtype} [P, 1, {self.rows}, {self.row}], and the elements of a page are contiguous"
        check(fine, "E803", got=got, rule=rule)
        # By address: a view that came through DLPack has a separate storage, and its offset there is 0.
        for what, value in (("begin at address", views.data_ptr()), ("are apart", _page_bytes(views))):
            rule = f"pages begin at multiples of {PAGE_ALIGN} bytes, and are as far apart"
            check(value % PAGE_ALIGN == 0, "E803", got=f"{got}, whose pages {what} {value}", rule=rule)
        pages = views.squeeze(1)
        return pages if pages.dtype is torch.float32 else pages.flatten(1)


def _page_bytes(views: Tensor) -> int:
    """Return the bytes between the beginnings of two pages."""
    return views.stride(0) * views.element_size()


def cache_kinds(config: DeepseekV4Config, layer_idx: int) -> tuple[CacheKind, ...]:
    """Return the caches of a layer in vLLM's formats: `fp8_ds_mla` keys and values, fp8 indexer keys."""
    sources = (group for source in config.sources(layer_idx) for group in source_groups(source.ratio))
    return tuple(_kind(config, group) for group in (window_group(), *sources))


def _kind(config: DeepseekV4Config, group: Group) -> CacheKind:
    """Return the cache of a group; vLLM frees pages of states when no open group of tokens needs them."""
    row, dtype, window = row_bytes(layout.FP8_DS_MLA), torch.uint8, None
    if group.role == "window":
        window = config.sliding_window
    elif group.role == "keys":
        row = row_bytes(layout.INDEXER_FP8)
    elif group.role in ("states", "key_states"):
        dim = config.head_dim if group.role == "states" else config.index_head_dim
        row, dtype = layout.state_width(group.ratio, dim), torch.float32
        window = layout.overlap_factor(group.ratio) * group.ratio
    return CacheKind(group.role, group.name, group.page_tokens, group.row_tokens, row, dtype, window)


def row_bytes(page: layout.PageLayout) -> int:
    """Return the bytes of a row: its elements and its scales."""
    return page.data + page.scale
