"""Scenario `gemm`: its layers are those of the models, and its gate finds a wrong result."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.bench import Problem, gemm
from dsv4_compile.bench.runner import rows_of
from dsv4_compile.config import DeepseekV4Config
from dsv4_compile.ops.common.define import OPS
from dsv4_compile.reference.common.block_scale import dequantize_activation

CPU = torch.device("cpu")
QUANTISED = "fp8_grouped_einsum_quant"
TINY = {"tiny": DeepseekV4Config(num_heads=4, o_groups=2, o_lora_rank=128, q_lora_rank=160, hidden_size=96)}


def found(tokens: int = 3, **only: str) -> list[Problem]:
    return list(gemm.problems(CPU, {name: {value} for name, value in only.items()}, TINY, (tokens,)))


def results(given: Any) -> list[Tensor]:
    return [given] if isinstance(given, Tensor) else list(given)


def test_layers_are_those_of_the_models() -> None:
    shapes = {(x.op, x.name): (x.groups, x.rows, x.size, x.beside) for x in gemm.layers(gemm.MODELS["Flash"])}
    assert shapes == {
        ("fp8_linear", "wq_a + wkv"): (1, 1536, 4096, 0),
        ("fp8_linear", "wq_a + wkv beside HCA"): (1, 1536, 4096, 1024),
        ("fp8_linear", "wq_a + wkv beside CSA"): (1, 1536, 4096, 2560),
        ("fp8_linear", "wq_b"): (1, 32768, 1024, 0),
        ("fp8_linear", "indexer wq_b"): (1, 8192, 1024, 0),
        ("fp8_linear", "wq_b + indexer wq_b"): (1, 40960, 1024, 0),
        ("fp8_linear", "wo_b"): (1, 4096, 8192, 0),
        ("fp8_grouped_einsum", "wo_a"): (8, 1024, 4096, 0),
        ("fp8_grouped_einsum_quant", "wo_a"): (8, 1024, 4096, 0),
        ("grouped_linear", "wo_a"): (8, 1024, 4096, 0),
        ("fp8_grouped_einsum", "wo_b"): (1, 4096, 8192, 0),
        ("grouped_linear", "wq_a + wkv"): (1, 1536, 4096, 0),
        ("grouped_linear", "wq_b"): (1, 32768, 1024, 0),
        ("grouped_linear", "wo_b"): (1, 4096, 8192, 0),
    }


def test_every_op_takes_its_arguments_and_costs_what_they_hold() -> None:
    problems = found()
    assert len(problems) == len(list(gemm.layers(TINY["tiny"])))
    for problem in problems:
        args = problem.make(0)
        result = OPS[problem.op](*args)
        out = result if isinstance(result, Tensor) else dequantize_activation(*result)
        tensors = [x for x in (*args, *results(result)) if isinstance(x, Tensor)]
        assert problem.cost.bytes == sum(x.numel() * x.element_size() for x in tensors)
        assert out.isfinite().all() and out.any()
        rows = {
            row["impl"]: row["status"]
            for row in rows_of(problem, {"impl": {"eager", "bmm", "triton", "scaled_mm"}}, CPU)
        }
        assert rows.pop("eager") == rows.pop("bmm", "ok") == "ok"
        assert set(rows.values()) == {"unavailable"}


@pytest.mark.parametrize(
    "wrong",
    [
        lambda out: out.flip(0),
        lambda out: out * 1.02,
        lambda out: torch.where(torch.arange(out.shape[-1]) == 0, torch.nan, out),
        lambda out: out.half(),
    ],
    ids=["rows", "scale", "NaN", "dtype"],
)
def test_a_wrong_gemm_gets_no_number(wrong: Callable[[Tensor], Tensor]) -> None:
    for problem in found():
        if problem.op != QUANTISED:
            want = problem.reference(*problem.make(0))
            assert problem.differs is not None
            assert problem.differs([want], [want]) == ""
            assert problem.differs([wrong(want)], [want]) != ""


@pytest.mark.parametrize(
    "wrong",
    [
        lambda values, scale: (values.flip(0), scale),
        lambda values, scale: (values, scale * 2),
        lambda values, scale: (values.float().mul(1.3).to(values.dtype), scale),
        lambda values, scale: (values, scale.contiguous()),
        lambda values, scale: (values, torch.where(torch.arange(scale.shape[-1]) == 0, torch.nan, scale)),
        lambda values, scale: (values,),
    ],
    ids=["rows", "scales", "values", "strides", "NaN", "no scale"],
)
def test_a_wrong_quantised_gemm_gets_no_number(wrong: Callable[..., tuple[Tensor, ...]]) -> None:
    (problem,) = found(op=QUANTISED)
    want = problem.reference(*problem.make(0))
    assert problem.differs is not None
    assert problem.differs(want, want) == ""
    # A different rounding may give a K-block the next scale.
    assert problem.differs([(want[0].float() / 2).to(want[0].dtype), want[1] * 2], want) == ""
    assert problem.differs(wrong(*want), want) != ""


def test_a_missing_k_block_is_found() -> None:
    (problem,) = found(layer="wq_b", op="fp8_linear")
    x, weight, scale = problem.make(0)
    want = problem.reference(x, weight, scale)
    short = x.clone()
    short[:, 128:] = 0
    assert partial(gemm.differs, tolerance=2.0**-7)([problem.reference(short, weight, scale)], [want])
