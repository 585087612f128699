"""Kernels of `dsv4.batch_invariant` at real sizes: a token's bits are those that it has in a call of any other size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.bench import experts
from dsv4_compile.kernels.linear.grouped_linear import invariant_mm
from dsv4_compile.ops.common.define import OPS
from dsv4_compile.ops.common.invariance import STEP, TOKENS, row_places
from dsv4_compile.ops.common.kernels import invariant_launcher
from tests.gpu.linear import products

MOST = 672
SIZES = (1, 2, 7, 8, 9, 16, 17, 31, 64, 65, 128, 171, 342, 513)
LEVELS = [STEP, TOKENS]


def tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def check_rows(run: Callable[..., Any], part: Callable[[slice], tuple[Any, ...]]) -> None:
    """Assert that all rows of calls of SIZES equal those of one call of MOST rows."""
    want = tensors(run(*part(slice(0, MOST))))
    for number, size in enumerate(SIZES):
        begin = 37 * number % (MOST - size)
        rows = slice(begin, begin + size)
        for got, wanted in zip(tensors(run(*part(rows))), want, strict=True):
            differing = (got.float() != wanted[rows].float()).flatten(1).any(1).nonzero().flatten().tolist()
            assert not differing, f"rows {differing[:8]} of {size} from {begin} on differ from those of {MOST}"


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", products.LAYERS)
def test_linear_layers(name: str, level: str) -> None:
    layer = products.LAYERS[name]
    most = products.arguments(name, MOST)
    places = row_places(layer.op, OPS[layer.op]._schema.arguments)

    def part(rows: slice) -> tuple[Any, ...]:
        """Return the arguments of some rows, with the strides of a call of so many."""
        values = list(most)
        fresh = products.arguments(name, rows.stop - rows.start)
        for place in places:
            values[place] = fresh[place].copy_(most[place][rows])
        return tuple(values)

    check_rows(invariant_launcher(layer.op, level), part)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("rows", "dtype"), [(129280, torch.bfloat16), (1000, torch.bfloat16), (64, torch.float32)])
def test_matrix_products_of_a_graph(rows: int, dtype: torch.dtype, level: str) -> None:
    x = torch.randn(MOST, 4096, dtype=dtype, device="cuda")
    weight = torch.randn(rows, 4096, dtype=dtype, device="cuda").t()
    check_rows(lambda x: invariant_mm(x, weight, level), lambda some: (x[some],))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", experts.FORMATS)
def test_experts(kind: str, level: str) -> None:
    shared = "bfloat16" if kind == "bfloat16" else "e4m3"
    most = experts.arguments(experts.MODELS["Flash"], kind, shared, MOST, torch.device("cuda"), 0)
    check_rows(invariant_launcher("moe_experts", level), lambda some: (*(x[some] for x in most[:3]), *most[3:]))
