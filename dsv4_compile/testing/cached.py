"""Comparison of caches that two implementations of one op have written.

Values rounded from exact values are equal to the byte. Values summed first, in a norm, a pool or a Hadamard transform,
are float32 and depend on the order of the sum. If such a value lies next to a rounding boundary, one implementation
stores its lower neighbour and the other its upper one: a tie, and neither is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..layout import FP8_DS_MLA_TILES, NOPE_DIM, PAGE_LAYOUTS
from ..reference.common import kv_format, paging

TIES = 3e-5
"""Share of the stored bytes that may be ties. An ulp of float32 is 2^-16 of one of bfloat16: of the rotated dims, which
are stored as bfloat16, one in 10,000 is a tie, and of those that are rounded on to e4m3 one in 16 of that. For a row of
`fp8_ds_mla` that makes 1.6e-5."""
FEW_TIES = 4
"""Ties that are always allowed: in a small cache one tie is more than `TIES`."""
CANCELLED = 2.0**-16
"""Allowed error of a rotated value as a share of its pair's size, 2^8 ulp of float32: a rotation may cancel a value to
almost nothing, and the float32 error of the pair is many steps of such a value."""


def assert_cached(
    got: Tensor,
    want: Tensor,
    cache_format: str,
    block_size: int,
    *,
    transformed: bool = False,
    pooled: int = 1,
    label: str = "cache",
) -> int:
    """Fail unless scales are equal and so are values, but for a few that are one step of the format apart.

    Args:
        got, want: caches of a format that quantises, on one device; rows that are all zero count as not stored.
        transformed: keys have gone through a Hadamard transform. A tie before it shifts all results a little,
            for values near zero by several steps: 2^-8 of the root mean square of a row is allowed.
        pooled: rows that an entry is the weighted sum of. Terms of both signs cancel to 1 / sqrt(pooled) of their
            size and their errors do not, so sqrt(pooled) times as many ties are allowed.
    Returns:
        Number of values that differ.
    """
    slots = torch.arange(len(want) * block_size, device=want.device)
    ties, stored = 0, torch.zeros(len(slots), dtype=torch.bool, device=want.device)
    for (name, a), (_, b) in zip(*(_parts(x, cache_format, block_size, slots) for x in (got, want)), strict=True):
        apart = (a - b).abs()
        if name == "scale":
            if apart.any():
                raise AssertionError(f"{label}: {int(apart.any(-1).sum())} rows have other scales")
            continue
        if transformed:
            ours, theirs = (kv_format.load_indexer(x, cache_format, block_size, slots) for x in (got, want))
            apart = apart.masked_fill((ours - theirs).abs() <= 2.0**-8 * theirs.square().mean(-1, True).sqrt(), 0)
        if name == "bfloat16":
            ours, theirs = (_rotated(x, cache_format, block_size, slots).float() for x in (got, want))
            pair = theirs.unflatten(-1, (-1, 2)).norm(dim=-1).repeat_interleave(2, dim=-1)
            apart = apart.masked_fill((ours - theirs).abs() <= CANCELLED * pair, 0)
        if (apart > 1).any():
            raise AssertionError(f"{label}: {int((apart > 1).sum())} values are up to {int(apart.max())} steps apart")
        ties += int((a != b).sum())
        stored |= b.any(-1)
    rows, page = int(stored.sum()), PAGE_LAYOUTS.get(cache_format)
    row_bytes = want.shape[-1] if page is None else page.data + page.scale
    if ties > max(FEW_TIES, TIES * pooled**0.5 * rows * row_bytes):
        raise AssertionError(f"{label}: {ties} values of {rows} rows of {row_bytes} bytes differ")
    return ties


def _parts(cache: Tensor, cache_format: str, block_size: int, slots: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the contents of rows, int32 `[N, n]`: values as counts of steps of their format, and scales as bytes."""
    if cache_format == "fp8":
        yield "e4m3", _steps(paging.read_rows(cache.view(torch.uint8), block_size, slots), 8)
        return
    data, scale = paging.read_bytes(cache, cache_format, block_size, slots)
    if cache_format == "fp8_ds_mla":
        yield "e4m3", _steps(data[:, :NOPE_DIM], 8)
        yield "bfloat16", _steps(_rotated(cache, cache_format, block_size, slots).view(torch.int16), 16)
        scale = scale[:, :FP8_DS_MLA_TILES]
    elif cache_format == "indexer_fp8":
        yield "e4m3", _steps(data, 8)
    else:
        yield "e2m1", _steps(torch.stack((data & 0xF, data >> 4), -1).flatten(1), 4)
    yield "scale", scale.int()


def _rotated(cache: Tensor, cache_format: str, block_size: int, slots: Tensor) -> Tensor:
    """bfloat16 `[N, rope_dim]`: the rotated dims of rows of `fp8_ds_mla`."""
    data, _ = paging.read_bytes(cache, cache_format, block_size, slots)
    return data[:, NOPE_DIM:].contiguous().view(torch.bfloat16)


def _steps(codes: Tensor, bits: int) -> Tensor:
    """int32: codes of `bits` bits, sign and magnitude, in the order of their values. Both zeros are 0."""
    sign = 1 << (bits - 1)
    codes = codes.int() & (2 * sign - 1)
    return torch.where(codes >= sign, sign - codes, codes)
