"""The kernel that copies lists to graph buffers on a GPU against the reference on the same GPU, to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4_compile.kernels.metadata import copy_ragged_to_graph_buffers as kernel
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.testing import samples  # noqa: F401  (importing the package registers the ops)

REFERENCE = REFERENCES["copy_ragged_to_graph_buffers"]


def arguments(rows: int, width: int, room: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    lens = torch.randint(0, width + 1, (rows,), generator=generator, device="cuda")
    ends = torch.cat((lens.new_zeros(1), lens.cumsum(0))).int()
    lists = torch.randint(0, 2**30, (rows * width,), generator=generator, device="cuda").int()
    stale = (torch.full((size,), 777, dtype=torch.int32, device="cuda") for size in (room, rows + 5))
    return [lists, ends, *stale]


@pytest.mark.parametrize("room", [1, 100, 70_000])
@pytest.mark.parametrize(("rows", "width"), [(0, 128), (1, 128), (128, 128), (512, 1000)])
def test_lists_are_equal(rows: int, width: int, room: int) -> None:
    ours = arguments(rows, width, room)
    theirs = [x.clone() for x in ours]
    kernel.copy_ragged_to_graph_buffers(*ours)
    REFERENCE(*theirs)
    assert all(map(torch.equal, ours, theirs))


def test_a_captured_copy_follows_the_lists() -> None:
    args = arguments(128, 128, 128 * 128)
    kernel.copy_ragged_to_graph_buffers(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.copy_ragged_to_graph_buffers(*args)
    for seed in range(1, 5):
        for mine, new in zip(args[:2], arguments(128, 128, 1, seed)[:2], strict=True):
            mine.copy_(new)
        theirs = [x.clone() for x in args]
        graph.replay()
        REFERENCE(*theirs)
        assert all(map(torch.equal, args, theirs))
