"""The boundary that adds up the parts of all ranks: mailboxes and flags of other ranks are written by the test."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from dsv4_compile.kernels.device.exchange import Peers
from dsv4_compile.kernels.hyper_connections import mhc_boundary as kernels
from dsv4_compile.reference.hyper_connections.mhc_boundary import MhcBoundary
from dsv4_compile.testing import assert_bitwise, padded, poisoned_empty
from tests.kernels.gpus import GPUS, sees
from tests.kernels.hyper_connections.calls import arguments
from tests.kernels.hyper_connections.test_mhc_boundary import MUTATED
from tests.support.bounds import checked
from tests.tools.compiled_facts import compiled_for

CTAS, RANKS, LIMIT = kernels.EXCHANGE_CTAS, 3, 50
SM_REGISTERS = 1 << 16
ONE = 2**31 - 2
"""An exchange after which the count of exchanges overflows."""


class Ranks:
    """Memory of three ranks, seen from `rank`; the others have filled their mailboxes for exchange `count`."""

    def __init__(self, call: MhcBoundary, rank: int, count: int, ahead: int = 0) -> None:
        self.rank, self.count = rank, count
        region = kernels.REGION_BYTES // call.output.element_size()
        self.boxes = [torch.full((2, CTAS, region), torch.nan, dtype=call.output.dtype) for _ in range(RANKS)]
        self.flags = [torch.full((RANKS, CTAS), self.wrapped(count - 1), dtype=torch.int32) for _ in range(RANKS)]
        self.counts = torch.full((CTAS,), self.wrapped(count - 1), dtype=torch.int32)
        self.failed, self.fault = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        self.parts = [torch.randn(call.output.shape).to(call.output.dtype) for _ in range(RANKS)]
        for other in range(RANKS):
            if other != rank:
                self.flags[rank][other] = self.wrapped(count + ahead)
                self.fill(other)

    @staticmethod
    def wrapped(count: int) -> int:
        return (count + 2**31) % 2**32 - 2**31

    def fill(self, rank: int) -> None:
        """Write the part of a rank as its kernel would: a program for a token and a slice."""
        output = self.parts[rank]
        channels, slices = kernels._slices(output.shape[1])
        for program in range(len(output) * slices):
            first = program % slices * channels
            channel_slice = output[program // slices, first : first + channels]
            self.boxes[rank][self.count & 1, program][: channel_slice.numel()] = channel_slice

    @property
    def peers(self) -> Peers:
        return Peers(tuple(self.boxes), tuple(self.flags), self.fault, self.counts, self.failed, LIMIT)

    @property
    def addresses(self) -> Peers:
        """`peers` with addresses in place of tensors, as a GPU takes them: beyond 4 GiB, so that they have 64 bits."""
        boxes, flags = (tuple(tensor.data_ptr() + (1 << 40) for tensor in every) for every in (self.boxes, self.flags))
        return self.peers._replace(mailboxes=boxes, flags=flags, fault=self.fault.data_ptr() + (1 << 40))

    @property
    def written(self) -> tuple[str, ...]:
        """Names of tensors that the kernel may write: this rank's mailboxes, and the flags of the others."""
        flags = (f"peers.flags[{rank}]" for rank in range(RANKS) if rank != self.rank)
        mine = f"peers.mailboxes[{self.rank}]", "peers.counts", "peers.failed", "peers.fault"
        return *mine, *flags, f"peers.flags[{self.rank}]"  # own flags are read by an atomic operation

    @property
    def sum(self) -> Tensor:
        total = sum(output.float() for output in self.parts)
        assert isinstance(total, Tensor)
        return total.to(self.parts[0].dtype)


def launch(call: MhcBoundary, ranks: Ranks) -> list[Tensor]:
    with poisoned_empty(), checked(mutated=(*MUTATED, *ranks.written)):
        return list(kernels.all_reduce_mhc_boundary(call, ranks.peers, ranks.rank))


def alone(call: MhcBoundary) -> list[Tensor]:
    with checked(mutated=MUTATED):
        return list(kernels.mhc_boundary(call))


