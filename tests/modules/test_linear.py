"""Products of a layer: which op multiplies, and what may stand in front of it."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from dsv4_compile.modules.linear import Fp8Linear, linear_fp32
from dsv4_compile.modules.output import project_output

READ_EARLY = {"grouped_linear": 1, "fp8_linear": 1, "fp8_grouped_einsum": 2, "fp8_grouped_einsum_quant": 2}
"""Position of the weight, which on Hopper is read before the kernel in front has ended."""


def products(graph: GraphModule) -> list[str]:
    """Our products in `graph`, after a look at where their weights come from."""
    found = []
    for node in graph.graph.nodes:
        name = getattr(node.target, "_opname", "")
        if name in READ_EARLY:
            assert node.args[READ_EARLY[name]].op in ("placeholder", "get_attr"), f"{name} of a weight that is computed"
            found.append(name)
    return found


def test_a_weight_that_is_rounded_at_each_call_is_not_read_early() -> None:
    with FakeTensorMode():
        x = torch.empty(4, 256, dtype=torch.bfloat16, device="cuda")
        weights = {dtype: torch.empty(128, 256, dtype=dtype, device="cuda") for dtype in (x.dtype, torch.float32)}
        graphs = {dtype: make_fx(linear_fp32)(x, weight) for dtype, weight in weights.items()}
        assert all(linear_fp32(x, weight).dtype is torch.float32 for weight in weights.values())
    assert {dtype: products(graph) for dtype, graph in graphs.items()} == {
        torch.bfloat16: ["grouped_linear"],
        torch.float32: [],
    }


def test_a_weight_that_is_dequantised_at_each_call_is_not_read_early() -> None:
    wo_a, wo_b = Fp8Linear(256, 512), torch.nn.Identity()
    out, positions, table = torch.empty(5, 4, 256, dtype=torch.bfloat16), torch.arange(5), torch.empty(64, 64)

    def projected(path: str) -> GraphModule:
        return make_fx(lambda out: project_output(path, out, positions, table, wo_a, wo_b, 2), tracing_mode="fake",
                       _allow_non_fake_inputs=True)(out)  # fmt: skip

    assert products(projected("bfloat16")) == []
    assert products(projected("fp8")) == ["fp8_grouped_einsum"]
