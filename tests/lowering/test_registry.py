"""Tests of the ops that the backend puts into a graph."""

from __future__ import annotations

import pytest
import torch

from dsv4_compile._compat import lowerings
from dsv4_compile.lowering import registry
from dsv4_compile.ops.common.define import OPS
from dsv4_compile.ops.common.kernels import KERNELS


@pytest.mark.parametrize(("impl", "ops"), [("eager", list(OPS)), ("triton", list(KERNELS))])
def test_an_opaque_op_has_its_lowering_before_a_graph_is_compiled(impl: str, ops: list[str]) -> None:
    registry.load()
    twins = [registry.twin(op, impl) for op in ops]
    assert twins and [twin for twin in twins if twin not in lowerings] == []
    assert all(torch.Tag.needs_exact_strides in twin.tags for twin in twins)
