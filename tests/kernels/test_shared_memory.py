"""What the compiler keeps in the place of a barrier, read from kernels compiled for Hopper."""

from __future__ import annotations

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tests.support.fake_triton import HOPPER, compiled_for
from tests.support.shared_memory import barriers_given_away

PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
ROWS = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0]))
COLUMNS = gl.constexpr(gl.BlockedLayout([1, 1], [32, 1], [1, 4], [1, 0]))


@gluon.jit
def _wait():
    gate = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(gate, count=1)
    mbarrier.wait(gate, 1)
    return gate


@gluon.jit
def _work(p_x, HOW: gl.constexpr):
    rows, columns = gl.arange(0, 64, gl.SliceLayout(1, ROWS)), gl.arange(0, 64, gl.SliceLayout(0, ROWS))
    x = gl.load(p_x + gl.expand_dims(rows * 64, 1) + gl.expand_dims(columns, 0))
    if HOW == "a buffer":
        buffer = gl.allocate_shared_memory(gl.float32, [64, 64], PLAIN)
        buffer.store(x)
        x = buffer.load(ROWS)
    elif HOW == "a layout":
        x = gl.convert_layout(gl.convert_layout(x, COLUMNS) + 1, ROWS)
    else:
        x += gl.expand_dims(gl.sum(x, 0), 0)
    gl.store(p_x + gl.expand_dims(rows * 64, 1) + gl.expand_dims(columns, 0), x)


@gluon.jit
def gate_kernel(p_x, flag, WHEN: gl.constexpr, HOW: gl.constexpr):
    if WHEN == "instead":
        if flag > 0:
            _wait()
        else:
            _work(p_x, HOW)
    else:
        gate = _wait()
        if WHEN == "given back":
            mbarrier.invalidate(gate)
        _work(p_x, HOW)
        if WHEN == "between":
            mbarrier.wait(gate, 1)


def compile_gate(when: str, how: str) -> None:
    with compiled_for(HOPPER):
        gate_kernel[(1,)](torch.zeros(4096), 1, WHEN=when, HOW=how, num_warps=4)


@pytest.mark.parametrize("how", ["a buffer", "a layout", "a sum"])
def test_what_takes_the_place_of_a_barrier_is_found(how: str) -> None:
    with pytest.raises(AssertionError, match=r"gate_kernel reuses the memory of an mbarrier.*1xi64"):
        compile_gate("behind", how)


@pytest.mark.parametrize("how", ["a buffer", "a layout", "a sum"])
@pytest.mark.parametrize("when", ["between", "instead", "given back"])
def test_a_barrier_in_use_in_another_branch_or_given_back_is_in_nobodys_way(when: str, how: str) -> None:
    compile_gate(when, how)


def test_a_kernel_without_barriers_has_none_to_give_away() -> None:
    @gluon.jit
    def work_kernel(p_x):
        _work(p_x, "a buffer")

    with compiled_for(HOPPER) as compiled:
        work_kernel[(1,)](torch.zeros(4096), num_warps=4)
    assert "ttng.init_barrier" not in compiled[0].asm["ttgir"] and barriers_given_away(compiled[0]) == []
