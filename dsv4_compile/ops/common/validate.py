"""Argument checks that several ops use. They look at ranks, dtypes and fixed dims, so a traced token dim stays free.

Messages are built only when a check fails: these run on every eager call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import check, fail
from ...layout import (
    GRIDS,
    HEAD_DIM,
    INDEXER_FORMATS,
    INDEXER_HEAD_DIM,
    KV_FORMATS,
    PAGE_LAYOUTS,
    ROW_FORMATS,
    WEIGHT_TILE,
    byte_pages,
    cdiv,
    grid_tile,
    page_layout,
)

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
INTS = (torch.int32, torch.int64)
E4M3 = torch.float8_e4m3fn


def describe(value: Tensor) -> str:
    """Return shape and dtype as they appear in an error message."""
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def expect(value: Tensor, what: str, dtypes: torch.dtype | tuple[torch.dtype, ...]) -> None:
    """Raise E201 unless `value` has one of `dtypes` and the rank that `what` spells: `"q_norm_rope: q [T, H, D]"`."""
    allowed = dtypes if isinstance(dtypes, tuple) else (dtypes,)
    if value.dtype not in allowed or value.dim() != what.count(",") + 1:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        fail("E201", got=describe(value), rule=f"{what} is {names}")


def expect_scale(scale: Tensor | None, what: str) -> None:
    """Raise E201 unless `scale` is None or one float32 element."""
    if scale is not None and (scale.dtype is not torch.float32 or scale.numel() != 1):
        fail("E201", got=describe(scale), rule=f"{what} is one float32 element")


def expect_weight_scale(scale: Tensor, weight: Tensor, what: str, tile: int = WEIGHT_TILE) -> None:
    """Raise E201 unless `scale` has one scale for each square block of `weight` `[N, K]`, partial blocks included."""
    expect(scale, f"{what} [N / {tile}, K / {tile}]", (torch.float32, torch.float8_e8m0fnu, torch.uint8))
    if any(blocks != cdiv(size, tile) for blocks, size in zip(scale.shape, weight.shape, strict=True)):
        fail("E201", got=f"{describe(scale)} for a weight {describe(weight)}", rule=f"{what} has one scale per block")


def expect_dim(size: int, expected: int, what: str) -> None:
    """Raise E201 unless two fixed dims agree."""
    if size != expected:
        fail("E201", got=f"{size} instead of {expected}", rule=what)


def expect_rows(available: int, needed: int, what: str) -> None:
    """Raise E201 unless a per-token argument covers every token: `available >= needed`."""
    if available < needed:
        fail("E201", got=f"{available} rows for {needed} tokens", rule=f"{what} has a row for every token")


def expect_rope_table(table: Tensor, op: str, head_dim: int) -> None:
    """Raise E201 unless `table` is a RoPE table that fits vectors of `head_dim`."""
    expect(table, f"{op}: cos_sin_cache [max_pos, rope_dim]", torch.float32)
    rows, rope_dim = table.shape
    if rows == 0 or rope_dim % 2 != 0 or rope_dim > head_dim:
        fail("E201", got=describe(table), rule=f"{op}: cos_sin_cache has rows, and an even width of at most {head_dim}")


def expect_kv_cache(
    cache: Tensor, op: str, cache_format: str, block_size: int, head_dim: int, kv_scale: Tensor | None = None
) -> None:
    """Raise E202 for an unknown KV format, E203 or E201 unless `cache` holds vectors of `head_dim` in that format."""
    if cache_format not in KV_FORMATS:
        fail("E202", got=f"{op}: {cache_format!r}", fix=f"pass one of {', '.join(KV_FORMATS)}")
    expect_scale(kv_scale, f"{op}: kv_scale")
    check(kv_scale is None or cache_format == "fp8", "E201", got=f"{op}: kv_scale with {cache_format}", fix="drop it")
    if cache_format == "fp8_ds_mla":
        expect_dim(head_dim, HEAD_DIM, f"{op}: fp8_ds_mla rows hold vectors of {HEAD_DIM} dims")
        byte_pages(cache, cache_format, block_size, op)
        return
    expect(cache, f"{op}: {cache_format} cache [P, S, D]", FLOATS if cache_format == "plain" else torch.uint8)
    if cache.shape[1] != block_size or cache.shape[2] != head_dim:
        fail("E203", got=describe(cache), rule=f"{op}: {cache_format} cache is [P, {block_size}, {head_dim}]")


def expect_row_cache(cache: Tensor, op: str, name: str, cache_format: str, block_size: int, channels: int) -> None:
    """Raise E202 for a format that V4.1 does not have, E203 or E201 unless `cache` holds rows of `channels` in it."""
    if cache_format not in ROW_FORMATS:
        fail("E202", got=f"{op}: {name} in {cache_format!r}", fix=f"pass one of {', '.join(ROW_FORMATS)}")
    if page_layout(cache_format, channels) is None:
        expect(cache, f"{op}: plain {name} [P, S, D]", FLOATS)
        if cache.shape[1] != block_size or cache.shape[2] != channels:
            fail("E203", got=describe(cache), rule=f"{op}: plain {name} is [P, {block_size}, {channels}]")
        return
    if cache_format == "fp8_ds_mla":
        expect_dim(channels, HEAD_DIM, f"{op}: fp8_ds_mla rows hold vectors of {HEAD_DIM} dims")
    byte_pages(cache, cache_format, block_size, f"{op}: {name}", channels)


def expect_grid(op: str, grid: str, cache_format: str, channels: int) -> None:
    """Raise E202 for an unknown grid, or one with a cache that is not plain; E201 if its scales do not cover rows."""
    if not grid:
        return
    if grid not in GRIDS or cache_format != "plain":
        fail("E202", got=f"{op}: {grid=} with {cache_format}", rule=f"plain rows hold values of {', '.join(GRIDS)}")
    expect_dim(channels % grid_tile(grid), 0, f"{op}: scales of {grid} cover all channels; the remainder")


def expect_indexer_format(op: str, cache_format: str) -> None:
    """Raise E202 for an unknown indexer format."""
    if cache_format not in INDEXER_FORMATS:
        fail("E202", got=f"{op}: {cache_format!r}", fix=f"pass one of {', '.join(INDEXER_FORMATS)}")


def expect_indexer_dim(head_dim: int, op: str, cache_format: str) -> None:
    """Raise E202 for an unknown indexer format, E201 unless it can hold keys and queries of `head_dim`."""
    expect_indexer_format(op, cache_format)
    if cache_format in PAGE_LAYOUTS:
        expect_dim(head_dim, INDEXER_HEAD_DIM, f"{op}: {cache_format} holds vectors of {INDEXER_HEAD_DIM} dims")


def expect_hadamard_dim(head_dim: int, op: str) -> None:
    """Raise E201 unless a vector of `head_dim` has a Hadamard transform."""
    if head_dim & (head_dim - 1) != 0:
        fail("E201", got=f"{op}: hadamard=True with {head_dim} dims", rule="the number of dims is a power of two")


def expect_indexer_cache(cache: Tensor, op: str, cache_format: str, block_size: int, head_dim: int) -> None:
    """Raise E202 for an unknown indexer format, E203 or E201 unless `cache` holds keys of `head_dim` in that format."""
    expect_indexer_dim(head_dim, op, cache_format)
    if cache_format in PAGE_LAYOUTS:
        byte_pages(cache, cache_format, block_size, op)
        return
    expect(cache, f"{op}: plain cache [P, S, D]", FLOATS)
    if cache.shape[1] != block_size or cache.shape[2] != head_dim:
        fail("E203", got=describe(cache), rule=f"{op}: plain cache is [P, {block_size}, {head_dim}]")


def expect_gathered_keys(k: Tensor, k_scale: Tensor, op: str, cache_format: str, head_dim: int) -> None:
    """Raise E201 unless `k` and `k_scale` hold gathered indexer keys of a known format, which has been checked."""
    page = PAGE_LAYOUTS.get(cache_format)
    expect(k, f"{op}: k [N, {cache_format} D]", torch.uint8 if page else FLOATS)
    expect(k_scale, f"{op}: k_scale [N, bytes]", torch.uint8)
    expect_dim(k_scale.shape[0], k.shape[0], f"{op}: k and k_scale have the same rows")
    expect_dim(k.shape[1], page.data if page else head_dim, f"{op}: width of k for {cache_format}")
    expect_dim(k_scale.shape[1], page.scale if page else 0, f"{op}: width of k_scale for {cache_format}")


def expect_state_cache(cache: Tensor, op: str, block_size: int, width: int) -> None:
    """Raise E201 or E203 unless `cache` holds compressor state rows of `width`."""
    expect(cache, f"{op}: state_cache [P, S, width]", torch.float32)
    if cache.shape[1] != block_size or cache.shape[2] != width:
        fail("E203", got=describe(cache), rule=f"{op}: state_cache is [P, {block_size}, {width}]")
