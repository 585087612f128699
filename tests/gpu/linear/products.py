"""What the matrix products have in common: against the reference at the layers of the models, repeats, and capture."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsv4_compile.bench import gemm
from dsv4_compile.ops.common.define import REFERENCES

CUDA = torch.device("cuda")
Kernel = Callable[..., Tensor]
TOKENS = (1, 2, 8, 9, 17, 33, 64, 65, 128, 200, 513, 1027, 4096)
LAYERS = {f"{model} {x.op} {x.name}": x for model, config in gemm.MODELS.items() for x in gemm.layers(config)}


def names(op: str) -> list[str]:
    """Layers of `op` in both models."""
    return [name for name, layer in LAYERS.items() if layer.op == op]


def arguments(name: str, tokens: int, seed: int = 0) -> tuple[Any, ...]:
    """Of a layer by its name."""
    return LAYERS[name].arguments(tokens, CUDA, seed)


def check(op: str, kernel: Kernel, args: tuple[Any, ...]) -> None:
    """The product is the reference's but for rounding, and everything around the output is left alone."""
    differs = partial(gemm.differs, tolerance=gemm.TOLERANCE[op])
    assert differs([kernel(*args)], [REFERENCES[op](*args)]) == ""


def repeats_are_equal(kernel: Kernel, args: tuple[Any, ...], count: int = 100, replays: int = 300) -> None:
    """Bit by bit, with a different order of arrival each time: single launches, and thousands in replays of a graph.

    Parts that a cluster fetched before they had been released were others in 1 to 5 of 6000 replayed products.
    """
    first = kernel(*args)
    for _ in range(count):
        assert torch.equal(kernel(*args), first)
    differing, graph = torch.zeros((), dtype=torch.int64, device=CUDA), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            differing += (kernel(*args) != first).any()
    for _ in range(replays):
        graph.replay()
    assert int(differing) == 0


def capture_follows_its_inputs(op: str, kernel: Kernel, args: tuple[Any, ...]) -> None:
    """Captured twice without a wait, replayed interleaved with eager calls, always the eager result."""
    kernel(*args)
    torch.cuda.synchronize()
    graphs, results = [torch.cuda.CUDAGraph() for _ in range(2)], []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for graph in graphs:
            with torch.cuda.graph(graph):
                results.append((kernel(*args), kernel(*args)))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for _ in range(3):
        args[0].copy_(args[0].flip(0))
        for graph, both in zip(graphs, results, strict=True):
            graph.replay()
            want = kernel(*args)
            assert all(torch.equal(got, want) for got in both)
    check(op, kernel, args)


def streams_do_not_share_counters(kernel: Kernel, args: tuple[Any, ...]) -> None:
    """Launches that overlap on four streams give what one alone gives."""
    want = kernel(*args)
    torch.cuda.synchronize()
    streams, results = [torch.cuda.Stream() for _ in range(4)], []
    for _ in range(25):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(kernel(*args))
    torch.cuda.synchronize()
    assert all(torch.equal(got, want) for got in results)
