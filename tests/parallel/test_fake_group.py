"""Tests of one rank without the others: its weights, and its limits."""

from __future__ import annotations

import pytest
import torch

from dsv4_compile import DeepseekV4Attention, DeepseekV4Config
from dsv4_compile.errors import CompileError, RankError
from dsv4_compile.parallel import Ranks, all_gather, all_reduce, gather_objects, symmetric
from dsv4_compile.parallel.fake_group import fake_mesh, is_fake

CPU = torch.device("cpu")


@pytest.mark.parametrize("size", [1, 8])
def test_a_rank_without_the_others_has_its_part_and_its_collectives_return_at_once(size: int) -> None:
    with fake_mesh(size, CPU) as mesh:
        ranks = Ranks.of(mesh)
        assert (ranks.rank, ranks.size, is_fake(ranks)) == (0, size, True)
        layer = DeepseekV4Attention(DeepseekV4Config.flash(), 2, fp8=True, device="meta", mesh=mesh)
        assert layer.config.num_heads * size == 64 and layer.wo_b.weight.shape == (4096, 8192 // size)
        x = torch.arange(3.0)
        assert torch.equal(all_reduce(x, ranks), x) and torch.equal(all_gather(x, ranks), x.repeat(size))
        assert gather_objects("fact", ranks) == ["fact"] * size
    assert not torch.distributed.is_initialized()


def test_symmetric_memory_is_unsupported_by_ranks_that_do_not_exist() -> None:
    with fake_mesh(2, CPU) as mesh, pytest.raises(CompileError, match=r"E302[\s\S]*1 ranks of group .* do not exist"):
        symmetric.prepare(Ranks.of(mesh), torch.device("cuda", 0))


def test_the_fake_group_is_the_only_one_of_its_process_and_ends_with_its_block() -> None:
    with pytest.raises(RankError, match="E701"), fake_mesh(2, CPU), fake_mesh(4, CPU):
        raise AssertionError("two groups")
    assert not torch.distributed.is_initialized()
