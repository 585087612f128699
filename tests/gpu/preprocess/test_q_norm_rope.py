"""The fused query and insert kernel on a GPU against the reference on the same GPU, at sizes that models have."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.bench.gate import disagreement
from dsv4_compile.kernels.preprocess import q_norm_rope as kernels
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.ops.common.kernels import launcher
from dsv4_compile.testing import samples  # noqa: F401  (importing the package registers the ops)

BLOCK, EPS, MAX_POS = layout.WINDOW_BLOCK, 1e-6, 1000


def generator(seed: int) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(seed)


def rope_table(rope_dim: int = layout.ROPE_DIM) -> Tensor:
    angle = torch.rand(MAX_POS, rope_dim // 2, device="cuda", generator=generator(1)) * 6.28
    return torch.cat((angle.cos(), angle.sin()), 1)


def inputs(tokens: int, heads: int, dim: int = layout.HEAD_DIM, pages: int = 64) -> tuple[Tensor, ...]:
    """Queries, keys, slots (some of them none), positions; queries and keys are slices of one projection."""
    projection = torch.randn(tokens, (heads + 1) * dim, device="cuda", generator=generator(tokens)).bfloat16() * 3
    slots = torch.randperm(max(pages * BLOCK, tokens), device="cuda", generator=generator(2))[:tokens]
    slots[::5] = -1
    slots[3::7] = pages * BLOCK + 5
    positions = torch.randint(-2, MAX_POS + 2, (tokens,), device="cuda", generator=generator(3))
    return projection[:, : heads * dim].unflatten(1, (heads, dim)), projection[:, heads * dim :], slots, positions


def same_bytes(got: Tensor, want: Tensor) -> bool:
    return torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("fmt", layout.KV_FORMATS)
@pytest.mark.parametrize(("tokens", "heads"), [(1, 64), (2, 8), (8, 64), (33, 128), (512, 64), (4096, 64), (4099, 17)])
def test_cache_bytes_are_exact_and_queries_neighbours_at_most(tokens: int, heads: int, fmt: str) -> None:
    q, kv, slots, positions = inputs(tokens, heads)
    caches = [layout.allocate_cache(fmt, 64, BLOCK, device="cuda") for _ in range(2)]
    rest = slots, positions, rope_table(), EPS, BLOCK, fmt, 64
    got = launcher("q_norm_rope_kv_insert")(q, kv, caches[0], *rest)
    want = REFERENCES["q_norm_rope_kv_insert"](q, kv, caches[1], *rest)
    assert same_bytes(caches[0], caches[1])
    assert disagreement([got], [want]) == ""


@pytest.mark.parametrize("tile", [(1, 1), (2, 1), (4, 1), (8, 1), (4, 2), (4, 4), (8, 4), (16, 8)])
def test_every_tile_gives_the_same_bytes(tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "tile", lambda rows: tile)
    test_cache_bytes_are_exact_and_queries_neighbours_at_most(301, 65, "fp8_ds_mla")


@pytest.mark.parametrize(("dim", "rope"), [(64, 16), (128, 64), (256, 22), (512, 512)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_other_dims_and_dtypes(dim: int, rope: int, dtype: torch.dtype) -> None:
    q, _, _, positions = inputs(77, 3, dim, pages=1)
    q, table = q.to(dtype), rope_table(rope)
    want = REFERENCES["q_norm_rope"](q, positions, table, EPS)
    assert disagreement([kernels.q_norm_rope(q, positions.int(), table, EPS)], [want]) == ""


def test_scales_divide_as_the_reference_does() -> None:
    q, kv, slots, positions = inputs(700, 8)
    for scale in (0.0123, 1.7, 3.3e-4):
        one = torch.tensor([scale], device="cuda")
        caches = [layout.allocate_cache("fp8", 64, BLOCK, device="cuda") for _ in range(2)]
        rest = slots, positions, rope_table(), EPS, BLOCK, "fp8", 16, one, one
        got = launcher("q_norm_rope_kv_insert")(q, kv, caches[0], *rest)
        want = REFERENCES["q_norm_rope_kv_insert"](q, kv, caches[1], *rest)
        assert same_bytes(caches[0], caches[1])
        # Normed values that are summed in a different order may round to the neighbouring e4m3 value.
        flipped = (got.view(torch.uint8) != want.view(torch.uint8)).float().mean()
        assert flipped < 1e-3
        assert (got.float() - want.float()).abs().max() <= 32


def test_seventy_thousand_tokens_and_a_cache_past_two_gibibytes() -> None:
    pages = 2**31 // layout.FP8_DS_MLA.page_stride(BLOCK) + 9
    q, kv, slots, positions = inputs(70_000, 8, pages=pages)
    slots[:100] = torch.arange(pages * BLOCK - 100, pages * BLOCK, device="cuda")
    slots[100:] = torch.where(slots[100:] < pages * BLOCK - 100, slots[100:], -1)
    caches = [layout.allocate_cache("fp8_ds_mla", pages, BLOCK, device="cuda") for _ in range(2)]
    rest = slots, positions, rope_table(), EPS, BLOCK, "fp8_ds_mla"
    got = launcher("q_norm_rope_kv_insert")(q, kv, caches[0], *rest)
    want = REFERENCES["q_norm_rope_kv_insert"](q, kv, caches[1], *rest)
    assert same_bytes(caches[0], caches[1])
    assert disagreement([got], [want]) == ""


def test_a_captured_launch_follows_its_inputs() -> None:
    q, kv, slots, positions = (x.clone() for x in inputs(40, 64))
    cache, table = layout.allocate_cache("fp8_ds_mla", 64, BLOCK, device="cuda"), rope_table()

    def step() -> Tensor:
        return launcher("q_norm_rope_kv_insert")(q, kv, cache, slots, positions, table, EPS, BLOCK, "fp8_ds_mla")

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for seed in (5, 6):
        q.copy_(torch.randn(q.shape, device="cuda", generator=generator(seed)))
        slots.copy_(torch.randperm(64 * BLOCK, device="cuda", generator=generator(seed))[:40])
        cache.zero_()
        graph.replay()
        replayed = out.clone(), cache.clone()
        cache.zero_()
        assert torch.equal(replayed[0], step())
        assert torch.equal(replayed[1], cache)


def test_the_op_is_one_launch() -> None:
    q, kv, slots, positions = inputs(256, 64)
    args = q, kv, layout.allocate_cache("fp8_ds_mla", 64, BLOCK, device="cuda"), slots, positions, rope_table()
    torch.ops.dsv4.q_norm_rope_kv_insert(*args, EPS, BLOCK, "fp8_ds_mla")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.ops.dsv4.q_norm_rope_kv_insert(*args, EPS, BLOCK, "fp8_ds_mla")
        torch.cuda.synchronize()
    kernels_run = [event.name for event in profile.events() if event.device_type.name == "CUDA"]
    assert kernels_run == ["q_norm_rope_kv_insert_kernel"]
