"""The kernel behind `combine_topk_swa` and its list form on a GPU, equal to the reference on the same GPU."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.ops.common.kernels import launcher
from dsv4_compile.testing import hostile_indices
from dsv4_compile.testing.batch import Batch, random_batch
from tests.ops.metadata.test_combine_topk_swa import arguments

OPS = ("combine_topk_swa", "combine_topk_swa_ragged")


def on_gpu(args: list[Any]) -> list[Any]:
    return [x.cuda() if isinstance(x, Tensor) else x for x in args]


def check(args: list[Any]) -> None:
    for op in OPS:
        for got, want in zip(launcher(op)(*args), REFERENCES[op](*args), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize(("window", "ratio", "topk"), [(128, 4, 512), (128, 128, 300), (128, 1, 0), (7, 3, 5)])
def test_random_chunks(window: int, ratio: int, topk: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(10):
        batch = random_batch(rng, max_seq_len=3000)
        n = 3000 // ratio if topk else 0
        indices = hostile_indices((batch.num_tokens, topk + 2), n, fraction=0.2)
        args = arguments(batch, indices, window, ratio, topk, n + 2000, n, first=rng.choice((0, 50)))
        check(on_gpu(args))
        args[3] = hostile_indices(tuple(args[3].shape), 2500)
        check(on_gpu([x.long() if isinstance(x, Tensor) else x for x in args]))


def test_many_requests_and_many_tokens() -> None:
    many = Batch((3,) * 1000, tuple(range(3, 1003)), padding=5)
    check(on_gpu(arguments(many, hostile_indices((3005, 16), 200), 8, 4, 16, 300, 200)))
    long = Batch((50_000, 20_000), (50_000, 100_000))
    check(on_gpu(arguments(long, hostile_indices((70_000, 12), 9000), 128, 4, 12, 90_000, 9000)))


def test_a_captured_launch_follows_its_inputs() -> None:
    def batch(seed: int) -> list[Any]:
        lens = tuple(400 + 7 * seed + i for i in range(4))
        return on_gpu(arguments(Batch((100, 50, 49, 1), lens), hostile_indices((200, 64), 99), 128, 4, 64, 600, 99))

    args = batch(0)
    for op in OPS:
        launcher(op)(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [launcher(op)(*args) for op in OPS]
    for seed in (1, 2):
        for mine, new in zip(args[:4], batch(seed)[:4], strict=True):
            mine.copy_(new)
        graph.replay()
        for op, got in zip(OPS, captured, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(got, REFERENCES[op](*args), strict=True))
