"""`fp8_linear` on a GPU against the reference there, at the layers of the models."""

from __future__ import annotations

import pytest
import torch

from dsv4_compile.kernels.linear import fp8_linear as kernels
from dsv4_compile.kernels.linear import gemm, gemm_sm90_small
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.reference.common.block_scale import quantize_activation
from dsv4_compile.reference.common.quant import ue8m0_scale
from tests.gpu.linear import products

OP = "fp8_linear"
WIDE = "Flash fp8_linear wo_b"


@pytest.mark.parametrize("tokens", products.TOKENS)
@pytest.mark.parametrize("name", products.names(OP))
def test_layers_of_the_models(name: str, tokens: int) -> None:
    products.check(OP, kernels.fp8_linear, products.arguments(name, tokens))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize(
    ("tokens", "rows", "size"), [(1, 1, 1), (5, 130, 200), (33, 70, 129), (66, 5, 100), (300, 9, 7)]
)
def test_odd_sizes(tokens: int, rows: int, size: int, quantize: bool, dtype: torch.dtype) -> None:
    x, weight, scale = products.gemm.Layer(OP, "", rows, size).arguments(tokens, products.CUDA, 1)
    products.check(OP, kernels.fp8_linear, (x.to(dtype), weight, scale, quantize))


@pytest.mark.parametrize("others", [1024, 2624, 100])
@pytest.mark.parametrize("tokens", [1, 8, 16, 33, 64, 65, 128, 200, 300, 385, 500, 512])
def test_another_layer_of_the_same_input_is_written_beside(tokens: int, others: int) -> None:
    """With the sizes of the compressors, and with rows that are no multiple of a tile."""
    x, weight, scale = products.arguments("Flash fp8_linear wq_a + wkv", tokens)
    other = torch.randn(others, x.shape[1], device="cuda", dtype=x.dtype)
    products.check(OP, kernels.fp8_linear, (x, weight, scale, True, other))


@pytest.mark.parametrize(("tokens", "others"), [(257, 1024), (384, 1024), (512, 1024), (200, 2624)])
def test_whole_tiles_of_pro(tokens: int, others: int) -> None:
    """More tiles than can be shared, at fewer tokens than in V4-Flash."""
    x, weight, scale = products.arguments("Pro fp8_linear wq_a + wkv", tokens)
    other = torch.randn(others, x.shape[1], device="cuda", dtype=x.dtype)
    products.check(OP, kernels.fp8_linear, (x, weight, scale, True, other))


@pytest.mark.parametrize("others", [0, 200])
@pytest.mark.parametrize("rows", [256, 4224, 8192])
def test_any_number_of_tokens(rows: int, others: int) -> None:
    """Tiles are multiplied twice, in part, rather than copied past the end: of 1 to 400 tokens none is left out."""
    x, weight, scale = products.gemm.Layer(OP, "", rows, 2048).arguments(400, products.CUDA, 4)
    other = torch.randn(others, 2048, device="cuda").bfloat16() if others else None
    want = REFERENCES[OP](x, weight, scale, True, other)
    for tokens in (*range(1, 80, 3), *range(63, 71), *range(80, 400, 17), *range(126, 134), *range(254, 260)):
        got = kernels.fp8_linear(x[:tokens].contiguous(), weight, scale, True, other)
        assert products.gemm.differs([got], [want[:tokens]], products.gemm.TOLERANCE[OP]) == "", tokens


@pytest.mark.parametrize("tokens", [1, 9, 17, 40, 64])
def test_what_is_quantised_on_the_way_is_what_the_reference_quantises(tokens: int) -> None:
    """One weight of 1 for each input: an output is a quantised input times its scale, and no sum can hide a bit."""
    weight = torch.eye(1024, device="cuda").to(torch.float8_e4m3fn)
    x = torch.randn(tokens, 1024, device="cuda") * 10.0 ** torch.randint(-12, 4, (tokens, 1), device="cuda")
    x[0, :128] = 0
    for dtype in (torch.float32, torch.bfloat16):
        args = x.to(dtype), weight, torch.ones(8, 8, device="cuda")
        assert torch.equal(kernels.fp8_linear(*args), REFERENCES[OP](*args))


