"""Times of a replay's nodes: from the profiler on a GPU, and from the host's clock on the stand-in."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from .driver import DriverNode, function_name
from .observe import Launch

Replay = Callable[[], None]
_IN_A_ROW, _ROUNDS = 20, 5


class Span(NamedTuple):
    """Something that ran on the GPU: name, start and end in microseconds."""

    name: str
    start: float
    end: float


class NodeTime(NamedTuple):
    """Start of a node since the replay's, its time without an earlier node running, and the gap to the next one, us."""

    start: float
    us: float
    gap: float


def profiled(replay: Replay) -> list[Span]:
    """Return what one replay puts on the GPU, in the order of starts."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        replay()
        torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type.name == "CUDA"]
    spans = [Span(event.name, event.time_range.start, event.time_range.end) for event in events]
    return sorted(spans, key=lambda span: span.start)


def stream_us(replay: Replay) -> float:
    """Return the microseconds of one of several consecutive replays, by events of the current stream."""
    times = []
    for _ in range(_ROUNDS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(_IN_A_ROW):
            replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / _IN_A_ROW)
    return statistics.median(times)


def host_us(replay: Replay) -> float:
    """Return the median microseconds of a replay on the host."""
    times = []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        replay()
        times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times)


def assign(nodes: Sequence[DriverNode], spans: Sequence[Span]) -> list[int] | None:
    """Return the position in `nodes` of each span, or None if they do not fit together.

    A span belongs to the first node of its name, in the order of creation, with spans for all its predecessors.
    """
    waiting = {i: {edge.node for edge in node.after} for i, node in enumerate(nodes)}
    done: set[int] = set()

    def settle() -> None:
        """Count nodes without spans, such as empty ones, as done when their predecessors are."""
        ready = [i for i, before in waiting.items() if not nodes[i].timed and before <= done]
        while ready:
            done.update(ready)
            for i in ready:
                del waiting[i]
            ready = [i for i, before in waiting.items() if not nodes[i].timed and before <= done]

    positions = []
    settle()
    for span in spans:
        node = next((i for i, before in waiting.items() if before <= done and _fits(nodes[i], span.name)), None)
        if node is None:
            return None
        positions.append(node)
        done.add(node)
        del waiting[node]
        settle()
    return None if waiting else positions


def _fits(node: DriverNode, name: str) -> bool:
    """Return whether the profiler's name of a span can be that of `node`."""
    if node.kind == "copy":
        return name.startswith("Memcpy")
    if node.kind == "fill":
        return name.startswith("Memset")
    return node.kind == "kernel" and (not node.name or function_name(node.name) in name)


def exclusive(spans: Sequence[Span]) -> list[NodeTime]:
    """Return the time of each span, in the order of starts; one that overlaps earlier ones counts from their end."""
    times: list[NodeTime] = []
    over = -math.inf
    for position, span in enumerate(spans):
        us = max(0.0, span.end - max(span.start, over))
        over = max(over, span.end)
        following = spans[position + 1].start if position + 1 < len(spans) else over
        times.append(NodeTime(span.start - spans[0].start, us, max(0.0, following - over)))
    return times


def node_times(nodes: Sequence[DriverNode], replays: Sequence[Sequence[Span]]) -> tuple[dict[int, NodeTime], str]:
    """Return times by position in `nodes`, medians over replays, and why most replays could not be used, or ""."""
    by_node: dict[int, list[NodeTime]] = {}
    used = 0
    for spans in replays:
        order = assign(nodes, spans)
        if order is not None:
            used += 1
            for node, node_time in zip(order, exclusive(spans), strict=True):
                by_node.setdefault(node, []).append(node_time)
    times = {node: NodeTime(*map(statistics.median, zip(*samples, strict=True))) for node, samples in by_node.items()}
    if 2 * used > len(replays):
        return times, ""
    timed, seen = sum(node.timed for node in nodes), [len(spans) for spans in replays] or [0]
    counts = f"{timed} nodes, {min(seen)} to {max(seen)} seen by the profiler"
    return times, f"{used} of {len(replays)} profiles fit the graph: {counts}"


def launch_times(expected: Sequence[Launch], replays: Sequence[Sequence[Launch]]) -> dict[int, float]:
    """Return the median microseconds by position in `expected`, for replays of the stand-in, which also copy."""
    by_position: dict[int, list[float]] = {}
    for launches in replays:
        position = 0
        for launch in launches:
            if position < len(expected) and launch.key == expected[position].key:
                by_position.setdefault(position, []).append(launch.seconds * 1e6)
                position += 1
    return {position: statistics.median(times) for position, times in by_position.items()}
