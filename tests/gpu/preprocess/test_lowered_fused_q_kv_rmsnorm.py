"""IR of `fused_q_kv_rmsnorm` on a GPU against the reference on the same GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.lowered import as_ir, assert_equals_reference, launches

OP = "fused_q_kv_rmsnorm"
SIZES = (7, 64, 513, 4096, 70_000)


def inputs(tokens: int, latent: int = 1536, dim: int = 512, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """One projection, rows of zeros and of large and small values among it, and the weights of both halves."""
    generator = torch.Generator("cuda").manual_seed(tokens)
    projection = torch.randn(tokens, latent + dim, device="cuda", generator=generator).to(dtype) * 3
    projection[1::7], projection[2::7], projection[3::7] = 0, projection[2::7] * 1e-20, projection[3::7] * 1e15
    weights = [torch.randn(n, device="cuda", generator=generator) for n in (latent, dim)]
    return [projection, weights[0].bfloat16(), weights[1]]


def call(op: Any, projection: Tensor, q_weight: Tensor, kv_weight: Tensor) -> tuple[Tensor, Tensor]:
    qr, kv = projection.split((q_weight.shape[0], kv_weight.shape[0]), 1)
    return op(qr, kv, q_weight, kv_weight, 1e-6)


@pytest.mark.parametrize("sizes", [SIZES, (1,), (0,)])
def test_rows_are_neighbours_of_the_reference_at_most(sizes: tuple[int, ...]) -> None:
    assert_equals_reference(OP, call, inputs, sizes, dynamic=(0,))


def cast(op: Any, projection: Tensor, q_weight: Tensor, kv_weight: Tensor) -> tuple[Tensor, ...]:
    """Halves that are rounded in the kernels of their norms, and results that are scaled there."""
    halves = (projection.float() * 1.3).split((q_weight.shape[0], kv_weight.shape[0]), 1)
    qr, kv = (half.to(projection.dtype) for half in halves)
    return tuple(normed * 1.1 for normed in op(qr, kv, q_weight, kv_weight, 1e-6))


def test_what_is_computed_in_the_same_kernel_is_read_rounded() -> None:
    args = inputs(4096)
    pairs = zip(as_ir(OP, cast)(*args), cast(torch.ops.dsv4.fused_q_kv_rmsnorm, *args), strict=True)
    # A sum in a different order moves about one element in 2^15 to its neighbour; unrounded inputs would move a
    # quarter.
    assert all((got != want).float().mean() < 1e-3 for got, want in pairs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_and_lengths(dtype: torch.dtype) -> None:
    def small(tokens: int) -> list[Tensor]:
        tensors = inputs(tokens, 97, 64, dtype)
        # float16 has no room for the large values.
        return [tensors[0].nan_to_num(0, 1, -1), *tensors[1:]]

    assert_equals_reference(OP, call, small, (9, 300), dynamic=(0,))


@pytest.mark.parametrize("tokens", [1, 256])
def test_one_launch_for_each_half_and_no_copy(tokens: int) -> None:
    assert len(launches(OP, call, inputs(tokens))) == 2
