"""Kernels of `engram_rows` on a GPU against the reference there, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.ops.common.kernels import launcher
from dsv4_compile.testing import poisoned_empty, samples  # noqa: F401  (importing the package registers the ops)
from tests.kernels.engram.test_engram_rows import step

ROWS = launcher("engram_rows")


def check(args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """Compare rows and history with the reference's, and return them."""
    ids, positions, requests, history, *rest = args
    mine, theirs = history.clone(), history.clone()
    want = REFERENCES["engram_rows"](ids, positions, requests, theirs, *rest)
    with poisoned_empty():
        out = ROWS(ids, positions, requests, mine, *rest)
    assert torch.equal(out, want) and torch.equal(mine, theirs)
    return out, mine


def on_gpu(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x.cuda() if isinstance(x, Tensor) else x for x in args)


@pytest.mark.parametrize(("columns", "hashes", "orders"), [(3, 8, 4), (8, 1, 2), (5, 3, 6), (64, 16, 3)])
def test_runs_of_several_requests(columns: int, hashes: int, orders: int) -> None:
    runs = [(2, 0, 4000), (0, 17, 1), (4, 100, 6), (4, 110, 2), (-1, -1, 3), (1, 0, 2), (7, 5, 2), (3, 2, 1)]
    check(on_gpu(step(*runs, columns=columns, hashes=hashes, orders=orders)))


def test_decoding_continues_a_prompt() -> None:
    ids, positions, requests, history, *rest = on_gpu(step((1, 0, 700)))
    out, _ = check((ids, positions, requests, history, *rest))
    for start, end in ((0, 650), *((i, i + 1) for i in range(650, 700))):
        chunk = slice(start, end)
        rows, history = check((ids[chunk], positions[chunk], requests[chunk], history, *rest))
        assert torch.equal(rows, out[chunk])


def test_a_captured_launch_follows_its_inputs() -> None:
    args = on_gpu(step((1, 4, 6), (0, 9, 6), (3, 0, 6)))
    check(args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ROWS(*args)
    for old, new in zip(args[:4], on_gpu(step((2, 5, 6), (3, 0, 6), (0, 19, 6)))[:4], strict=True):
        old.copy_(new)
    want, history = check(args)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, want) and torch.equal(args[3], history)
