"""IR of `fp8_linear` on a GPU: what quantises the input, alone and behind a norm, against the reference there."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.bench.gemm import TOLERANCE, differs
from tests.gpu.lowered import as_ir, launches

OP, ROWS, WIDTH = "fp8_linear", 4096, 1536
SIZES = (7, 64, 513, 4096)


def inputs(tokens: int) -> list[Tensor]:
    """Rows of zeros and of small and large values among the input."""
    generator = torch.Generator("cuda").manual_seed(tokens)
    randn = partial(torch.randn, device="cuda", generator=generator)
    x = randn(tokens, WIDTH + 64).bfloat16()
    x[1::7], x[2::7] = 0, x[2::7] * 1e-20
    scale = torch.randint(117, 121, (ROWS // 128, WIDTH // 128), device="cuda", generator=generator, dtype=torch.uint8)
    return [x, randn(ROWS, WIDTH).to(torch.float8_e4m3fn), scale]


def linear(op: Any, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return op(x[:, :WIDTH], weight, scale)


def scaled(op: Any, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return op(x[:, :WIDTH] * 1.3, weight, scale)


@pytest.mark.parametrize("call", [linear, scaled])
@torch.inference_mode()
def test_products_are_those_of_the_op(call: Any) -> None:
    compiled = as_ir(OP, call)
    for tokens in (*SIZES, 1):
        args = inputs(tokens)
        if tokens > 1:
            torch._dynamo.mark_dynamic(args[0], 0)
        got, want = compiled(*args), call(torch.ops.dsv4.fp8_linear, *args)
        assert differs([got], [want], TOLERANCE[OP]) == "", f"{tokens} tokens"


@pytest.mark.parametrize("tokens", [1, 256])
def test_the_quantisation_is_one_launch_with_what_computes_its_input(tokens: int) -> None:
    # The other launch is the product.
    assert len(launches(OP, scaled, inputs(tokens))) == 2
