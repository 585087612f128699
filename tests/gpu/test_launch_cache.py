"""A cached call gives the bits of its launcher, for arguments at other addresses than the recorded call's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.kernels.host.launch_cache import LaunchCache, key_of
from dsv4_compile.ops.common.kernels import KERNELS, launcher, refusal
from dsv4_compile.testing.samples import op_samples

TORCH_GEMM = {("fp8_linear", 2)}
"""Samples that are not cached, because their launcher calls a GEMM of torch."""


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for one in value:
            yield from tensors(one)


def bits(value: Any) -> list[bytes]:
    """Return the bytes of every element; gaps between strided elements are left out."""
    return [x.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for x in tensors(value)]


@pytest.mark.parametrize("op", sorted(KERNELS))
def test_a_cached_call_gives_the_same_bits(op: str) -> None:
    refuses, cache = refusal(op), LaunchCache(launcher(op))
    for index in range(len(op_samples(op))):
        again, recorded, fresh, right = (op_samples(op, "cuda")[index] for _ in range(4))
        if refuses is not None and refuses(*fresh):
            continue
        cache(*again)
        cache(*recorded)
        if (op, index) in TORCH_GEMM:
            assert "it calls aten." in cache.unsupported[key_of(fresh)]
            continue
        assert cache.look_up(fresh).entry is not None, cache.unsupported
        for x in tensors((again, recorded)):
            x.zero_()
        results, expected = cache(*fresh), launcher(op)(*right)
        assert bits((results, fresh)) == bits((expected, right))


def test_a_cached_call_is_captured_like_a_launcher() -> None:
    """A captured launch has separate counters."""
    op = "compress_norm_rope_insert"
    cache, (args, right) = LaunchCache(launcher(op)), (op_samples(op, "cuda")[0] for _ in range(2))
    for _ in range(2):
        cache(*args)
    assert cache.look_up(args).entry is not None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cache(*args)
        cache(*args)
    for x, y in zip(tensors(args), tensors(op_samples(op, "cuda")[0]), strict=True):
        x.copy_(y)
    graph.replay()
    for _ in range(2):
        launcher(op)(*right)
    assert bits(args) == bits(right)
