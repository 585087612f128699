"""`dsv4_invariant::mm`, a GEMM of a graph: a row has the same bits in calls of any size."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..._compat import OpOverload, device_architecture
from ...cpu.linear import mm as on_cpu
from ...errors import fail
from ...ops.common.invariance import is_large, watchers
from ...ops.common.kernels import kernel_module
from ...selection.proven import is_proven, why_unproven
from ..calls_on_cpu import Function, call_on_cpu

_KERNEL = "grouped_linear"
"""Op with the kernels for GPUs."""


def mm(x: Tensor, weight: Tensor, level: str) -> Tensor:
    """Return `[T, N]`: `x` `[T, K]` times `weight` `[K, N]`, at a value of `dsv4.batch_invariant`."""
    if is_large(level, x.shape[0]):
        product = torch.mm(x, weight)
    elif x.device.type == "cpu":
        product = on_cpu.invariant_mm(x, weight)
    else:
        product = kernel_module(_KERNEL).invariant_mm(x, weight, level)
    for watcher in watchers:
        watcher("mm", (x, weight), product)
    return product


# Defined when this module is imported: a graph from a cache may call the op in a process that compiles none.
_LIBRARY = torch.library.Library("dsv4_invariant", "DEF")
_LIBRARY.define("mm(Tensor x, Tensor weight, str level) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.impl("mm", mm, "CompositeExplicitAutograd")
torch.library.register_fake("dsv4_invariant::mm", lambda x, weight, level: x.new_empty((x.shape[0], weight.shape[1])))


@functools.cache
def _lowered() -> OpOverload:
    target: OpOverload = torch.ops.dsv4_invariant.mm.default
    call_on_cpu(target, Function("dsv4_compile.lowering.linear.invariant_mm", "mm"))
    return target


def op(device: torch.device) -> OpOverload:
    """Return `dsv4_invariant::mm` for graphs on `device`. Raises E303 where its kernel is not proven."""
    architecture = device_architecture(device)
    if device.type != "cpu" and not is_proven("triton", _KERNEL, architecture):
        fail("E303", got="aten.mm", why=why_unproven("triton", _KERNEL, architecture))
    return _lowered()
