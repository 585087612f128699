"""Tests of ranks that differ, or that are gone: the others say which and why, none hangs, none returns tokens.

A sample on two ranks; with `DSV4_RANKS="2 4"`, as `make ranks` sets it, all ways on so many ranks.
"""

from __future__ import annotations

import functools
import os
import socket
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList

from dsv4_compile.errors import RankError
from dsv4_compile.hf.model import call_facts
from dsv4_compile.parallel import Ranks, agreement, peers
from dsv4_compile.parallel.host_waits import close_connections
from tests.parallel.apart import GONE, Outcome, run_ways, wrong
from tests.parallel.callers import Add
from tests.parallel.ways import DIFFERS

ALL = tuple(map(int, os.environ.get("DSV4_RANKS", "").split()))
SAMPLE = (
    "repetition_penalty",
    "eos_token_id",
    "what a processor does",
    "a processor that fails",
    "kind of call",
    "order of ids",
    "floating ids",
    "convert that rejects",
    "killed between steps",
    "stopped before a call",
    "raises in a forward, and lives on",
    "killed in a step of a batch",
    "chooses other tokens in a batch",
)
CASES = [(size, name) for size in ALL or (2,) for name in ((*DIFFERS, *GONE) if ALL else SAMPLE)]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, list[Outcome | None]]]:
    sizes = {size: [name for ranks, name in CASES if ranks == size] for size, _ in CASES}
    return {size: run_ways(size, names, tmp_path_factory.mktemp("apart")) for size, names in sizes.items()}


@pytest.mark.parametrize(("size", "name"), CASES)
def test_other_ranks_are_told_which_rank_and_why(
    size: int, name: str, outcomes: dict[int, dict[str, list[Outcome | None]]]
) -> None:
    assert wrong(name, outcomes[size][name]) == []


def test_order_of_values_counts() -> None:
    one, two = torch.tensor([[1, 2, 3]]), torch.tensor([[2, 1, 3]])
    assert agreement.digest_in_order(one) == agreement.digest_in_order(one.clone())
    assert agreement.digest_in_order(one) != agreement.digest_in_order(two)
    assert agreement.digest_in_order(torch.zeros(3)) != agreement.digest_in_order(torch.zeros(4))
    for dtype in (torch.bool, torch.bfloat16, torch.float64, torch.complex64):
        values = torch.tensor([1, 0, 1]).to(dtype)
        assert agreement.digest_in_order(values) != agreement.digest_in_order(values.flip(0)[:2])


def enclosing(value: int) -> Any:
    return lambda batch, tokens: [value]


class Calls:
    """An object without class attributes, and code that differs."""

    def __call__(self, value: int) -> int:
        return value + 1


class CallsElse:
    def __call__(self, value: int) -> int:
        return value + 2


CallsElse.__qualname__ = Calls.__qualname__


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (LogitsProcessorList([Add(1.0)]), LogitsProcessorList([Add(2.0)])),
        (LogitsProcessorList([Add(1.0)]), LogitsProcessorList([])),
        (LogitsProcessorList([Add(1.0)]), LogitsProcessorList([Add(1.0), Add(1.0)])),
        (enclosing(1), enclosing(2)),
        (functools.partial(enclosing, 1), functools.partial(enclosing, 2)),
        (Calls(), CallsElse()),
        (GenerationConfig(temperature=0.5), GenerationConfig(temperature=0.7)),
        (torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)),
        ({"a": [1, (2, 3.0)]}, {"a": [1, (2, 3.5)]}),
        (torch.tensor([1, 2]), torch.tensor([2, 1])),
        ("a" * 1000 + "b", "a" * 1000 + "c"),
        ({1, 2}, {1, 3}),
    ],
)
def test_facts_of_arguments_that_differ_differ(one: Any, two: Any) -> None:
    assert call_facts.fact(one) == call_facts.fact(one)
    assert call_facts.fact(one) != call_facts.fact(two)


def test_facts_hold_no_address_and_end_in_cycles() -> None:
    class Node:
        def __init__(self) -> None:
            self.next, self.lock = self, object()

    assert call_facts.fact(Node()) == call_facts.fact(Node())
    assert " at 0x" not in repr(call_facts.fact([Node(), enclosing(1), Add.__call__, print, len, torch.relu]))


def test_message_shows_long_values_where_they_differ() -> None:
    with pytest.raises(RankError, match=r"(?s)E702.*eps': 1.*on rank 0.*eps': 2.*on rank 1") as caught:
        agreement.check_equal("convert", [{"configuration": f"{'x' * 5000}, 'eps': {i}, {'y' * 900}"} for i in (1, 2)])
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("fault", "of_collective"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"), True),
        (RuntimeError("Timed out waiting 6000ms for recv operation to complete"), True),
        (torch.distributed.DistNetworkError("Failed to recv, got 0 bytes"), True),
        (RuntimeError("no kernel for mhc_pre\nwhile gloo was waiting"), False),
        (ValueError("gloo"), False),
        (RankError("E702", got="gloo"), False),
    ],
)
def test_faults_of_collectives_are_known(fault: BaseException, of_collective: bool) -> None:
    assert peers.of_collective(fault) is of_collective


def test_a_rank_alone_waits_for_nobody() -> None:
    alone = Ranks(0, 1, "")
    assert agreement.agree("a call", {"x": 1}, alone, "note") == ["note"]
    agreement.reject("a call", ValueError("no"), alone)
    assert peers.meet(alone).gone() == []


def test_connections_to_a_process_are_closed_and_no_others() -> None:
    with ExitStack() as stack:
        ends = []
        for _ in range(2):
            server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            client = stack.enter_context(socket.create_connection(server.getsockname(), timeout=5.0))
            ends.append((client, stack.enter_context(server.accept()[0])))
        (spared, _), (closed, _) = ends
        assert close_connections([]) == 0
        assert close_connections([os.getpid()], but_port=spared.getpeername()[1]) >= 2
        assert closed.recv(1) == b""
        spared.sendall(b"x")
        assert ends[0][1].recv(1) == b"x"


def test_every_way_is_named_once() -> None:
    assert not set(DIFFERS) & set(GONE)
    assert set(SAMPLE) <= {*DIFFERS, *GONE}
    assert len(DIFFERS) + len(GONE) >= 24
