"""The compressor kernel on a GPU against the reference on the same GPU, at sizes that models have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.kernels.preprocess import compress_norm_rope_insert as kernel
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.ops.common.kernels import launcher
from dsv4_compile.reference.common import kv_format
from dsv4_compile.testing import Tolerance, assert_cached, assert_close, poison_
from dsv4_compile.testing import samples as samples  # registers the ops
from tests.gpu.far import behind_2_31_bytes, moved

REFERENCE, LAUNCHER = REFERENCES["compress_norm_rope_insert"], launcher("compress_norm_rope_insert")
CACHE, REQUESTS, MAX_POS = 8, 5, 4096
NEIGHBOURS = Tolerance(abs=1e-5, rel=1.01 / 128, cosine=1e-6)
"""One step of bfloat16."""
LAYERS = [
    (4, 512, "fp8_ds_mla", False), (128, 512, "fp8_ds_mla", False), (4, 128, "indexer_fp8", False),
    (4, 128, "indexer_mxfp4", False), (4, 128, "indexer_fp8", True), (4, 128, "indexer_mxfp4", True),
    (128, 512, "fp8", False), (4, 512, "plain", False), (6, 64, "plain", False),
]  # fmt: skip


def arguments(tokens: int, ratio: int, dim: int, fmt: str, hadamard: bool = False, seed: int = 0) -> tuple[Any, ...]:
    """Tokens at random positions of a few requests with all their states; the rest of the memory is NaN.

    A tenth of the tokens have no slot, a tenth close no group, and every request lacks a block.
    """
    generator = torch.Generator("cuda").manual_seed(seed)

    def randint(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, device="cuda", generator=generator)

    state_block, block = layout.state_block_size(ratio), 64 // (ratio // 4)
    columns = layout.cdiv(MAX_POS, state_block) if ratio != 128 else 64
    positions = randint(0, columns * state_block, tokens) // ratio * ratio + ratio - 1
    positions[7::10] -= 1
    state = poison_(torch.empty(REQUESTS * columns + 3, state_block + 1, layout.state_width(ratio, dim), device="cuda"))
    state = state[:, :state_block].normal_(generator=generator)
    table = torch.randperm(REQUESTS * columns, device="cuda", generator=generator).int().view(REQUESTS, columns)
    table[:, 3] = -1
    # Each token is a separate request, which shares its pages with others.
    table = table[randint(0, REQUESTS, tokens)]
    capacity = max(tokens, 64)
    slots = torch.randperm(capacity, device="cuda", generator=generator)[:tokens]
    slots[5::10] = -1
    cache = layout.allocate_cache(fmt, layout.cdiv(capacity, block), block, dim, device="cuda")
    weight = 1 + 0.1 * torch.randn(dim, device="cuda", generator=generator)
    angle = torch.rand(MAX_POS, min(64, dim // 2) // 2, device="cuda", generator=generator) * 6.28
    rope = torch.cat((angle.cos(), angle.sin()), 1)
    scale = torch.tensor([0.0123], device="cuda") if fmt == "fp8" else None
    owners = torch.randperm(tokens, device="cuda", generator=generator).int()
    where = randint(0, 99, tokens), table, owners, positions, slots
    return state, *where, weight.bfloat16(), rope, cache, 1e-6, ratio, state_block, block, fmt, hadamard, scale


def storage(cache: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cuda").set_(cache.untyped_storage())


def assert_agree(args: tuple[Any, ...], **options: Any) -> None:
    """Kernel and reference write the same, but for ties."""
    cache, fmt, block = args[CACHE], args[13], args[12]
    results = []
    for run in (lambda *a: LAUNCHER(*a, **options), REFERENCE):
        storage(cache).fill_(0)
        run(*args)
        results.append(storage(cache).clone().view(cache.dtype).as_strided(cache.shape, cache.stride()))
    ours, theirs = results
    assert storage(theirs).any() or not len(args[1])
    if fmt == "plain":
        assert_close(ours, theirs, NEIGHBOURS)
        return
    ties = assert_cached(ours, theirs, fmt, block, transformed=args[14], pooled=args[10])
    # A value of two bytes may differ in both; nothing else was written.
    assert (storage(ours) != storage(theirs)).sum() <= 2 * ties


@pytest.mark.parametrize(("ratio", "dim", "fmt", "hadamard"), LAYERS)
@pytest.mark.parametrize("tokens", [1, 2, 33, 512, 4099])
def test_entries_are_those_of_the_reference(tokens: int, ratio: int, dim: int, fmt: str, hadamard: bool) -> None:
    assert_agree(arguments(tokens, ratio, dim, fmt, hadamard))


@pytest.mark.parametrize(("dim", "fmt"), [(512, "fp8_ds_mla"), (128, "indexer_fp8")])
def test_70_000_tokens_over_caches_of_more_than_2_31_bytes(dim: int, fmt: str) -> None:
    args = list(arguments(70_000, layout.CSA_RATIO, dim, fmt))
    args[0], added = behind_2_31_bytes(args[0])
    args[1], args[2] = args[1] + added * args[11], moved(args[2], added)
    args[CACHE], added = behind_2_31_bytes(args[CACHE])
    args[5] = moved(args[5], added * args[12])
    assert_agree(tuple(args))


@pytest.mark.parametrize(
    "changes",
    [
        {"parts": 8},
        {"parts": 8, "warps": 8},
        {"parts": 16, "tokens": 8},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("ratio", "dim", "fmt"), [(4, 512, "fp8_ds_mla"), (128, 512, "fp8_ds_mla"), (4, 128, "indexer_fp8")]
)
def test_every_cut(changes: dict[str, int], ratio: int, dim: int, fmt: str) -> None:
    assert_agree(arguments(200, ratio, dim, fmt), tiling=kernel.pool_tiling(200, ratio, dim)._replace(**changes))


@pytest.mark.parametrize(("ratio", "dim", "fmt", "hadamard"), LAYERS[:4])
def test_an_entry_is_encoded_as_the_reference_encodes_it(ratio: int, dim: int, fmt: str, hadamard: bool) -> None:
    """The kernel's own float32 entries, stored by the reference, give its bytes, but for contracted arithmetic."""
    args = arguments(300, ratio, dim, fmt)
    exact = torch.zeros(len(args[CACHE]), args[12], dim, device="cuda")
    LAUNCHER(*args[:CACHE], exact, *args[CACHE + 1 : 13], "plain")
    slots = torch.arange(exact.shape[0] * exact.shape[1], device="cuda")
    written = exact.flatten(0, 1).any(-1)
    expected = storage(args[CACHE]).clone().as_strided(args[CACHE].shape, args[CACHE].stride())
    store = kv_format.store_kv if fmt in layout.KV_FORMATS else kv_format.store_indexer
    store(expected, fmt, args[12], torch.where(written, slots, -1), exact.flatten(0, 1))
    LAUNCHER(*args)
    assert (storage(expected) != storage(args[CACHE])).sum() <= 2


def test_a_captured_launch_follows_its_inputs() -> None:
    args = arguments(40, 4, 512, "fp8_ds_mla")
    LAUNCHER(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        LAUNCHER(*args)
    for seed in (5, 6):
        for mine, new in zip(args[:6], arguments(40, 4, 512, "fp8_ds_mla", seed=seed)[:6], strict=True):
            mine.copy_(new)
        results = []
        for run in (graph.replay, lambda: LAUNCHER(*args)):
            args[CACHE].zero_()
            run()
            results.append(args[CACHE].clone())
        assert torch.equal(*results)


def test_a_hundred_runs_are_equal_bit_for_bit() -> None:
    args = arguments(300, 128, 512, "fp8_ds_mla")
    first = None
    for _ in range(100):
        args[CACHE].zero_()
        LAUNCHER(*args)
        first = args[CACHE].clone() if first is None else first
        assert torch.equal(args[CACHE], first)
