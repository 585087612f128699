"""Schema, check and fake of `quantize_and_insert_k_cache`."""

from __future__ import annotations

from torch import Tensor

from ...reference.preprocess import quantize_and_insert_k_cache as reference
from ...selection.costs import CostModel, inserted, row_bytes
from ..common.define import define
from ..common.invariance import AS_IT_IS, Invariance
from ..common.validate import FLOATS, INTS, expect, expect_kv_cache, expect_rows


def _check(k: Tensor, k_cache: Tensor, slot_mapping: Tensor, block_size: int) -> None:
    op = "quantize_and_insert_k_cache"
    expect(k, f"{op}: k [N, D]", FLOATS)
    expect(slot_mapping, f"{op}: slot_mapping [<= N]", INTS)
    expect_rows(k.shape[0], slot_mapping.shape[0], f"{op}: k")
    expect_kv_cache(k_cache, op, "fp8_ds_mla", block_size, k.shape[1])


def _fake(k: Tensor, k_cache: Tensor, slot_mapping: Tensor, block_size: int) -> None:
    return None


quantize_and_insert_k_cache = define(
    "quantize_and_insert_k_cache",
    mutates=("k_cache",),
    reference=reference.quantize_and_insert_k_cache,
    fake=_fake,
    check=_check,
    lowering="dsv4_compile.lowering.preprocess.quantize_and_insert_k_cache",
    cost=CostModel(
        lambda T, D, row, e=2: (T * (e * D + inserted(row)), 0),
        sizes=lambda call: call.of_rows("k") | {"row": row_bytes("fp8_ds_mla", call.dims("k")[-1])},
    ),
    invariant=Invariance(rows=("k", "slot_mapping"), on_cpu=AS_IT_IS),
)
