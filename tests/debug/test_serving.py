"""`compile_log`: late compilations, captures and builds are named with their cause; strict raises before they begin."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import dsv4_compile
from dsv4_compile.debug import LateWork, compile_log
from dsv4_compile.runtime.standin import StandInGraphs


@pytest.fixture
def scaled() -> Iterator[Callable[..., Tensor]]:
    """A compiled function that has been warmed up for three elements and the factor 2."""
    torch.compiler.reset()

    def scale(x: Tensor, factor: int) -> Tensor:
        return x * factor

    compiled = torch.compile(scale, backend="eager", dynamic=False)
    compiled(torch.ones(3), 2)
    yield compiled
    torch.compiler.reset()


def test_calls_that_were_warmed_up_are_no_late_work(scaled: Callable[..., Tensor]) -> None:
    capture = StandInGraphs().capture(lambda: torch.ones(3) + 1, "the step")
    with compile_log(strict=True) as log:
        for _ in range(3):
            scaled(torch.ones(3), 2)
            capture.replay()
    assert log == []


@pytest.mark.parametrize(
    ("args", "words"),
    [((torch.ones(4), 2), ("`x`", "3 before, now 4")), ((torch.ones(3), 5), ("`factor`", "2 before, now 5"))],
)
def test_shape_or_value_that_was_never_warmed_up_is_named(
    scaled: Callable[..., Tensor], args: tuple[Tensor, int], words: tuple[str, ...]
) -> None:
    reported: list[LateWork] = []
    with compile_log(report=reported.append) as log:
        scaled(*args)
        scaled(*args)
    assert log == reported and len(log) == 1
    assert log[0].kind == "compile" and log[0].what.startswith("scale, ") and "test_serving.py" in log[0].what
    assert log[0].seconds is not None and log[0].seconds > 0
    assert all(word in log[0].cause for word in words), log[0].cause
    assert log[0].what in str(log[0]) and log[0].cause in str(log[0])


def test_first_compilation_of_a_function_says_so() -> None:
    with compile_log() as log:
        torch.compile(lambda x: x + 41, backend="eager")(torch.ones(2))
    assert [entry.cause for entry in log] == ["it had not run before"]


def test_strict_raises_before_the_work_and_leaves_the_function_usable(scaled: Callable[..., Tensor]) -> None:
    expected = pytest.raises(dsv4_compile.DSV4Error, match=r"E430[\s\S]*scale[\s\S]*3 before, now 4")
    with compile_log(strict=True) as log, expected:
        scaled(torch.ones(4), 2)
    assert log == []
    assert torch.equal(scaled(torch.ones(4), 2), torch.full((4,), 2.0))
    with compile_log(strict=True):
        scaled(torch.ones(4), 2)


def test_captures_are_late_work_too() -> None:
    graphs, captured = StandInGraphs(), []

    def step() -> Tensor:
        captured.append(True)
        return torch.ones(3) + 1

    with compile_log() as log:
        graphs.capture(step, "the step of 8 tokens")
    assert [(entry.kind, entry.what) for entry in log] == [("capture", "the step of 8 tokens")]
    with compile_log(strict=True), pytest.raises(dsv4_compile.DSV4Error, match=r"E430[\s\S]*the step of 9 tokens"):
        graphs.capture(step, "the step of 9 tokens")
    assert len(captured) == 1
    assert StandInGraphs.capture.__qualname__ == "StandInGraphs.capture"


def test_kernels_that_triton_builds_are_late_work() -> None:
    import triton

    knobs = triton.knobs.runtime
    before = knobs.jit_cache_hook, knobs.jit_post_compile_hook
    with compile_log() as log:
        assert not knobs.jit_cache_hook(key="k", repr="my_kernel[num_warps=4](*bf16, i32)", fn=None)
        knobs.jit_post_compile_hook(key="k", repr="my_kernel", fn=None)
    assert [(entry.kind, entry.what) for entry in log] == [("kernel", "my_kernel[num_warps=4](*bf16, i32)")]
    with compile_log(strict=True), pytest.raises(dsv4_compile.DSV4Error, match=r"E430[\s\S]*my_kernel"):
        knobs.jit_cache_hook(key="k", repr="my_kernel", fn=None)
    assert (knobs.jit_cache_hook, knobs.jit_post_compile_hook) == before


def test_other_threads_and_the_time_after_the_block_are_not_logged(scaled: Callable[..., Tensor]) -> None:
    handlers = list(logging.getLogger("torch.__trace").handlers)
    with compile_log() as log:
        thread = threading.Thread(target=scaled, args=(torch.ones(5), 2))
        thread.start()
        thread.join()
    scaled(torch.ones(6), 2)
    assert log == []
    assert logging.getLogger("torch.__trace").handlers == handlers
