"""Graphs with `dsv4.batch_invariant`: implementations with a claim, replaced GEMMs and sums, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, Node

import dsv4_compile
from dsv4_compile import DSV4Error
from dsv4_compile._compat import FakeTensorMode
from dsv4_compile.options import Options
from dsv4_compile.passes import ChooseImplementations
from dsv4_compile.passes.invariant_nodes import make_invariant
from dsv4_compile.testing.samples import op_samples

MODE = {"dsv4.batch_invariant": "tokens"}
CALLS = {"fallback_by_default": True}
"""Inductor calls PyTorch, where the generated code is not the question."""


def compiled(function: object, dynamic: bool | None = None, **options: object) -> object:
    return torch.compile(function, backend="dsv4", dynamic=dynamic, fullgraph=True, options={**MODE, **options})


def graph_of(*calls: tuple[object, ...], level: str = "tokens") -> list[str]:
    """Return the targets of a graph of calls, each of a fake tensor `[6, 24]`, after the pass."""
    graph = Graph()
    with FakeTensorMode():
        x = torch.empty(6, 24)
        node_of_x = graph.placeholder("x")
        node_of_x.meta["val"] = x
        weight = graph.placeholder("weight")
        weight.meta["val"] = torch.empty(24, 8)
        results: list[Node] = []
        for function, *args in calls:
            nodes = [{"x": node_of_x, "weight": weight}.get(a, a) if isinstance(a, str) else a for a in args]
            node = graph.call_function(function, tuple(results[-1] if a == "last" else a for a in nodes))
            node.meta["val"] = function(*torch.fx.map_arg(node.args, lambda n: n.meta["val"]))
            results.append(node)
        graph.output(results[-1])
    make_invariant(graph, level)
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def test_values_of_the_option() -> None:
    def level(value: object) -> str:
        return Options.parse(None, {"dsv4.batch_invariant": value}, ops=()).batch_invariant

    assert [level(value) for value in ("off", "step", "tokens", True, False)] == [
        "off", "step", "tokens", "tokens", "off",
    ]  # fmt: skip
    for wrong in ("on", 1, None):
        with pytest.raises(DSV4Error, match="E301"):
            level(wrong)
    keys = {Options.parse(None, {"dsv4.batch_invariant": value}, ops=()).cache_key() for value in ("off", "step", True)}
    assert len(keys) == 3


def test_a_graph_without_the_option_is_as_before() -> None:
    graph = Graph()
    with FakeTensorMode():
        x, weight = graph.placeholder("x"), graph.placeholder("weight")
        x.meta["val"], weight.meta["val"] = torch.empty(6, 24), torch.empty(8, 24).t()
        node = graph.call_function(torch.ops.aten.mm.default, (x, weight))
        node.meta["val"] = torch.empty(6, 8)
        graph.output(node)
    ChooseImplementations(Options.parse(None, {}, ops=()), (), [torch.device("cpu")])(graph)
    assert str(node.target) == "dsv4_cpu.mm.default"


def test_gemms_and_sums_are_replaced() -> None:
    aten = torch.ops.aten
    assert graph_of((aten.mm.default, "x", "weight")) == ["dsv4_invariant.mm.default"]
    assert "dsv4_invariant.mm.default" in graph_of((aten.sum.dim_IntList, "x", [-1], True))
    assert "aten.sum.dim_IntList" not in graph_of((aten.mean.dim, "x", [1]))


@pytest.mark.parametrize(
    "call",
    [
        (torch.ops.aten.exp.default, "x"),
        (torch.ops.aten.cumsum.default, "x", 1),
        (torch.ops.aten._softmax.default, "x", 1, False),
        (torch.ops.aten.pow.Tensor_Scalar, "x", 3),
        (torch.ops.aten.var.correction, "x", [1]),
        (torch.ops.aten.tanh.default, "x"),
    ],
    ids=lambda call: str(call[0]),
)
def test_what_rounds_by_place_or_sums_over_tokens_is_refused(call: tuple[object, ...]) -> None:
    with pytest.raises(DSV4Error, match="E303"):
        graph_of(call)


def test_roundings_that_code_generation_may_leave_out_are_refused() -> None:
    half = (torch.ops.prims.convert_element_type.default, "x", torch.bfloat16)
    with pytest.raises(DSV4Error, match=r"(?s)E303.*rounding to torch.bfloat16"):
        graph_of(half, (torch.ops.aten.mul.Tensor, "last", 3.0), (torch.ops.aten.add.Tensor, "last", 1.0))
    graph_of(half, (torch.ops.aten.mul.Tensor, "last", 3.0))


@pytest.mark.parametrize("dynamic", [None, True])
def test_rows_of_a_compiled_function_do_not_depend_on_their_number(dynamic: bool | None, gemms_by_size: None) -> None:
    weight, bias = torch.randn(24, 40), torch.randn(40)

    def layer(x: Tensor) -> Tensor:
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        return torch.addmm(bias, normed, weight).unflatten(1, (4, 10)).sum(1)

    x = torch.randn(70, 24)
    run = compiled(layer, dynamic, **CALLS)
    together = run(x)
    torch.testing.assert_close(together, layer(x), rtol=1e-4, atol=1e-4)
    for rows in (slice(0, 1), slice(3, 5), slice(17, 70)):
        assert torch.equal(run(x[rows]), together[rows])


def test_sums_of_step_do_not_depend_on_the_rows_of_a_token(gemms_by_size: None) -> None:
    x = torch.randn(300, 40)
    run: Any = compiled(lambda x: x.unflatten(1, (4, 10)).sum(1), True, **CALLS, **{"dsv4.batch_invariant": "step"})
    together = run(x)  # a product of 3,000 rows
    for rows in (slice(0, 1), slice(5, 70)):
        assert torch.equal(run(x[rows]), together[rows])


def test_an_op_without_a_claim_and_a_demanded_implementation_are_refused() -> None:
    args = op_samples("sparse_mla_prefill")[0]
    with pytest.raises(Exception, match=r"(?s)E303.*sparse_mla_prefill"):
        compiled(torch.ops.dsv4.sparse_mla_prefill.default)(*args)
    norm = op_samples("fused_q_kv_rmsnorm")[0]
    with pytest.raises(Exception, match=r"(?s)E303.*demands"):
        compiled(torch.ops.dsv4.fused_q_kv_rmsnorm.default, **{"dsv4.impl.fused_q_kv_rmsnorm": "ir"})(*norm)


def test_explain_lists_launches_that_are_not_invariant_and_why() -> None:
    weight = torch.randn(24, 8)
    norm = op_samples("fused_q_kv_rmsnorm")[0]

    def layer(x: Tensor, *args: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ops.dsv4.fused_q_kv_rmsnorm(*args, 1e-6)[0], (x @ weight).exp()

    def report(function: Any, level: str) -> Any:
        options = {"dsv4.batch_invariant": level, **CALLS}
        return dsv4_compile.explain(function, torch.randn(20, 24), *norm[:4], options=options)

    reasons = {row.op: row.reason for row in report(layer, "off").dependent}
    assert set(reasons) == {"aten.mm", "aten.exp", "fused_q_kv_rmsnorm"}
    assert "replaced" in reasons["aten.mm"] and "E303" in reasons["aten.exp"]
    assert "sums" in reasons["fused_q_kv_rmsnorm"]
    reported = report(lambda x, *args: (x @ weight, torch.ops.dsv4.fused_q_kv_rmsnorm(*args, 1e-6)[0]), "tokens")
    assert reported.ok and reported.dependent == [] and "batch-invariant" in reported.decisions[0].reason
    assert "E303" in report(layer, "tokens").failure.message


def test_a_linear_layer_of_the_last_tokens_is_a_gemm_of_rows() -> None:
    """Rows that do not lie next to each other, of a batch of any size: torch repeats the weight for each sequence."""
    hidden, weight = torch.randn(5, 4, 24), torch.randn(8, 24)
    call: Any = compiled(lambda x: torch.nn.functional.linear(x[:, -2:], weight), dynamic=True, **CALLS)
    whole = call(hidden)
    assert torch.equal(whole[1:4], call(hidden[1:4].clone()))
    torch.testing.assert_close(whole, torch.nn.functional.linear(hidden[:, -2:], weight))
