"""Tests that GEMMs with a weight prefetch (PDL) never read a weight that an earlier kernel of the step computes."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from dsv4_compile.modules.linear import Fp8Linear, linear_fp32
from dsv4_compile.modules.output import project_output

WEIGHT_POSITION = {"grouped_linear": 1, "fp8_linear": 1, "fp8_grouped_einsum": 2, "fp8_grouped_einsum_quant": 2}
"""Position of the weight in the GEMMs that on Hopper load it before the previous kernel ends."""


def prefetching_gemms(graph: GraphModule) -> list[str]:
    """Return the GEMMs in `graph` that prefetch their weight, after a check that it is an input of the graph."""
    gemms = []
    for node in graph.graph.nodes:
        name = getattr(node.target, "_opname", "")
        if name in WEIGHT_POSITION:
            assert node.args[WEIGHT_POSITION[name]].op in ("placeholder", "get_attr"), f"{name} of a computed weight"
            gemms.append(name)
    return gemms


def test_a_weight_that_is_cast_at_each_call_is_not_prefetched() -> None:
    with FakeTensorMode():
        x = torch.empty(4, 256, dtype=torch.bfloat16, device="cuda")
        weights = {dtype: torch.empty(128, 256, dtype=dtype, device="cuda") for dtype in (x.dtype, torch.float32)}
        graphs = {dtype: make_fx(linear_fp32)(x, weight) for dtype, weight in weights.items()}
        assert all(linear_fp32(x, weight).dtype is torch.float32 for weight in weights.values())
    assert {dtype: prefetching_gemms(graph) for dtype, graph in graphs.items()} == {
        torch.bfloat16: ["grouped_linear"],
        torch.float32: [],
    }


def test_a_weight_that_is_dequantised_at_each_call_is_not_prefetched() -> None:
    wo_a, wo_b = Fp8Linear(256, 512), torch.nn.Identity()
    out, positions, table = torch.empty(5, 4, 256, dtype=torch.bfloat16), torch.arange(5), torch.empty(64, 64)

    def projected(path: str) -> GraphModule:
        return make_fx(lambda out: project_output(path, out, positions, table, wo_a, wo_b, 2), tracing_mode="fake",
                       _allow_non_fake_inputs=True)(out)  # fmt: skip

    assert prefetching_gemms(projected("bfloat16")) == []
    assert prefetching_gemms(projected("fp8")) == ["fp8_grouped_einsum"]
