"""The kernel of `kv_rope_insert` against the reference, in the checking interpreter, and compiled for every GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.kernels.preprocess import kv_rope_insert as kernel
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.testing import assert_bitwise, hostile_indices, padded, poison_, strided
from tests.kernels.gpus import begins_early, sees, shared_out
from tests.support import fake_triton
from tests.support.bounds import checked
from tests.tools.compiled_facts import compiled_for

interpreted = pytest.mark.interpreted
PAGES, BLOCK, MAX_POS = 4, 2, 40
SLOTS = PAGES * BLOCK


def rope_table(rope_dim: int) -> Tensor:
    angle = torch.rand(MAX_POS, rope_dim // 2) * 6.28
    return torch.cat((angle.cos(), angle.sin()), dim=1)


def poisoned_cache(fmt: str, dim: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """Return storage full of NaN, and a cache in it with a page stride above the page size."""
    shape = layout.cache_shape(fmt, PAGES, BLOCK, dim)
    used = math.prod(shape[1:])
    stride = layout.PAGE_LAYOUTS[fmt].page_stride(BLOCK) if fmt in layout.PAGE_LAYOUTS else used + 32
    storage = poison_(torch.empty(PAGES * stride, dtype=dtype if fmt == "plain" else torch.uint8))
    inner = (1,) if len(shape) == 2 else (shape[2], 1)
    return storage, storage.as_strided(shape, (stride, *inner))


def insert(kv: Tensor, slots: Tensor, positions: Tensor, table: Tensor, fmt: str, **more: Any) -> None:
    """Compare the whole storage behind the cache after the kernel and after the reference."""
    dtype = more.pop("dtype", torch.bfloat16)
    stored = []
    for implementation in (REFERENCES["kv_rope_insert"], kernel.kv_rope_insert):
        storage, cache = poisoned_cache(fmt, kv.shape[1], dtype)
        with checked(mutated=("p_cache",)) as launched:
            implementation(kv, cache, slots, positions, table, BLOCK, fmt, **more)
        ran = implementation is kernel.kv_rope_insert and slots.numel() > 0
        assert launched == ["kv_rope_insert_kernel"] * ran
        stored.append(storage)
    assert_bitwise(stored[1], stored[0], label=f"{fmt} cache")


FORMATS = [
    ("fp8_ds_mla", 512, 64, torch.bfloat16),
    ("fp8_ds_mla", 512, 64, torch.float32),
    ("fp8_ds_mla", 512, 128, torch.bfloat16),
    ("plain", 64, 16, torch.bfloat16),
    ("plain", 64, 16, torch.float32),
    ("fp8", 64, 16, torch.bfloat16),
    ("fp8", 512, 64, torch.float32),
]


@interpreted
@pytest.mark.parametrize(("fmt", "dim", "rope", "dtype"), FORMATS)
def test_inserted_bytes_are_exact_and_nothing_else_is_written(
    fmt: str, dim: int, rope: int, dtype: torch.dtype
) -> None:
    kv = torch.randn(9, dim).to(dtype) * 10.0 ** torch.linspace(-6, 3, 9)[:, None].to(dtype)
    kv[0], kv[8], kv[1] = torch.nan, torch.nan, 0
    slots = torch.tensor([-1, 7, 0, 3, -5, 8, 2**40, 5])  # one fewer than tokens
    scale = {"kv_scale": torch.tensor([0.0371])} if fmt == "fp8" and dim == 64 else {}
    insert(kv, slots, torch.arange(9) * 4, rope_table(rope), fmt, dtype=dtype, **scale)


@interpreted
@pytest.mark.parametrize("fmt", layout.KV_FORMATS)
def test_hostile_slots_and_positions_touch_nothing_else(fmt: str) -> None:
    slots = hostile_indices((16,), SLOTS, dtype=torch.int64)
    live = torch.randperm(SLOTS)[:4]
    slots = torch.where((slots >= 0) & (slots < SLOTS), -1, slots)
    slots[[1, 5, 6, 15]] = live
    positions = hostile_indices((16,), MAX_POS, dtype=torch.int64)
    insert(torch.randn(16, 512).bfloat16(), slots, positions, rope_table(64), fmt)
    insert(torch.randn(16, 512).bfloat16(), torch.full((16,), -1, dtype=torch.int32), positions, rope_table(64), fmt)


@interpreted
def test_a_nan_element_spoils_its_own_tile_alone() -> None:
    kv = torch.randn(2, 512).bfloat16()
    kv[0, 70], kv[0, 200], kv[1, 500] = torch.nan, torch.inf, torch.nan
    insert(kv, torch.tensor([1, 4]), torch.arange(2), rope_table(64), "fp8_ds_mla")


@interpreted
def test_a_cache_may_begin_at_any_byte_and_be_given_by_token() -> None:
    shape = (PAGES, layout.FP8_DS_MLA.page_bytes(BLOCK))
    kv, slots, table = torch.randn(3, 512).bfloat16(), torch.tensor([6, 1, 0]), rope_table(64)
    caches = [poison_(torch.empty(PAGES * 1201 + 1, dtype=torch.uint8))[1:].as_strided(shape, (1201, 1)) for _ in "ab"]
    by_token = caches[1].unflatten(1, (BLOCK, -1))
    REFERENCES["kv_rope_insert"](kv, caches[0], slots, torch.arange(3), table, BLOCK, "fp8_ds_mla")
    with checked(mutated=("p_cache",)):
        kernel.kv_rope_insert(kv, by_token, slots, torch.arange(3), table, BLOCK, "fp8_ds_mla")
    assert_bitwise(caches[1], caches[0])


@interpreted
@pytest.mark.parametrize("tile", [(1, 1), (2, 1), (4, 1), (8, 2)])
def test_any_tile_stores_the_same_bytes(tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "tile", lambda rows: tile)
    slots = torch.tensor([3, -1, 0, 7, 2])
    insert(torch.randn(5, 512).bfloat16(), slots, torch.arange(5), rope_table(64), "fp8_ds_mla")


@interpreted
@pytest.mark.parametrize("tokens", [0, 1, 2])
def test_no_row_and_few_rows(tokens: int) -> None:
    insert(torch.randn(tokens, 64).bfloat16(), torch.arange(tokens), torch.arange(2), rope_table(16), "plain")


@interpreted
@pytest.mark.parametrize("spread", [padded, strided])
def test_inputs_have_any_strides(spread: Any) -> None:
    slots, positions = strided(torch.tensor([5, -1, 2])), strided(torch.randint(MAX_POS, (3,)))
    insert(spread(torch.randn(3, 512).bfloat16()), slots, positions, padded(rope_table(64)), "fp8_ds_mla")


def test_unsupported_calls_have_a_reason() -> None:
    def why(dim: int) -> str:
        where = None, torch.arange(2), torch.arange(2), rope_table(16)
        return kernel.why_unsupported_kv_rope_insert(torch.randn(2, dim), *where, BLOCK, "plain")

    assert why(64) == ""
    assert "48 is not a power of two" in why(48)


@pytest.mark.parametrize("target", fake_triton.TARGETS)
def test_it_compiles_ahead_of_time(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    early = sees(monkeypatch, target)
    kv, index, one = torch.empty(3, 512, dtype=torch.bfloat16), torch.arange(3), torch.ones(1)
    formats = shared_out(list(layout.KV_FORMATS))[target]
    with compiled_for(target) as compiled:
        for fmt in formats:
            cache = layout.allocate_cache(fmt, PAGES, 64)
            kernel.kv_rope_insert(kv, cache, index, index, rope_table(64), 64, fmt, one if fmt == "fp8" else None)
    assert len(compiled) == len(formats)
    assert all(binary.assembled and begins_early(binary) == early for binary in compiled)
