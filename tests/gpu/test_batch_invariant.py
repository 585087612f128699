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
from tests.gpu.attention.sparse_mla import BF16, on_gpu, rope
from tests.gpu.linear import products
from tests.kernels.hyper_connections import calls as mhc
from tests.ops.attention.test_sparse_mla_decode import sample

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


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dim", [4096, 7168])
@pytest.mark.parametrize("op", mhc.OPS)
def test_hyper_connections(op: str, dim: int, level: str) -> None:
    most = mhc.arguments(op, MOST, dim, device="cuda")
    places = row_places(op, OPS[op]._schema.arguments)
    check_rows(
        invariant_launcher(op, level),
        lambda some: tuple(x[some] if i in places and x is not None else x for i, x in enumerate(most)),
    )


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("heads", "extra"), [(64, 0), (64, 512), (128, 1024), (100, 512), (64, 2048), (32, 512)])
@pytest.mark.parametrize("quantised", [False, True])
def test_attention(heads: int, extra: int, quantised: bool, level: str) -> None:
    op = "sparse_mla_decode_quant" if quantised else "sparse_mla_decode"
    declared = [argument.name for argument in OPS[op]._schema.arguments]
    of_rows = [declared[i] for i in row_places(op, OPS[op]._schema.arguments)]
    args = on_gpu(sample(MOST, heads, window=128, extra=extra, fmt="fp8_ds_mla", **BF16))
    most = dict(zip(declared, args, strict=False)) | rope(MOST) | {"q_norm_eps": 1e-6, "inverse_rope": True}
    most |= {"n_groups": 4} if quantised else {}

    def results(some: slice) -> Any:
        rows = {name: x[some] if name in of_rows and x is not None else x for name, x in most.items()}
        return invariant_launcher(op, level)(**rows)

    check_rows(lambda *rows: rows, results)
