"""Attention over lists of slots on a GPU: bit for bit the same slots as padded rows, at a model's sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.ops.common.kernels import launcher
from dsv4_compile.testing import assert_close, random_cache
from tests.gpu.far import behind_2_31_bytes

WINDOW, ENTRIES = 128, 512
RAGGED, DENSE = launcher("sparse_mla_decode_ragged"), launcher("sparse_mla_decode")


def rows(tokens: int, width: int, capacity: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return random slots int32 `[T, width]` and lengths int32 `[T]`, the first one 0, the last one full."""
    slots = torch.randint(capacity, (tokens, width), generator=generator, dtype=torch.int32)
    lens = torch.randint(width + 1, (tokens,), generator=generator, dtype=torch.int32)
    lens[0], lens[-1] = 0, width
    return slots.cuda(), lens.cuda()


def case(fmt: str, tokens: int, heads: int = 64, seed: int = 0) -> tuple[list[Any], list[Any]]:
    """Return arguments of the op on lists and on rows."""
    generator = torch.Generator().manual_seed(seed)
    window = random_cache(fmt, 40, 64, live=40 * 64, device="cuda", generator=generator)
    extra = random_cache(fmt, 60, 64, live=60 * 64, device="cuda", generator=generator)
    q = torch.randn(tokens, heads, 512, generator=generator).bfloat16().cuda()
    sink = torch.randn(heads, generator=generator).cuda()
    first, second = rows(tokens, WINDOW, 40 * 64, generator), rows(tokens, ENTRIES, 60 * 64, generator)
    lists = [REFERENCES["ragged_from_dense"](*pair) for pair in (first, second)]
    attend = (64, fmt, 512**-0.5, sink, extra.cache)
    ragged = [q, window.cache, *lists[0], *attend, *lists[1], 64, window.kv_scale, WINDOW, ENTRIES]
    return ragged, [q, window.cache, *first, *attend, *second, 64, window.kv_scale]


@pytest.mark.parametrize("fmt", ["fp8_ds_mla", "fp8", "plain"])
@pytest.mark.parametrize("tokens", [1, 2, 33, 128])
def test_lists_give_the_bits_of_rows_and_the_values_of_the_reference(fmt: str, tokens: int) -> None:
    ragged, padded = case(fmt, tokens)
    out, lse = RAGGED(*ragged)
    want = DENSE(*padded)
    assert torch.equal(out, want[0])
    assert torch.equal(lse, want[1])
    exact = REFERENCES["sparse_mla_decode_ragged"](*ragged)
    assert_close(out, exact[0], "attention_few_keys")
    assert_close(lse, exact[1], "lse")


@pytest.mark.parametrize("fmt", ["fp8_ds_mla", "fp8", "plain"])
def test_70_000_tokens_over_a_cache_of_more_than_2_31_bytes(fmt: str) -> None:
    _, padded = case(fmt, 64, heads=8)
    row = torch.arange(70_000, device="cuda") % 64
    padded[0] = padded[0][row]
    for slots, width in ((2, 20), (9, 5)):
        padded[slots], padded[slots + 1] = padded[slots][row, :width], padded[slots + 1][row].clamp(max=width)
    padded[1], added = behind_2_31_bytes(padded[1])
    padded[2] = padded[2] + 64 * added
    lists = [REFERENCES["ragged_from_dense"](*padded[i : i + 2]) for i in (2, 9)]
    ragged = [*padded[:2], *lists[0], *padded[4:9], *lists[1], *padded[11:], 20, 5]
    got, want = RAGGED(*ragged), DENSE(*padded)
    assert all(map(torch.equal, got, want))
    assert all(torch.equal(x, x[:64][row]) for x in got)


def test_a_captured_launch_follows_its_lists() -> None:
    ragged, _ = case("fp8_ds_mla", 32)
    RAGGED(*ragged)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = RAGGED(*ragged)
    for seed in (3, 4):
        for mine, new in zip(ragged, case("fp8_ds_mla", 32, seed=seed)[0], strict=True):
            if isinstance(mine, Tensor):
                mine.copy_(new)
        graph.replay()
        want = RAGGED(*ragged)
        assert torch.equal(out, want[0])
        assert torch.equal(lse, want[1])
