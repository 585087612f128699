"""The slot map of the indexer's choice on a GPU against the reference on the same GPU, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.kernels.metadata import global_topk as kernel
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.testing import hostile_indices

REFERENCE = REFERENCES["global_topk"]


def arguments(tokens: int, width: int, columns: int = 64, block: int = 64, seed: int = 0) -> tuple[Any, ...]:
    """A tenth of all indices, requests and blocks are out of range."""
    generator = torch.Generator().manual_seed(seed)

    def hostile(bound: int, *shape: int) -> Tensor:
        return hostile_indices(shape, bound, fraction=0.1, device="cuda", generator=generator)

    valid = (torch.rand(tokens, generator=generator) < 0.8).cuda()
    return hostile(columns * block, tokens, width), hostile(9, tokens), hostile(10_000, 9, columns), valid, block


@pytest.mark.parametrize("width", [512, 1024, 100, 2500])
@pytest.mark.parametrize("tokens", [1, 32, 513, 4099])
def test_slots_and_counts_are_equal(tokens: int, width: int) -> None:
    args = arguments(tokens, width)
    assert all(torch.equal(a, b) for a, b in zip(kernel.global_topk(*args), REFERENCE(*args), strict=True))


def test_seventy_thousand_tokens_and_wide_integers() -> None:
    args = [a.long() if isinstance(a, Tensor) and a.dtype is torch.int32 else a for a in arguments(70_000, 16)]
    assert all(torch.equal(a, b) for a, b in zip(kernel.global_topk(*args), REFERENCE(*args), strict=True))


def test_a_captured_launch_follows_its_inputs() -> None:
    args = arguments(40, 512)
    kernel.global_topk(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel.global_topk(*args)
    for seed in (5, 6):
        for mine, new in zip(args[:4], arguments(40, 512, seed=seed)[:4], strict=True):
            mine.copy_(new)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(out, REFERENCE(*args), strict=True))
