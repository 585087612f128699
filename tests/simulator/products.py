"""The GEMM of few tokens on sm_90, simulated."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from dsv4_compile.kernels.linear import gemm as kernels
from dsv4_compile.testing import poisoned_empty
from tests.kernels.gpus import GPUS
from tests.simulator import cluster as simulated_cluster
from tests.simulator import copies
from tests.simulator import gluon as base
from tests.simulator.gluon import GLUON
from tests.simulator.values import Pointer, Value

GPU, STEM = GPUS["sm_90"][0], "linear.gemm_sm90_small"


def atomic_add(pointer: Pointer, value: int, sem: str, scope: str) -> Value:
    offset, _ = pointer.resolve(None)
    before = pointer.memory[offset].clone()
    pointer.memory[offset] += value
    return Value(before)


def load(pointer: Pointer, mask: Any = None, other: Any = 0, cache_modifier: str = "") -> Value:
    return base.load(pointer, mask, other)


class Descriptor(copies.Descriptor):
    layout = None

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def block_shape(self) -> list[int]:
        return self.block


class Launched(copies.Persistent):
    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, launch_pdl: bool, **constants: Any) -> None:
            assert launch_pdl
            start(*args, **constants)

        start = super().__getitem__(grid)
        return launch


def modules() -> dict[str, types.ModuleType]:
    stand_ins = copies.modules()
    vars(stand_ins[f"{GLUON}.language"]).update(
        uint8=torch.uint8,
        atomic_add=atomic_add,
        load=load,
        program_id=simulated_cluster.program_id,
        warp_specialize=simulated_cluster.specialize,
        assume=base.static_assert,
    )
    vars(stand_ins["triton.language.extra.cuda"]).update(gdc_wait=base.anything)
    vars(stand_ins[GLUON]).update(jit=lambda f=None, **_: Launched(f) if f else Launched)
    vars(stand_ins[f"{GLUON}.nvidia.hopper"]).update(TensorDescriptor=Descriptor)
    return stand_ins


@contextlib.contextmanager
def simulated_products() -> Iterator[Any]:
    """Yield the module of one GEMM; its `pair` is the module of two."""
    with (
        mock.patch.object(base, "modules", modules),
        mock.patch.object(
            Pointer, "dtype", property(lambda p: types.SimpleNamespace(element_ty=p.memory.dtype)), create=True
        ),
    ):
        pair = base.simulated("linear.gemm_sm90_pair")
        products = base.simulated("linear.gemm_sm90_small")
        products.pair = pair
        with simulated_cluster.clustered(products), simulated_cluster.clustered(pair):
            yield products


def product(hopper: Any, *args: Any, tiling: tuple[int, ...], quantize: bool = False) -> Tensor:
    """Return the GEMM of a launch with this tiling."""
    counters = torch.zeros(64, dtype=torch.int32)
    x, _, weight, _, dtype = args
    assert hopper.why_unsupported(x, weight, quantize, GPU) == ""
    with (
        mock.patch.object(kernels, "gpu_of", lambda device: GPU),
        mock.patch.object(kernels, "sm90_module", lambda gpu, stem: hopper if stem == STEM else None),
        mock.patch.object(hopper, "choose_tiling", lambda *sizes: hopper.SmallTiling(*tiling)),
        mock.patch.object(hopper, "arrival_counters", hopper.arrival_counters and (lambda count, device: counters)),
        poisoned_empty(),
        torch.no_grad(),
    ):
        out = kernels.grouped_gemm(kernels.Operands(*args[:4]), dtype, quantize=quantize)
    assert not counters.any()
    assert out.dtype is dtype
    return out


@contextlib.contextmanager
def launches(module: types.ModuleType) -> Iterator[list[dict[str, Any]]]:
    """Yield the constants of all launches of `module` in the block; nothing runs."""
    calls: list[dict[str, Any]] = []
    take = lambda *args, **constants: calls.append(constants)  # noqa: E731
    with mock.patch.multiple(module, launch_kernel=take, launch_clusters=take):
        yield calls
