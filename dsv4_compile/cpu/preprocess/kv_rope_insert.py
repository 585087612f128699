"""RoPE of key/value vectors and their insertion into the paged cache: the tokens that have a slot, and no others."""

from __future__ import annotations

from torch import Tensor

from ...reference.common.rope import apply_rope
from .. import native
from ..common.rows import with_slots, write_rows


def kv_rope_insert(
    kv: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    block_size: int,
    cache_format: str,
    kv_scale: Tensor | None = None,
) -> None:
    """Compute the op of this name as its reference does, bit for bit."""
    inserted, capacity = slot_mapping.shape[0], k_cache.shape[0] * block_size
    if cache_format == "plain" and native.takes(k_cache, cos_sin_cache, rows=kv, int64=(slot_mapping, positions)):
        where = k_cache, slot_mapping, positions, cos_sin_cache
        rows, rope = cos_sin_cache.shape
        native.call("kv_rope_insert", kv, kv.stride(0), *where, inserted, capacity, kv.shape[1], rope, rows)
        return
    slots, kv, positions = with_slots(slot_mapping, k_cache.shape[0], block_size, kv, positions)
    if slots.shape[0] > 0:
        x = apply_rope(kv, positions, cos_sin_cache)
        write_rows(k_cache, cache_format, block_size, slots, x, kv_scale)
