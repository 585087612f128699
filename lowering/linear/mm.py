"""A GEMM of a graph on a CPU as a call of the function in `cpu/linear/mm.py`, which chooses by the number of rows."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.fx import Graph

from ..._compat import OpOverload
from ...cpu.linear.mm import mm
from ..calls_on_cpu import Function, call_on_cpu

# Defined when this module is imported: a graph from a cache may call the op in a process that compiles none.
_LIBRARY = torch.library.Library("dsv4_cpu", "DEF")
_LIBRARY.define("mm(Tensor x, Tensor weight) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.impl("mm", mm, "CompositeExplicitAutograd")
torch.library.register_fake("dsv4_cpu::mm", lambda x, weight: x.new_empty((x.shape[0], weight.shape[1])))


@functools.cache
def op() -> OpOverload:
    """Return `dsv4_cpu::mm`, `aten::mm` under a separate name: a lowering of aten's would change others' graphs."""
    mm: OpOverload = torch.ops.dsv4_cpu.mm.default
    call_on_cpu(mm, Function("dsv4_compile.cpu.linear.mm", "mm"))
    return mm


def retarget(graph: Graph) -> None:
    """Let float32 GEMMs on a CPU call the function if their weight is the transpose of a contiguous matrix."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default):
        x, weight = (operand.meta["val"] for operand in node.args)
        if x.device.type == "cpu" and x.dtype is torch.float32 and _transposed(weight):
            node.target = op()


def _transposed(weight: Tensor) -> bool:
    return weight.stride(0) == 1 and weight.stride(1) == weight.shape[0]
