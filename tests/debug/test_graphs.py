"""Reported graphs, decisions on dsv4 ops, kernels, and copies of caches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import dsv4_compile
from dsv4_compile import layout
from dsv4_compile.debug import graphs
from dsv4_compile.debug.report import Report

BLOCK = 4
TOKENS = 3
HEADS = 2


@pytest.fixture
def step() -> Iterator[tuple[Any, ...]]:
    """Yield arguments of `attention_inputs`: queries, KV rows, a byte cache, slots, positions and the RoPE table."""
    cache = layout.allocate_cache("fp8_ds_mla", num_blocks=16, block_size=BLOCK)
    q, kv = torch.randn(TOKENS, HEADS, layout.HEAD_DIM), torch.randn(TOKENS, layout.HEAD_DIM)
    yield q, kv, cache, torch.arange(TOKENS), torch.arange(TOKENS), torch.randn(8, layout.ROPE_DIM)


def attention_inputs(
    q: torch.Tensor,
    kv: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
) -> torch.Tensor:
    q = torch.ops.dsv4.q_norm_rope(q, positions, cos_sin, 1e-6)
    torch.ops.dsv4.kv_rope_insert(kv, cache, slots, positions, cos_sin, BLOCK, "fp8_ds_mla")
    return q * 0.5


def scattered_through_a_view(cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    flat = cache.view(-1)
    index = slots[:, None] * cache.shape[-1] + torch.arange(cache.shape[-1])
    flat.index_put_((index,), rows)
    flat.index_put_((index + 0,), rows * 2)
    return rows + 1


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    report = dsv4_compile.explain(function, *args, **kwargs)
    assert report.failure is None, report.text()
    return report


def test_dsv4_backend_shows_a_decision_with_its_reason_for_every_op(step: tuple[Any, ...]) -> None:
    report = explain(attention_inputs, *step)

    by_op = {row.op: row for row in report.decisions}
    assert all(cost.bytes > 0 and cost.floor_us > 0 for row in report.decisions for cost in row.costs)
    assert [len(row.costs) for row in report.decisions] == [row.count for row in report.decisions]
    assert set(by_op) == {"q_norm_rope", "kv_rope_insert"}
    for row in by_op.values():
        assert row.impl in ("ir", "triton", "eager")
        assert row.reason
        assert row.count == 1
        assert "test_graphs.py" in row.where[0]
    assert report.graphs[0].ops["dsv4.q_norm_rope"] == 1
    assert any(kernel.kind in ("cpp", "triton") and kernel.calls for kernel in report.kernels)
    assert report.cache_copies == []
    assert report.ok
    text = report.text()
    assert "DSV4 OPS" in text
    assert by_op["q_norm_rope"].reason.split()[0] in text


def test_demanded_implementation_is_the_one_reported(step: tuple[Any, ...]) -> None:
    report = explain(attention_inputs, *step, options={"dsv4.impl": "eager"})
    assert {row.impl for row in report.decisions} == {"eager"}
    externs = {kernel.name.split(".")[1] for kernel in report.kernels if kernel.kind == "extern"}
    assert externs == {"q_norm_rope", "kv_rope_insert"}


def test_backend_that_decides_nothing_leaves_ops_undecided(step: tuple[Any, ...]) -> None:
    report = explain(attention_inputs, *step, backend="eager")
    assert {row.op for row in report.decisions} == {"q_norm_rope", "kv_rope_insert"}
    assert {row.impl for row in report.decisions} == {"undecided"}
    assert "eager" in report.decisions[0].reason


def test_copy_of_a_whole_cache_is_found_at_the_write_that_causes_it() -> None:
    cache = torch.zeros(64, 16, 32)
    report = explain(scattered_through_a_view, cache, torch.randn(4, 32), torch.arange(4), backend="inductor")
    (copy,) = report.cache_copies
    assert copy.argument == "cache"
    assert copy.shape == ["64", "16", "32"]
    assert copy.bytes == cache.numel() * 4
    assert "index_put_" in copy.place.source
    assert copy.place.file == __file__
    assert not report.ok
    assert "cache copied" in report.text()


def test_temporary_of_the_size_of_a_mutated_activation_is_no_cache_copy() -> None:
    def residual(hidden: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        hidden.add_(x)
        return (hidden * 3).T.contiguous()

    report = explain(residual, torch.randn(128, 128), torch.randn(128, 128), backend="inductor")
    assert report.cache_copies == []
    assert report.ok


def test_old_value_of_a_cache_used_after_the_write_is_listed_as_a_clone(step: tuple[Any, ...]) -> None:
    def remembers(kv: torch.Tensor, cache: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        before = cache.clone()
        torch.ops.dsv4.kv_rope_insert(kv, cache, *rest, BLOCK, "fp8_ds_mla")
        return before.float() @ before.float().T

    _, kv, cache, *rest = step
    report = explain(remembers, kv, cache, *rest, options={"dsv4.impl": "eager"})
    (missed,) = report.missed_reinplace
    assert missed.tensors == 1
    assert missed.bytes > 0
    assert "cloned before an op mutates it" in report.text()


def test_cache_with_a_dynamic_dim_is_a_hazard(step: tuple[Any, ...]) -> None:
    torch._dynamo.mark_dynamic(step[2], 0)
    report = explain(attention_inputs, *step, backend="eager")
    (hazard,) = report.cache_hazards
    assert hazard.argument == "cache"
    assert hazard.op == "dsv4.kv_rope_insert"
    assert "kv_rope_insert" in hazard.place.source
    assert not report.ok
    assert "198068" in report.text()


def test_view_of_a_cache_with_a_dynamic_dim_is_a_hazard_too(step: tuple[Any, ...]) -> None:
    def insert(kv: torch.Tensor, caches: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        torch.ops.dsv4.kv_rope_insert(kv, caches[1], *rest, BLOCK, "fp8_ds_mla")
        return kv + 1

    _, kv, cache, *rest = step
    caches = torch.stack([cache, cache])
    torch._dynamo.mark_dynamic(caches, 1)
    assert [h.argument for h in explain(insert, kv, caches, *rest, backend="eager").cache_hazards] == ["caches"]


def test_dynamic_tokens_beside_a_static_cache_are_no_hazard(step: tuple[Any, ...]) -> None:
    for index in (0, 1, 3, 4):
        torch._dynamo.mark_dynamic(step[index], 0)
    report = explain(attention_inputs, *step, backend="eager")
    assert report.cache_hazards == []
    assert report.ok
    dynamic = {entry.name for entry in report.graphs[0].inputs if entry.dynamic and entry.shape}
    assert dynamic == {"q", "kv", "slots", "positions"}


def test_parameters_are_counted_and_arguments_listed() -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = torch.nn.Linear(4, 4)
            self.register_buffer("scale", torch.ones(4))

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.proj(hidden) * self.scale

    report = explain(Block(), torch.randn(2, 4), backend="eager")
    (graph,) = report.graphs
    assert graph.parameters == 3
    assert [(entry.name, entry.shape, entry.dtype) for entry in graph.inputs] == [("hidden", ["2", "4"], "f32")]
    assert (graph.place.function, graph.place.file) == ("forward", __file__)
    assert report.target.endswith("Block")


def test_kernels_are_counted_by_their_launches_in_generated_code() -> None:
    code = """
