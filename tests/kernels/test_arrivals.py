"""Counters of arrivals: a share for each stream, new ones for each captured launch, none handed out twice."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from dsv4_compile.kernels import arrivals


class Stream:
    def __init__(self, handle: int) -> None:
        self.cuda_stream, self.waited = handle, 0

    def wait_event(self, event: object) -> None:
        self.waited += 1


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> arrivals._Pool:
    monkeypatch.setattr(torch.cuda, "Event", mock.Mock)
    monkeypatch.setattr(arrivals, "POOL", 3 * arrivals.STREAM_SHARE)
    return arrivals._Pool(torch.device("cpu"))


def span(counters: Tensor | None) -> tuple[int, int]:
    assert counters is not None
    return counters.storage_offset(), counters.storage_offset() + len(counters)


def test_a_stream_keeps_its_share_and_waits_once_for_the_fill(pool: arrivals._Pool) -> None:
    first, second = Stream(7), Stream(9)
    spans = [span(pool.of_stream(stream)) for stream in (first, second, first)]
    assert spans == [(0, 1024), (1024, 2048), (0, 1024)]
    assert (first.waited, second.waited) == (1, 1)


def test_captured_launches_get_counters_of_their_own_until_there_are_none(pool: arrivals._Pool) -> None:
    assert [span(pool.take(count)) for count in (5, 100)] == [(0, 5), (5, 105)]
    assert span(pool.of_stream(Stream(1))) == (105, 1129)
    assert pool.take(arrivals.POOL) is None
    assert span(pool.take(10)) == (1129, 1139)


def test_without_a_pool_counters_are_new() -> None:
    counters = arrivals.arrival_counters(12, torch.device("cpu"))
    assert len(counters) == 12 and counters.dtype is torch.int32 and not counters.any()
