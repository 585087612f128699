"""IR of `indexer_q_rope_quant` on a GPU against the reference on the same GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.layout import INDEXER_FORMATS, INDEXER_HEAD_DIM, ROPE_DIM
from dsv4_compile.ops.common.define import REFERENCES
from tests.gpu.lowered import as_ir, assert_equals_reference, launches

OP, HEADS = "indexer_q_rope_quant", 64
SIZES = (7, 64, 513, 4096)


def inputs(tokens: int) -> list[Tensor]:
    """Columns of a projection; rows of zeros and of small and large values; positions outside the table."""
    generator = torch.Generator("cuda").manual_seed(tokens)
    projection = torch.randn(tokens, HEADS * (INDEXER_HEAD_DIM + 1), device="cuda", generator=generator).bfloat16()
    projection[1::7], projection[2::7] = 0, projection[2::7] * 1e-20
    q, weights = projection[:, :-HEADS].unflatten(1, (HEADS, INDEXER_HEAD_DIM)), projection[:, -HEADS:]
    positions = torch.randint(0, 1000, (tokens,), device="cuda", generator=generator)
    positions[::5], positions[3::9] = -1, 10**9
    angles = torch.rand(1000, ROPE_DIM // 2, device="cuda", generator=generator) * 6.28
    return [q, positions, torch.cat((angles.cos(), angles.sin()), 1), weights]


def to(fmt: str) -> Callable[..., Any]:
    return lambda op, q, positions, table, weights: op(q, positions, table, weights, fmt)


@pytest.mark.parametrize("fmt", INDEXER_FORMATS)
@pytest.mark.parametrize("sizes", [SIZES, (1,), (0,)])
def test_queries_and_weights_are_those_of_the_reference(fmt: str, sizes: tuple[int, ...]) -> None:
    assert_equals_reference(OP, to(fmt), inputs, sizes, dynamic=(0, 1, 3))


@pytest.mark.parametrize("fmt", INDEXER_FORMATS)
@torch.inference_mode()
def test_a_hadamard_transform_rounds_to_a_neighbour_at_most(fmt: str) -> None:
    args = inputs(300)

    def call(op: Any, q: Tensor, positions: Tensor, table: Tensor, weights: Tensor) -> Any:
        return op(q, positions, table, weights, fmt, True)

    got, want = as_ir(OP, call)(*args), call(REFERENCES[OP], *args)
    for index in (0, 2):
        assert (got[index].view(torch.uint8) != want[index].view(torch.uint8)).float().mean() < 1e-3


@pytest.mark.parametrize("tokens", [1, 250])
@pytest.mark.parametrize(("fmt", "expected"), [("indexer_fp8", 1), ("indexer_mxfp4", 2), ("plain", 2)])
def test_launches(tokens: int, fmt: str, expected: int) -> None:
    assert len(launches(OP, to(fmt), inputs(tokens))) == expected
