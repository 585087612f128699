"""`fp8_grouped_einsum` on a GPU against the reference there, behind the inverse rotation of the models."""

from __future__ import annotations

import pytest
import torch

from dsv4_compile.kernels.linear.fp8_grouped_einsum import fp8_grouped_einsum
from dsv4_compile.ops.common.define import REFERENCES
from tests.gpu.linear import products

OP = "fp8_grouped_einsum"


@pytest.mark.parametrize("tokens", products.TOKENS)
@pytest.mark.parametrize("name", products.names(OP))
def test_layers_of_the_models(name: str, tokens: int) -> None:
    products.check(OP, fp8_grouped_einsum, products.arguments(name, tokens))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("tokens", "groups", "heads", "rows"), [(1, 8, 8, 1024), (7, 3, 5, 40), (300, 2, 10, 130)])
def test_it_reads_what_the_inverse_rotation_wrote(
    tokens: int, groups: int, heads: int, rows: int, packed: bool
) -> None:
    o, table = torch.randn(tokens, groups * heads, 512, device="cuda").bfloat16(), torch.randn(9, 64, device="cuda")
    positions = torch.arange(tokens, device="cuda") % 9
    a = REFERENCES["inv_rope_fp8_quant"](o, positions, table, groups, heads, packed)
    _, _, b, scale = products.gemm.Layer(OP, "", rows, heads * 512, groups).arguments(1, products.CUDA, 0)
    products.check(OP, fp8_grouped_einsum, (*a, b, scale))


@pytest.mark.parametrize("tokens", [1, 32, 64, 100])
def test_repeats_capture_and_streams(tokens: int) -> None:
    args = products.arguments(products.names(OP)[0], tokens)
    products.repeats_are_equal(fp8_grouped_einsum, args)
    products.streams_do_not_share_counters(fp8_grouped_einsum, args)
    products.capture_follows_its_inputs(OP, fp8_grouped_einsum, args)
