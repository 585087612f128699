"""The indexer's query kernel on a GPU against the reference on the same GPU, to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.kernels.indexer import indexer_q_rope_quant as kernel
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.testing import samples  # noqa: F401  (importing the package registers the ops)

REFERENCE = REFERENCES["indexer_q_rope_quant"]
FORMATS = pytest.mark.parametrize("fmt", layout.INDEXER_FORMATS)
MAX_POS = 1000


def arguments(
    tokens: int, heads: int, dim: int = 128, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries and weights are slices of one projection."""
    generator = torch.Generator("cuda").manual_seed(seed)
    projection = torch.randn(tokens, heads * (dim + 1), device="cuda", generator=generator).to(dtype) * 3
    angle = torch.rand(MAX_POS, dim // 4, device="cuda", generator=generator) * 6.28
    positions = torch.randint(-2, MAX_POS + 2, (tokens,), device="cuda", generator=generator)
    q, weights = projection[:, : heads * dim].unflatten(1, (heads, dim)), projection[:, heads * dim :]
    return q, positions, torch.cat((angle.cos(), angle.sin()), 1), weights


def bits(x: Tensor) -> Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


@FORMATS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "heads"), [(1, 64), (2, 8), (33, 64), (512, 64), (4099, 17), (70_000, 2)])
def test_bits_are_equal(tokens: int, heads: int, dtype: torch.dtype, fmt: str) -> None:
    args = (*arguments(tokens, heads, dtype=dtype), fmt)
    for name, got, want in zip(
        ("q", "scale", "weights"), kernel.indexer_q_rope_quant(*args), REFERENCE(*args), strict=True
    ):
        assert got.stride() == want.stride() and got.dtype is want.dtype
        assert torch.equal(bits(got), bits(want)), name


@FORMATS
def test_weights_are_rounded_as_by_a_cast_before(fmt: str) -> None:
    q, positions, table, weights = arguments(300, 64)
    wide = weights.float() * 1.01
    want = REFERENCE(q, positions, table, wide.to(q.dtype), fmt)
    for got, expected in zip(
        kernel.indexer_q_rope_quant(q, positions, table, wide, fmt, False, True), want, strict=True
    ):
        assert torch.equal(bits(got), bits(expected))


@FORMATS
@pytest.mark.parametrize("tile", [(1, 1), (4, 1), (8, 2), (16, 4), (64, 8)])
def test_every_tile_gives_the_same_bits(tile: tuple[int, int], fmt: str) -> None:
    args = (*arguments(50, 65), fmt)
    for got, want in zip(kernel.indexer_q_rope_quant(*args, tile=tile), REFERENCE(*args), strict=True):
        assert torch.equal(bits(got), bits(want))


@FORMATS
def test_hadamard_transform_is_exact_where_its_sums_are(fmt: str) -> None:
    _, _, _, weights = arguments(300, 64)
    q = torch.randint(-4, 5, (300, 64, 128), device="cuda").bfloat16()
    table = torch.cat((torch.ones(4, 32), torch.zeros(4, 32)), dim=1).cuda()
    args = q, torch.zeros(300, dtype=torch.int64, device="cuda"), table, weights, fmt, True
    for got, want in zip(kernel.indexer_q_rope_quant(*args), REFERENCE(*args), strict=True):
        assert torch.equal(bits(got), bits(want))


@FORMATS
def test_hadamard_transform_rounds_to_a_neighbour_at_most(fmt: str) -> None:
    args = (*arguments(300, 64), fmt, True)
    got, want = kernel.indexer_q_rope_quant(*args), REFERENCE(*args)
    assert (bits(got[0]) != bits(want[0])).float().mean() < 1e-3
    assert (got[2] != want[2]).float().mean() < 1e-3


@pytest.mark.parametrize("dim", [16, 32, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_plain_queries_of_other_dims(dim: int, dtype: torch.dtype) -> None:
    args = (*arguments(77, 5, dim, dtype), "plain")
    for got, want in zip(kernel.indexer_q_rope_quant(*args), REFERENCE(*args), strict=True):
        assert torch.equal(bits(got), bits(want))


def test_a_captured_launch_follows_its_inputs() -> None:
    q, positions, table, weights = (x.clone() for x in arguments(40, 64))

    def step() -> tuple[Tensor, Tensor, Tensor]:
        return kernel.indexer_q_rope_quant(q, positions, table, weights, "indexer_fp8")

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for seed in (5, 6):
        others = arguments(40, 64, seed=seed)
        for mine, new in zip((q, positions, weights), (others[0], others[1], others[3]), strict=True):
            mine.copy_(new)
        graph.replay()
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(out, step(), strict=True))
