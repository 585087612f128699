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

CTAS, WORDS, RANKS, LIMIT = kernels.EXCHANGE_CTAS, kernels.MAILBOX_WORDS, 3, 50
SM_REGISTERS = 1 << 16
ONE = 2**31 - 2
"""An exchange after which the count of exchanges overflows."""
STALE = 0x7FC0
"""Bits of the elements that earlier exchanges have left: NaN."""


def wrapped(count: int) -> int:
    return (count + 2**31) % 2**32 - 2**31


def words_of(elements: Tensor, count: int) -> Tensor:
    """Return the words that hold elements of 16 bits in exchange `count`."""
    number = torch.full(elements.shape, count % 2**16, dtype=torch.int32) << 16
    return (elements.view(torch.int16).int() & 0xFFFF) | number


class Ranks:
    """Memory of three ranks, seen from `rank`; the others have filled their mailboxes here for exchange `count`."""

    def __init__(self, call: MhcBoundary, rank: int, count: int, ahead: int = 0) -> None:
        self.rank, self.count = rank, count
        self.channels, self.slices = kernels._slices(call.output.shape[1])
        self.programs = len(call.output) * self.slices
        stale = torch.full((2, RANKS, CTAS, WORDS), STALE, dtype=torch.int16)
        self.boxes = [words_of(stale, count - 1) for _ in range(RANKS)]
        for boxes in self.boxes:
            boxes[count & 1] = words_of(stale[0], count - 2)
        self.numbers.fill_(wrapped(count - 1))
        self.failed, self.fault = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        self.parts = [torch.randn(call.output.shape).to(call.output.dtype) for _ in range(RANKS)]
        for other in self.others:
            for later in range(ahead + 1):
                self.received(other, count + later).copy_(self.sent(other, count + later))

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(RANKS) if rank != self.rank]

    @property
    def numbers(self) -> Tensor:
        """Numbers of the last exchanges of all CTAs."""
        return self.boxes[self.rank][0, self.rank, :, self.channels]

    def received(self, rank: int, count: int, at: int | None = None) -> Tensor:
        """Return the words that `rank` writes on rank `at`, or on this one."""
        boxes = self.boxes[self.rank if at is None else at]
        return boxes[count & 1, rank, : self.programs, self.channels : 2 * self.channels]

    def sent(self, rank: int, count: int) -> Tensor:
        """Return the words that the kernel of `rank` writes: a program has those of a token and a slice."""
        rows = self.parts[rank]
        padded_rows = torch.zeros(len(rows), self.slices * self.channels, dtype=rows.dtype)
        padded_rows[:, : rows.shape[1]] = rows
        return words_of(padded_rows.view(self.programs, self.channels), count)

    @property
    def peers(self) -> Peers:
        return Peers(tuple(self.boxes), self.fault, self.failed, LIMIT)

    @property
    def addresses(self) -> Peers:
        """`peers` with addresses in place of tensors, as a GPU takes them: beyond 4 GiB, so that they have 64 bits."""
        boxes = tuple(tensor.data_ptr() + (1 << 40) for tensor in self.boxes)
        return self.peers._replace(mailboxes=boxes, fault=self.fault.data_ptr() + (1 << 40))

    @property
    def written(self) -> tuple[str, ...]:
        """Names of tensors that the kernel may write."""
        return *(f"peers.mailboxes[{rank}]" for rank in range(RANKS)), "peers.failed", "peers.fault"

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
@pytest.mark.parametrize(("dtype", "dim"), [(torch.bfloat16, 80), (torch.float16, 40), (torch.bfloat16, 272)])
def test_results_are_those_of_the_sum(rank: int, tokens: int, dtype: torch.dtype, dim: int) -> None:
    call = MhcBoundary(*arguments("mhc_boundary", tokens, dim, dtype))
    ranks = Ranks(call, rank, count=7 + rank)
    want = alone(call._replace(output=ranks.sum))
    before = [boxes.clone() for boxes in ranks.boxes]
    got = launch(call._replace(output=padded(ranks.parts[rank])), ranks)
    for result, expected in zip(got, want, strict=True):
        assert_bitwise(result, expected)
    after, ranks.boxes = ranks.boxes, before
    ranks.numbers[: ranks.programs] = ranks.count
    for other in ranks.others:
        ranks.received(rank, ranks.count, other).copy_(ranks.sent(rank, ranks.count))
    assert all(map(torch.equal, after, before)), "a word that is no element of this exchange"
    assert not ranks.failed.any() and not ranks.fault.any()


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("count", "ahead"), [(1, 0), (4, 1), (2**15, 0), (2**16, 1), (ONE, 1), (ONE + 1, 0), (ONE + 1, 1), (ONE + 2, 0)]
)
def test_counts_overflow_and_ranks_may_be_an_exchange_ahead(count: int, ahead: int) -> None:
    call = MhcBoundary(*arguments("mhc_boundary", 2))
    ranks = Ranks(call, 1, count, ahead)
    want = alone(call._replace(output=ranks.sum))
    for result, expected in zip(launch(call._replace(output=ranks.parts[1]), ranks), want, strict=True):
        assert_bitwise(result, expected)
    assert not ranks.failed.any()