@pytest.mark.interpreted
@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize(("dtype", "dim"), [(torch.bfloat16, 80), (torch.float32, 80), (torch.bfloat16, 272)])
def test_results_are_those_of_the_sum(rank: int, tokens: int, dtype: torch.dtype, dim: int) -> None:
    call = MhcBoundary(*arguments("mhc_boundary", tokens, dim, dtype))
    ranks = Ranks(call, rank, count=7 + rank)
    want = alone(call._replace(output=ranks.sum))
    got = launch(call._replace(output=padded(ranks.parts[rank])), ranks)
    for result, expected in zip(got, want, strict=True):
        assert_bitwise(result, expected)
    programs = tokens * kernels._slices(dim)[1]
    assert (ranks.counts[:programs] == ranks.count).all() and (ranks.counts[programs:] == ranks.count - 1).all()
    for other in range(RANKS):
        raised = ranks.flags[other][rank]
        expected = ranks.count if other != rank else ranks.count - 1
        assert (raised[:programs] == expected).all() and (raised[programs:] == ranks.count - 1).all()
    assert not ranks.failed.any() and not ranks.fault.any()


@pytest.mark.interpreted
@pytest.mark.parametrize(("count", "ahead"), [(1, 0), (4, 1), (ONE, 1), (ONE + 1, 0), (ONE + 1, 1), (ONE + 2, 0)])
def test_counts_overflow_and_ranks_may_be_an_exchange_ahead(count: int, ahead: int) -> None:
    call = MhcBoundary(*arguments("mhc_boundary", 2))
    ranks = Ranks(call, 1, count, ahead)
    want = alone(call._replace(output=ranks.sum))
    for result, expected in zip(launch(call._replace(output=ranks.parts[1]), ranks), want, strict=True):
        assert_bitwise(result, expected)
    assert not ranks.failed.any()


@pytest.mark.interpreted
def test_rank_that_does_not_come_is_named_once_and_later_launches_do_not_wait() -> None:
    call = MhcBoundary(*arguments("mhc_boundary", 2))
    ranks = Ranks(call, 0, count=3)
    ranks.flags[0][2] = 2
    launch(call, ranks)
    assert ranks.fault.tolist() == [3] and ranks.failed.tolist() == [1]
    ranks.flags[0][1] = 2
    launch(call, ranks)
    assert ranks.fault.tolist() == [3]


@pytest.mark.parametrize("dim", [4096, 7168])
def test_all_ctas_find_registers_at_once(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sees(monkeypatch, "sm_90")
    call = MhcBoundary(*arguments("mhc_boundary", 1, dim))
    counters = torch.zeros(64, dtype=torch.int32)
    with (
        mock.patch.object(kernels, "arrival_counters", lambda count, device: counters),
        compiled_for("sm_90") as compiled,
    ):
        kernels.all_reduce_mhc_boundary(call, Ranks(call, 1, 1).addresses, 1)
    ptx = compiled[0].asm["ptx"]
    assert "sys.release" in ptx and "sys.acquire" in ptx and "ld.global.cg" in ptx
    used, threads = compiled[0].resources(), 32 * compiled[0].metadata.num_warps
    assert used["STACK"] == 0
    assert used["REG"] * threads * kernels.ctas_per_sm(call.streams) <= SM_REGISTERS


def test_calls_whose_ctas_may_not_be_resident_at_once_are_refused() -> None:
    def why(tokens: int, dim: int = 4096, **changed: Any) -> str:
        call = MhcBoundary(*arguments("mhc_boundary", tokens, dim))._replace(**changed)
        with mock.patch.object(kernels, "gpu_of", lambda device: GPUS["sm_90"][0]):
            return str(kernels.why_unsupported_over_ranks(call))

    assert not any(why(tokens) for tokens in (0, 1, 8))
    assert why(9) == "9 tokens, one launch takes 8"
    assert (
        why(4, 7168) == ""
        and "140 CTAs" in why(5, 7168)
        and why(4, 64, output=torch.randn(4, 64)).startswith("the output is torch.float32")
    )
