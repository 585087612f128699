"""Scenario `decode_step`: a whole step runs, is gated, and replays what the ops give."""

from __future__ import annotations

import pytest
import torch

from dsv4_compile import bench
from dsv4_compile.bench import decode_step, timing
from dsv4_compile.bench.runner import rows_of
from dsv4_compile.config import DeepseekV4Config

CPU = torch.device("cpu")
TINY = DeepseekV4Config(
    hidden_size=128, num_heads=2, q_lora_rank=128, o_groups=1, o_lora_rank=128, index_n_heads=2, index_topk=16
)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two samples are enough for tests, and three layers for a stack."""
    monkeypatch.setattr(timing, "_MAX_REPEATS", 2)
    monkeypatch.setattr(decode_step, "LAYERS", {**decode_step.LAYERS, "stack": (1, 4, 128)})


def found(**only: str) -> list[bench.Problem]:
    return list(decode_step.problems(CPU, {name: {value} for name, value in only.items()}, TINY, 128))


@pytest.mark.parametrize("weights", decode_step.WEIGHTS)
def test_replays_of_a_step_agree_with_the_ops_and_are_timed(weights: str) -> None:
    for problem in found(weights=weights):
        rows = list(rows_of(problem, {"impl": {"eager", "eager graph"}}, CPU))
        assert [(row["impl"], row["status"]) for row in rows] == [("eager", "ok"), ("eager graph", "ok")], rows
        assert rows[0]["context"] == 128
        assert problem.cost.bytes > 0 and problem.cost.flops > 0


def test_a_stack_is_not_compiled_and_a_layer_in_every_way() -> None:
    [stack], [layer] = found(layer="stack", weights="fp8"), found(layer="CSA", weights="fp8")
    assert set(stack.implementations) == {"eager", "eager graph"}
    assert set(layer.implementations) == {"eager", "eager graph", "stock", "reduce-overhead", "dsv4", "graph"}


def test_a_wrong_step_is_found() -> None:
    [problem] = found(layer="CSA", weights="bfloat16")
    want = [problem.reference(*problem.make(0))]
    assert decode_step.differs(want, want) == ""
    assert decode_step.differs([want[0] * 1.2], want) != ""
    assert decode_step.differs([problem.reference(*problem.make(1))], want) != ""
