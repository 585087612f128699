"""The selection of the best order keys, with NVIDIA's shared memory simulated and with `tl.histogram`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4_compile.kernels.indexer import select_topk as kernel
from dsv4_compile.kernels.indexer.histogram import count_bins, reserve_counters
from dsv4_compile.testing import assert_bitwise
from tests.kernels.gpus import GPUS
from tests.kernels.indexer.held_once import COUNTING, held_by_several
from tests.simulator.shared import SimulatedShared, simulated_shared  # noqa: F401  (a fixture)
from tests.support import fake_triton
from tests.support.bounds import checked
from tests.tools.compiled_facts import compiled_for

interpreted = pytest.mark.interpreted
INF, NAN = torch.inf, torch.nan
INVISIBLE = torch.iinfo(torch.int32).min
SPREADS = ["normal", "outlier", "infinities", "exponents", "clusters", "equal", "rising", "subnormal", "invisible"]


def logits(spread: str, number: int) -> Tensor:
    x = torch.randn(number)
    if spread == "outlier":
        x[::40], x[5] = 3e38, -3e38
    elif spread == "infinities":
        x[1::5], x[2::7], x[3::11] = INF, -INF, NAN
    elif spread == "exponents":
        x = torch.exp2(40 * x)
    elif spread == "clusters":
        x = torch.where(x > 0, 1 + 1e-6 * x, 1e6 + x.round())
    elif spread == "equal":
        x = torch.zeros(number)
    elif spread == "rising":
        x = x.sort().values
    elif spread == "subnormal":
        x *= 1e-40
    return x


def order_keys(x: Tensor) -> Tensor:
    bits = (x + 0.0).view(torch.int32)
    return torch.where(x.isnan(), INVISIBLE + 1, bits ^ ((bits >> 31) & 0x7FFFFFFF))


def best(keys: Tensor, length: int, topk: int) -> list[int]:
    visible = [(-key, column) for column, key in enumerate(keys[:length].tolist()) if key != INVISIBLE]
    chosen = sorted(column for _, column in sorted(visible)[:topk])
    return chosen + [-1] * (topk - len(chosen))


def check(number: int, topk: int, tile: tuple[int, int], spreads: list[str] = SPREADS) -> None:
    keys = torch.zeros(len(spreads), -number // 16 * -16, dtype=torch.int32)
    keys[:, :number] = torch.stack([order_keys(logits(spread, number)) for spread in spreads])
    if "invisible" in spreads:
        keys[-1, torch.rand(keys.shape[1]) < 0.6] = INVISIBLE
    lens = torch.tensor([number - row % 2 for row in range(len(spreads))], dtype=torch.int32)
    out = torch.full((len(spreads), topk), 77, dtype=torch.int32)
    with checked(mutated=("outputs[0]", "best[0]", "best[1]", "p_arrived")):
        rows = kernel.KeyRows(keys, torch.arange(len(spreads)), lens, len(spreads), number)
        kernel.select(out, rows, tile)
    want = [best(row, length, topk) for row, length in zip(keys, lens.tolist(), strict=True)]
    assert_bitwise(out, torch.tensor(want, dtype=torch.int32))


SIZES = pytest.mark.parametrize(
    ("number", "topk", "tile"), [(7, 3, (16, 1)), (300, 1, (512, 2)), (300, 40, (512, 2)), (300, 70, (64, 1))]
)


@interpreted
@pytest.mark.usefixtures("simulated_shared")
@SIZES
def test_shared_memory_finds_the_best_of_any_logits(number: int, topk: int, tile: tuple[int, int]) -> None:
    check(number, topk, tile)


@interpreted
@SIZES
def test_histograms_find_the_best_of_any_logits(number: int, topk: int, tile: tuple[int, int]) -> None:
    check(number, topk, tile)


@interpreted
def test_one_pass_is_enough_for_smooth_logits(simulated_shared: SimulatedShared) -> None:  # noqa: F811
    check(4096, 512, (4096, 8), ["normal"] * 2)
    assert simulated_shared.passes == simulated_shared.lists == 2


def held(compiled: Any) -> list[str]:
    return held_by_several(compiled.asm["ttgir"])


@pytest.mark.parametrize(
    ("stride", "topk", "tile", "page", "counting"),
    [(16, 5, (4096, 8), 0, 3), (512, 50, (4096, 8), 1, 3), (4096, 512, (4096, 16), 64, 3), (3008, 99, (512, 8), 2, 7)],
)
def test_no_two_threads_count_the_same_key(
    stride: int, topk: int, tile: tuple[int, int], page: int, counting: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "gpu_of", lambda device: GPUS["sm_90"][0])
    keys, lens = torch.zeros(2, stride, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    slots = kernel.SlotMap(lens, torch.zeros(2, 8, dtype=torch.int32), lens > 0, page) if page else None
    with compiled_for("sm_90") as compiled:
        rows = kernel.KeyRows(keys, lens, lens, 2, stride)
        kernel.select(torch.zeros(2, topk, dtype=torch.int32), rows, tile, slots)
    (selecting,) = compiled
    assert sum(selecting.asm["ttgir"].count(name) for name in COUNTING) >= counting
    assert selecting.ask(held) == []


@triton.jit
def _count_few_kernel(p_keys, NUMBER: tl.constexpr):
    at = reserve_counters(256, True)
    count_bins(at, tl.load(p_keys + tl.arange(0, NUMBER)))


@pytest.mark.parametrize(("number", "twice"), [(16, 1), (32, 0), (256, 0)])
def test_a_key_that_several_threads_count_is_found(number: int, twice: int) -> None:
    with compiled_for("sm_90") as compiled:
        _count_few_kernel[(1,)](torch.zeros(number, dtype=torch.int32), NUMBER=number, num_warps=1)
    assert len(compiled[0].ask(held)) == twice


@pytest.mark.parametrize("target", fake_triton.TARGETS)
def test_it_compiles_ahead_of_time(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting takes no memory of Triton's but what its sums over the threads exchange, and pointers stay in place."""
    monkeypatch.setattr(kernel, "gpu_of", lambda device: GPUS[target][0])
    keys, lens = torch.zeros(2, 4096, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    with compiled_for(target) as compiled:
        kernel.select(torch.zeros(2, 512, dtype=torch.int32), kernel.KeyRows(keys, lens, lens, 2, 4096), (4096, 8))
    (selecting,) = compiled
    assert selecting.assembled
    if GPUS[target][0].backend == "cuda":
        assert "red.shared.add.u32" in selecting.asm["ptx"]
        assert selecting.metadata.shared <= 1024
