"""Times of a call in microseconds: CUDA graph replays on a GPU, the wall clock on a CPU. All times are medians.

Warm: the same arguments in every call. Cold, of a single op: as many argument sets in turn as exceed twice the L2
cache. Cold, of the parts of a captured step: `ColdTimer`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

MAX_SETS = 1024
FLUSH_BYTES = {"cuda": 256 << 20, "cpu": 1 << 20}
"""Bytes that `ColdTimer` reads before each part: four times the L2 cache of an H200."""
_GRAPH_US, _MOST_CALLS = 400.0, 100.0
"""Least time of a graph of repeated calls, which makes the start of a replay negligible, and most calls of one."""
_IN_A_ROW = 20
_SECONDS = 0.02
_SETTLING_SECONDS = 0.05
"""Time to keep a GPU busy before samples count: clocks ramp up, and freed memory may still be cleared."""
_MIN_REPEATS, _MAX_REPEATS = 7, 200
Call = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of one call.

    Attributes:
        us: warm time; data that fits the L2 cache stays there between calls.
        cold_us: cold time; None if it was not measured: on a CPU, and for calls that touch so few bytes that more than
            `MAX_SETS` argument sets would be needed.
        clock: "cuda graph", "stream" (consecutive calls, host time included) or "wall clock".
    """

    us: float
    cold_us: float | None
    clock: str


@dataclass(frozen=True, slots=True)
class ColdTime:
    """Cold time of all parts of a step together, and of an event pair with nothing between its events."""

    us: float
    empty_pair_us: float


class _WallEvent:
    """Stand-in for a CUDA event on a CPU."""

    def __init__(self) -> None:
        self._at = 0.0

    def record(self) -> None:
        self._at = time.perf_counter()

    def elapsed_time(self, end: _WallEvent) -> float:
        return (end._at - self._at) * 1e3


class ColdTimer:
    """Times the parts of a captured step, each after a flush of the L2 cache that cannot overlap it.

    Call `begin(i)` before part i of the step and `end(i)` after it. `begin` reads `FLUSH_BYTES` of memory that the step
    does not use, then records an event; `end` records a second one. In a CUDA graph both become event-record nodes
    (`torch.cuda.Event(external=True)`). An edge to or from such a node is a full dependency, since programmatic
    dependent launch needs two kernel nodes: the first kernel of a part, weight prefetch included, starts after the
    flush has ended, and the flush of the next part starts after the last kernel of this one. Nothing is subtracted.

    CUDA events resolve about half a microsecond. A pair also counts the launch of the part's first kernel, which no
    previous kernel hides; `ColdTime.empty_pair_us`, measured in the same replays, is the part of that which the events
    cost by themselves.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._memory = torch.zeros(FLUSH_BYTES[device.type] // 4, device=device)
        self._sum = torch.zeros((), device=device)
        self._pairs: dict[int, tuple[Any, Any]] = {}
        self._empty = self._pair()

    def _pair(self) -> tuple[Any, Any]:
        if self.device.type != "cuda":
            return _WallEvent(), _WallEvent()
        first, second = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))
        return first, second

    def flush(self) -> None:
        """Read so much other memory that the L2 cache holds nothing from before."""
        torch.sum(self._memory, dim=0, out=self._sum)

    def begin(self, part: int) -> None:
        """Flush the cache, then record the first event of `part`."""
        self.flush()
        if part == 0:
            for event in self._empty:
                event.record()
        if part not in self._pairs:
            self._pairs[part] = self._pair()
        self._pairs[part][0].record()

    def end(self, part: int) -> None:
        """Record the second event of `part`."""
        self._pairs[part][1].record()

    def measure(self, replay: Call) -> ColdTime:
        """Return the times of a step, which `replay` runs."""
        empty: list[float] = []

        def sample() -> float:
            replay()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            empty.append(_elapsed_us(self._empty))
            return sum(map(_elapsed_us, self._pairs.values()))

        us = _settled_median(sample)
        return ColdTime(us, statistics.median(empty))


def _elapsed_us(pair: tuple[Any, Any]) -> float:
    return float(pair[0].elapsed_time(pair[1])) * 1e3


def measure(
    call: Callable[..., Any],
    sets: Sequence[tuple[Any, ...]],
    device: torch.device,
    *,
    cold: bool = False,
    clock: str = "",
) -> Timing:
    """Time `call` on the first of `sets`; if `cold`, on a GPU, also on all of them in turn (see `cold_sets`).

    With clock "stream" a GPU runs consecutive calls without a graph: the time is that of the host or of the GPU,
    whichever is longer; host time counts in a cold call as in a warm one.
    """
    if device.type != "cuda":
        return Timing(_wall_us(partial(call, *sets[0])), None, "wall clock")
    if clock == "stream":
        once = _stream_us(partial(call, *sets[0]))
        # As below, one set that is larger than the cache is cold in every call.
        turns = _stream_us(partial(_all, call, sets)) / len(sets) if cold and len(sets) > 1 else once
        return Timing(once, turns if cold else None, clock)
    once = _graph_us([partial(call, *sets[0])])
    repeats = calls_of_a_graph(once)
    warm = _graph_us([partial(call, *sets[0])] * repeats) if repeats > 1 else once
    if not cold:
        return Timing(warm, None, "cuda graph")
    # One set that is larger than the cache is cold in every call.
    turns = _graph_us([partial(call, *args) for args in sets], keep=True) if len(sets) > 1 else warm
    return Timing(warm, turns, "cuda graph")


def _all(call: Callable[..., Any], sets: Sequence[tuple[Any, ...]]) -> None:
    for args in sets:
        call(*args)


def calls_of_a_graph(us: float) -> int:
    """Return how many calls of `us` microseconds a graph needs for the start of a replay to be negligible."""
    return int(min(_MOST_CALLS, max(1.0, _GRAPH_US / us)))


def replay_us(graph: torch.cuda.CUDAGraph) -> float:
    """Return the time of one replay, start included."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def us_in_a_row(call: Call, replays: int) -> float:
    """Return the median time of one of `replays` consecutive replays of `call`, for long calls."""
    replay, times = _captured(call), []
    for _ in range(12):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(replays):
            replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / replays)
    return statistics.median(times[2:])


