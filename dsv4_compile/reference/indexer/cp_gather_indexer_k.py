"""Copy the indexer keys of several requests out of their pages, one request after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from ...layout import PAD_INDEX
from ..common import paging


def cp_gather_indexer_k(
    k_cache: Tensor,
    block_table: Tensor,
    cu_seq_lens: Tensor,
    k: Tensor,
    k_scale: Tensor,
    block_size: int,
    cache_format: str,
) -> None:
    """Rows [cu_seq_lens[r], cu_seq_lens[r + 1]) of `k` and `k_scale` get the first entries of request r, as stored.

    Rows of no request, and entries in a block that is not in the table or the cache, are zeroed.

    Args:
        k_cache: indexer cache; block_table: int32 `[R, B]`, in blocks of `block_size` entries.
        cu_seq_lens: int `[N_req + 1]`, ascending, in compressed entries; N_req <= R.
        k: written in place: uint8 `[N, 128]` for `indexer_fp8`, uint8 `[N, 64]` for `indexer_mxfp4`, the cache's dtype
            `[N, D]` for `plain`.
        k_scale: written in place: uint8 `[N, 4]`, one float32 or four UE8M0 bytes; uint8 `[N, 0]` for `plain`.
    """
    row = torch.arange(k.shape[0], device=k.device, dtype=cu_seq_lens.dtype)
    request = torch.searchsorted(cu_seq_lens.contiguous(), row, right=True) - 1
    entry = torch.where(row < cu_seq_lens[-1], row - cu_seq_lens[request], PAD_INDEX)
    slots = paging.lookup_slots(block_table, request, entry, block_size)
    if cache_format == "plain":
        k.copy_(paging.read_rows(k_cache, block_size, slots))
    else:
        data, scale = paging.read_bytes(k_cache, cache_format, block_size, slots)
        k.copy_(data)
        k_scale.copy_(scale)
