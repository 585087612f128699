"""The kernel of `rope_quantize_insert` on a GPU against the reference on the same GPU: every byte."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.kernels.preprocess import rope_quantize_insert as kernel
from dsv4_compile.ops.common.define import REFERENCES
from tests.gpu.far import behind_2_31_bytes, moved
from tests.gpu.preprocess.test_q_norm_rope import BLOCK, generator, inputs, rope_table, same_bytes

REFERENCE = REFERENCES["rope_quantize_insert"]
PAGES = 64
FORMATS = [
    ("mxfp8", "", 512),
    ("nvfp4", "", 512),
    ("mxfp4", "", 128),
    ("fp8_ds_mla", "", 512),
    ("plain", "", 512),
    *(("plain", grid, 128) for grid in layout.GRIDS),
]
"""Format, grid of plain rows, channels."""


def stored(implementation: object, cache: Tensor, x: Tensor, *args: object) -> Tensor:
    """Return the cache that an implementation has written."""
    implementation(x, cache, *args)  # type: ignore[operator]
    return cache


def compare(x: Tensor, slots: Tensor, positions: Tensor, fmt: str, grid: str, rope: int = 64) -> None:
    got, want = (
        stored(
            insert,
            layout.allocate_cache(fmt, PAGES, BLOCK, x.shape[1], dtype=x.dtype, device="cuda"),
            x,
            *(slots, positions, rope_table(rope), BLOCK, fmt, grid),
        )
        for insert in (kernel.rope_quantize_insert, REFERENCE)
    )
    assert same_bytes(got, want)


@pytest.mark.parametrize(("fmt", "grid", "dim"), FORMATS)
@pytest.mark.parametrize("tokens", [0, 1, 2, 33, 1536, 1537, 4099])
def test_every_byte_is_the_reference(tokens: int, fmt: str, grid: str, dim: int) -> None:
    _, x, slots, positions = inputs(tokens, 1, dim)
    compare(x, slots, positions, fmt, grid)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("fmt", "grid", "dim"), FORMATS)
def test_other_dtypes_large_and_small_values_and_zeros(fmt: str, grid: str, dim: int, dtype: torch.dtype) -> None:
    _, x, _, positions = inputs(2000, 1, dim)
    x = (x.float() * 10.0 ** torch.linspace(-9, 3, 2000, device="cuda")[:, None]).to(dtype)
    x[5], x[7, 3] = 0, torch.inf
    positions = torch.where(torch.arange(2000, device="cuda") == 7, 0, positions)
    compare(x, torch.randperm(PAGES * BLOCK, device="cuda", generator=generator(4))[:2000], positions, fmt, grid)


@pytest.mark.parametrize(("dim", "rope"), [(32, 16), (64, 22), (256, 64), (1024, 1024)])
@pytest.mark.parametrize("fmt", layout.GRIDS)
def test_other_dims(fmt: str, dim: int, rope: int) -> None:
    _, x, slots, positions = inputs(77, 3, dim)
    compare(x, slots, positions, fmt, "", rope)


@pytest.mark.parametrize("tile", [(1, 1), (2, 1), (4, 1), (8, 2), (16, 8)])
def test_every_tile_stores_the_same_bytes(tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "tile", lambda rows: tile)
    for fmt, grid, dim in FORMATS:
        test_every_byte_is_the_reference(301, fmt, grid, dim)


@pytest.mark.parametrize("fmt", ["mxfp8", "nvfp4"])
def test_70_000_tokens_and_a_cache_of_more_than_2_31_bytes(fmt: str) -> None:
    _, x, _, positions = inputs(70_000, 1)
    pages = layout.cdiv(70_000, BLOCK)
    slots = torch.randperm(pages * BLOCK, device="cuda", generator=generator(2))[:70_000]
    results = []
    for insert in (kernel.rope_quantize_insert, REFERENCE):
        cache, added = behind_2_31_bytes(layout.allocate_cache(fmt, pages, BLOCK, device="cuda"))
        results.append(stored(insert, cache, x, moved(slots, added * BLOCK), positions, rope_table(), BLOCK, fmt))
    assert same_bytes(*results)


def test_a_captured_launch_follows_its_inputs() -> None:
    _, x, slots, positions = (tensor.clone() for tensor in inputs(40, 1))
    cache, table = layout.allocate_cache("nvfp4", PAGES, BLOCK, device="cuda"), rope_table()

    def step() -> None:
        kernel.rope_quantize_insert(x, cache, slots, positions, table, BLOCK, "nvfp4")

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed in (5, 6):
        x.copy_(torch.randn(x.shape, device="cuda", generator=generator(seed)))
        slots.copy_(torch.randperm(PAGES * BLOCK, device="cuda", generator=generator(seed))[:40])
        caches = []
        for run in (graph.replay, step):
            cache.zero_()
            run()
            caches.append(cache.clone())
        assert torch.equal(*caches)
