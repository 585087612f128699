"""The indexer's choice as slots on a GPU: bit by bit the mapped entries that the same kernels select."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.ops.common.kernels import launcher
from dsv4_compile.testing import hostile_indices
from tests.gpu.indexer.test_indexer_logits import arguments as scores

MAP, SLOTS = REFERENCES["global_topk"], launcher("indexer_topk_slots")


def arguments(fmt: str, tokens: int, topk: int, *, columns: int = 64, seed: int = 0) -> tuple[Any, ...]:
    """A tenth of the extra cache's blocks are out of range."""
    generator = torch.Generator().manual_seed(seed)
    table = hostile_indices((4, columns), 10_000, fraction=0.1, device="cuda", generator=generator)
    valid = (torch.rand(tokens, generator=generator) < 0.8).cuda()
    return (*scores(fmt, tokens, columns=columns, seed=seed), topk, table, valid, 64)


def expected(args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    slots, lens = MAP(launcher("indexer_logits_topk")(*args[:10]), args[5], *args[10:])
    return slots, lens


@pytest.mark.parametrize("fmt", layout.INDEXER_FORMATS)
@pytest.mark.parametrize("topk", [512, 1024, 100])
@pytest.mark.parametrize(("tokens", "columns"), [(1, 64), (32, 64), (128, 7), (300, 64), (40, 700)])
def test_slots_are_the_map_of_the_selection(fmt: str, topk: int, tokens: int, columns: int) -> None:
    args = arguments(fmt, tokens, topk, columns=columns)
    assert all(map(torch.equal, SLOTS(*args), expected(args)))


def test_every_part_of_a_row_that_stays_in_registers() -> None:
    args = arguments("indexer_fp8", 40, 512, columns=200)
    for tile in ((8192, 16), (4096, 8), (2048, 8), (1024, 4)):
        assert all(map(torch.equal, SLOTS(*args, select_tile=tile), expected(args)))


def test_more_best_of_parts_than_two_counts_in_a_word_hold() -> None:
    args = arguments("indexer_fp8", 20, 1024, columns=1100)
    assert all(map(torch.equal, SLOTS(*args, select_tile=(1024, 4)), expected(args)))


@pytest.mark.parametrize("groups", [(4, 8), (8, 16), (16, 16), (16, 32)])
@pytest.mark.parametrize("fmt", layout.INDEXER_FORMATS)
@pytest.mark.parametrize(("tokens", "columns"), [(1, 66), (130, 200)])
def test_groups_select_what_parts_select(fmt: str, tokens: int, columns: int, groups: tuple[int, int]) -> None:
    args = arguments(fmt, tokens, 512, columns=columns)
    want = SLOTS(*args, groups=(0, 0))
    for _ in range(5):
        assert all(map(torch.equal, SLOTS(*args, groups=groups), want))


def test_more_groups_than_a_tile() -> None:
    args = arguments("indexer_fp8", 3, 512, columns=4500)
    assert all(map(torch.equal, SLOTS(*args, groups=(16, 16)), SLOTS(*args, groups=(0, 0))))


def test_seventy_thousand_tokens() -> None:
    args = arguments("indexer_fp8", 70_000, 8, columns=3)
    assert all(map(torch.equal, SLOTS(*args), expected(args)))


def test_a_captured_launch_follows_its_inputs() -> None:
    args = arguments("indexer_fp8", 40, 512)
    SLOTS(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = SLOTS(*args)
    for seed in (5, 6):
        for mine, new in zip(args, arguments("indexer_fp8", 40, 512, seed=seed), strict=True):
            if isinstance(mine, Tensor):
                mine.copy_(new)
        graph.replay()
        assert all(map(torch.equal, out, expected(args)))


def test_a_hundred_runs_are_equal_bit_for_bit() -> None:
    args = arguments("indexer_fp8", 128, 512)
    first = SLOTS(*args)
    assert all(all(map(torch.equal, SLOTS(*args), first)) for _ in range(100))
