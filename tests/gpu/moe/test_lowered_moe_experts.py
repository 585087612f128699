"""IR of `moe_experts` on a GPU against the reference there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsv4_compile.testing import hostile_indices
from tests.gpu.lowered import as_ir
from tests.kernels.moe.problems import assert_accurate, experts

OP = "moe_experts"


def call(op: Any, *arguments: Any) -> Any:
    return op(*arguments)


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@torch.inference_mode()
def test_results_are_those_of_the_op(kind: str) -> None:
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    sizes: dict[str, Any] = {"kind": kind, "shared": kind, "dtype": dtype, "device": "cuda", "count": 8}
    compiled, weights = as_ir(OP, call), experts(1, **sizes)
    for tokens in (7, 40, 1):
        sample = experts(tokens, **sizes)
        ids = hostile_indices((tokens, 2), 8, device="cuda")
        args = weights._replace(x=sample.x, weights=sample.weights, ids=ids)
        if tokens > 1:
            for tensor in args[:3]:
                torch._dynamo.mark_dynamic(tensor, 0)
        assert_accurate(compiled(*args), args)
