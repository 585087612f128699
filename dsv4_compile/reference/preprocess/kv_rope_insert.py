"""RoPE of key/value vectors and their insertion into the paged cache."""

from __future__ import annotations

from torch import Tensor

from ..common import kv_format
from ..common.rope import apply_rope


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
    """Rotate the last `rope_dim` of each vector in float32 and store it; `kv_format.store_kv` defines the stored bytes.

    Args:
        kv: `[T, D]`, already RMS-normed. Not modified.
        k_cache: cache in `cache_format`, pages stride(0) apart; only the rows of valid slots are written.
        slot_mapping: int64 `[<= T]`; slot i receives token i. A slot outside the cache, -1 say, skips its token. Valid
            slots are distinct.
        positions: int32 or int64 `[>= T]`.
        cos_sin_cache: float32 `[max_pos, rope_dim]`.
        kv_scale: one float32 element, `fp8` only; None means 1.
    """
    inserted = slot_mapping.shape[0]
    x = apply_rope(kv[:inserted], positions[:inserted], cos_sin_cache)
    kv_format.store_kv(k_cache, cache_format, block_size, slot_mapping, x, kv_scale)
