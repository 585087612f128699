"""The kernel of `engram_embed` on a GPU against the reference there, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.ops.common.kernels import launcher
from dsv4_compile.testing import poisoned_empty, samples  # noqa: F401  (importing the package registers the ops)

EMBED = launcher("engram_embed")


def arguments(tokens: int, entries: int, seed: int = 0, channels: int = 256, count: int = 24) -> tuple[Tensor, ...]:
    """Return rows, some outside the table, and a table of any bytes with any scales."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def randint(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, device="cuda", generator=generator)

    data = randint(0, 256, entries, channels).to(torch.uint8).view(torch.float8_e4m3fn)
    return randint(-2, entries + 2, tokens, count), data, randint(0, 256, entries, channels // 32).to(torch.uint8)


def check(args: tuple[Any, ...]) -> Tensor:
    with poisoned_empty():
        out: Tensor = EMBED(*args)
    want = REFERENCES["engram_embed"](*args)
    assert torch.equal(out.isnan(), want.isnan())
    assert torch.equal(out.nan_to_num(7.0).view(torch.int32), want.nan_to_num(7.0).view(torch.int32))
    return out


@pytest.mark.parametrize("tokens", [1, 6, 130, 4000])
@pytest.mark.parametrize(("channels", "count"), [(256, 24), (32, 1), (96, 5), (8192, 3)])
def test_any_byte_with_any_scale(tokens: int, channels: int, count: int) -> None:
    check(arguments(tokens, 1000, tokens, channels, count))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_floating_tables(dtype: torch.dtype) -> None:
    rows = arguments(300, 1000)[0]
    check((rows, torch.randn(1000, 37, device="cuda").to(dtype)))


def test_a_table_of_more_than_four_gigabytes() -> None:
    entries = 2**24 + 2**20
    table = torch.zeros(entries, 256, dtype=torch.uint8, device="cuda")
    table[-1] = 0x38
    scale = torch.full((entries, 8), 127, dtype=torch.uint8, device="cuda")
    rows = torch.tensor([[entries - 1, 0, entries]], device="cuda")
    out = EMBED(rows, table.view(torch.float8_e4m3fn), scale)
    assert out.view(3, 256).sum(1).tolist() == [256.0, 0.0, 0.0]


def test_a_captured_launch_follows_its_inputs() -> None:
    args = arguments(6, 1000)
    check(args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = EMBED(*args)
    args[0].copy_(arguments(6, 1000, seed=7)[0])
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured.nan_to_num(7.0), check(args).nan_to_num(7.0))
