from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.errors import InputError
from dsv4_compile.ops.preprocess.dequantize_and_gather_k_cache import dequantize_and_gather_k_cache
from dsv4_compile.reference.common import kv_format
from dsv4_compile.testing import RandomCache, assert_bitwise, check_op, padded, poison_, random_cache, strided

BLOCK = 4
TABLE = torch.tensor([[5, 2, 0, 7], [1, 3, -1, 99], [6, -1, -1, -1]], dtype=torch.int32)
"""Of a cache with 8 pages: request 1 has lost a block and names one that does not exist, request 2 has one block."""


def full_cache(fmt: str, dtype: torch.dtype = torch.bfloat16) -> RandomCache:
    return random_cache(fmt, 8, BLOCK, live=8 * BLOCK, dtype=dtype)


def expected(
    out: Tensor, cache: RandomCache, table: Tensor, seq_lens: list[int], gather_lens: list[int], offset: int
) -> Tensor:
    """Row by row: the definition in the docstring, with plain loops."""
    out = out.clone()
    for request, (length, count) in enumerate(zip(seq_lens, gather_lens, strict=True)):
        for i in range(min(count, out.shape[1] - offset)):
            entry, row = length - count + i, torch.zeros(out.shape[2])
            if 0 <= entry < table.shape[1] * BLOCK and 0 <= table[request, entry // BLOCK] < 8:
                slot = table[request, entry // BLOCK].long() * BLOCK + entry % BLOCK
                row = kv_format.load_kv(cache.cache, cache.fmt, BLOCK, slot[None], cache.kv_scale)[0]
            out[request, offset + i] = row.to(out.dtype)
    return out


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("fmt", layout.KV_FORMATS)
@pytest.mark.parametrize(
    ("seq_lens", "gather_lens", "rows", "offset"),
    [
        pytest.param([16, 7, 4], [16, 7, 4], 20, 0, id="whole"),
        pytest.param([16, 7, 4], [5, 6, 1], 9, 2, id="tails behind an offset"),
        pytest.param([16, 15, 9], [16, 15, 9], 16, 0, id="missing blocks"),
        pytest.param([16, 8, 3], [16, 8, 3], 6, 1, id="out too short"),
        pytest.param([2, 0, 1], [5, 3, 1], 8, 0, id="before the first entry"),
        pytest.param([0, 0, 0], [0, 0, 0], 4, 0, id="empty requests"),
        pytest.param([16, 7, 4], [3, 3, 3], 4, 4, id="offset at the end"),
    ],
)
def test_entries_land_in_their_rows_and_no_other_row_changes(
    fmt: str, seq_lens: list[int], gather_lens: list[int], rows: int, offset: int
) -> None:
    cache = full_cache(fmt)
    out = poison_(torch.empty(3, rows, 512, dtype=torch.bfloat16))
    want = expected(out, cache, TABLE, seq_lens, gather_lens, offset)
    dequantize_and_gather_k_cache(
        out, cache.cache, ints(seq_lens), ints(gather_lens), TABLE, BLOCK, offset, fmt, cache.kv_scale
    )
    assert_bitwise(out, want)


def test_rows_are_dequantised_values() -> None:
    """Independently of the reader: powers of two survive every rounding."""
    cache = layout.allocate_cache("fp8_ds_mla", 2, BLOCK)
    x = 2.0 ** torch.randint(-3, 3, (8, 512)).float()
    kv_format.store_kv(cache, "fp8_ds_mla", BLOCK, torch.arange(8), x)
    out = torch.zeros(1, 3, 512, dtype=torch.bfloat16)
    dequantize_and_gather_k_cache(out, cache, ints([7]), ints([3]), ints([1, 0])[None], BLOCK, 0)
    assert_bitwise(out[0], x[[0, 1, 2]].bfloat16())


def test_without_gather_lens_all_entries_are_gathered() -> None:
    cache, lens = full_cache("fp8_ds_mla"), ints([9, 3, 4])
    one, two = torch.zeros(2, 3, 12, 512, dtype=torch.bfloat16)
    dequantize_and_gather_k_cache(one, cache.cache, lens, None, TABLE, BLOCK, 1)
    dequantize_and_gather_k_cache(two, cache.cache, lens, lens, TABLE, BLOCK, 1)
    assert_bitwise(one, two)


def test_block_tables_and_outputs_may_have_rows_apart() -> None:
    cache, lens = full_cache("fp8_ds_mla"), ints([16, 7, 4])
    out = torch.zeros(3, 16, 512, dtype=torch.bfloat16)
    spread, table = strided(out), padded(TABLE)
    dequantize_and_gather_k_cache(out, cache.cache, lens, lens, TABLE, BLOCK, 0)
    dequantize_and_gather_k_cache(spread, cache.cache, lens, lens, table, BLOCK, 0)
    assert_bitwise(spread, out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_rows_of_float32_are_rounded_to_the_output_alone(dtype: torch.dtype) -> None:
    cache, lens = full_cache("plain", torch.float32), ints([16, 7, 4])
    out = torch.zeros(3, 16, 512, dtype=dtype)
    dequantize_and_gather_k_cache(out, cache.cache, lens, lens, TABLE, BLOCK, 0, "plain")
    assert_bitwise(out[2, 1], cache.cache[6, 1].to(dtype))


def test_nan_in_unused_rows_stays_out() -> None:
    cache = random_cache("fp8_ds_mla", 8, BLOCK, live=0)
    kv_format.store_kv(cache.cache, "fp8_ds_mla", BLOCK, torch.tensor([20, 21]), torch.randn(2, 512))
    out = torch.zeros(3, 5, 512, dtype=torch.bfloat16)
    dequantize_and_gather_k_cache(out, cache.cache, ints([2, 0, 0]), None, TABLE, BLOCK, 0)
    assert out.isfinite().all()
    assert out[0, :2].any(-1).all()
    assert not out[0, 2:].any()


def test_op_keeps_its_promises() -> None:
    for fmt in layout.KV_FORMATS:
        cache, lens, tails = full_cache(fmt), ints([16, 7, 4]), ints([4, 7, 0])
        out = torch.randn(3, 9, 512).bfloat16()
        empty = cache.cache.new_empty((0, *cache.cache.shape[1:]))
        samples = [
            (out, cache.cache, lens, None, TABLE, BLOCK, 0, fmt, cache.kv_scale),
            (padded(out.float()), cache.cache, strided(lens), strided(tails), padded(TABLE), BLOCK, 2, fmt),
            (out[:1], cache.cache, lens[:1], tails[:1], TABLE[:1], BLOCK, 9, fmt),
            (out[:0], cache.cache, lens[:0], tails[:0], TABLE[:0], BLOCK, 0, fmt),
            (out, empty, lens, tails, TABLE.new_empty((3, 0)), BLOCK, 0, fmt),
        ]
        check_op(dequantize_and_gather_k_cache, samples, utilities=fmt == "fp8_ds_mla")


def test_one_graph_serves_every_batch_and_workspace_size() -> None:
    cache = full_cache("fp8_ds_mla")

    def step(out: Tensor, pages: Tensor, lens: Tensor, tails: Tensor, table: Tensor) -> Tensor:
        dequantize_and_gather_k_cache(out, pages, lens, tails, table, BLOCK, 1)
        return out.sum(-1)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for requests, rows in ((3, 9), (2, 5), (3, 17)):
            lens, tails, table = ints([16, 7, 4])[:requests], ints([3, 7, 4])[:requests], TABLE[:requests].clone()
            out = torch.zeros(requests, rows, 512, dtype=torch.bfloat16)
            for tensor in (out, lens, tails, table):
                torch._dynamo.mark_dynamic(tensor, 0)
            torch._dynamo.mark_dynamic(out, 1)
            other = out.clone()
            assert_bitwise(compiled(out, cache.cache, lens, tails, table), step(other, cache.cache, lens, tails, table))
            assert_bitwise(out, other)


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        ({"out": torch.zeros(3, 512)}, "E201", r"out \[B, M, D\]"),
        ({"seq_lens": ints([1, 2])}, "E201", "seq_lens has a length for every request"),
        ({"gather_lens": ints([1, 2])}, "E201", "gather_lens has a length for every request"),
        ({"seq_lens": torch.tensor([1, 2, 3])}, "E201", "int32"),
        ({"block_table": TABLE[:2]}, "E201", "block_table has a row for every request"),
        ({"offset": -1}, "E201", "offset -1"),
        ({"offset": 6}, "E201", "offset 6"),
        ({"cache_format": "bf16"}, "E202", "bf16"),
        ({"block_size": 8}, "E203", "block_size 8"),
    ],
)
def test_wrong_arguments_are_refused(changes: dict[str, object], code: str, message: str) -> None:
    arguments = {
        "out": torch.zeros(3, 5, 512),
        "k_cache": full_cache("fp8_ds_mla").cache,
        "seq_lens": ints([1, 2, 3]),
        "gather_lens": None,
        "block_table": TABLE,
        "block_size": BLOCK,
        "offset": 0,
        "cache_format": "fp8_ds_mla",
    }
    with pytest.raises(InputError, match=rf"(?s)\[{code}\].*{message}"):
        dequantize_and_gather_k_cache(*{**arguments, **changes}.values())
