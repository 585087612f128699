"""The kernels that make one list of rows of indices on a GPU against the references on the same GPU, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.ops.common.kernels import launcher
from dsv4_compile.testing import samples  # noqa: F401  (importing the package registers the ops)


def arguments(op: str, tokens: int, width: int, seed: int = 0) -> tuple[Any, ...]:
    generator = torch.Generator("cuda").manual_seed(seed)

    def ints(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, device="cuda").int()

    rows = ints(-400, 4000, tokens, width)
    if op == "ragged_from_dense":
        return rows, ints(-2, width + 3, tokens)
    valid = ints(0, 5, tokens) > 0
    return rows, ints(-1, 9, tokens), ints(-2, 10_000, 8, 60), valid, 64


@pytest.mark.parametrize("op", ["ragged_from_dense", "global_topk_ragged"])
@pytest.mark.parametrize(("tokens", "width"), [(1, 128), (128, 128), (128, 512), (512, 1000), (5000, 128)])
def test_lists_are_equal(op: str, tokens: int, width: int) -> None:
    args = arguments(op, tokens, width)
    ours, theirs = launcher(op)(*args), REFERENCES[op](*args)
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("op", ["ragged_from_dense", "global_topk_ragged"])
def test_a_captured_launch_follows_its_inputs(op: str) -> None:
    args = arguments(op, 128, 512)
    launcher(op)(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours = launcher(op)(*args)
    for seed in range(1, 4):
        for mine, new in zip(args, arguments(op, 128, 512, seed), strict=True):
            if isinstance(mine, torch.Tensor):
                mine.copy_(new)
        graph.replay()
        assert all(map(torch.equal, ours, REFERENCES[op](*args)))
