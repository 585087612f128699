"""The launch cache: what is replayed, what is not cached, and when a call is recorded. A kernel adds on the CPU."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.errors import DSV4Error, fail
from dsv4_compile.kernels.host import launch_cache
from dsv4_compile.kernels.host.launch import launch_kernel, per_call, recording
from dsv4_compile.kernels.host.launch_cache import LaunchCache
from dsv4_compile.ops.common import kernels

HELD = torch.ones(4)


class AddKernel:
    """A kernel, and the same compiled: `out[i] = x[i] + scale * y[i]`, float32, by address. Arguments may be tuples."""

    params = tuple(SimpleNamespace(name=name, default=None) for name in ("out", "xy", "count", "scale"))
    runs = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., AddKernel]:
        return self.run

    def run(self, out: Any, xy: Any, count: int, scale: float, enable_fp_fusion: bool = True) -> AddKernel:
        addresses = [x.data_ptr() if isinstance(x, Tensor) else x for x in (out, *xy)]
        to, x, y, *_ = ((ctypes.c_float * count).from_address(address) for address in addresses)
        to[:] = [a + scale * b for a, b in zip(x, y, strict=True)]
        self.runs += 1
        return self


ADD = AddKernel()


def add(x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
    """A launcher with one result."""
    out = torch.empty_like(x)
    launch_kernel(ADD, (1,), out, (x, y), x.numel(), scale=scale)
    return out


def twice(x: Tensor, y: Tensor, scale: float) -> tuple[Tensor, None, Tensor]:
    """A launcher with memory between two kernels, rows of one allocation as results, and a second dtype."""
    rows, between = x.new_empty((2, x.shape[0])), torch.empty(x.shape[0], dtype=torch.int32)
    launch_kernel(ADD, (1,), between.view(torch.float32), (x, y), x.numel(), scale=scale)
    launch_kernel(ADD, (1,), rows[1], (x, between), x.numel(), scale=scale)
    launch_kernel(ADD, (1,), rows[0], (rows[1], y), x.numel(), scale=scale)
    return rows.t(), None, rows[1, 1:].view(torch.int32)


def recorded(launcher: Callable[..., Any], *args: Any) -> LaunchCache:
    cache = LaunchCache(launcher)
    for _ in range(2):
        cache(*args)
    return cache


def test_a_cached_call_launches_for_other_tensors_without_the_launcher() -> None:
    calls = []
    cache = recorded(lambda *args: calls.append(1) or twice(*args), torch.randn(4), torch.randn(4), 2.0)
    x, y = torch.randn(4), torch.randn(4)
    before, right = ADD.runs, twice(x, y, 2.0)
    got = cache(x, y, 2.0)
    assert len(calls) == 2 and ADD.runs == before + 6
    assert type(got) is tuple and got[1] is None
    for one, other in ((got[0], right[0]), (got[2], right[2])):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
        assert one.stride() == other.stride() and one.dtype is other.dtype
    assert got[2].data_ptr() == got[0].data_ptr() + 5 * 4


def addressed(value: Any) -> Any:
    """Replace the tensors of an argument by their addresses."""
    if isinstance(value, tuple):
        return tuple(map(addressed, value))
    return value.data_ptr() if isinstance(value, Tensor) else value


@pytest.mark.parametrize(
    "group",
    [
        lambda x, y: (x, y),
        lambda x, y: (x, y, None, 3),
        lambda x, y: (x, y[1:], None),
        lambda x, y: (x, None, y),
        lambda x, y: (x, y, (x[2:], 5)),
        lambda x, y: (y, x[:0]),
    ],
    ids=["tensors", "constants last", "an offset", "a constant between", "nested", "no elements"],
)
def test_a_tuple_has_the_addresses_of_the_call(group: Callable[..., Any]) -> None:
    got: list[Any] = []

    class Kernel(AddKernel):
        params = ()

        def run(self, group: Any, **options: Any) -> Kernel:  # type: ignore[override]
            got.append(group)
            return self

    cache = recorded(lambda x, y: launch_kernel(Kernel(), (1,), group(x, y)), torch.zeros(4), torch.zeros(4))
    x, y = torch.zeros(4), torch.zeros(4)
    cache(x, y)
    assert len(got) == 3 and isinstance(cache.look_up((x, y)).state, launch_cache.Entry)
    assert got[-1] == addressed(group(x, y))


def test_arguments_of_one_storage_may_be_of_two_the_next_time() -> None:
    both = torch.randn(2, 16)
    cache = recorded(lambda a, b: add(a[2:], b[2:]), both[0], both[1])
    a, b = torch.randn(16), torch.randn(1, 48)[0, 16:32]
    entry = cache.look_up((a, b)).entry
    assert entry is not None
    torch.testing.assert_close(entry((a, b)), a[2:] + b[2:], rtol=0, atol=0)


def add_list(xy: list[Tensor], scales: list[float]) -> Tensor:
    """A launcher of lists."""
    return add(*xy, *scales)


def test_tensors_in_lists_are_arguments_too() -> None:
    cache = LaunchCache(add_list)
    for i in range(4):
        xy = [torch.full((4,), float(i)), torch.arange(4.0) + i]
        assert cache(xy, [2.0]).tolist() == [3 * i + 2 * j for j in range(4)]
    (entry,) = cache.states.values()
    assert isinstance(entry, launch_cache.Entry) and entry.in_lists == [(0, 0), (0, 1)]
    keys = [launch_cache.key_of(args) for args in (([xy[0]], [xy[1]]), (xy, []), ([1, 2], [3]), ([1], [2, 3]))]
    assert len(set(keys)) == 4


def test_a_call_is_recorded_when_its_key_comes_again() -> None:
    recorders = []
    cache = LaunchCache(lambda x, y: recorders.append(recording.recorder is not None) or add(x, y))
    for _ in range(4):
        cache(torch.zeros(3), torch.zeros(3))
    cache(torch.zeros(4), torch.zeros(4))
    cache(x=torch.zeros(3), y=torch.zeros(3))
    assert recorders == [False, True, False, False]
    assert recording.recorder is None


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
def test_a_call_that_differs_has_another_key(like: Tensor) -> None:
    y = torch.zeros(8)
    cache = recorded(lambda x, y: add(y, y), torch.zeros(8), y)
    assert cache.look_up((torch.ones(8), y)).entry is not None
    assert cache.look_up((like, y)).entry is None


@pytest.mark.parametrize(
    ("launcher", "why"),
    [
        (lambda x: add(x, x) * 2, "it calls aten.mul"),
        (lambda x: add(x, x, x.sum().item()), "it calls aten.sum"),
        (lambda x: add(x, x).zero_(), "it calls aten.zero_"),
        (lambda x: add(x, HELD), "neither an argument nor made"),
        (lambda x: HELD, "neither an argument nor made"),
        (lambda x: x[1:], "a result is a view of an argument"),
    ],
    ids=["computes", "looks at values", "fills", "holds a tensor", "returns it", "returns a view"],
)
def test_what_is_not_cached_is_launched_each_time(launcher: Callable[[Tensor], Tensor], why: str) -> None:
    cache = recorded(launcher, torch.ones(4))
    assert why in next(iter(cache.unsupported.values()))
    x = torch.full((4,), 3.0)
    assert cache.look_up((x,)).entry is None
    torch.testing.assert_close(cache(x), launcher(x), rtol=0, atol=0)


def test_a_kernel_that_is_not_compiled_is_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AddKernel, "run", lambda *args, **constants: None)
    assert [*recorded(add, torch.ones(4), torch.ones(4)).unsupported.values()] == ["a kernel is not compiled"]


def test_two_arguments_that_are_one_tensor_are_not_cached() -> None:
    cache, same = LaunchCache(add), torch.ones(4)
    for _ in range(2):
        cache(same, same)
    assert "two arguments are one tensor" in next(iter(cache.unsupported.values()))
    torch.testing.assert_close(cache(torch.ones(4), torch.zeros(4)), torch.ones(4))


def test_an_entry_keeps_no_tensor() -> None:
    def launcher(x: Tensor, y: Tensor, empty: Tensor) -> Tensor:
        out = torch.empty_like(y)
        launch_kernel(ADD, (1,), out, (x[1:], y, empty), 3, scale=1.0)
        return out

    x, y, empty = torch.randn(4), torch.randn(3), torch.randn(0)
    cache = recorded(launcher, x, y, empty)
    gone = [weakref.ref(tensor) for tensor in (x, y, empty)]
    del x, y, empty
    gc.collect()
    assert [reference() for reference in gone] == [None] * 3
    assert cache.look_up((torch.ones(4), torch.ones(3), torch.ones(0))).entry is not None


def test_a_failing_launcher_is_not_recorded() -> None:
    def launcher(x: Tensor, y: Tensor) -> Tensor:
        if recording.recorder is not None:
            raise RuntimeError("out of memory")
        return add(x, y)

    cache = LaunchCache(launcher)
    cache(torch.ones(4), torch.ones(4))
    with pytest.raises(RuntimeError, match="out of memory"):
        cache(torch.ones(4), torch.ones(4))
    assert recording.recorder is None
    assert cache.look_up((torch.ones(4), torch.ones(4))).entry is None


def test_what_is_made_per_call_is_made_again() -> None:
    tensors = [torch.full((4,), float(i)) for i in range(3)]
    cache = recorded(lambda x: add(x, per_call(lambda: tensors.pop(0))), torch.zeros(4))
    torch.testing.assert_close(cache(torch.ones(4)), torch.full((4,), 3.0))


def test_two_tensors_per_call_are_told_apart_where_they_are_one_while_recording() -> None:
    same, sizes = torch.zeros(4), list[int]()

    def make(size: int) -> Tensor:
        sizes.append(size)
        return same

    cache = recorded(lambda x: add(add(x, per_call(make, 4)), per_call(make, 5)), torch.zeros(4))
    sizes.clear()
    cache(torch.ones(4))
    assert sizes == [4, 5]


def test_entries_are_dropped_where_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_cache, "MAX_ENTRIES", 3)
    cache = LaunchCache(add)
    for size in (1, 2, 3, 4, 4, 1):
        torch.testing.assert_close(cache(torch.zeros(size), torch.ones(size)), torch.ones(size))
    assert len(cache.states) == 2
    assert cache.look_up((torch.zeros(4), torch.zeros(4))).entry is not None


def test_a_call_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[launch_cache.Key] = []
    key_of = launch_cache.key_of
    monkeypatch.setattr(launch_cache, "key_of", lambda args: keys.append(key_of(args)) or keys[-1])
    cache = LaunchCache(add)
    monkeypatch.setattr(kernels, "launch_cache", lambda op, invariant="": cache)
    monkeypatch.setattr(kernels, "refusal", lambda op: None)
    x = torch.ones(4)
    for call in range(1, 4):
        kernels.launch("an_op", torch.add, None, x.device, (x, torch.ones(4)), {})
        assert len(keys) == call
    assert cache.look_up((x, torch.ones(4))).entry is not None


def test_a_recorder_hears_its_own_thread_alone() -> None:
    from concurrent.futures import ThreadPoolExecutor

    with launch_cache.CallRecorder(()) as recorder, ThreadPoolExecutor(1) as other:
        assert recording.recorder is recorder
        assert other.submit(lambda: recording.recorder).result() is None


@pytest.mark.filterwarnings(r"ignore:\[W603\]")
def test_an_op_checks_its_arguments_until_the_call_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[int] = []

    def check(x: Tensor, y: Tensor) -> None:
        checks.append(x.shape[0])
        if x.dim() > 1:
            fail("E201", got="a matrix")

    cache = LaunchCache(add)
    monkeypatch.setattr(kernels, "runs_kernel", lambda op, device: True)
    monkeypatch.setattr(kernels, "refusal", lambda op: lambda x, y: "odd" if x.shape[0] % 2 else "")
    monkeypatch.setattr(kernels, "launch_cache", lambda op, invariant="": cache)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    run = kernels.dispatcher("an_op", torch.sub, check)
    for _ in range(4):
        torch.testing.assert_close(run(torch.zeros(4), torch.ones(4)), torch.ones(4))
        torch.testing.assert_close(run(torch.zeros(5), torch.ones(5)), -torch.ones(5))
        with pytest.raises(DSV4Error, match="E201"):
            run(torch.zeros(4, 1), torch.ones(4, 1))
    assert checks.count(5) == 4
    assert checks.count(4) == 2 + 4
