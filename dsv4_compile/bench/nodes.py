"""Profiles a call: its kernels, copies and fills on the GPU, its host time and its allocations."""

from __future__ import annotations

import math
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

Call = Callable[[], Any]
_GRAPH_CALL = re.compile("(cuda|cu|hip)GraphLaunch")
_LAUNCH_CALL = re.compile("(cuda|cu|hip)(Ext)?(Module)?(LaunchKernel|LaunchCooperativeKernel|Memcpy|Memset)")
"""Beginnings of the names of the driver's calls, as the profiler writes them."""
_REPEATS, _IN_A_ROW = 4, 5
_LEAST, _MOST, _SECONDS = 20, 2000, 1.0
"""Bounds of the number of samples of host time, and the seconds to spend on them."""


class Node(NamedTuple):
    """A kernel, copy or fill, and its median microseconds over some calls, by the profiler.

    A kernel that starts before the previous one has ended (PDL) counts from that end, so that times add up to the
    call's.
    """

    name: str
    us: float


def nodes(call: Call) -> list[Node]:
    """Return the nodes of one call in order of execution; none if calls differ.

    Measure host times before: the profiler slows the host for the rest of the process.
    """
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(_REPEATS):
            call()
            torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type.name == "CUDA"]
    events.sort(key=lambda event: event.time_range.start)
    count = len(events) // _REPEATS
    calls = [events[i * count : (i + 1) * count] for i in range(_REPEATS)]
    names = {tuple(event.name for event in same_call) for same_call in calls}
    if len(names) != 1 or count * _REPEATS != len(events):
        return []
    times = [_exclusive([(event.time_range.start, event.time_range.end) for event in same_call]) for same_call in calls]
    return [
        Node(event.name, round(statistics.median(same), 3))
        for event, same in zip(calls[0], zip(*times, strict=True), strict=True)
    ]


def launches_of_host(call: Call) -> dict[str, int]:
    """Return how many "graph_launches" and other "launches" (kernels, copies, fills) one call asks the driver for."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type.name == "CPU"]
    kinds = {"graph_launches": _GRAPH_CALL, "launches": _LAUNCH_CALL}
    return {kind: sum(bool(pattern.match(name)) for name in names) for kind, pattern in kinds.items()}


def by_name(found: Sequence[Node]) -> list[tuple[str, int, float]]:
    """Return name, number and us of all launches of each kernel, those that take most first."""
    times: dict[str, list[float]] = {}
    for node in found:
        times.setdefault(node.name[:120], []).append(node.us)
    rows = [(name, len(kernel_times), round(sum(kernel_times), 1)) for name, kernel_times in times.items()]
    return sorted(rows, key=lambda row: -row[2])


def _exclusive(spans: Sequence[tuple[float, float]]) -> list[float]:
    """Return what each span, in order of starts, adds to the time that earlier spans have covered."""
    times, over = [], -math.inf
    for start, end in spans:
        times.append(max(0.0, end - max(start, over)))
        over = max(over, end)
    return times


def repeated(names: Sequence[str], times: int) -> tuple[int, int]:
    """Return `(first, length)` of the run that `names` repeats `times` times from `first` to the end, or `(0, 0)`."""
    for first in range(len(names)):
        length, rest = divmod(len(names) - first, times)
        if not rest and length and list(names[first:]) == list(names[first : first + length]) * times:
            return first, length
    return 0, 0


def host_us(call: Call) -> dict[str, float]:
    """Return median and 99th percentile of the host time of a call, in short runs of consecutive calls."""
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < _LEAST or (len(times) < _MOST and time.perf_counter() - begin < _SECONDS):
        torch.cuda.synchronize()
        for _ in range(_IN_A_ROW):
            start = time.perf_counter_ns()
            call()
            times.append((time.perf_counter_ns() - start) / 1e3)
    times.sort()
    return {"host_us": round(times[len(times) // 2], 2), "host_p99_us": round(times[len(times) * 99 // 100], 2)}


def allocations(call: Call) -> int:
    """Return how many tensors ten calls take from the caching allocator."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(10):
        call()
    return int(torch.cuda.memory_stats()["allocation.all.allocated"] - before)


def kernels_us(calls: Sequence[Call]) -> dict[str, float]:
    """Return the mean microseconds of each kernel of `calls`, one at a time, under the profiler."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        for call in calls:
            call()
            torch.cuda.synchronize()
    total: dict[str, float] = defaultdict(float)
    for event in profile.events():
        if event.device_type.name == "CUDA":
            total[event.name] += event.device_time / len(calls)
    return {name: round(us, 2) for name, us in total.items()}
