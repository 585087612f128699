"""The cold timer: the work between its events, and outside them."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from dsv4_compile.bench import timing

CPU = torch.device("cpu")


@pytest.fixture
def slow_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing.ColdTimer, "flush", lambda self: time.sleep(5e-3))


@pytest.mark.usefixtures("slow_flush")
def test_a_cold_time_counts_the_parts_and_not_the_flushes_between_them() -> None:
    timer = timing.ColdTimer(CPU)

    def step() -> None:
        for section in range(3):
            timer.begin(section)
            time.sleep(1e-3)
            timer.end(section)

    sample = timer.measure(step)
    assert 3000 <= sample.us < 3 * 5000
    assert 0 <= sample.empty_pair_us < 500


def test_a_flush_reads_more_than_a_cache_and_leaves_its_memory_as_it_is() -> None:
    timer = timing.ColdTimer(CPU)
    before = timer._memory.clone()
    timer.flush()
    assert torch.equal(timer._memory, before)
    assert timer._memory.nbytes == timing.FLUSH_BYTES["cpu"] < 60 << 20 < timing.FLUSH_BYTES["cuda"]


def test_events_are_nodes_of_a_captured_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without external=True a capture would drop them, and their times would be those of the capture."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.cuda, "Event", lambda **options: calls.append(options))
    timer = object.__new__(timing.ColdTimer)
    timer.device = torch.device("cuda")
    timer._pair()
    assert calls == [{"enable_timing": True, "external": True}] * 2


def test_the_first_event_of_a_part_follows_its_flush_and_the_empty_pair_follows_a_flush(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []
    count = iter(range(100))

    class Event:
        def __init__(self) -> None:
            self.name = f"event {next(count)}"

        def record(self) -> None:
            order.append(self.name)

    monkeypatch.setattr(timing, "_WallEvent", Event)
    monkeypatch.setattr(timing.ColdTimer, "flush", lambda self: order.append("flush"))
    timer = timing.ColdTimer(CPU)
    for section in range(2):
        timer.begin(section)
        order.append(f"part {section}")
        timer.end(section)
    empty, (first, second) = ["event 0", "event 1"], (["event 2", "event 3"], ["event 4", "event 5"])
    assert order == ["flush", *empty, first[0], "part 0", first[1], "flush", second[0], "part 1", second[1]]
    again = order.copy()
    order.clear()
    for section in range(2):
        timer.begin(section)
        order.append(f"part {section}")
        timer.end(section)
    assert order == again


def test_a_cold_time_of_consecutive_calls_takes_all_sets_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def stream_us(call: timing.Call) -> float:
        seen.clear()
        call()
        return 10.0 * len(seen)

    monkeypatch.setattr(timing, "_stream_us", stream_us)
    gpu, sets = torch.device("cuda"), [(1,), (2,), (3,)]
    assert timing.measure(seen.append, sets, gpu, cold=True, clock="stream") == timing.Timing(10.0, 10.0, "stream")
    assert seen == [1, 2, 3]
    assert timing.measure(seen.append, sets[:1], gpu, cold=True, clock="stream").cold_us == 10.0
    assert timing.measure(seen.append, sets, gpu, clock="stream").cold_us is None
