"""`grouped_linear` on a GPU against the reference there."""

from __future__ import annotations

import pytest
import torch

from dsv4_compile.kernels.linear.grouped_linear import grouped_linear
from tests.gpu.linear import products

OP = "grouped_linear"


@pytest.mark.parametrize("tokens", products.TOKENS)
@pytest.mark.parametrize("name", products.names(OP))
def test_layers_of_the_models(name: str, tokens: int) -> None:
    products.check(OP, grouped_linear, products.arguments(name, tokens))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("tokens", "groups", "rows", "size"), [(1, 2, 64, 256), (5, 3, 40, 33), (300, 2, 130, 200)])
def test_odd_sizes_and_strides(tokens: int, groups: int, rows: int, size: int, dtype: torch.dtype) -> None:
    flat, weight, _ = products.gemm.Layer(OP, "", rows, size, groups).arguments(tokens, products.CUDA, 0)
    x = flat.to(dtype).view(tokens, groups, size)
    spread = x.transpose(0, 1).contiguous().transpose(0, 1)
    for one in (x, x.flatten(1), spread, torch.stack((x, x), -1)[..., 0]):
        products.check(OP, grouped_linear, (one, weight.to(dtype), groups))


@pytest.mark.parametrize("float32", [False, True])
@pytest.mark.parametrize("tokens", [1, 8, 33, 64, 65, 300])
def test_one_matrix_whose_result_is_rounded_or_not(tokens: int, float32: bool) -> None:
    x, weight, _ = products.gemm.Layer(OP, "", 1536, 4096, 1).arguments(tokens, products.CUDA, 0)
    products.check(OP, grouped_linear, (x, weight, 1, float32))


@pytest.mark.parametrize("tokens", [1, 32, 64, 100])
def test_repeats_capture_and_streams(tokens: int) -> None:
    args = products.arguments(products.names(OP)[0], tokens)
    products.repeats_are_equal(grouped_linear, args)
    products.streams_do_not_share_counters(grouped_linear, args)
    products.capture_follows_its_inputs(OP, grouped_linear, args)
