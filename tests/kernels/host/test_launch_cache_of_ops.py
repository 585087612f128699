"""A cached call has the launches, arguments and results of its launcher, for every sample of every op."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime import JITFunction

from dsv4_compile._compat import TorchDispatchMode
from dsv4_compile.kernels.host.gpu import Gpu
from dsv4_compile.kernels.host.launch import bound
from dsv4_compile.kernels.host.launch_cache import LaunchCache, key_of
from dsv4_compile.ops.common.arguments import map_tensors, tensors_in
from dsv4_compile.ops.common.kernels import KERNELS, launcher, refusal
from dsv4_compile.reference.attention.sparse_mla_decode import DecodeArguments
from dsv4_compile.testing.samples import op_samples
from tests.support import fake_triton

GPUS = {"sm_90": Gpu("cuda", 90, 132), "sm_100": Gpu("cuda", 100, 148), "gfx942": Gpu("hip", 0, 304)}
Launch = tuple[Any, ...]
TORCH_GEMM = {("fp8_linear", 2)}
"""Samples that are not cached, because their launcher calls a GEMM of torch."""


def offset_in(tensor: Tensor, address: int) -> int | None:
    """Return how far an address is from the start of a tensor's memory, None outside of it."""
    storage = tensor.untyped_storage()
    offset = address - storage.data_ptr()
    return offset if 0 <= offset < max(1, storage.nbytes()) else None


