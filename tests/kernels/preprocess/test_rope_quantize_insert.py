"""The kernel of `rope_quantize_insert` against the reference, every access checked, and compiled for every GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.kernels.preprocess import rope_quantize_insert as kernel
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.testing import assert_bitwise, hostile_indices, padded, poison_, strided
from dsv4_compile.testing.samples import op_samples
from tests.kernels.gpus import begins_early, sees, shared_out
from tests.support import fake_triton
from tests.support.bounds import checked
from tests.tools.compiled_facts import compiled_for

interpreted = pytest.mark.interpreted
reference = REFERENCES["rope_quantize_insert"]
PAGES, BLOCK, MAX_POS = 4, 2, 40
SLOTS = PAGES * BLOCK
FORMATS = [
    ("mxfp8", "", 512),
    ("nvfp4", "", 512),
    ("mxfp4", "", 128),
    ("fp8_ds_mla", "", 512),
    ("plain", "", 64),
    *(("plain", grid, 64) for grid in layout.GRIDS),
]
"""Format, grid of plain rows, channels."""


def rope_table(rope_dim: int) -> Tensor:
    angle = torch.rand(MAX_POS, rope_dim // 2) * 6.28
    return torch.cat((angle.cos(), angle.sin()), dim=1)


def poisoned_cache(fmt: str, dim: int, dtype: torch.dtype, odd: bool = False) -> tuple[Tensor, Tensor]:
    """Return storage full of NaN, and a cache in it with padded pages; `odd`: at an odd address, pages of odd size."""
    shape = layout.cache_shape(fmt, PAGES, BLOCK, dim)
    stride = math.prod(shape[1:]) + (33 if odd else 32)
    stored = dtype if fmt == "plain" else torch.uint8
    storage = poison_(torch.empty(PAGES * stride + 1, dtype=stored))
    inner = (1,) if len(shape) == 2 else (shape[2], 1)
    return storage, storage[int(odd) :].as_strided(shape, (stride, *inner))


def insert(
    x: Tensor, slots: Tensor, positions: Tensor, fmt: str, grid: str = "", *, odd: bool = False, **more: Any
) -> None:
    """Compare the whole storage behind the cache after the kernel and after the reference."""
    table = more.get("table", rope_table(16 if x.shape[1] < 512 else 64))
    stored = []
    for implementation in (reference, kernel.rope_quantize_insert):
        storage, cache = poisoned_cache(fmt, x.shape[1], x.dtype, odd)
        with checked(mutated=("p_cache",)) as launched:
            implementation(x, cache, slots, positions, table, BLOCK, fmt, grid)
        ran = implementation is kernel.rope_quantize_insert and slots.numel() > 0
        assert launched == ["rope_quantize_insert_kernel"] * ran
        stored.append(storage)
    assert_bitwise(stored[1], stored[0], label=f"{fmt} {grid} cache")


@interpreted
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("number", range(len(op_samples("rope_quantize_insert"))))
def test_samples(number: int) -> None:
    x, cache, *rest = op_samples("rope_quantize_insert")[number]
    want = cache.clone()
    with checked(mutated=("p_cache",)):
        kernel.rope_quantize_insert(x, cache, *rest)
    reference(x, want, *rest)
    assert_bitwise(cache, want)


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("fmt", "grid", "dim"), FORMATS)
def test_inserted_bytes_are_exact_and_nothing_else_is_written(
    fmt: str, grid: str, dim: int, dtype: torch.dtype
) -> None:
    x = (torch.randn(9, dim) * 10.0 ** torch.linspace(-7, 4, 9)[:, None]).to(dtype)
    x[1], x[4, 3], x[0] = 0, math.inf, math.nan  # row 0 has no slot
    slots = torch.tensor([-1, 7, 0, 3, 6, -5, 8, 2**40, 5])
    insert(x, slots, torch.arange(9) * 4, fmt, grid)


@interpreted
@pytest.mark.parametrize(("fmt", "grid", "dim"), FORMATS)
def test_hostile_slots_and_positions_touch_nothing_else(fmt: str, grid: str, dim: int) -> None:
    slots = hostile_indices((16,), SLOTS, dtype=torch.int64)
    slots = torch.where((slots >= 0) & (slots < SLOTS), -1, slots)
    slots[[1, 5, 6, 15]] = torch.randperm(SLOTS)[:4]
    positions = hostile_indices((16,), MAX_POS, dtype=torch.int64)
    x = torch.randn(16, dim).bfloat16()
    insert(x, slots, positions, fmt, grid)
    insert(x, torch.full((16,), -1, dtype=torch.int32), positions.clamp(-9, 99).int(), fmt, grid)


@interpreted
@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4"])
def test_a_nan_channel_spoils_its_own_tile_alone(fmt: str) -> None:
    x = torch.randn(2, 128).bfloat16()
    x[0, 70] = math.nan
    insert(x, torch.tensor([1, 4]), torch.arange(2), fmt)


@interpreted
@pytest.mark.parametrize("fmt", [*layout.GRIDS, "fp8_ds_mla"])
def test_a_cache_of_bytes_may_begin_anywhere_and_be_given_by_row(fmt: str) -> None:
    x, slots, positions, table = (
        torch.randn(3, 512).bfloat16(),
        torch.tensor([6, 1, 0]),
        torch.arange(3),
        rope_table(64),
    )
    insert(x, slots, positions, fmt, odd=True, table=table)
    (first, want), (second, got) = (poisoned_cache(fmt, 512, torch.uint8, odd=True) for _ in "ab")
    reference(x, want, slots, positions, table, BLOCK, fmt)
    with checked(mutated=("p_cache",)):
        kernel.rope_quantize_insert(x, got.unflatten(1, (BLOCK, -1)), slots, positions, table, BLOCK, fmt)
    assert_bitwise(second, first)


@interpreted
@pytest.mark.parametrize("tile", [(1, 1), (2, 1), (4, 1), (8, 2)])
def test_any_tile_stores_the_same_bytes(tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "tile", lambda rows: tile)
    for fmt in ("mxfp8", "nvfp4"):
        insert(torch.randn(5, 128).bfloat16(), torch.tensor([3, -1, 0, 7, 2]), torch.arange(5), fmt)


@interpreted
@pytest.mark.parametrize("tokens", [0, 1, 2])
@pytest.mark.parametrize("fmt", layout.GRIDS)
def test_no_row_and_few_rows(tokens: int, fmt: str) -> None:
    insert(torch.randn(tokens, 32).bfloat16(), torch.arange(tokens), torch.arange(tokens), fmt)


@interpreted
def test_a_cache_without_pages_takes_no_row() -> None:
    x, index = torch.randn(3, 64).bfloat16(), torch.arange(3)
    cache = layout.allocate_cache("mxfp8", 0, BLOCK, 64)
    with checked(mutated=()):
        kernel.rope_quantize_insert(x, cache, index, index, rope_table(16), BLOCK, "mxfp8")


@interpreted
@pytest.mark.parametrize("spread", [padded, strided])
def test_inputs_have_any_strides(spread: Any) -> None:
    slots, positions = strided(torch.tensor([5, -1, 2])), strided(torch.randint(MAX_POS, (3,)))
    for fmt in layout.GRIDS:
        insert(spread(torch.randn(3, 128).bfloat16()), slots, positions, fmt, table=padded(rope_table(64)))


def test_unsupported_calls_have_a_reason() -> None:
    def why(dim: int) -> str:
        where = torch.empty(0), torch.arange(2), torch.arange(2), rope_table(16)
        return kernel.why_unsupported_rope_quantize_insert(torch.randn(2, dim), *where, BLOCK, "mxfp4")

    assert why(64) == ""
    assert "96 is not a power of two" in why(96)


@pytest.mark.parametrize("target", fake_triton.TARGETS)
def test_it_compiles_ahead_of_time(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    early = sees(monkeypatch, target)
    index = torch.arange(3)
    formats = shared_out(FORMATS)[target]
    with compiled_for(target) as compiled:
        for fmt, grid, dim in formats:
            cache, table = layout.allocate_cache(fmt, PAGES, 64, dim), rope_table(64 if dim == 512 else 16)
            x = torch.empty(3, dim, dtype=torch.bfloat16)
            kernel.rope_quantize_insert(x, cache, index, index, table, 64, fmt, grid)
    assert len(compiled) == len(formats)
    assert all(binary.assembled and begins_early(binary) == early for binary in compiled)
