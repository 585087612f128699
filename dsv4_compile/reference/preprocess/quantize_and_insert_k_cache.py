"""Store vectors that are already rotated in an `fp8_ds_mla` cache."""

from __future__ import annotations

from torch import Tensor

from ..common import kv_format


def quantize_and_insert_k_cache(k: Tensor, k_cache: Tensor, slot_mapping: Tensor, block_size: int) -> None:
    """Quantise `k` as `fp8_ds_mla` rows and store them; `kv_format.store_kv` defines the bytes.

    Args:
        k: `[N, 512]` bfloat16, float16 or float32; rounded to bfloat16 before anything else. Not modified.
        k_cache: uint8 `[P, page_bytes]`, pages stride(0) apart; only the rows of valid slots are written.
        slot_mapping: int64 `[<= N]`; slot i receives row i. A slot outside the cache skips its row. Valid slots are
            distinct.
    """
    rows = k[: slot_mapping.shape[0]].float()
    kv_format.store_kv(k_cache, "fp8_ds_mla", block_size, slot_mapping, rows)