@pytest.mark.parametrize(("tokens", "size"), [(65, 1024), (4097, 4096), (70_000, 256), (301, 200)])
def test_the_quantisation_in_front_of_many_tokens_is_exact(tokens: int, size: int) -> None:
    x = torch.randn(tokens, size, device="cuda").bfloat16() * 1e-3
    values, byte = quantize_activation(x)
    got, scale = kernels.quantize_activation(x)
    assert torch.equal(got.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(scale, ue8m0_scale(byte))


@pytest.mark.parametrize("splits", [1, 2, 7, 32])
@pytest.mark.parametrize("tokens", [1, 16, 64, 100])
def test_any_tiling_of_the_portable_kernel_gives_the_product(
    tokens: int, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemm, "sm90_module", lambda gpu, stem: None)
    monkeypatch.setattr(gemm, "choose_tiling", lambda *sizes: gemm.GemmTiling(16, 64, 4, 3, splits))
    products.check(OP, kernels.fp8_linear, products.arguments("Flash fp8_linear wq_a + wkv", tokens))


TILINGS = [(64, 4, 3, 1), (64, 4, 1, 8), (128, 8, 2, 4), (128, 4, 2, 11), (256, 8, 1, 2)]
CLUSTERS = [(64, 4, 2, 8, True), (64, 4, 4, 5, True), (128, 4, 3, 2, True), (128, 8, 1, 6, True), (256, 8, 1, 3, True)]
CLUSTERS += [(64, 4, 3, 5, True), (128, 4, 2, 7, True)]


@pytest.mark.parametrize("tiling", TILINGS + CLUSTERS)
@pytest.mark.parametrize("tokens", [1, 16, 30, 64])
def test_any_tiling_of_the_hopper_kernel_gives_the_product(
    tokens: int, tiling: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On other GPUs, the portable kernel's choice once more."""
    monkeypatch.setattr(gemm_sm90_small, "choose_tiling", lambda *sizes: gemm_sm90_small.SmallTiling(*tiling))
    products.check(OP, kernels.fp8_linear, products.arguments("Flash fp8_linear wq_a + wkv", tokens))


@pytest.mark.parametrize("tokens", [1, 8, 64, 128])
def test_a_launch_reads_what_the_one_before_has_written(tokens: int) -> None:
    """A launch may start before the one in front of it ends: eight in a row, each with the last one's result."""
    layer = products.gemm.Layer(OP, "", 4224, 4224)
    x, weight, scale = layer.arguments(tokens, products.CUDA, 3)
    scale = scale + 2

    def chain(wait: bool) -> torch.Tensor:
        y = x
        for _ in range(8):
            y = kernels.fp8_linear(y, weight, scale)
            if wait:
                torch.cuda.synchronize()
        return y

    want = chain(wait=True)
    assert want.isfinite().all() and want.std() > 1e-3
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(wait=False)
    for _ in range(20):
        assert torch.equal(chain(wait=False), want)
        graph.replay()
        assert torch.equal(captured, want)


@pytest.mark.parametrize(
    ("tokens", "rows", "others"),
    [
        (385, 1536, 1024),
        (500, 1536, 1024),
        (512, 1536, 1024),
        (300, 1664, 1272),
        (300, 1536, 2624),
        (512, 1536, 2624),
        (700, 1536, 1024),
    ],
)
def test_repeats_capture_and_streams_of_whole_tiles(tokens: int, rows: int, others: int) -> None:
    """V4-Flash's rows with HCA's and CSA's, in clusters or each by itself; and 39 tiles, the first one shared."""
    x, weight, scale = products.gemm.Layer(OP, "", rows, 4096).arguments(tokens, products.CUDA, 5)
    args = x, weight, scale, True, torch.randn(others, 4096, device="cuda", dtype=x.dtype)
    products.check(OP, kernels.fp8_linear, args)
    products.repeats_are_equal(kernels.fp8_linear, args)
    products.streams_do_not_share_counters(kernels.fp8_linear, args)
    products.capture_follows_its_inputs(OP, kernels.fp8_linear, args)


def test_more_than_two_gibibytes_of_tokens() -> None:
    x, weight, scale = products.gemm.Layer(OP, "", 128, 128).arguments(300, products.CUDA, 2)
    many = x.repeat(60_000, 1)
    out = kernels.fp8_linear(many, weight, scale)
    assert torch.equal(out.view(60_000, 300, 128)[-1], out[:300])
    products.check(OP, kernels.fp8_linear, (x, weight, scale))


@pytest.mark.parametrize("tokens", [8, 17, 24, 32])
def test_repeats_of_what_is_quantised_on_the_way_beside_rows_of_csa(tokens: int) -> None:
    """In programs with rings that do not hold all strips; they quantise them in two passes."""
    x, weight, scale = products.gemm.Layer(OP, "", 1536, 4096).arguments(tokens, products.CUDA, 5)
    other = torch.randn(2624, 4096, device="cuda", dtype=x.dtype)
    products.repeats_are_equal(kernels.fp8_linear, (x, weight, scale, True, other), replays=600)


@pytest.mark.parametrize("tokens", [1, 32, 64, 100, 200, 600])
def test_repeats_capture_and_streams(tokens: int) -> None:
    args = products.arguments(WIDE, tokens)
    other = torch.randn(1024, args[0].shape[1], device="cuda", dtype=args[0].dtype)
    products.repeats_are_equal(kernels.fp8_linear, (*args, True, other))
    products.repeats_are_equal(kernels.fp8_linear, args)
    products.streams_do_not_share_counters(kernels.fp8_linear, args)
    products.capture_follows_its_inputs(OP, kernels.fp8_linear, args)
