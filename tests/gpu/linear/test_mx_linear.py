"""`mx_linear` on a GPU against the reference there, at the layers of DeepSeek-V4.1: rounding, repeats, capture."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.kernels.linear import gemm
from dsv4_compile.kernels.linear import mx_linear as kernels
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.reference.linear.mx_linear import rounded_input
from dsv4_compile.testing import Tolerance, assert_close, padded, strided
from tests.gpu.linear import products

CUDA = torch.device("cuda")
LAYERS = {
    "wq_a": (1280, 5120),
    "wq_b": (32768, 1280),
    "wkv": (512, 5120),
    "wo_b": (5120, 8192),
    "wo_b of 8": (5120, 1024),
}
TOKENS = (1, 8, 9, 17, 64, 65, 128, 513, 2048)
TOLERANCES = {
    # Sums of thousands of terms in a different order, and one rounding.
    torch.float32: Tolerance(abs=2e-3, rel=1e-5, cosine=1e-10),
    torch.bfloat16: Tolerance(abs=2e-3, rel=1.01 / 128, cosine=1e-5),
    torch.float16: Tolerance(abs=2e-3, rel=1.01 / 1024, cosine=1e-7),
}


def arguments(tokens: int, rows: int, size: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(CUDA).manual_seed(tokens)
    x, weight = (torch.randn(n, size, device=CUDA, generator=generator) for n in (tokens, rows))
    blocks = -(-rows // 32), -(-size // 32)
    scale = torch.randint(124, 129, blocks, device=CUDA, generator=generator).to(torch.uint8)
    return x.to(dtype), (weight * size**-0.5 * 8).to(torch.float8_e4m3fn), scale - 3


def check(*args: Any) -> None:
    want = REFERENCES["mx_linear"](*args)
    assert_close(kernels.mx_linear(*args), want, TOLERANCES[want.dtype])


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_the_model(name: str, tokens: int) -> None:
    check(*arguments(tokens, *LAYERS[name]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize(("tokens", "rows", "size"), [(1, 1, 32), (33, 70, 160), (66, 5, 96)])
def test_odd_sizes_and_strides(tokens: int, rows: int, size: int, quantize: bool, dtype: torch.dtype) -> None:
    x, weight, scale = arguments(tokens, rows, size, dtype)
    check(x, weight, scale, quantize)
    check(strided(x), padded(weight), scale.view(torch.float8_e8m0fnu), quantize)
    if dtype is torch.bfloat16:  # a product in float32 takes long to compile
        check(padded(x), strided(weight), torch.exp2(scale.float() - 127) * 1.25, quantize)


@pytest.mark.parametrize("tokens", [1, 9, 16, 17, 40, 200])
def test_what_is_rounded_on_the_way_is_what_the_reference_rounds(tokens: int) -> None:
    """One weight of 1 for each input: an output is a rounded input, and no sum can hide a bit."""
    weight, scale = torch.eye(1024, device=CUDA).to(torch.float8_e4m3fn), torch.full((32, 32), 127, device=CUDA)
    x = torch.randn(tokens, 1024, device=CUDA) * 10.0 ** torch.randint(-12, 4, (tokens, 1), device=CUDA)
    x[0, :64] = 0
    for dtype in (torch.float32, torch.bfloat16):
        got = kernels.mx_linear(x.to(dtype), weight, scale.to(torch.uint8))
        assert torch.equal(got, rounded_input(x.to(dtype).float(), True).to(dtype))


def test_scales_at_the_ends_of_their_range() -> None:
    weight = torch.eye(128, device=CUDA).to(torch.float8_e4m3fn)
    for tokens, (byte, value) in zip((1, 9, 33, 300), ((7, 100), (247, -100), (1, 60), (253, -120)), strict=True):
        scale = torch.full((4, 4), byte, dtype=torch.uint8, device=CUDA)
        x = torch.full((tokens, 128), 2.0**value, device=CUDA).bfloat16()
        assert torch.equal(kernels.mx_linear(x, weight, scale, False), x * 2.0 ** (byte - 127))
    scale[1, 2] = 255
    got = kernels.mx_linear(torch.ones(3, 128, device=CUDA).bfloat16(), weight, scale)
    assert got[:, 32:64].isnan().all() and got[:, :32].isfinite().all() and got[:, 64:].isfinite().all()


@pytest.mark.parametrize("tokens", [1, 16, 40, 300])
def test_a_row_of_nan_keeps_to_itself(tokens: int) -> None:
    x, weight, scale = arguments(tokens + 1, 1280, 5120)
    want = kernels.mx_linear(x, weight, scale)
    x[0] = torch.nan
    got = kernels.mx_linear(x, weight, scale)
    assert got[0].isnan().all() and torch.equal(got[1:], want[1:])


@pytest.mark.parametrize("splits", [1, 2, 7, 32])
@pytest.mark.parametrize("tokens", [1, 16, 64, 100])
def test_any_split_gives_the_product(tokens: int, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "choose_tiling", lambda *sizes: gemm.GemmTiling(16, 64, 4, 3, splits))
    monkeypatch.setattr(gemm, "plan", gemm.plan.__wrapped__)
    check(*arguments(tokens, 1280, 5120))


@pytest.mark.parametrize("tokens", [1, 16, 17, 64, 100, 600])
def test_repeats_capture_and_streams(tokens: int) -> None:
    args = arguments(tokens, *LAYERS["wo_b"])
    products.repeats_are_equal(kernels.mx_linear, args)
    products.streams_do_not_share_counters(kernels.mx_linear, args)
    kernel, graph = kernels.mx_linear, torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [kernel(*args) for _ in range(3)]
    for _ in range(3):
        args[0].copy_(args[0].flip(0))
        graph.replay()
        want = kernel(*args)
        assert all(torch.equal(got, want) for got in captured)


@pytest.mark.parametrize("tokens", [1, 16, 64])
def test_a_launch_reads_what_the_one_before_has_written(tokens: int) -> None:
    """A launch may start before the one before it ends: eight in a row, each with the last one's result."""
    x, weight, scale = arguments(tokens, 4096, 4096)

    def chain(wait: bool) -> Tensor:
        y = x
        for _ in range(8):
            y = kernels.mx_linear(y, weight, scale)
            if wait:
                torch.cuda.synchronize()
        return y

    want = chain(wait=True)
    assert want.isfinite().all() and want.std() > 1e-3
    assert all(torch.equal(chain(wait=False), want) for _ in range(20))
