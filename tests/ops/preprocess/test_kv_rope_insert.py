"""`kv_rope_insert`: RoPE of key/value vectors and their cache rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dsv4_compile import layout
from dsv4_compile.ops.preprocess.kv_rope_insert import kv_rope_insert
from dsv4_compile.testing import assert_bitwise, check_op, padded, strided
from tests.ops.preprocess.test_q_norm_rope_kv_insert import EDGES, SLOTS, expected_storage, poisoned_cache, rope_table
from tests.support import scalar


@pytest.mark.parametrize(
    ("fmt", "dim", "dtype"),
    [
        ("fp8_ds_mla", 512, torch.bfloat16),
        ("fp8_ds_mla", 512, torch.float32),
        ("plain", 64, torch.bfloat16),
        ("plain", 64, torch.float32),
        ("fp8", 64, torch.bfloat16),
    ],
)
def test_inserted_bytes_are_exact_and_nothing_else_is_written(fmt: str, dim: int, dtype: torch.dtype) -> None:
    storage, cache = poisoned_cache(fmt, 4, 2, dim, dtype)
    table = rope_table(64 if dim == 512 else 16)
    kv = torch.randn(9, dim).to(dtype)  # one token more than there are slots
    kv[0], kv[8] = torch.nan, torch.nan  # tokens without a slot
    kv[1] = 0
    scale = torch.tensor([0.0371]) if fmt == "fp8" else None
    expected = expected_storage(storage, fmt, cache.stride(0), kv, EDGES, table, 1.0 if scale is None else scale.item())
    kv_rope_insert(kv, cache, SLOTS, EDGES, table, 2, fmt, scale)
    assert_bitwise(storage, expected)


@pytest.mark.parametrize("fmt", layout.KV_FORMATS)
@pytest.mark.parametrize("slots", [[], [-1, -1, -1], [8, 2**31 - 1, -(2**31)]], ids=["none", "padding", "out of range"])
def test_without_a_valid_slot_the_cache_keeps_every_byte(fmt: str, slots: list[int]) -> None:
    storage, cache = poisoned_cache(fmt, 4, 2, 512, torch.bfloat16)
    before = storage.clone()
    kv = torch.randn(3, 512).bfloat16()
    kv_rope_insert(kv, cache, torch.tensor(slots, dtype=torch.int64), EDGES[:3], rope_table(), 2, fmt)
    assert_bitwise(storage, before)


def test_pages_past_two_to_the_31_bytes_are_addressed() -> None:
    blocks, stride = 57400, layout.FP8_DS_MLA.page_stride(64)
    assert blocks * stride > 2**31
    # NumPy's zeros are not backed by memory until they are written.
    storage = torch.from_numpy(np.zeros(blocks * stride, dtype=np.uint8))
    cache = storage.as_strided((blocks, layout.FP8_DS_MLA.page_bytes(64)), (stride, 1))
    kv, slot = torch.randn(1, 512).bfloat16(), blocks * 64 - 1
    kv_rope_insert(kv, cache, torch.tensor([slot]), torch.tensor([256]), rope_table(), 64, "fp8_ds_mla")
    data, scale = scalar.mla_row(scalar.rotate(kv[0].tolist(), rope_table()[256].tolist()))
    page = (blocks - 1) * stride
    assert bytes(storage[page + 36288 : page + 36864].tolist()) == data
    assert bytes(storage[page + 37368 : page + 37376].tolist()) == scale


@pytest.mark.parametrize("fmt", layout.KV_FORMATS)
def test_insert_op_keeps_its_promises(fmt: str) -> None:
    _, cache = poisoned_cache(fmt, 4, 2, 512, torch.bfloat16)
    kv, table, scale = torch.randn(8, 512).bfloat16(), rope_table(), torch.tensor([2.0]) if fmt == "fp8" else None
    check_op(
        kv_rope_insert,
        [
            (kv, cache, SLOTS, EDGES[:8], table, 2, fmt, scale),
            (padded(kv), cache, strided(SLOTS[:5]), EDGES.int(), padded(table), 2, fmt),
            (strided(kv.float()), cache, torch.full((8,), -1), EDGES, table, 2, fmt),
            (kv[:1], cache, SLOTS[1:2], EDGES[:1], table, 2, fmt),
            (kv[:0], cache, SLOTS[:0], EDGES[:0], table, 2, fmt),
            (kv, cache.new_empty((0, *cache.shape[1:])), SLOTS, EDGES[:8], table, 2, fmt),
        ],
        utilities=fmt == "fp8",
    )
