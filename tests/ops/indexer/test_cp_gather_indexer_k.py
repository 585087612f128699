from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.errors import InputError
from dsv4_compile.ops.indexer.cp_gather_indexer_k import cp_gather_indexer_k
from dsv4_compile.reference.indexer.cp_gather_indexer_k import cp_gather_indexer_k as reference
from dsv4_compile.testing import (
    assert_bitwise,
    check_op,
    hostile_values,
    padded,
    poison_,
    random_cache,
    refuse_synchronization,
    strided,
)

FORMATS = pytest.mark.parametrize("fmt", layout.INDEXER_FORMATS)
BLOCK = 4
PAGES = 9


def arguments(fmt: str, lengths: list[int], rows: int | None = None, columns: int = 3) -> tuple[Tensor, ...]:
    """Cache, block table, cumulative lengths and poisoned outputs of `rows` rows."""
    cache = random_cache(fmt, PAGES, BLOCK, live=PAGES * BLOCK, head_dim=24).cache
    table = torch.randint(PAGES, (max(len(lengths), 1), columns), dtype=torch.int32)
    cumulative = torch.tensor([0, *lengths]).cumsum(0).int()
    rows = sum(lengths) if rows is None else rows
    if fmt == "plain":
        return cache, table, cumulative, poison_(cache.new_empty(rows, 24)), torch.empty(rows, 0, dtype=torch.uint8)
    page = layout.PAGE_LAYOUTS[fmt]
    outputs = (poison_(torch.empty(rows, width, dtype=torch.uint8)) for width in (page.data, page.scale))
    return cache, table, cumulative, *outputs


def gathered_by_hand(fmt: str, cache: Tensor, table: Tensor, cumulative: Tensor, k: Tensor, k_scale: Tensor) -> None:
    """Fill `k` and `k_scale` row by row; a byte row is cut out of its page at the offsets of the specification."""
    k.zero_()
    k_scale.zero_()
    bounds = cumulative.tolist()
    for request, (start, stop) in enumerate(itertools.pairwise(bounds)):
        for row in range(start, min(stop, len(k))):
            column, offset = divmod(row - start, BLOCK)
            block = table[request, column].item() if request < len(table) and column < table.shape[1] else -1
            if not 0 <= block < len(cache):
                continue
            if fmt == "plain":
                k[row] = cache[block, offset]
                continue
            width = {"indexer_fp8": 128, "indexer_mxfp4": 64}[fmt]
            k[row] = cache[block, offset * width : (offset + 1) * width]
            k_scale[row] = cache[block, BLOCK * width + offset * 4 : BLOCK * width + offset * 4 + 4]


def check(fmt: str, cache: Tensor, table: Tensor, cumulative: Tensor, k: Tensor, k_scale: Tensor) -> None:
    expected = k.clone(), k_scale.clone()
    gathered_by_hand(fmt, cache, table, cumulative, *expected)
    cp_gather_indexer_k(cache, table, cumulative, k, k_scale, BLOCK, fmt)
    assert_bitwise(k.contiguous(), expected[0].contiguous())
    assert_bitwise(k_scale.contiguous(), expected[1].contiguous())


@FORMATS
@pytest.mark.parametrize("lengths", [[7], [3, 0, 9, 1], [0, 0, 5], [12, 12], [1, 0]])
def test_requests_follow_each_other_as_stored(fmt: str, lengths: list[int]) -> None:
    check(fmt, *arguments(fmt, lengths))


@FORMATS
def test_rows_of_no_request_are_zeroed(fmt: str) -> None:
    args = arguments(fmt, [2, 3], rows=9)
    check(fmt, *args)
    assert not args[3][5:].any()
    assert not args[4][5:].any()


@FORMATS
def test_outputs_shorter_than_the_requests_are_filled(fmt: str) -> None:
    check(fmt, *arguments(fmt, [5, 6], rows=7))


@FORMATS
def test_blocks_out_of_range_give_zeros(fmt: str) -> None:
    cache, table, cumulative, k, k_scale = arguments(fmt, [12] * len(hostile_values(PAGES)))
    for request, block in enumerate(hostile_values(PAGES)):
        table[request, 1] = block
    check(fmt, cache, table, cumulative, k, k_scale)
    assert not k.unflatten(0, (-1, 12))[:, 4:8].any()


