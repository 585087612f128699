"""DeepSeek-V3.2's attention on a GPU at its real sizes: 128 heads, 2048 keys of 576 dims."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.ops.common.kernels import launcher
from dsv4_compile.testing import assert_close, random_cache
from tests.gpu.far import behind_2_31_bytes, moved

REFERENCE, LAUNCHER = REFERENCES["sparse_mla_decode_latent"], launcher("sparse_mla_decode_latent")


def case(tokens: int, heads: int = 128, topk: int = 2048, seed: int = 0) -> list[Any]:
    """Return arguments with an empty first row, a full last row, and a tenth of all slots invalid."""
    generator = torch.Generator().manual_seed(seed)
    cache = random_cache("plain", 64, 64, live=64 * 64, head_dim=576, device="cuda", generator=generator).cache
    slots = torch.randint(-400, 64 * 64, (tokens, topk), generator=generator, dtype=torch.int32).clamp_min(-1)
    lens = torch.randint(topk // 2, topk + 1, (tokens,), generator=generator, dtype=torch.int32)
    lens[0], lens[-1] = 0, topk
    q = torch.randn(tokens, heads, 576, generator=generator).bfloat16()
    return [q.cuda(), cache, slots.cuda(), lens.cuda(), 64, 576**-0.5, 512]


@pytest.mark.parametrize("tokens", [1, 2, 32, 129])
@pytest.mark.parametrize("heads", [16, 128])
def test_results_are_those_of_the_reference(tokens: int, heads: int) -> None:
    args = case(tokens, heads)
    out, lse = LAUNCHER(*args)
    want_out, want_lse = REFERENCE(*args)
    assert_close(out, want_out)
    assert_close(lse, want_lse, "lse")


def test_70_000_tokens_over_a_cache_of_more_than_2_31_bytes() -> None:
    q, cache, slots, lens, *rest = case(64, heads=16, topk=24)
    want = REFERENCE(q, cache, slots, lens, *rest)
    row = torch.arange(70_000, device="cuda") % 64
    cache, added = behind_2_31_bytes(cache)
    out, lse = LAUNCHER(q[row], cache, moved(slots, 64 * added)[row], lens[row], *rest)
    assert_close(out[:64], want[0], "attention_few_keys")
    assert_close(lse[:64], want[1], "lse")
    assert torch.equal(out, out[:64][row]) and torch.equal(lse, lse[:64][row])


def test_a_captured_launch_follows_its_inputs() -> None:
    args = case(8)
    LAUNCHER(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = LAUNCHER(*args)
    for seed in (3, 4):
        for mine, new in zip(args[:4], case(8, seed=seed)[:4], strict=True):
            mine.copy_(new)
        graph.replay()
        want = LAUNCHER(*args)
        assert torch.equal(out, want[0])
        assert torch.equal(lse, want[1])
