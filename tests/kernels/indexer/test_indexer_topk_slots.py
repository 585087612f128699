"""The selecting kernel with slots for entries: its selection without them, mapped; every access checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.kernels.indexer import indexer_logits as entries
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.ops.common.kernels import launcher
from dsv4_compile.reference.metadata.global_topk import global_topk
from dsv4_compile.testing import assert_bitwise, hostile_indices, padded, strided
from dsv4_compile.testing.samples import op_samples
from tests.kernels.indexer.test_indexer_logits_topk import Scored, batch
from tests.support import fake_triton
from tests.support.bounds import checked
from tests.tools.compiled_facts import compiled_for

interpreted = pytest.mark.interpreted
FORMATS = pytest.mark.parametrize("fmt", layout.INDEXER_FORMATS)


def slots(*args: Any, **tiles: Any) -> tuple[Tensor, Tensor]:
    with checked(("p_out", "outputs[0]", "outputs[1]", "best[0]", "best[1]", "p_arrived")):
        return launcher("indexer_topk_slots")(*args, **tiles)


def arguments(fmt: str, tokens: int, topk: int, block: int = 4, extra_block: int = 4, columns: int = 6) -> list[Any]:
    """A third of the requests and of the extra cache's blocks are out of range, and a column is missing."""
    args = list(batch(fmt, tokens, block=block, columns=columns))
    args[5] = hostile_indices((tokens,), 3, fraction=0.3)
    table = hostile_indices((3, columns * block // extra_block - 1), 40, fraction=0.3)
    return [*args, topk, table, torch.rand(tokens) < 0.8, extra_block]


def compare(args: list[Any], **tiles: Any) -> None:
    """Compare with the mapped entries that the same kernel selects."""
    chosen = launcher("indexer_logits_topk")(*args[:10])
    want = global_topk(chosen, args[5], *args[10:])
    for name, got, expected in zip(("slots", "lens"), slots(*args, **tiles), want, strict=True):
        assert_bitwise(got, expected, strides=True, label=name)


@interpreted
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("number", range(len(op_samples("indexer_topk_slots"))))
def test_samples(number: int) -> None:
    args = op_samples("indexer_topk_slots")[number]
    for got, want in zip(slots(*args), REFERENCES["indexer_topk_slots"](*args), strict=True):
        assert_bitwise(got, want, strides=True)


@interpreted
@pytest.mark.usefixtures("poisoned_memory")
@FORMATS
@pytest.mark.parametrize(("topk", "extra_block"), [(1, 4), (5, 2), (24, 3), (40, 8)])
def test_slots_are_the_map_of_the_selection(fmt: str, topk: int, extra_block: int) -> None:
    compare(arguments(fmt, 6, topk, extra_block=extra_block))


@interpreted
@pytest.mark.parametrize("select_tile", [(16, 1), (32, 2), (4096, 8)])
def test_tiles_and_chunks_of_tokens_change_nothing(
    monkeypatch: pytest.MonkeyPatch, select_tile: tuple[int, int]
) -> None:
    args = arguments("indexer_fp8", 5, 9, block=16)
    compare(args, select_tile=select_tile)
    monkeypatch.setattr(entries, "WORKSPACE_BYTES", 4 * 96 * 2)
    compare(args, select_tile=select_tile)


@interpreted
@pytest.mark.parametrize("spread", [padded, strided])
def test_any_strides_spare_tokens_and_wide_integers(spread: Callable[[Tensor], Tensor]) -> None:
    args = arguments("indexer_fp8", 5, 7)
    args[:3] = [x[:4] for x in args[:3]]
    want = slots(*args)
    args = [*map(spread, args[:3]), args[3], *map(spread, args[4:7]), *args[7:10], *map(spread, args[10:12]), 4]
    for dtype in (torch.int32, torch.int64):
        args[10] = spread(args[10].to(dtype))
        for got, expected in zip(slots(*args), want, strict=True):
            assert_bitwise(got, expected)


@interpreted
def test_whole_contexts_ties_and_illegal_blocks_of_the_indexers_cache() -> None:
    scored = Scored([1.0, 2.0, 2.0, 2.0, 9.0, 9.0, 9.0, 9.0, 2.0, 2.0, 1.0, 3.0])
    scored.table[0, 1] = -1
    table, valid = torch.tensor([[5, 0, 3]], dtype=torch.int32), torch.tensor([True, True, True, False])
    args = *scored.args([0] * 4, [12, 12, 6, 12]), 4, table, valid, 4
    got, lens = slots(*args)
    assert got.tolist() == [[21, 22, 23, 15], [21, 22, 23, 15], [20, 21, 22, 23], [21, 22, 23, 15]]
    assert lens.tolist() == [4, 4, 4, 0]


@interpreted
def test_a_slot_that_int32_cannot_hold_is_dropped() -> None:
    table = torch.tensor([[2**29 - 1, 2**29]], dtype=torch.int32)
    got, lens = slots(*Scored([1.0] * 5).args([0], [5]), 5, table, torch.ones(1) > 0, 4)
    assert got.tolist() == [[2**31 - 4, 2**31 - 3, 2**31 - 2, 2**31 - 1, -1]]
    assert lens.tolist() == [4]


@interpreted
def test_nothing_reachable_gives_padding() -> None:
    args = arguments("indexer_fp8", 3, 4)
    for index, empty in ((3, args[3][:0]), (4, args[4][:, :0]), (10, args[10][:0]), (10, args[10][:, :0])):
        got, lens = slots(*args[:index], empty, *args[index + 1 :])
        assert got.tolist() == [[-1] * 4] * 3
        assert lens.tolist() == [0] * 3
    got, lens = slots(*(x[:0] for x in args[:3]), *args[3:])
    assert got.shape == (0, 4)
    assert lens.shape == (0,)


@pytest.mark.parametrize("target", fake_triton.TARGETS)
def test_it_compiles_ahead_of_time(target: str) -> None:
    table, valid = torch.zeros(3, 8, dtype=torch.int32), torch.ones(2) > 0
    with compiled_for(target) as compiled:
        launcher("indexer_topk_slots")(*batch("indexer_fp8", 2, heads=64, block=64, columns=8), 512, table, valid, 64)
    assert len(compiled) == 2
    assert all(binary.assembled for binary in compiled)
