"""The cold timer on a GPU: its flush empties the cache and overlaps nothing between a pair of events."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from dsv4_compile.bench.timing import ColdTimer, replay_us

CUDA = torch.device("cuda")
PARTS, PART_BYTES, PEAK = 4, 24 << 20, 5.2e12
"""Bytes that fit an L2 cache, and more bytes a second than any Hopper memory gives."""


def graph_of(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def repeated(call: Callable[[], None]) -> Callable[[], None]:
    def step() -> None:
        for _ in range(PARTS):
            call()

    return step


def median_us(graph: torch.cuda.CUDAGraph) -> float:
    return statistics.median(replay_us(graph) for _ in range(30))


def test_parts_are_read_from_memory_after_a_flush_that_is_over() -> None:
    data, total = torch.ones(PART_BYTES // 4, device=CUDA), torch.zeros((), device=CUDA)
    timer = ColdTimer(CUDA)

    def part() -> None:
        torch.sum(data, dim=0, out=total)

    def step() -> None:
        for index in range(PARTS):
            timer.begin(index)
            part()
            timer.end(index)

    sample = timer.measure(graph_of(step).replay)
    warm, flushes = median_us(graph_of(repeated(part))), median_us(graph_of(repeated(timer.flush)))
    step_us = median_us(graph_of(step))
    assert sample.us > PARTS * PART_BYTES / PEAK * 1e6
    assert sample.us > warm
    assert sample.us + 0.9 * flushes < step_us
    assert 0 <= sample.empty_pair_us < 5