@FORMATS
def test_lengths_beyond_the_block_table_give_zeros(fmt: str) -> None:
    args = arguments(fmt, [14, 2])
    check(fmt, *args)
    assert not args[3][12:14].any()


@FORMATS
def test_requests_beyond_the_block_table_give_zeros(fmt: str) -> None:
    cache, table, cumulative, k, k_scale = arguments(fmt, [2, 4])
    check(fmt, cache, table[:1], cumulative, k, k_scale)
    assert not k[2:].any()


@FORMATS
def test_block_table_rows_of_no_request_are_not_read(fmt: str) -> None:
    """A persistent block table has more rows than the step has requests."""
    cache, table, cumulative, k, k_scale = arguments(fmt, [3, 3], rows=8)
    wide = torch.cat((table, torch.randint(PAGES, (4, 3), dtype=torch.int32)))
    check(fmt, cache, wide, cumulative, k, k_scale)
    assert not k[6:].any()


@FORMATS
def test_nothing_to_gather_zeroes_everything(fmt: str) -> None:
    for lengths in ([], [0], [0, 0]):
        args = arguments(fmt, lengths, rows=3)
        check(fmt, *args)
        assert not args[3].any()
    cache, table, cumulative, k, k_scale = arguments(fmt, [3])
    cp_gather_indexer_k(cache[:0], table, cumulative, k, k_scale, BLOCK, fmt)
    assert not k.any()


@FORMATS
def test_layout_of_the_arguments_does_not_matter(fmt: str) -> None:
    cache, table, cumulative, k, k_scale = arguments(fmt, [7, 2])
    check(fmt, cache, strided(table), strided(cumulative.long()), padded(k), k_scale)


@FORMATS
def test_op_keeps_its_promises(fmt: str) -> None:
    samples = [arguments(fmt, [7, 2], rows=11), arguments(fmt, [1]), arguments(fmt, [], rows=0)]
    cache, table, cumulative, k, k_scale = arguments(fmt, [3, 4])
    samples.append((cache, padded(table), strided(cumulative), padded(k), k_scale))
    check_op(cp_gather_indexer_k, [(*sample, BLOCK, fmt) for sample in samples], utilities=fmt == "indexer_fp8")


@FORMATS
def test_reference_never_synchronises(fmt: str) -> None:
    args = arguments(fmt, [3, 4], rows=9)
    with refuse_synchronization():
        reference(*args, BLOCK, fmt)


def test_compiles_once_for_every_row_count() -> None:
    cache = arguments("indexer_fp8", [])[0]

    def step(table: Tensor, cumulative: Tensor, k: Tensor, k_scale: Tensor) -> Tensor:
        cp_gather_indexer_k(cache, table, cumulative, k, k_scale, BLOCK, "indexer_fp8")
        return k + 1

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in ([2, 3], [4, 4], [9, 1]):
            _, table, cumulative, k, k_scale = arguments("indexer_fp8", lengths)
            for x in (k, k_scale):
                torch._dynamo.mark_dynamic(x, 0)
            mine, scale = k.clone(), k_scale.clone()
            assert torch.equal(compiled(table, cumulative, k, k_scale), step(table, cumulative, mine, scale))
            assert_bitwise(k, mine)
            assert_bitwise(k_scale, scale)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: torch.zeros(2, 100, dtype=torch.uint8)}, r"\[E203\]"),
        ({1: torch.zeros(1, 2)}, "block_table"),
        ({2: torch.zeros(0, dtype=torch.int32)}, "starts with 0"),
        ({3: torch.zeros(5, 64, dtype=torch.uint8)}, "width of k"),
        ({3: torch.zeros(4, 128, dtype=torch.uint8)}, "same rows"),
        ({4: torch.zeros(5, dtype=torch.float32)}, r"k_scale \[N, bytes\]"),
        ({6: "fp8"}, "unknown cache format"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[int, object], message: str) -> None:
    args: list[object] = [*arguments("indexer_fp8", [5]), BLOCK, "indexer_fp8"]
    for index, value in change.items():
        args[index] = value
    with pytest.raises(InputError, match=message):
        cp_gather_indexer_k(*args)


def test_plain_keys_keep_their_dtype() -> None:
    cache, table, cumulative, k, k_scale = arguments("plain", [5])
    with pytest.raises(InputError, match="keep their dtype"):
        cp_gather_indexer_k(cache, table, cumulative, k.float(), k_scale, BLOCK, "plain")
