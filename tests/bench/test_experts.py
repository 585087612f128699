"""Scenarios `router` and `experts`: costs of the bytes that are touched, and gates that find a wrong result."""

from __future__ import annotations

import math
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.bench import Problem, expert_peers, experts, router
from dsv4_compile.bench.runner import rows_of
from dsv4_compile.ops.common.define import OPS
from dsv4_compile.reference.moe.expert_weights import dequantize_expert

CPU = torch.device("cpu")
ROUTER, EXPERTS = {"tiny": router.Router(8, 64, 2, 1.5)}, {"tiny": experts.Experts(4, 128, 128, 2)}


def routers(tokens: int = 5, **only: str) -> list[Problem]:
    return list(router.problems(CPU, {name: {value} for name, value in only.items()}, ROUTER, (tokens,)))


def layers(tokens: int = 3, **only: str) -> list[Problem]:
    return list(experts.problems(CPU, {name: {value} for name, value in only.items()}, EXPERTS, (tokens,)))


def moved(*tensors: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tensors if isinstance(x, Tensor))


def test_every_format_and_routing_is_measured() -> None:
    assert len(routers()) == 3 and len(layers()) == 12
    assert len(layers(weights="e4m3")) == 3 and len(layers(weights="e4m3", shared="none")) == 1


@pytest.mark.parametrize("problem", routers(), ids=lambda problem: " ".join(map(str, problem.params.values())))
def test_a_router_costs_what_it_moves(problem: Problem) -> None:
    args = problem.make(0)
    table = args[4]
    rows = 0 if table is None else len(args[0]) * table.shape[1] * table.element_size()
    assert problem.cost.bytes == moved(*args[:4], *OPS[problem.op](*args)) + rows


@pytest.mark.parametrize("shared", experts.SHARED)
@pytest.mark.parametrize("kind", experts.FORMATS)
def test_experts_cost_the_weights_that_uniform_routing_touches(kind: str, shared: str) -> None:
    (problem,) = layers(weights=kind, shared=shared)
    args = problem.make(0)
    result = OPS[problem.op](*args)
    assert not result.isnan().any()
    touched = 4 * (1 - (1 - 2 / 4) ** 3)
    weights = moved(*args[3:7]) / 4 * touched
    assert problem.cost.bytes == pytest.approx(moved(*args[:3], *args[7:], result) + weights, abs=1)


def test_gates_find_a_wrong_result() -> None:
    (problem,) = layers(weights="mxfp4", shared="none")
    want = OPS[problem.op](*problem.make(0))
    assert problem.differs is not None and problem.differs([want], [want]) == ""
    assert "relative error" in problem.differs([want * 1.1], [want])
    assert "relative error" in problem.differs([want * torch.nan], [want])
    assert "the reference gives" in problem.differs([want.float()], [want])
    problem = routers()[0]
    ids, weights = OPS[problem.op](*problem.make(0))
    assert problem.differs is not None and problem.differs([ids, weights], [ids, weights]) == ""
    assert "other experts" in problem.differs([(ids + 1) % 8, weights], [ids, weights])
    assert "weights are wrong" in problem.differs([ids, weights * 1.1], [ids, weights])


def test_references_are_timed() -> None:
    for problem in (routers()[0], layers(weights="bfloat16", shared="e4m3")[0]):
        rows = list(rows_of(problem, {"impl": {"eager"}}, CPU))
        assert [(row["impl"], row["status"]) for row in rows] == [("eager", "ok")]


def statuses(problem: Problem, *impls: str) -> dict[str, str]:
    return {row["impl"]: row["note"] or row["status"] for row in rows_of(problem, {"impl": set(impls)}, CPU)}


def test_experts_have_peers_on_the_same_weights() -> None:
    (problem,) = layers(weights="bfloat16", shared="none")
    peers = (*expert_peers.OF_TRANSFORMERS, expert_peers.TORCH)
    assert statuses(problem, *peers) == dict.fromkeys(peers, "ok")
    args = problem.make(0)
    module, *rest = problem.arranged(expert_peers.BATCHED, args)
    assert module.gate_up_proj.data_ptr() == args[3].data_ptr() and rest[2].dtype is torch.bfloat16
    # No peer has the shared expert, and only Marlin has quantised weights.
    assert [set(problem.implementations) & {*peers, "marlin"} for problem in layers(weights="mxfp4")] == [
        {"marlin"},
        set(),
        set(),
    ]
    assert not any(set(problem.implementations) & {*peers, "marlin"} for problem in layers(weights="e4m3"))