triton_poi_fused_add_0 = async_compile.triton('triton_poi_fused_add_0', '''
def triton_poi_fused_add_0(in_ptr0): tl.load(in_ptr0)
''')
cpp_fused_mul_1 = async_compile.cpp_pybinding(['float*'], r''' kernel ''')

def call(args):
        # Topologically Sorted Source Nodes: [x], Original ATen: [aten.add]
        triton_poi_fused_add_0.run(arg0_1, buf0, 8, stream=stream0)
        triton_poi_fused_add_0.run(buf0, buf1, 8, stream=stream0)
        cpp_fused_mul_1(buf1)
        extern_kernels.mm(buf0, buf1, out=buf2)
        buf3 = torch.ops.dsv4.sparse_mla_decode.default(buf2)
        buf4 = reinterpret_tensor(buf2, (2,), (1,), 0)

def benchmark_compiled_module(times=10):
    extern_kernels.mm(buf0, buf1, out=buf2)
"""
    rows = [(kernel.kind, kernel.name, kernel.calls) for kernel in graphs.read_kernels(code, graph=1)]
    assert rows == [
        ("triton", "triton_poi_fused_add_0", 2),
        ("cpp", "cpp_fused_mul_1", 1),
        ("extern", "extern_kernels.mm", 1),
        ("extern", "dsv4.sparse_mla_decode.default", 1),
    ]


def test_decorated_function_is_reported_under_its_own_name() -> None:
    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any) -> Any:
            return function(*args)

        return wrapper

    @noted
    def decorated(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    report = dsv4_compile.explain(decorated, calls=[((torch.ones(2),), {}), ((torch.ones(3),), {})], backend="eager")
    assert {graph.place.function.split(".")[-1] for graph in report.graphs} == {"decorated"}
    assert [row.place.function.split(".")[-1] for row in report.recompiles] == ["decorated"]


def test_long_lists_are_truncated_in_the_text_and_complete_in_the_data() -> None:
    def many(*tensors: torch.Tensor) -> torch.Tensor:
        return sum(tensors)

    report = dsv4_compile.explain(many, *torch.ones(20, 2), backend="eager")
    assert len(report.graphs[0].inputs) == 20
    assert ", 8 more" in " ".join(report.text().split())


def test_place_of_a_function_is_its_def_line_below_the_decorators() -> None:
    @torch.no_grad()
    def decorated(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    (graph,) = dsv4_compile.explain(decorated, torch.ones(2), backend="eager").graphs
    assert graph.place.source.startswith("def decorated")


def test_a_graph_that_torch_traces_again_counts_once() -> None:
    class Norm(torch.nn.Module):
        eps = 1e-6  # a symbol of the first graph, under dynamic=True, until an op asks for its value

        def forward(self, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.ops.dsv4.fused_q_kv_rmsnorm(x, x, weight, weight, self.eps)

    report = dsv4_compile.explain(Norm(), torch.ones(3, 8), torch.ones(8), dynamic=True, options={"dsv4.impl": "eager"})
    assert len(report.graphs) == len(report.decisions) == 1
    assert report.ok
