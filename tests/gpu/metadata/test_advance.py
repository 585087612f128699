"""The kernel that moves a decode batch one step on, on a GPU, against the reference on the same GPU, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.ops.common.kernels import launcher
from dsv4_compile.testing import samples  # noqa: F401  (importing the package registers the ops)

REFERENCE = REFERENCES["advance"]


def arguments(requests: int, query_len: int, seed: int = 0) -> list[Any]:
    generator = torch.Generator("cuda").manual_seed(seed)

    def ints(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, device="cuda").to(dtype)

    return [
        ints(-1, query_len + 2, requests),
        ints(1, 99, requests, query_len, dtype=torch.int64),
        ints(1, 99, requests, query_len - 1, dtype=torch.int64) if query_len > 1 else None,
        ints(40, 90, requests),
        query_len,
        torch.arange(requests + 1, device="cuda", dtype=torch.int32) * query_len,
        torch.where(ints(0, 4, requests) == 0, 0, ints(1, 50, requests)).int(),
        torch.full((requests * query_len + 9,), 12345, device="cuda"),
        torch.zeros(requests, dtype=torch.int32, device="cuda"),
    ]


def copied(args: list[Any]) -> list[Any]:
    return [x.clone() if isinstance(x, Tensor) else x for x in args]


@pytest.mark.parametrize("query_len", [1, 2, 4, 7])
@pytest.mark.parametrize("requests", [0, 1, 2, 33, 512, 5000])
def test_forty_steps(requests: int, query_len: int) -> None:
    ours = arguments(requests, query_len)
    theirs = copied(ours)
    for step in range(40):
        launcher("advance")(*ours)
        REFERENCE(*theirs)
        assert all(map(torch.equal, ours[5:], theirs[5:])), step


def test_a_captured_step_replays_a_thousand_times() -> None:
    args = arguments(128, 2)
    args[3].fill_(900)
    launcher("advance")(*copied(args))
    torch.cuda.synchronize()
    theirs = copied(args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launcher("advance")(*args)
    for step in range(1000):
        args[0].copy_((args[0] * 7 + step) % 4)
        theirs[0].copy_(args[0])
        graph.replay()
        REFERENCE(*theirs)
    assert all(map(torch.equal, args[5:], theirs[5:]))
    assert int(args[8].max()) > 0
