"""What is done again from a plan gives what the launcher gives, out of other memory than that it was noted with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.kernels.host.launch_cache import Planned
from dsv4_compile.ops.common.kernels import KERNELS, launcher, refusal
from dsv4_compile.testing.samples import op_samples


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for one in value:
            yield from tensors(one)


def bits(value: Any) -> list[bytes]:
    """Every element, padding of strides left out."""
    return [x.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for x in tensors(value)]


@pytest.mark.parametrize("op", sorted(KERNELS))
def test_a_call_like_one_before_gives_the_same_bits(op: str) -> None:
    refuses, planned = refusal(op), Planned(launcher(op))
    for index in range(len(op_samples(op))):
        again, noted, fresh, right = (op_samples(op, "cuda")[index] for _ in range(4))
        if refuses is not None and refuses(*fresh):
            continue
        planned(*again)
        planned(*noted)
        assert planned.find(fresh) is not None, planned.refused
        for x in tensors((again, noted)):
            x.zero_()
        results, expected = planned(*fresh), launcher(op)(*right)
        assert bits((results, fresh)) == bits((expected, right))


def test_a_plan_is_captured_like_a_launcher() -> None:
    """Counters of programs that wait for each other are a captured launch's own."""
    op = "compress_norm_rope_insert"
    planned, (args, right) = Planned(launcher(op)), (op_samples(op, "cuda")[0] for _ in range(2))
    for _ in range(2):
        planned(*args)
    assert planned.find(args) is not None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        planned(*args)
        planned(*args)
    for x, y in zip(tensors(args), tensors(op_samples(op, "cuda")[0]), strict=True):
        x.copy_(y)
    graph.replay()
    for _ in range(2):
        launcher(op)(*right)
    assert bits(args) == bits(right)
