"""Copy the last entries of each request out of a paged cache into a dense workspace, dequantised."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common import kv_format
from ..common.paging import lookup_slots


def dequantize_and_gather_k_cache(
    out: Tensor,
    k_cache: Tensor,
    seq_lens: Tensor,
    gather_lens: Tensor | None,
    block_table: Tensor,
    block_size: int,
    offset: int,
    cache_format: str = "fp8_ds_mla",
    kv_scale: Tensor | None = None,
) -> None:
    """`out[b, offset + i] = entry seq_lens[b] - gather_lens[b] + i` of request b, for `0 <= i < gather_lens[b]`.

    Rows past the end of `out` are dropped. An entry that no block holds (negative, or beyond the block table) is
    written as zeros. No other row of `out` is touched.

    Args:
        out: `[B, M, D]` bfloat16, float16 or float32, any strides. Stored entries are bfloat16, or the cache's dtype in
            `plain` rows, and are converted to its dtype.
        k_cache: cache in `cache_format`.
        seq_lens: int32 `[B]`, in entries of this cache. gather_lens: int32 `[B]`; None gathers all of `seq_lens`.
        block_table: int32 `[B, blocks]`, any row stride.
        offset: first row of `out`, in [0, M].
        kv_scale: one float32 element, `fp8` only; None means 1.
    """
    rows = out[:, offset:]
    requests, count, _ = rows.shape
    gather_lens = seq_lens if gather_lens is None else gather_lens
    i = torch.arange(count, device=out.device)
    entries = (seq_lens - gather_lens).long()[:, None] + i
    owner = torch.arange(requests, device=out.device)[:, None]
    slots = lookup_slots(block_table, owner, entries, block_size)
    values = kv_format.load_kv(k_cache, cache_format, block_size, slots, kv_scale).to(out.dtype)
    rows.copy_(torch.where((i < gather_lens[:, None])[..., None], values, rows))
