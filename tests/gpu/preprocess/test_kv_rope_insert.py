"""The kernel of `kv_rope_insert` on a GPU against the reference on the same GPU: every byte."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.kernels.preprocess import kv_rope_insert as kernel
from dsv4_compile.ops.common.define import REFERENCES
from tests.gpu.far import behind_2_31_bytes, moved
from tests.gpu.preprocess.test_q_norm_rope import BLOCK, generator, inputs, rope_table, same_bytes

REFERENCE = REFERENCES["kv_rope_insert"]
PAGES = 64


def stored(implementation: object, cache: Tensor, *args: object) -> Tensor:
    """Return the cache that an implementation has written."""
    kv, *rest = args
    implementation(kv, cache, *rest)  # type: ignore[operator]
    return cache


@pytest.mark.parametrize("fmt", layout.KV_FORMATS)
@pytest.mark.parametrize("tokens", [0, 1, 2, 33, 1536, 1537, 4099])
def test_every_byte_is_the_reference(tokens: int, fmt: str) -> None:
    _, kv, slots, positions = inputs(tokens, 1)
    args = kv, slots, positions, rope_table(), BLOCK, fmt
    if fmt == "fp8":
        args += (torch.tensor([0.0371], device="cuda"),)  # type: ignore[assignment]
    got, want = (
        stored(insert, layout.allocate_cache(fmt, PAGES, BLOCK, device="cuda"), *args)
        for insert in (kernel.kv_rope_insert, REFERENCE)
    )
    assert same_bytes(got, want)


@pytest.mark.parametrize("tile", [(1, 1), (2, 1), (4, 1), (8, 2), (16, 8)])
def test_every_tile_stores_the_same_bytes(tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "tile", lambda rows: tile)
    test_every_byte_is_the_reference(301, "fp8_ds_mla")


@pytest.mark.parametrize(("dim", "rope"), [(64, 16), (128, 64), (256, 22), (512, 512)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_other_dims_and_dtypes(dim: int, rope: int, dtype: torch.dtype) -> None:
    _, kv, slots, positions = inputs(77, 3, dim, pages=1)
    args = kv.to(dtype), slots, positions, rope_table(rope), BLOCK, "plain"
    got, want = (
        stored(insert, torch.zeros(1, BLOCK, dim, dtype=dtype, device="cuda"), *args)
        for insert in (kernel.kv_rope_insert, REFERENCE)
    )
    assert same_bytes(got, want)


def test_70_000_tokens_and_a_cache_of_more_than_2_31_bytes() -> None:
    _, kv, _, positions = inputs(70_000, 1)
    pages = layout.cdiv(70_000, BLOCK)
    slots = torch.randperm(pages * BLOCK, device="cuda", generator=generator(2))[:70_000]
    results = []
    for insert in (kernel.kv_rope_insert, REFERENCE):
        cache, added = behind_2_31_bytes(layout.allocate_cache("fp8_ds_mla", pages, BLOCK, device="cuda"))
        args = kv, moved(slots, added * BLOCK), positions, rope_table(), BLOCK, "fp8_ds_mla"
        results.append(stored(insert, cache, *args))
    assert same_bytes(*results)


def test_a_captured_launch_follows_its_inputs() -> None:
    _, kv, slots, positions = (x.clone() for x in inputs(40, 1))
    cache, table = layout.allocate_cache("fp8_ds_mla", PAGES, BLOCK, device="cuda"), rope_table()

    def step() -> None:
        kernel.kv_rope_insert(kv, cache, slots, positions, table, BLOCK, "fp8_ds_mla")

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed in (5, 6):
        kv.copy_(torch.randn(kv.shape, device="cuda", generator=generator(seed)))
        slots.copy_(torch.randperm(PAGES * BLOCK, device="cuda", generator=generator(seed))[:40])
        caches = []
        for run in (graph.replay, step):
            cache.zero_()
            run()
            caches.append(cache.clone())
        assert torch.equal(*caches)
