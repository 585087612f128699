"""Threads that compile at once: one graph at a time, and each with its own options and decisions."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from dsv4_compile import _compat
from dsv4_compile.backend import dsv4
from dsv4_compile.ops.preprocess.fused_q_kv_rmsnorm import fused_q_kv_rmsnorm
from dsv4_compile.selection import decisions
from dsv4_compile.testing import assert_bitwise

QR, KV, WEIGHT = torch.randn(5, 16), torch.randn(5, 16), torch.rand(16)


def norms(scale: float) -> Callable[[Tensor, Tensor], Tensor]:
    def run(qr: Tensor, kv: Tensor) -> Tensor:
        q, k = fused_q_kv_rmsnorm(qr, kv, WEIGHT, WEIGHT, 1e-6)
        return q * scale + k

    return run


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Return the results of calls that threads begin at the same time."""
    ready = threading.Barrier(len(calls))

    def run(call: Callable[[], Any]) -> Any:
        ready.wait(20)
        return call()

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(run, calls))


def test_two_threads_compile_with_options_of_their_own() -> None:
    functions = [norms(2.0), norms(3.0)]
    want = [function(QR, KV) for function in functions]

    def compile_with(function: Any, impl: str) -> Callable[[], tuple[Tensor, list[str]]]:
        def run() -> tuple[Tensor, list[str]]:
            with decisions.collect() as decided, torch.no_grad():
                out = torch.compile(function, backend="dsv4", fullgraph=True, options={"dsv4.impl": impl})(QR, KV)
            return out, [decision.impl for decision in decided]

        return run

    (first, ir), (second, eager) = at_once(compile_with(functions[0], "ir"), compile_with(functions[1], "eager"))
    torch.testing.assert_close(first, want[0])
    assert_bitwise(second, want[1])
    assert (ir, eager) == (["ir"], ["eager"])


def test_direct_calls_of_the_backend_compile_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile holds torch's lock; who calls the backend may not, and they share torch's table of C++ names."""
    inside, most = [0], [0]

    def slow(gm: fx.GraphModule, inputs: Any, **settings: Any) -> Any:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        for _ in range(10):
            time.sleep(0.005)
            assert torch.float8_e8m0fnu in _compat.DTYPE_TO_CPP
        inside[0] -= 1
        return gm.forward

    monkeypatch.setitem(vars(_compat), "compile_fx", slow)
    graphs = [fx.symbolic_trace(lambda x: x + 1) for _ in range(3)]
    before = dict(_compat.DTYPE_TO_CPP)
    compiled = at_once(*(lambda gm=gm: dsv4(gm, [QR]) for gm in graphs))
    assert most == [1] and before == _compat.DTYPE_TO_CPP
    assert all(torch.equal(run(QR), QR + 1) for run in compiled)


def test_blocks_that_refuse_replays_overlap_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    class Manager:
        def _run(self) -> str:
            return "replayed"

    trees = SimpleNamespace(CUDAGraphTreeManager=Manager)
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", trees)
    original, told = Manager._run, []
    first, second = (_compat.without_cudagraph_trees(lambda name=name: told.append(name)) for name in ("a", "b"))
    first.__enter__()
    second.__enter__()
    assert Manager()._run() == "replayed" and told == ["a", "b"]
    first.__exit__(None, None, None)  # the first to come goes first
    assert Manager()._run() == "replayed" and told == ["a", "b", "b"]
    second.__exit__(None, None, None)
    assert Manager._run is original
