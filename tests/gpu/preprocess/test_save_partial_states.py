"""The kernel that saves compressor states on a GPU against the reference on the same GPU, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.kernels.preprocess import save_partial_states as kernel
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.testing import poison_, samples  # noqa: F401  (importing the package registers the ops)

REFERENCE = REFERENCES["save_partial_states"]


def arguments(tokens: int, ratio: int, width: int, pages: int = 600, seed: int = 0) -> tuple[Any, ...]:
    """A state cache full of NaN with gaps between its pages; a fifth of the slots are none."""
    generator, block = torch.Generator("cuda").manual_seed(seed), layout.state_block_size(ratio)
    kv_score = torch.randn(tokens, 2 * width + 64, device="cuda", generator=generator)[:, 32:-32]
    ape = torch.randn(ratio, width, device="cuda", generator=generator)
    state = poison_(torch.empty(pages, block + 1, 2 * width, device="cuda"))[:, :block]
    slots = torch.randperm(max(tokens, pages * block), device="cuda", generator=generator)[:tokens]
    slots[::5], slots[3::7] = -1, pages * block
    positions = torch.randint(-3, 5000, (tokens,), device="cuda", generator=generator)
    return kv_score, ape, state, slots, positions, block


def assert_equal(args: tuple[Any, ...]) -> None:
    state = args[2]
    ours, theirs = state.clone(), state.clone()
    kernel.save_partial_states(*args[:2], ours, *args[3:])
    REFERENCE(*args[:2], theirs, *args[3:])
    assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


@pytest.mark.parametrize(("ratio", "width"), [(4, 1024), (128, 512), (4, 256), (4, 24), (128, 700)])
@pytest.mark.parametrize("tokens", [1, 2, 33, 512, 4099])
def test_states_are_equal(tokens: int, ratio: int, width: int) -> None:
    assert_equal(arguments(tokens, ratio, width))


def test_seventy_thousand_tokens_and_a_cache_past_two_gibibytes() -> None:
    args = list(arguments(70_000, 4, 256, pages=300_000))
    assert args[2].numel() * 4 > 2**31
    args[3][-50:] = torch.arange(4 * 300_000 - 50, 4 * 300_000, device="cuda")
    args[3][:-50] = torch.where(args[3][:-50] < 4 * 300_000 - 50, args[3][:-50], -1)
    assert_equal(tuple(args))


def test_a_captured_launch_follows_its_inputs() -> None:
    kv_score, ape, state, slots, positions, block = arguments(40, 4, 1024)

    def step() -> None:
        kernel.save_partial_states(kv_score, ape, state, slots, positions, block)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed in (5, 6):
        others = arguments(40, 4, 1024, seed=seed)
        for mine, new in zip((kv_score, slots, positions), (others[0], others[3], others[4]), strict=True):
            mine.copy_(new)
        results: list[Tensor] = []
        for run in (graph.replay, step):
            poison_(state)
            run()
            results.append(state.clone().view(torch.int32))
        assert torch.equal(*results)
