"""IR of `save_partial_states` on a GPU against the reference on the same GPU: every byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.layout import overlap_factor, state_block_size, state_width
from tests.gpu.lowered import assert_equals_reference, launches

OP = "save_partial_states"


def inputs(tokens: int, ratio: int = 4, head_dim: int = 512, pages: int = 2048) -> list[Tensor]:
    """Columns of a projection; slots of padding with rows of NaN; positions that are padding."""
    generator = torch.Generator("cuda").manual_seed(tokens)
    width, block = state_width(ratio, head_dim), state_block_size(ratio)
    kv_score = torch.randn(tokens, width + 64, device="cuda", generator=generator)[:, 32:-32]
    slots = torch.randperm(pages * block, device="cuda", generator=generator)[:tokens]
    slots[::5], slots[3::7], slots[4::9] = -1, pages * block, 2**40
    kv_score[(slots < 0) | (slots >= pages * block)] = torch.nan
    positions = torch.randint(-4, 100_000, (tokens,), device="cuda", generator=generator)
    cache = torch.randn(pages, block, width, device="cuda", generator=generator)
    ape = torch.randn(ratio, overlap_factor(ratio) * head_dim, device="cuda", generator=generator)
    return [kv_score, ape, cache, slots, positions]


def call(op: Any, kv_score: Tensor, ape: Tensor, cache: Tensor, slots: Tensor, positions: Tensor) -> None:
    op(kv_score, ape, cache, slots, positions, cache.shape[1])


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("sizes", [(7, 64, 513, 8192), (1,), (0,)])
def test_the_cache_is_that_of_the_reference(ratio: int, sizes: tuple[int, ...]) -> None:
    assert_equals_reference(OP, call, lambda t: inputs(t, ratio), sizes, dynamic=(0, 3, 4), written=(2,))


@pytest.mark.parametrize("tokens", [1, 250])
def test_one_launch_and_no_copy(tokens: int) -> None:
    assert len(launches(OP, call, inputs(tokens))) == 1
