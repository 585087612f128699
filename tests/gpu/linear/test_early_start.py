"""Kernels that start before the one in front has ended (`gpu.supports_pdl`), within CUDA graphs.

A capture keeps such a dependency as a programmatic edge, everything else waits as ever, and replays give what eager
gives, bit for bit, however often and in whatever order kernels of both kinds follow each other.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4_compile.kernels.host.gpu import gpu_of
from dsv4_compile.kernels.host.pdl import pdl_option, supports_pdl
from dsv4_compile.testing import assert_bitwise
from tests.gpu.soak import SETUPS, full_world
from tests.runtime.engine import make_runner

CUDA = torch.device("cuda:0")
SIZE, BLOCK = 1 << 16, 256
FULL, PROGRAMMATIC = 0, 1
"""Types of an edge, as the driver counts them."""


class _Edge(ctypes.Structure):
    _fields_ = (("from_port", ctypes.c_ubyte), ("to_port", ctypes.c_ubyte), ("type", ctypes.c_ubyte))
    _fields_ += (("reserved", ctypes.c_ubyte * 5),)


def edges(graph: torch.cuda.CUDAGraph) -> Counter[int]:
    """Edges of a captured graph by type."""
    driver, raw, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t(0)
    assert driver.cuGraphGetEdges_v2(raw, None, None, None, ctypes.byref(count)) == 0
    size = count.value
    ends, data = ((ctypes.c_void_p * size)(), (ctypes.c_void_p * size)()), (_Edge * size)()
    assert driver.cuGraphGetEdges_v2(raw, *ends, data, ctypes.byref(count)) == 0
    return Counter(edge.type for edge in data)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[torch.cuda.CUDAGraph]:
    """Every graph that is made from now on, its edges kept."""
    graphs, new = [], torch.cuda.CUDAGraph

    def keep() -> torch.cuda.CUDAGraph:
        graphs.append(new(keep_graph=True))
        return graphs[-1]

    monkeypatch.setattr(torch.cuda, "CUDAGraph", keep)
    return graphs


@triton.jit
def _mix_kernel(p_out, p_x, shift, PDL: tl.constexpr, BLOCK: tl.constexpr, TURNS: tl.constexpr):
    """Mix x with x `shift` elements further on, which a different program of the previous kernel writes late."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    size = tl.num_programs(0) * BLOCK
    x, y = tl.load(p_x + i), tl.load(p_x + (i + shift) % size)
    for _ in range(TURNS):
        x = x * 1664525 + y
    tl.store(p_out + i, x)


def mix(x: Tensor, shift: int, early: bool, turns: int, out: Tensor | None = None) -> Tensor:
    out = torch.empty_like(x) if out is None else out
    grid = (SIZE // BLOCK,)
    _mix_kernel[grid](out, x, shift, PDL=early, BLOCK=BLOCK, TURNS=turns, **pdl_option(early))
    return out


def chain(x: Tensor, between: Callable[[Tensor], Tensor], early: bool) -> Tensor:
    """Kernels that start early behind slow ones, behind others, and behind a fill and a copy; one buffer is reused."""
    reused = mix(x, 7, early, 500)
    for turn in range(6):
        y = mix(reused, 12_345 + turn, early, 3)
        reused = mix(y, 31 * turn, early, 300, out=reused)  # the kernel in front still reads it, unless waited for
        x = between(reused)
        x = mix(x, 77, early, 100)
    filled = torch.full_like(x, 3)
    y = mix(filled, 1, early, 2)
    reused.copy_(y)
    return mix(reused, 9, early, 2) + x


@pytest.fixture
def inputs(seed: int) -> list[Tensor]:
    return [torch.randint(-(2**31), 2**31 - 1, (SIZE,), dtype=torch.int32, device=CUDA) for _ in range(8)]


def test_a_capture_keeps_early_starts_and_everything_else_waits(
    inputs: list[Tensor], captured: list[torch.cuda.CUDAGraph]
) -> None:
    assert supports_pdl(gpu_of(CUDA))
    between = torch.compile(lambda x: x ^ (x >> 5))
    expected = [chain(x, between, early=False) for x in inputs]
    for x, want in zip(inputs, expected, strict=True):
        assert_bitwise(chain(x, between, early=True), want, label="eager")
    held = inputs[0].clone()
    counts = {}
    for early in (False, True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = chain(held, between, early)
        counts[early] = edges(graph)
        for _ in range(50):
            for x, want in zip(inputs, expected, strict=True):
                held.copy_(x)
                graph.replay()
                assert_bitwise(out, want, label=f"replay, early={early}")
    print(f"\nedges by type: {counts}")
    assert counts[False][PROGRAMMATIC] == 0
    assert counts[True][PROGRAMMATIC] >= 18  # behind kernels; behind a copy of the driver it waits in full
    assert counts[True][FULL] >= 6  # in front of kernels that Inductor generated


def test_a_runners_capture_starts_kernels_early(captured: list[torch.cuda.CUDAGraph]) -> None:
    """tests/gpu/soak.py compares the bits."""
    runner = make_runner(full_world(SETUPS["flash fp8"]), buckets=(1, 4))
    runner.warm_up()
    counts = [edges(graph) for graph in captured]
    print(f"\nedges by type: {counts}")
    assert len(counts) == 2
    assert all(count[PROGRAMMATIC] > 0 for count in counts)


@torch.no_grad()
@pytest.mark.parametrize("tokens", [4, 48])
@pytest.mark.parametrize("value", ["full", "trees"])
def test_products_that_start_early_give_the_same_bits_in_compiled_graphs(value: str, tokens: int) -> None:
    """Two products, with generated kernels in front, between and behind."""
    width = 512
    weights = [torch.randn(width, width, device=CUDA).to(torch.float8_e4m3fn) for _ in range(2)]
    scale = torch.full((width // 128, width // 128), 2.0**-5, device=CUDA)

    def step(x: Tensor) -> Tensor:
        for weight in weights:
            x = torch.nn.functional.silu(torch.ops.dsv4.fp8_linear(x * 2, weight, scale)) + x
        return x

    calls: dict[str, Any] = {}
    for option in ("off", value):
        torch.compiler.reset()
        calls[option] = torch.compile(step, backend="dsv4", fullgraph=True, options={"dsv4.cudagraph": option})
    batches = [torch.randn(tokens, width, device=CUDA).bfloat16() for _ in range(8)]
    expected = [calls["off"](x).clone() for x in batches]
    for _ in range(25):
        for x, want in zip(batches, expected, strict=True):
            torch.compiler.cudagraph_mark_step_begin()
            assert_bitwise(calls[value](x), want)