def _captured(call: Call) -> Call:
    """Return the replay of a CUDA graph of `call`."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def cold_sets(traffic: int, device: torch.device) -> int:
    """Return how many argument sets of `traffic` bytes exceed twice the L2 cache; 0 if too many, and on a CPU."""
    if device.type != "cuda":
        return 0
    needed = 2 * torch.cuda.get_device_properties(device).L2_cache_size // max(1, traffic) + 1
    return needed if needed <= MAX_SETS else 0


def launches(call: Call, device: torch.device) -> int | None:
    """Return the number of kernels, copies and fills of one call; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    # acc_events keeps all events, without which torch.profiler prints a warning.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type.name == "CUDA" for event in profile.events())


def memory(call: Call, device: torch.device) -> tuple[int, int] | None:
    """Return the bytes of a call's results, and its peak of further memory, as the allocator counts; None on a CPU.

    A copy of a cache counts as further memory.
    """
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = call()
    after, most = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    del result
    return after - before, most - after


def copy_rate(device: torch.device) -> float:
    """Return bytes per second, read and written together, of the fastest copy of much more than any cache.

    A captured `copy_` uses the driver, which is slower on an H200 than a kernel that copies; both are tried.
    """
    size = 1 << (30 if device.type == "cuda" else 26)
    source = torch.ones(size // 2, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    ways = target.copy_, partial(torch.neg, out=target)
    return 2e6 * size / min(measure(way, [(source,)], device).us for way in ways)


def _graph_us(calls: Sequence[Call], keep: bool = False) -> float:
    """Return the time of one of `calls`, captured together; `keep` holds all results, so that none reuses memory."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in {id(call): call for call in calls[:2]}.values():
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph, results = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for call in calls:
            result = call()
            if keep:
                results.append(result)
    return _settled_median(partial(replay_us, graph)) / len(calls)


def _stream_us(call: Call) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(3):
        call()

    def alone() -> None:
        call()
        torch.cuda.synchronize()

    once = _wall_us(alone)
    in_a_row = max(1, min(_IN_A_ROW, int(_SECONDS * 1e6 / once)))

    def run() -> float:
        torch.cuda.synchronize()
        begin.record()
        for _ in range(in_a_row):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / in_a_row

    return _settled_median(run)


def _wall_us(call: Call) -> float:
    def run() -> float:
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e6

    run()
    return _median(run)


def _settled_median(sample: Callable[[], float]) -> float:
    begin = time.perf_counter()
    sample()
    while time.perf_counter() - begin < _SETTLING_SECONDS:
        sample()
    return _median(sample)


def _median(sample: Callable[[], float]) -> float:
    return statistics.median(_repeat(sample))


def _repeat(sample: Callable[[], float]) -> Iterable[float]:
    """Yield samples until their time is up, within bounds of their number."""
    total = 0.0
    for count in range(_MAX_REPEATS):
        if count >= _MIN_REPEATS and total > _SECONDS * 1e6:
            return
        us = sample()
        total += us
        yield us