def test_peers_clamp_and_weigh_as_the_op_does() -> None:
    (problem,) = layers(weights="bfloat16", shared="none")
    args = list(problem.make(0))
    args[0] *= 8
    args[-3] = 0.5
    want = OPS[problem.op](*args)
    args[-3] = math.inf
    assert problem.differs is not None and problem.differs([OPS[problem.op](*args)], [want])
    args[-3] = 0.5
    for name in (*expert_peers.OF_TRANSFORMERS, expert_peers.TORCH):
        got = problem.implementations[name]()(*problem.arranged(name, tuple(args)))
        assert problem.differs([got], [want]) == "", name


def test_copies_of_weights_that_do_not_fit_are_unavailable() -> None:
    (problem,) = layers(weights="bfloat16", shared="none")
    _, ids, _, w13, w2, *_ = problem.make(0)
    copied = 6 * (w13.nbytes + w2.nbytes) // 4
    assert expert_peers.why_too_large(ids, w13, w2, 2 * copied) == ""
    assert "batched_mm copies 0 GB of weights" in expert_peers.why_too_large(ids, w13, w2, 2 * copied - 1)


def test_marlin_is_unavailable_for_a_true_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    (problem,) = layers(weights="mxfp4", shared="none")
    assert statuses(problem, "marlin") == {"marlin": "Marlin's kernels run on GPUs"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "no vLLM with Marlin's experts: No module named 'vllm" in statuses(problem, "marlin")["marlin"]


def test_marlin_gets_repacked_weights_and_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    (problem,) = layers(weights="mxfp4", shared="none")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def pack(layer: Any, w13: Tensor, w2: Tensor, w13_scale: Tensor, w2_scale: Tensor, *biases: None) -> Any:
        """Dequantise in place of the repacking."""
        assert layer.params_dtype is torch.bfloat16 and biases == (None, None)
        pairs = (w13, w13_scale), (w2, w2_scale)
        wide = [torch.stack([dequantize_expert(*expert) for expert in zip(*pair, strict=True)]) for pair in pairs]
        return *wide, w13_scale, w2_scale, None, None

    def fused(
        x: Any, w1: Any, w2: Any, b1: Any, b2: Any, s1: Any, s2: Any, weights: Any, ids: Any, kind: int, **more: Any
    ) -> Any:
        assert (b1, b2, kind) == (None, None, 7)
        return OPS[problem.op](x, ids, weights, w1, w2, limit=more["activation_config"].clamp_limit)

    activation = type("ApplyMoEActivationConfig", (SimpleNamespace,), {})
    scalars = SimpleNamespace(float4_e2m1f=SimpleNamespace(id=7))
    fakes: dict[str, dict[str, Any]] = {
        "model_executor.layers.fused_moe.experts.marlin_moe": {"fused_marlin_moe": fused},
        "model_executor.layers.fused_moe.activation": {"ApplyMoEActivationConfig": activation},
        "model_executor.layers.quantization.utils.marlin_utils_fp4": {"prepare_moe_mxfp4_layer_for_marlin": pack},
        "scalar_type": {"scalar_types": scalars},
    }
    for name, members in fakes.items():
        module = ModuleType(f"vllm.{name}")
        module.__dict__.update(members)
        for parent in [".".join(module.__name__.split(".")[:i]) for i in range(1, module.__name__.count(".") + 1)]:
            monkeypatch.setitem(sys.modules, parent, sys.modules.get(parent) or ModuleType(parent))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    assert statuses(problem, "marlin") == {"marlin": "ok"}


@pytest.mark.parametrize("problem", routers(64), ids=lambda problem: " ".join(map(str, problem.params.values())))
def test_transformers_routes_alike_up_to_rounded_logits(problem: Problem) -> None:
    assert statuses(problem, "transformers", "triton") == {
        "transformers": "ok",
        "triton": "hand-written kernels run on GPUs",
    }
    ids, weights = OPS[problem.op](*problem.make(0))
    differs = problem.differs_of["transformers"]
    assert differs([ids.flip(1), weights.flip(1)], [ids, weights]) == ""
    assert "other experts" in differs([(ids + 1) % 8, weights], [ids, weights])
    assert "weights are wrong" in differs([ids, weights * 1.05], [ids, weights])
    assert "weights are wrong" in differs([ids, weights * torch.nan], [ids, weights])
