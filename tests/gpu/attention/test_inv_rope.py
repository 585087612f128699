"""The inverse RoPE kernels on a GPU against the reference there: every byte, at sizes that models have."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.kernels.attention import inv_rope as kernels
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.testing import samples  # noqa: F401  (importing the package registers the ops)

MAX_POS = 1000


def inputs(tokens: int, heads: int, dim: int = layout.HEAD_DIM, rope: int = layout.ROPE_DIM) -> tuple[Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(tokens)
    o = torch.randn(tokens, heads, dim, device="cuda", generator=generator).bfloat16()
    o *= 10.0 ** torch.randint(-6, 3, (tokens, heads, 1), device="cuda", generator=generator)
    positions = torch.randint(-2, MAX_POS + 2, (tokens,), device="cuda", generator=generator)
    angle = torch.rand(MAX_POS, rope // 2, device="cuda", generator=generator) * 6.28
    return o, positions, torch.cat((angle.cos(), angle.sin()), 1)


def storage(x: Tensor) -> Tensor:
    """Return every byte of the storage of `x`: the zero rows after T are in no view."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("tokens", "heads"), [(1, 64), (3, 5), (33, 128), (4096, 64), (70_000, 8)])
def test_rotating_back_is_exact(tokens: int, heads: int, dtype: torch.dtype) -> None:
    o, positions, table = inputs(tokens, heads)
    args = o.to(dtype), positions, table
    assert torch.equal(kernels.inv_rope(*args), REFERENCES["inv_rope"](*args))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("tokens", "groups", "heads", "dim", "rope"),
    [
        (1, 8, 8, 512, 64),
        (8, 16, 8, 512, 64),
        (33, 8, 8, 512, 64),
        (510, 8, 8, 512, 64),
        (4097, 8, 8, 512, 64),
        (70_000, 1, 8, 512, 64),
        (77, 3, 6, 64, 22),
        (129, 2, 3, 128, 64),
    ],
)
def test_values_scales_and_padding_rows_are_exact(
    tokens: int, groups: int, heads: int, dim: int, rope: int, packed: bool
) -> None:
    o, positions, table = inputs(tokens, groups * heads + 2, dim, rope)
    args = o, positions, table, groups, heads, packed
    with_garbage = torch.full((1 << 28,), 0xFF, dtype=torch.uint8, device="cuda")
    del with_garbage  # new outputs begin as this memory
    got, want = kernels.inv_rope_fp8_quant(*args), REFERENCES["inv_rope_fp8_quant"](*args)
    for actual, expected in zip(got, want, strict=True):
        assert actual.stride() == expected.stride()
        assert torch.equal(storage(actual), storage(expected))


@pytest.mark.parametrize("packed", [False, True])
def test_infinities_and_nan_do_not_change_other_tiles(packed: bool) -> None:
    """The conversion to e4m3 saturates by itself; in the interpreter a clamp does."""
    o, positions, table = inputs(37, 64)
    generator = torch.Generator("cuda").manual_seed(1)
    for value in (torch.inf, -torch.inf, torch.nan, -torch.nan, torch.finfo(o.dtype).max):
        o[torch.rand(o.shape, device="cuda", generator=generator) < 1e-3] = value
    args = o, positions, table, 8, 8, packed
    for got, want in zip(kernels.inv_rope_fp8_quant(*args), REFERENCES["inv_rope_fp8_quant"](*args), strict=True):
        assert torch.equal(storage(got), storage(want))


@pytest.mark.parametrize("block", [(1, 1), (4, 1), (1, 4), (4, 2), (8, 1), (8, 2)])
def test_every_block_gives_the_same_bytes(block: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_block", lambda rows: block)
    for packed in (False, True):
        test_values_scales_and_padding_rows_are_exact(301, 2, 7, 512, 64, packed)


def test_a_captured_launch_follows_its_inputs() -> None:
    o, positions, table = inputs(40, 64)

    def step() -> tuple[Tensor, ...]:
        return kernels.inv_rope(o, positions, table), *kernels.inv_rope_fp8_quant(o, positions, table, 8, 8)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    o.copy_(torch.randn(o.shape, device="cuda"))
    graph.replay()
    for got, want in zip(captured, step(), strict=True):
        assert torch.equal(storage(got), storage(want))
