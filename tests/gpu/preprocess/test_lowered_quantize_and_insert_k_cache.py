"""IR of `quantize_and_insert_k_cache` on a GPU against the reference on the same GPU: every byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.layout import HEAD_DIM, WINDOW_BLOCK, allocate_cache
from tests.gpu.lowered import assert_equals_reference, launches

OP, PAGES = "quantize_and_insert_k_cache", 128
CAPACITY = PAGES * WINDOW_BLOCK


def inputs(tokens: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Rows of zeros and of small and large values; slots of padding with rows of NaN."""
    generator = torch.Generator("cuda").manual_seed(tokens)
    k = torch.randn(tokens, HEAD_DIM + 64, device="cuda", generator=generator).to(dtype)[:, 32:-32] * 3
    k[1::7], k[2::7], k[3::7] = 0, k[2::7] * 1e-20, k[3::7] * 1e20
    slots = torch.randperm(CAPACITY, device="cuda", generator=generator)[:tokens]
    slots[::5], slots[3::7], slots[4::9] = -1, CAPACITY, 2**40
    k[(slots < 0) | (slots >= CAPACITY)] = torch.nan
    return [k, allocate_cache("fp8_ds_mla", PAGES, WINDOW_BLOCK, device="cuda"), slots]


def call(op: Any, k: Tensor, cache: Tensor, slots: Tensor) -> None:
    op(k, cache, slots, WINDOW_BLOCK)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes", [(7, 64, 513, 4096), (1,), (0,)])
def test_the_cache_is_that_of_the_reference(dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    assert_equals_reference(OP, call, lambda t: inputs(t, dtype), sizes, dynamic=(0, 2), written=(1,))


@pytest.mark.parametrize("tokens", [1, 250])
def test_one_launch_and_no_copy(tokens: int) -> None:
    assert len(launches(OP, call, inputs(tokens))) == 1
