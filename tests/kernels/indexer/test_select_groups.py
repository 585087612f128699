"""The selection from groups of a row, with NVIDIA's shared memory simulated and with `tl.histogram`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.kernels.indexer import indexer_logits as launchers
from dsv4_compile.kernels.indexer import select_groups as kernel
from dsv4_compile.kernels.indexer.select_topk import KeyRows, SlotMap
from dsv4_compile.ops.common.kernels import launcher
from dsv4_compile.testing import assert_bitwise
from tests.kernels.gpus import GPUS, sees
from tests.kernels.indexer.held_once import COUNTING
from tests.kernels.indexer.test_indexer_logits_topk import Scored, batch
from tests.kernels.indexer.test_indexer_topk_slots import arguments, interpreted
from tests.kernels.indexer.test_select_topk import INVISIBLE, SPREADS, best, held, logits, order_keys
from tests.simulator.shared import simulated_shared  # noqa: F401  (a fixture)
from tests.support import fake_triton
from tests.support.bounds import checked
from tests.tools.compiled_facts import compiled_for

LARGEST = torch.iinfo(torch.int32).max
OUTPUTS = ("p_out", "p_best", "outputs[0]", "outputs[1]", "best[0]", "best[1]", "p_arrived")
SIZES = pytest.mark.parametrize(
    ("number", "topk", "group"), [(300, 40, 4), (300, 5, 8), (700, 5, 16), (7, 3, 4), (2000, 9, 4), (64, 4, 16)]
)


def select(number: int, topk: int, group: int, warps: int = 2, spreads: Sequence[str] = SPREADS) -> None:
    """Compare with sorted keys; what is past the end of a context holds the largest key."""
    stride = layout.align_up(number, 16 * group)
    keys = torch.full((len(spreads), stride), LARGEST, dtype=torch.int32)
    keys[:, :number] = torch.stack([order_keys(logits(spread, number)) for spread in spreads])
    if "invisible" in spreads:
        keys[-1, torch.rand(stride) < 0.6] = INVISIBLE
    lens = torch.tensor([number - row % 2 for row in range(len(spreads))], dtype=torch.int32)
    seen = torch.where(torch.arange(stride) < lens[:, None], keys, INVISIBLE)
    groups = seen.view(len(spreads), -1, group).amax(2).contiguous()
    groups[:, layout.cdiv(number, group) :] = LARGEST
    out = torch.full((len(spreads), topk), 77, dtype=torch.int32)
    with checked(mutated=("outputs[0]",)):
        rows = KeyRows(keys, torch.arange(len(spreads)), lens, len(spreads), number)
        kernel.select_from_groups(out, rows, groups, warps)
    want = [best(row, length, topk) for row, length in zip(keys, lens.tolist(), strict=True)]
    assert_bitwise(out, torch.tensor(want, dtype=torch.int32))


@interpreted
@pytest.mark.usefixtures("simulated_shared")
@SIZES
def test_shared_memory_finds_the_best_of_any_logits(number: int, topk: int, group: int) -> None:
    select(number, topk, group)


@interpreted
@SIZES
def test_histograms_find_the_best_of_any_logits(number: int, topk: int, group: int) -> None:
    select(number, topk, group)


@interpreted
@pytest.mark.usefixtures("simulated_shared")
@pytest.mark.parametrize(("number", "topk", "group"), [(2000, 9, 4), (3000, 16, 8)])
def test_groups_of_more_than_a_tile(monkeypatch: pytest.MonkeyPatch, number: int, topk: int, group: int) -> None:
    monkeypatch.setattr(kernel, "MAX_TILE", 128)
    select(number, topk, group, warps=1)


def slots_of(args: Sequence[object], groups: tuple[int, int]) -> tuple[Tensor, ...]:
    with checked(OUTPUTS):
        return launcher("indexer_topk_slots")(*args, select_tile=(16, 1), groups=groups)


@interpreted
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("fmt", layout.INDEXER_FORMATS)
@pytest.mark.parametrize(("topk", "extra_block", "group"), [(1, 4, 4), (5, 2, 16), (24, 3, 8), (2, 8, 16), (3, 4, 8)])
def test_slots_are_those_of_the_selection_from_parts(fmt: str, topk: int, extra_block: int, group: int) -> None:
    """Pages, blocks and requests are missing, and memory past the end of each context is poisoned."""
    args = arguments(fmt, 6, topk, block=16, extra_block=extra_block)
    args[4][0, 2] = -1
    want = slots_of(args, (0, 0))
    for got, expected in zip(slots_of(args, (group, 2)), want, strict=True):
        assert_bitwise(got, expected, strides=True)


@interpreted
def test_chunks_of_tokens_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments("indexer_fp8", 5, 3, block=16)
    want = slots_of(args, (8, 2))
    monkeypatch.setattr(launchers, "WORKSPACE_BYTES", 4 * 128 * 2)
    assert all(map(torch.equal, slots_of(args, (8, 2)), want))


@interpreted
def test_whole_contexts_and_ties() -> None:
    scored = Scored([1.0, 2.0, 2.0, 2.0, 9.0, 9.0, 9.0, 9.0, 2.0, 2.0, 1.0, 3.0])
    scored.table[0, 1] = -1
    args = scored.args([0] * 5 + [-1], [12, 12, 6, 3, 0, 12])
    chosen = launcher("indexer_logits_topk")(*args, 4, select_tile=(8, 1), groups=(4, 1))
    assert chosen.tolist() == [[1, 2, 3, 11], [1, 2, 3, 11], [0, 1, 2, 3], [0, 1, 2, -1], [-1] * 4, [-1] * 4]


@interpreted
def test_no_tokens_and_keys_of_groups_that_are_no_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments("indexer_fp8", 4, 24, block=16)
    want = slots_of(args, (0, 0))
    monkeypatch.setattr(kernel, "MAX_TILE", 128)
    assert not kernel.fits(24, 16) and kernel.fits(8, 16)
    assert all(map(torch.equal, slots_of(args, (16, 2)), want))
    none, counts = slots_of([*(x[:0] for x in args[:3]), *args[3:]], (4, 1))
    assert none.shape == (0, 24) and counts.shape == (0,)


@pytest.mark.parametrize("target", fake_triton.TARGETS)
def test_it_compiles_ahead_of_time(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the score. On NVIDIA GPUs no two threads count one key, and a thread loads four keys at once."""
    early = sees(monkeypatch, target)
    for module in (launchers, kernel):
        monkeypatch.setattr(module, "gpu_of", lambda device: GPUS[target][0])
    table, valid = torch.zeros(3, 512, dtype=torch.int32), torch.ones(2) > 0
    args = *batch("indexer_fp8", 2, heads=64, block=64, columns=512), 512, table, valid, 64
    with compiled_for(target) as compiled:
        launcher("indexer_topk_slots")(*args, groups=None)
    scoring, selecting = compiled
    assert scoring.assembled and selecting.assembled
    assert selecting.metadata.name == "select_groups_kernel"
    if GPUS[target][0].backend == "cuda":
        assert selecting.asm["ptx"].count("ld.global.v4") >= 2 + 2
        assert sum(selecting.asm["ttgir"].count(name) for name in COUNTING) >= 7
        assert selecting.ask(held) == []
        assert (fake_triton.WAIT in selecting.asm["ptx"]) == early


def test_groups_and_the_keys_of_the_best_512_are_a_tile() -> None:
    """Up to 262,144 entries, a million tokens: rows are read from the first group to the last."""
    for reach in (4097, 8192, 65536, 65537, 262144):
        group, _ = launchers.groups_of(reach)
        assert kernel.fits(512, group) and kernel.fits(1024, group)
        assert layout.cdiv(reach, group) <= kernel.MAX_TILE


@interpreted
def test_the_map_to_slots_has_pages_of_any_size() -> None:
    keys = torch.arange(64, dtype=torch.int32).flip(0)[None].contiguous()
    groups, one = keys.view(1, 16, 4).amax(2), torch.zeros(1, dtype=torch.int32)
    out, counts = torch.empty(1, 3, dtype=torch.int32), torch.empty(1, dtype=torch.int32)
    for page in (1, 2, 3, 64):
        table = torch.arange(64, dtype=torch.int32)[None] + 7
        slots = SlotMap(counts, table, one == 0, page)
        kernel.select_from_groups(out, KeyRows(keys, one, one + 60, 1, 64), groups, 1, slots)
        assert out.tolist() == [[column // page * page + column % page + 7 * page for column in range(3)]]
        assert counts.tolist() == [3]
