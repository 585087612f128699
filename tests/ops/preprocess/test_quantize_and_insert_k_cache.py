from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.errors import InputError
from dsv4_compile.ops.preprocess.quantize_and_insert_k_cache import quantize_and_insert_k_cache
from dsv4_compile.testing import assert_bitwise, check_op, padded, poison_, strided
from tests.support import scalar

BLOCKS = 3


def poisoned_pages(block_size: int, gap: int = 0) -> tuple[Tensor, Tensor]:
    """Storage full of 0xFF and the pages in it, `gap` bytes further apart than this package allocates them."""
    stride = layout.FP8_DS_MLA.page_stride(block_size) + gap
    storage = poison_(torch.empty(BLOCKS * stride, dtype=torch.uint8))
    return storage, storage.as_strided((BLOCKS, layout.FP8_DS_MLA.page_bytes(block_size)), (stride, 1))


def keys(rows: int) -> Tensor:
    """bfloat16 rows of magnitudes from 1e-6 to 1e4; row 0 is zero."""
    x = torch.randn(rows, 512) * torch.logspace(-6, 4, rows)[:, None]
    x[0] = 0
    return x.bfloat16()


@pytest.mark.parametrize(("block_size", "gap"), [(2, 0), (2, 7), (64, 0), (1, 576)])
@pytest.mark.parametrize("view", ["pages", "accounting view"])
def test_bytes_are_exact_and_nothing_else_is_written(block_size: int, gap: int, view: str) -> None:
    storage, cache = poisoned_pages(block_size, gap)
    last = BLOCKS * block_size - 1
    slots, k = torch.tensor([last, -1, 0, last + 1, -7]), keys(6)
    k[1], k[3], k[4], k[5] = torch.nan, torch.nan, torch.nan, torch.nan  # rows without a slot
    expected = bytearray(storage.tolist())
    for row in (0, 2):
        data, scale = scalar.mla_row(k[row].tolist())
        scalar.store(expected, "fp8_ds_mla", cache.stride(0), block_size, int(slots[row]), data, scale)
    if view == "accounting view":
        cache = cache.unflatten(1, (block_size, 584))
    quantize_and_insert_k_cache(k, cache, slots, block_size)
    assert_bitwise(storage, torch.tensor(list(expected), dtype=torch.uint8))


def test_an_all_zero_row_stores_zeros_and_the_floor_scale() -> None:
    _, cache = poisoned_pages(2)
    quantize_and_insert_k_cache(torch.zeros(1, 512).bfloat16(), cache, torch.tensor([1]), 2)
    assert not cache[0, 576:1152].any()
    assert cache[0, 1160:1168].tolist() == [105] * 7 + [0]


def test_without_a_valid_slot_the_cache_keeps_every_byte() -> None:
    storage, cache = poisoned_pages(2)
    before = storage.clone()
    quantize_and_insert_k_cache(keys(4), cache, torch.tensor([-1, 6, 2**40, -(2**40)]), 2)
    quantize_and_insert_k_cache(keys(4), cache, torch.empty(0, dtype=torch.int64), 2)
    assert_bitwise(storage, before)


def test_op_keeps_its_promises() -> None:
    _, cache = poisoned_pages(2)
    k, slots = keys(5), torch.tensor([5, -1, 0, 9, 2])
    check_op(
        quantize_and_insert_k_cache,
        [
            (k, cache, slots, 2),
            (strided(k), cache, strided(slots), 2),
            (padded(k.float()), cache.unflatten(1, (2, 584)), slots[:3].int(), 2),
            (k[:1], cache, slots[:1], 2),
            (k[:0], cache, slots[:0], 2),
            (k, cache, torch.full((5,), -1), 2),
        ],
    )


def test_one_graph_serves_every_token_count() -> None:
    def step(k: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
        quantize_and_insert_k_cache(k * 2, cache, slots, 2)
        return cache[:, :4].sum(1)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    (one, cache), (two, other) = poisoned_pages(2), poisoned_pages(2)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (3, 6, 2):
            k, slots = keys(tokens), torch.randperm(8)[:tokens] - 1
            torch._dynamo.mark_dynamic(k, 0)
            torch._dynamo.mark_dynamic(slots, 0)
            assert_bitwise(compiled(k, cache, slots), step(k, other, slots))
            assert_bitwise(one, two)


@pytest.mark.parametrize(
    ("k", "slots", "block_size", "message"),
    [
        (torch.zeros(2, 64), torch.tensor([0]), 2, "512 dims"),
        (torch.zeros(2, 512), torch.tensor([0, 1, 2]), 2, "k has a row for every token"),
        (torch.zeros(2, 512), torch.tensor([0]), 4, "block_size 4"),
        (torch.zeros(2, 512), torch.tensor([[0]]), 2, "slot_mapping"),
    ],
)
def test_wrong_arguments_are_refused(k: Tensor, slots: Tensor, block_size: int, message: str) -> None:
    with pytest.raises(InputError, match=f"(?s){message}"):
        quantize_and_insert_k_cache(k, poisoned_pages(2)[1], slots, block_size)
