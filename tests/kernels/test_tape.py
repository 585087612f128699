"""What a tape notes of torch's own ops, what it refuses, and when a launcher is noted."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.errors import DSV4Error, fail
from dsv4_compile.kernels.host import launch_cache as plans
from dsv4_compile.kernels.host.launch import each_time, noting
from dsv4_compile.kernels.host.launch_cache import Planned
from dsv4_compile.kernels.host.tape import Tape
from dsv4_compile.ops.common import kernels as _kernels

HELD = torch.ones(4)


def noted(launcher: Callable[..., Any], *args: Any) -> Planned:
    planned = Planned(launcher)
    for _ in range(2):
        planned(*args)
    return planned


def scaled_sum(x: Tensor, weight: Tensor, scale: float) -> tuple[Tensor, None, Tensor]:
    """Memory that is filled in place, an output of another op, views, and one that nobody needs."""
    out = torch.empty((2, x.shape[0]), dtype=x.dtype)
    out.zero_()
    torch.add(x, weight, alpha=scale, out=out[1])
    x.view(-1)[1:]
    return out.t(), None, (out[1] * scale).view(torch.int32)


def test_torchs_ops_are_done_again_with_other_tensors() -> None:
    planned = noted(scaled_sum, torch.randn(4), torch.randn(4), 2.0)
    x, weight = torch.randn(4), torch.randn(4)
    plan, right = planned.find((x, weight, 2.0)), scaled_sum(x, weight, 2.0)
    assert plan is not None and len(plan.steps) == 8  # without the views of x
    got = plan((x, weight, 2.0))
    assert got[1] is None
    for one, other in ((got[0], right[0]), (got[2], right[2])):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
        assert one.stride() == other.stride() and one.dtype is other.dtype


def test_arguments_of_one_storage_may_be_of_two_the_next_time() -> None:
    both = torch.randn(2, 16)
    planned = noted(lambda a, b: a[2:] - b[2:], both[0], both[1])
    a, b = torch.randn(16), torch.randn(1, 48)[0, 16:32]
    plan = planned.find((a, b))
    assert plan is not None
    torch.testing.assert_close(plan((a, b)), a[2:] - b[2:], rtol=0, atol=0)


def test_a_call_is_noted_when_one_like_it_comes_again() -> None:
    calls = []
    planned = Planned(lambda x: calls.append(noting.tape is not None) or x + 1)
    for _ in range(4):
        planned(torch.zeros(3))
    planned(torch.zeros(4))
    planned(x=torch.zeros(3))
    assert calls == [False, True, False, False]
    assert noting.tape is None


@pytest.mark.parametrize(
    "like",
    [
        torch.zeros(8, dtype=torch.int32),
        torch.zeros(4, 2),
        torch.zeros(16)[::2],
        torch.zeros(9)[1:],
        torch.zeros(0),
    ],
    ids=["dtype", "shape", "strides", "alignment", "empty"],
)
def test_a_call_that_differs_is_none_like_it(like: Tensor) -> None:
    planned = noted(lambda x: x + 1, torch.zeros(8))
    assert planned.find((torch.ones(8),)) is not None
    assert planned.find((like,)) is None


@pytest.mark.parametrize(
    ("launcher", "why"),
    [
        (lambda x: x * x.sum().item(), "gives no tensor"),
        (lambda x: x + HELD, "neither an argument nor made"),
        (lambda x: HELD, "neither an argument nor made"),
    ],
    ids=["looks at values", "holds a tensor", "gives it"],
)
def test_what_cannot_be_done_again_is_launched_as_ever(launcher: Callable[[Tensor], Tensor], why: str) -> None:
    planned = noted(launcher, torch.ones(4))
    assert why in next(iter(planned.refused.values()))
    x = torch.full((4,), 3.0)
    assert planned.find((x,)) is None
    torch.testing.assert_close(planned(x), launcher(x), rtol=0, atol=0)


def test_two_arguments_that_were_one_tensor_are_told_apart() -> None:
    planned, same = Planned(lambda a, b: a - b), torch.ones(4)
    for _ in range(2):
        planned(same, same)
    assert "one tensor is two arguments" in next(iter(planned.refused.values()))
    torch.testing.assert_close(planned(torch.ones(4), torch.zeros(4)), torch.ones(4))


def test_a_plan_keeps_no_tensor() -> None:
    x = torch.randn(4)
    planned = noted(lambda x: x[1:].clone(), x)
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None and planned.plans


def test_a_failing_launcher_is_not_noted() -> None:
    def launcher(x: Tensor) -> Tensor:
        if noting.tape is not None:
            raise RuntimeError("out of memory")
        return x + 1

    planned = Planned(launcher)
    planned(torch.ones(4))
    with pytest.raises(RuntimeError, match="out of memory"):
        planned(torch.ones(4))
    assert noting.tape is None
    assert planned.find((torch.ones(4),)) is None


def test_what_is_another_tensor_each_time_is_asked_for_again() -> None:
    given = [torch.full((4,), float(i)) for i in range(3)]
    planned = noted(lambda x: x + each_time(lambda: given.pop(0)), torch.zeros(4))
    torch.testing.assert_close(planned(torch.ones(4)), torch.full((4,), 3.0))


def test_plans_are_forgotten_where_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "MOST_PLANS", 3)
    planned = Planned(lambda x: x + 1)
    for size in (1, 2, 3, 4, 4, 1):
        torch.testing.assert_close(planned(torch.zeros(size)), torch.ones(size))
    assert len(planned.plans) == 2
    assert planned.find((torch.zeros(4),)) is not None


def test_a_tape_hears_its_own_thread_alone() -> None:
    from concurrent.futures import ThreadPoolExecutor

    with Tape(()) as tape, ThreadPoolExecutor(1) as other:
        assert noting.tape is tape
        assert other.submit(lambda: noting.tape).result() is None


def test_an_op_checks_its_arguments_until_there_is_a_plan_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[int] = []

    def check(x: Tensor) -> None:
        checks.append(x.shape[0])
        if x.dim() > 1:
            fail("E201", got="a matrix")

    planned = Planned(lambda x: x + 1)
    monkeypatch.setattr(_kernels, "runs_kernel", lambda op, device: True)
    monkeypatch.setattr(_kernels, "refusal", lambda op: lambda x: "odd" if x.shape[0] % 2 else "")
    monkeypatch.setattr(_kernels, "planned", lambda op: planned)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    run = _kernels.dispatcher("an_op", lambda x: x - 1, check)
    for _ in range(4):
        torch.testing.assert_close(run(torch.zeros(4)), torch.ones(4))
        torch.testing.assert_close(run(torch.zeros(5)), -torch.ones(5))
        with pytest.raises(DSV4Error, match="E201"):
            run(torch.zeros(4, 1))
    assert checks.count(5) == 4
    assert checks.count(4) == 2 + 4
