"""IR of `mx_linear` on a GPU against the reference there: inputs in mxfp8 and exact, rows of zeros."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.layout import MX_TILE
from dsv4_compile.ops.common.define import REFERENCES
from tests.gpu.lowered import as_ir

OP, ROWS, WIDTH = "mx_linear", 2304, 1280
SIZES = (7, 64, 513)


def inputs(tokens: int) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(tokens)
    randn = partial(torch.randn, device="cuda", generator=generator)
    x, size = randn(tokens, WIDTH).bfloat16(), (ROWS // MX_TILE, WIDTH // MX_TILE)
    x[1::7], x[2::7] = 0, x[2::7] * 1e-20
    scale = torch.randint(117, 121, size, device="cuda", generator=generator, dtype=torch.uint8)
    return [x, randn(ROWS, WIDTH).to(torch.float8_e4m3fn), scale]


@pytest.mark.parametrize("quantize", [True, False])
@torch.inference_mode()
def test_products_are_those_of_the_op(quantize: bool) -> None:
    def linear(op: Any, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return op(x, weight, scale, quantize)

    compiled = as_ir(OP, linear)
    for tokens in (*SIZES, 1):
        args = inputs(tokens)
        if tokens > 1:
            torch._dynamo.mark_dynamic(args[0], 0)
        got, want = compiled(*args).float(), linear(REFERENCES[OP], *args).float()
        assert float((got - want).norm() / want.norm()) < 5e-3, f"{tokens} tokens"