@pytest.mark.interpreted
def test_first_exchange_waits_where_mailboxes_are_zeros() -> None:
    call = MhcBoundary(*arguments("mhc_boundary", 1))
    ranks = Ranks(call, 1, count=1)
    for boxes in ranks.boxes:
        boxes.zero_()
    launch(call, ranks)
    assert ranks.fault.tolist() == [1] and ranks.failed.tolist() == [1]


@pytest.mark.interpreted
@pytest.mark.parametrize("element", [0, 17, -1])
def test_a_single_word_that_has_not_come_is_waited_for(element: int) -> None:
    call = MhcBoundary(*arguments("mhc_boundary", 2))
    ranks = Ranks(call, 0, count=3)
    ranks.received(1, 3)[1, element] = words_of(torch.tensor(STALE, dtype=torch.int16), 1)
    launch(call, ranks)
    assert ranks.fault.tolist() == [2] and ranks.failed.tolist() == [1]


@pytest.mark.interpreted
def test_rank_that_does_not_come_is_named_once_and_later_launches_do_not_wait() -> None:
    call = MhcBoundary(*arguments("mhc_boundary", 2))
    ranks = Ranks(call, 0, count=3)
    ranks.received(2, 3).copy_(ranks.sent(2, 1))
    launch(call, ranks)
    assert ranks.fault.tolist() == [3] and ranks.failed.tolist() == [1]
    launch(call, ranks)  # exchange 4, to which nobody comes
    assert ranks.fault.tolist() == [3]


@pytest.mark.interpreted
def test_calls_of_other_sizes_do_not_share_words() -> None:
    large, small = (MhcBoundary(*arguments("mhc_boundary", 1, dim)) for dim in (80, 40))
    ranks = Ranks(large, 0, count=3)
    of_small = Ranks(small, 0, count=8)
    for boxes, others in zip(ranks.boxes, of_small.boxes, strict=True):
        boxes[..., of_small.channels : 2 * of_small.channels] = others[..., of_small.channels : 2 * of_small.channels]
    of_small.boxes = ranks.boxes
    for call, memory in ((large, ranks), (small, of_small)):
        want = alone(call._replace(output=memory.sum))
        for result, expected in zip(launch(call._replace(output=memory.parts[0]), memory), want, strict=True):
            assert_bitwise(result, expected)
    assert not ranks.failed.any() and not of_small.failed.any()


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
    assert "ld.volatile.global" in ptx, "polls would read a register"
    used, threads = compiled[0].resources(), 32 * compiled[0].metadata.num_warps
    assert used["STACK"] == 0
    assert used["REG"] * threads * kernels.ctas_per_sm(call.streams) <= SM_REGISTERS


def test_calls_whose_ctas_may_not_be_resident_at_once_are_refused() -> None:
    def why(tokens: int, dim: int = 4096, **changed: Any) -> str:
        call = MhcBoundary(*arguments("mhc_boundary", tokens, dim))._replace(**changed)
        with mock.patch.object(kernels, "gpu_of", lambda device: GPUS["sm_90"][0]):
            return str(kernels.why_unsupported_over_ranks(call))

    assert not any(why(tokens) for tokens in (0, 1, 8))
    in_float32 = torch.randn(4, 4, 64), torch.randn(4, 64)
    assert "16-bit" in why(4, 64, streams=in_float32[0], output=in_float32[1])
    assert why(9) == "9 tokens, one launch takes 8"
    assert (
        why(4, 7168) == ""
        and "140 CTAs" in why(5, 7168)
        and why(4, 64, output=torch.randn(4, 64)).startswith("the output is torch.float32")
    )
