"""How long a call takes: CUDA graph replays on a GPU, the wall clock elsewhere. Medians, in microseconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

MAX_SETS = 1024
_GRAPH_US, _MOST_CALLS = 400.0, 100.0
"""Time that the calls of one graph should take together, so that the start of a replay is a small part of it; and how
many there are at most."""
_IN_A_ROW = 20
_SECONDS = 0.02
_SETTLING_SECONDS = 0.05
"""For which a GPU is kept busy before what it takes is noted: an H200 moves a gigabyte in a tenth more time while, it
seems, memory is being cleared that was freed a moment before."""
_MIN_REPEATS, _MAX_REPEATS = 7, 200
Call = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of one call.

    Attributes:
        us: the same arguments again and again; what fits the L2 cache stays in it.
        cold_us: different arguments at each call, together more than twice what L2 holds; None where that was not
            measured: on a CPU, and for calls that touch so little that too many sets would be needed.
        clock: "cuda graph", "stream" (calls in a row, host time included) or "wall clock".
    """

    us: float
    cold_us: float | None
    clock: str


def measure(
    call: Callable[..., Any],
    sets: Sequence[tuple[Any, ...]],
    device: torch.device,
    *,
    cold: bool = False,
    clock: str = "",
) -> Timing:
    """Time `call` on the first of `sets`, and `cold`, on a GPU, on all of them in turn: `cold_sets` says how many.

    With clock "stream" a GPU runs calls in a row: the time is that of the host or of the GPU, whichever takes longer.
    """
    if device.type != "cuda":
        return Timing(_wall_us(partial(call, *sets[0])), None, "wall clock")
    if clock == "stream":
        return Timing(_stream_us(partial(call, *sets[0])), None, clock)
    once = _graph_us([partial(call, *sets[0])])
    repeats = calls_of_a_graph(once)
    warm = _graph_us([partial(call, *sets[0])] * repeats) if repeats > 1 else once
    if not cold:
        return Timing(warm, None, "cuda graph")
    # One set that is larger than the cache is cold at every call.
    turns = _graph_us([partial(call, *args) for args in sets], keep=True) if len(sets) > 1 else warm
    return Timing(warm, turns, "cuda graph")


def calls_of_a_graph(us: float) -> int:
    """How many calls of so many microseconds a graph should have, for the start of a replay to count little."""
    return int(min(_MOST_CALLS, max(1.0, _GRAPH_US / us)))


def replay_us(graph: torch.cuda.CUDAGraph) -> float:
    """Time of one replay, start included."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def us_in_a_row(call: Call, replays: int) -> float:
    """Median of rows of so many replays, for a call that is long, or many calls, and compared within one run."""
    replay, times = replays_of(call), []
    for _ in range(12):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(replays):
            replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / replays)
    return statistics.median(times[2:])


def replays_of(call: Call) -> Call:
    """`call` captured into a CUDA graph."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def cold_sets(traffic: int, device: torch.device) -> int:
    """How many argument sets of `traffic` bytes are more than twice the L2 cache; 0 for too many, and on a CPU."""
    if device.type != "cuda":
        return 0
    needed = 2 * torch.cuda.get_device_properties(device).L2_cache_size // max(1, traffic) + 1
    return needed if needed <= MAX_SETS else 0


def launches(call: Call, device: torch.device) -> int | None:
    """Kernels, copies and fills that one call puts on the GPU; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    # acc_events says that all events are kept, which torch.profiler would otherwise print a warning about.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type.name == "CUDA" for event in profile.events())


def memory(call: Call, device: torch.device) -> tuple[int, int] | None:
    """Bytes of what a call returns, and the most that it holds beside that at any time; None on a CPU.

    As the allocator gives them out. A copy of a cache is among the second.
    """
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = call()
    kept, most = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    del result
    return kept - before, most - kept


def copy_rate(device: torch.device) -> float:
    """Bytes per second, read and written together, of the fastest copy of much more than any cache: the ceiling.

    In a graph `copy_` is the driver's: an H200 moves 2684 GB/s by it, 4241 by a kernel that changes a sign.
    """
    size = 1 << (30 if device.type == "cuda" else 26)
    source = torch.ones(size // 2, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    ways = target.copy_, partial(torch.neg, out=target)
    return 2e6 * size / min(measure(way, [(source,)], device).us for way in ways)


def _graph_us(calls: Sequence[Call], keep: bool = False) -> float:
    """Time of one of `calls`, captured together. `keep` holds all results, so that none reuses another's memory."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in {id(call): call for call in calls[:2]}.values():
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph, kept = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for call in calls:
            result = call()
            if keep:
                kept.append(result)
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
    """Samples until their time is up, within bounds of their number."""
    total = 0.0
    for count in range(_MAX_REPEATS):
        if count >= _MIN_REPEATS and total > _SECONDS * 1e6:
            return
        us = sample()
        total += us
        yield us
