"""Simulation of persistent kernels with asynchronous copies, in addition to gluon.py.

A copy lands when it is issued, as early as possible: a kernel that does not wait for a GEMM then overwrites its
operands, which fails. With `landing_late`, tiles land as late as possible: a kernel that does not wait for a copy then
reads unwritten memory.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.simulator import gluon as base
from tests.simulator.gluon import GLUON, SECONDS, Barrier, Kernel, Shared
from tests.simulator.values import Pointer, Value, raw

THREADS = 128


class Descriptor:
    """A TMA descriptor: a tensor in blocks."""

    def __init__(self, tensor: Tensor, shape: list[int], strides: list[int], block: list[int], layout: Any) -> None:
        assert strides[-1] == 1 and all(n * tensor.element_size() % 16 == 0 for n in strides[:-1])
        self.tensor, self.block = tensor.as_strided(shape, strides, tensor.storage_offset()), [int(n) for n in block]

    @classmethod
    def from_tensor(cls, tensor: Tensor, block: list[int], layout: Any) -> Descriptor:
        return cls(tensor, list(tensor.shape), list(tensor.stride()), block, layout)

    def at(self, corner: list[Any]) -> tuple[Tensor, tuple[slice, ...]]:
        """Return the part of a block that lies in the tensor, and its place in the block."""
        first = [int(raw(x)) for x in corner]
        block = self.tensor[tuple(slice(a, a + n) for a, n in zip(first, self.block, strict=True))]
        return block, tuple(slice(0, n) for n in block.shape)


class Persistent(Kernel):
    """A kernel that uses `num_programs`."""

    programs = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        Persistent.programs = grid[0]
        return super().__getitem__(grid)


def expect(barrier: Barrier, size: int) -> None:
    barrier.arrive(announced=int(size))


def load_block(source: Descriptor, corner: list[Any], barrier: Barrier, target: Shared) -> None:
    """Copy a block to shared memory, with zeros outside the tensor."""
    block, inside = source.at(corner)
    target.data.zero_()[inside] = block
    barrier.arrive(0, announced=-target.data.nbytes)


@contextlib.contextmanager
def landing_late() -> Iterator[None]:
    """Let tiles land when their barrier is waited for, in the order of issue; enter it around `simulated`."""
    waiting: dict[Barrier, list[Callable[[], None]]] = {}
    land, wait = load_block, Barrier.wait

    def issued(source: Descriptor, corner: list[Any], barrier: Barrier, target: Shared) -> None:
        with Barrier.changed:
            waiting.setdefault(barrier, []).append(lambda: land(source, corner, barrier, target))
            Barrier.changed.notify_all()

    def awaited(barrier: Barrier, parity: Any) -> None:
        with Barrier.changed:
            while barrier.phase & 1 == int(parity) and not Barrier.failed.is_set():
                if waiting.get(barrier):
                    waiting[barrier].pop(0)()
                elif not Barrier.changed.wait(SECONDS):
                    break
        wait(barrier, parity)

    with (
        mock.patch.object(sys.modules[__name__], "load_block", issued),
        mock.patch.object(Barrier, "wait", awaited),
    ):
        yield
    assert not any(waiting.values()), "a tile without a wait lands in memory that is reused"


EARLY_AND_LATE: dict[str, Any] = {"params": [contextlib.nullcontext, landing_late], "ids": ["early", "late"]}
"""Parameters of a fixture that enters `request.param()` around `simulated`, so that tests run both ways."""


def store_block(target: Descriptor, corner: list[Any], source: Shared) -> None:
    """Start to store the part of a block that lies in the tensor. It is read when its thread waits."""
    block, inside = target.at(corner)
    _stores.pending = [*getattr(_stores, "pending", []), (block, source.data, source.data.clone(), inside)]


def store_wait(pending: int) -> None:
    assert pending == 0
    for block, now, then, inside in getattr(_stores, "pending", []):
        bits = base.BITS[now.itemsize]
        assert torch.equal(now.view(bits), then.view(bits)), "a tile was overwritten while it was stored"
        block.copy_(now[inside])
    _stores.pending = []


_stores = threading.local()


def copy_elements(target: Shared, source: Pointer, mask: Any = None) -> None:
    target.store(base.load(source, mask))


def landed(barrier: Barrier, increment_count: bool) -> None:
    assert not increment_count
    barrier.arrive(THREADS)


def multiply(a: Any, b: Shared, acc: Value, use_acc: bool = True, is_async: bool = False) -> Value:
    """Return a GEMM as `gluon.multiply`; its wait also waits for its accumulator."""
    product = base.multiply(a, b, acc, use_acc, is_async)
    product.operands += getattr(acc, "operands", [])  # type: ignore[attr-defined]
    return product


def finish(pending: int, deps: list[Value]) -> Any:
    for dep in deps:
        if hasattr(dep, "operands"):
            base.finish(pending, [dep])
            dep.operands = []
    return tuple(deps) if len(deps) > 1 else deps[0]


def broadcast(a: Any, b: Any) -> tuple[Value, Any]:
    shape = b.offset if isinstance(b, Pointer) else b.data
    return Value(torch.broadcast_tensors(a.data, torch.as_tensor(shape))[0]), b


def modules() -> dict[str, types.ModuleType]:
    """Return all stand-ins."""
    stand_ins = _base_modules()
    language, hopper = stand_ins[f"{GLUON}.language"], stand_ins[f"{GLUON}.language.nvidia.hopper"]
    vars(stand_ins[GLUON]).update(jit=lambda f=None, **_: Persistent(f) if f else Persistent)
    vars(language).update(
        DistributedLinearLayout=base.anything,
        DotOperandLayout=base.anything,
        num_programs=lambda axis: (Persistent.programs, 1, 1)[axis],
        broadcast=broadcast,
        full=lambda shape, x, dtype, layout: Value(torch.full([int(n) for n in shape], raw(x), dtype=dtype)),
        min=lambda x, axis: Value(x.data.amin(axis)),
    )
    vars(hopper.mbarrier).update(expect=expect)
    vars(hopper).update(
        tma=types.SimpleNamespace(async_load=load_block, async_store=store_block, store_wait=store_wait),
        warpgroup_mma=multiply,
        warpgroup_mma_wait=finish,
    )
    ampere, host = types.ModuleType("ampere"), types.ModuleType("host")
    vars(ampere).update(
        async_copy=types.SimpleNamespace(
            async_load=copy_elements, mbarrier_arrive=landed, commit_group=lambda: None, wait_group=lambda count: None
        )
    )
    vars(host).update(TensorDescriptor=Descriptor)
    return stand_ins | {f"{GLUON}.language.nvidia.ampere": ampere, f"{GLUON}.nvidia.hopper": host}


_base_modules = base.modules


def simulated(launcher: str) -> Any:
    """Import a module as `gluon.simulated`, with these stand-ins."""
    with mock.patch.object(base, "modules", modules):
        return base.simulated(launcher)
