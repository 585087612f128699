"""Not a test: checks of `diverge_ranks`, run by each of two ranks in a separate process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dsv4_compile.debug import Divergence, diverge_ranks
from dsv4_compile.errors import RankError
from dsv4_compile.parallel import Ranks, all_reduce, gather_objects
from tests.debug.test_diverge import ROWS, D, Model, T, line_of

Plant = Callable[[Any], None]


def run(mesh: Any, plant: Plant = lambda layer: None) -> Divergence:
    """Run a model with a fault in its second layer on rank 1; check that both ranks return the same."""
    torch.manual_seed(3)
    model = Model()
    x, caches, slots = torch.randn(T, D), [torch.randn(ROWS, D) for _ in range(3)], torch.arange(T) * 2
    if mesh.get_rank() == 1:
        plant(model.layers[1])
    before = [cache.clone() for cache in caches]
    divergence = diverge_ranks(model, x, caches, slots, group=mesh)
    assert all(torch.equal(*pair) for pair in zip(before, caches, strict=True))
    texts = gather_objects(str(divergence), Ranks.of(mesh))
    assert len(set(texts)) == 1, texts
    return divergence


def equal_ranks_agree(mesh: Any) -> None:
    divergence = run(mesh)
    assert divergence.agrees and divergence.compared > 30, str(divergence)


def other_epsilon_is_found_at_its_op(mesh: Any) -> None:
    divergence = run(mesh, lambda layer: setattr(layer, "eps", 0.1))
    assert (divergence.op, divergence.layer, divergence.rank) == ("dsv4.fused_q_kv_rmsnorm", "layers.1", 1), str(
        divergence
    )
    assert divergence.place.line == line_of("q, kv = torch.ops") and divergence.after.startswith("aten.add")
    assert "rank     1" in str(divergence) and "expected" in str(divergence)


def other_weight_is_found_before_the_step(mesh: Any) -> None:
    def plant(layer: Any) -> None:
        with torch.no_grad():
            layer.weight[3, 5] += 0.5

    divergence = run(mesh, plant)
    assert (divergence.op, divergence.rank) == ("before the step", 1) and "layers.1.weight" in divergence.name, str(
        divergence
    )
    assert divergence.distance is not None and divergence.distance.index == (3, 5)


def other_op_is_found_where_it_runs(mesh: Any) -> None:
    divergence = run(mesh, lambda layer: setattr(layer, "stale", True))
    assert (divergence.op, divergence.layer, divergence.rank) == ("aten.add", "layers.1", 1), str(divergence)
    assert divergence.place.line == line_of("cache.index_copy_(0, slots") and "aten.index_select" in str(divergence)


def other_op_with_the_same_result_is_found_too(mesh: Any) -> None:
    divergence = run(mesh, lambda layer: setattr(layer, "strict", True))
    assert (divergence.op, divergence.layer, divergence.rank) == ("aten.ge", "layers.1", 1) and "aten.gt" in str(
        divergence
    ), str(divergence)


def difference_by_rounding_is_none(mesh: Any) -> None:
    divergence = run(mesh, lambda layer: setattr(layer, "gain", 1.0 + 1e-6))
    assert divergence.agrees, str(divergence)


class Divided(nn.Module):
    """A projection by parts and an all-reduce, then a scale that all ranks have."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks
        generator = torch.Generator().manual_seed(5 + ranks.rank)
        self.part = nn.Parameter(torch.randn(D, D, generator=generator))
        self.gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        total = all_reduce(torch.relu(x @ self.part), self.ranks)
        return torch.sigmoid(total * self.gain)


def parts_are_compared_after_a_collective(mesh: Any) -> None:
    ranks, x = Ranks.of(mesh), torch.ones(T, D)
    model = Divided(ranks)
    unequal = diverge_ranks(model, x, group=mesh)
    assert unequal.op == "before the step" and "part" in unequal.name, str(unequal)
    agreed = diverge_ranks(model, x, parts=lambda name: name == "part")  # of all processes
    assert agreed.agrees and agreed.compared == 10, (
        agreed.compared,
        str(agreed),
    )  # not the partial sums before the wait
    model.gain = 1.0 + ranks.rank
    divergence = diverge_ranks(model, x, group=mesh.get_group(), parts=lambda name: name == "part")
    assert (divergence.op, divergence.rank) == ("aten.mul", 1), str(divergence)


def a_rank_that_fails_is_named_on_all(mesh: Any) -> None:
    def form(x: Tensor) -> Tensor:
        if mesh.get_rank() == 1:
            raise ValueError("no such slot")
        return x * 2

    try:
        diverge_ranks(form, torch.ones(2), group=mesh)
    except RankError as error:
        assert error.code == "E702" and "rank 1: ValueError: no such slot" in error.got
        return
    raise AssertionError("no error")