class Launches(TorchDispatchMode):
    """Launches in the block: the kernel's name, grid and arguments. Tensors are named by the argument that has their
    memory, or by the first launch that had their allocation."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        super().__init__()
        self.log: list[Launch] = []
        self.memory: list[tuple[Any, Tensor]] = [*enumerate(tensors_in(args))]
        self.used = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.memory.append((None, out))
        return out

    def described(self, value: Any) -> Any:
        """An argument or a result, without addresses."""
        if isinstance(value, Tensor):
            return self.place(value.data_ptr()) if value.numel() else "empty"
        if isinstance(value, tuple):
            return tuple(map(self.described, value))
        if hasattr(value, "base"):
            return self.place(value.base.data_ptr()), list(value.shape), list(value.strides), value.block_shape
        # An address that an entry has filled in. Memory of a Python at a fixed address begins below 4 GiB.
        if isinstance(value, int) and (value > 1 << 32 or (value > 1 << 20 and self.has(value))):
            return self.place(value)
        return "empty" if value == 0 else value

    def has(self, address: int) -> bool:
        """Return whether an address is in known memory."""
        return any(offset_in(tensor, address) is not None for _, tensor in self.memory)

    def place(self, address: int) -> tuple[Any, int]:
        """Return the owner of an address, and its offset from the start of the memory."""
        for i, (name, tensor) in enumerate(self.memory):
            offset = offset_in(tensor, address)
            if offset is not None:
                if name is None:
                    name, self.used = f"made {self.used}", self.used + 1
                    self.memory[i] = name, tensor
                return name, offset
        raise AssertionError("an address that nobody has")

    def note(self, name: str, grid: tuple[int, ...], values: Any) -> None:
        """A launch."""
        self.log.append((name, (*grid, 1, 1)[:3], [self.described(value) for value in values]))


class Compiled:
    """A compiled kernel that notes instead of running."""

    packed_metadata = 4, 1, 0

    def __init__(self, name: str) -> None:
        self.name = name

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *values: watching[-1].note(self.name, grid, values)


watching: list[Launches] = []


def run(self: Any, *args: Any, grid: Any, warmup: bool, **constants: Any) -> Compiled:
    """In the place of `JITFunction.run`."""
    if not warmup:
        watching[-1].note(self.fn.__name__, grid, bound(self, args, constants))
    return Compiled(self.fn.__name__)


@contextmanager
def watched(args: tuple[Any, ...]) -> Iterator[Launches]:
    with Launches(args) as seen:
        watching.append(seen)
        try:
            yield seen
        finally:
            watching.pop()


def seen_of(call: Callable[..., Any], args: tuple[Any, ...]) -> tuple[list[Launch], Any]:
    """What a call launches, and where its results are."""
    with watched(args) as seen:
        result = call(*args)
    results = result if isinstance(result, tuple) else (result,)
    shapes = [x if x is None else (x.dtype, x.shape, x.stride()) for x in results]
    return seen.log, (type(result), shapes, [seen.described(x) for x in results])


def other(value: Tensor) -> Tensor:
    """Return a tensor in new memory that a launcher cannot tell from `value`."""
    span = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True)) + 1
    elements = value.storage_offset() + span * bool(value.numel())
    room = torch.zeros(elements * value.element_size(), dtype=torch.uint8).view(value.dtype)
    return room.as_strided(value.shape, value.stride(), value.storage_offset())


def check(cache: LaunchCache, launcher: Callable[..., Any], args: tuple[Any, ...]) -> list[Launch]:
    """Return the launches of a cached call like `args`, which are those of the launcher."""
    for _ in range(2):
        with watched(args):
            cache(*args)
    again = map_tensors(other, args)
    assert cache.look_up(again).entry is not None, cache.unsupported
    got, want = seen_of(cache, again), seen_of(launcher, again)
    assert got == want
    return got[0]


def check_uncached(op: str, args: tuple[Any, ...]) -> None:
    """Assert that a call is not cached because its launcher calls torch."""
    cache = LaunchCache(launcher(op))
    for _ in range(2):
        with watched(args):
            cache(*args)
    assert "it calls aten." in cache.unsupported[key_of(args)]


@pytest.fixture
def on(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = GPUS[request.param]
    package = "dsv4_compile.kernels"
    for module in {*KERNELS.values(), f"{package}.linear.gemm", f"{package}.indexer.select_topk"}:
        importlib.import_module(module)
    for name, kernels in list(sys.modules.items()):
        if name.startswith("dsv4_compile.kernels.") and hasattr(kernels, "gpu_of"):
            monkeypatch.setattr(kernels, "gpu_of", lambda device: gpu)
    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(fake_triton.triton_driver, "_active", fake_triton.FakeDriver(fake_triton.HOPPER))


@pytest.mark.parametrize("on", GPUS, indirect=True)
@pytest.mark.parametrize("op", sorted(KERNELS))
def test_a_cached_call_launches_what_the_launcher_would(op: str, on: None) -> None:
    refuses, cache = refusal(op), LaunchCache(launcher(op))
    for index, args in enumerate(op_samples(op)):
        if (op, index) in TORCH_GEMM:
            check_uncached(op, args)
        elif refuses is None or not refuses(*args):
            check(cache, launcher(op), args)


@pytest.mark.parametrize("on", ["sm_90"], indirect=True)
@pytest.mark.parametrize("op", ["sparse_mla_decode", "sparse_mla_decode_quant"])
def test_a_cached_call_of_attention_by_rows_does_too(op: str, on: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4_compile.kernels.attention.sparse_mla_decode.why_unsupported_by_rows", lambda *args: "")
    taken = [args for args in op_samples(op) if args[5] == "fp8_ds_mla" and args[0].dtype is torch.bfloat16]
    assert taken
    for args in taken:
        launches = check(LaunchCache(launcher(op)), launcher(op), args)
        assert {"dequantize_pages_kernel", "concatenate_slots_kernel"} <= {name for name, *_ in launches}


@pytest.mark.parametrize("on", ["sm_90"], indirect=True)
def test_a_cached_call_of_attention_reads_bfloat16_rows_where_they_are(
    on: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsv4_compile.kernels.attention.sparse_mla_decode.why_unsupported_by_rows", lambda *args: "")
    decode = launcher("sparse_mla_decode")
    for args in op_samples("sparse_mla_decode"):
        call = DecodeArguments(*args)
        if call.cache_format != "fp8_ds_mla":
            continue
        call = call._replace(
            k_cache=torch.zeros(len(call.k_cache), call.block_size, 512).bfloat16(), cache_format="plain"
        )
        if call.extra_k_cache is not None:
            extra = torch.zeros(len(call.extra_k_cache), call.extra_block_size, 512).bfloat16()
            call = call._replace(extra_k_cache=extra)
        launches = check(LaunchCache(decode), decode, call)
        assert [name for name, *_ in launches] == ["concatenate_slots_kernel", "sparse_mla_prefill_sm90_kernel"]
