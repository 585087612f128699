"""`fp8_grouped_einsum_quant` on a GPU: bit for bit the two ops one after the other, at the layers of the models."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from dsv4_compile.kernels.host.gpu import SM90, gpu_of
from dsv4_compile.kernels.linear import gemm_sm90_small
from dsv4_compile.kernels.linear.fp8_grouped_einsum import fp8_grouped_einsum, fp8_grouped_einsum_quant
from dsv4_compile.kernels.linear.fp8_linear import fp8_linear
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.reference.common.block_scale import quantize_activation
from dsv4_compile.reference.common.quant import ue8m0_scale
from dsv4_compile.selection import decisions
from dsv4_compile.testing import assert_bitwise
from tests.gpu.linear import products

TOKENS = (1, 8, 16, 17, 32, 64, 65, 100, 128, 129, 300)
WO_A = [name for name in products.names("fp8_grouped_einsum") if name.endswith(" wo_a")]
WO_B = [name for name in products.names("fp8_linear") if name.endswith(" wo_b")]
Pair = tuple[Tensor, Tensor]


def apart(args: tuple[Any, ...]) -> Pair:
    """The product of `fp8_grouped_einsum` in the tiling of the fused op, quantised by the reference."""
    choose = gemm_sm90_small.choose_tiling
    with mock.patch.object(gemm_sm90_small, "choose_tiling", lambda *sizes: choose(*sizes[:6], True)):
        values, byte = quantize_activation(fp8_grouped_einsum(*args).flatten(1))
    return values[:, None], ue8m0_scale(byte)[:, None]


def check(got: Pair, want: Pair) -> None:
    for a, b in zip(got, want, strict=True):
        assert_bitwise(a, b)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", WO_A)
def test_layers_of_the_models(name: str, tokens: int) -> None:
    args = products.arguments(name, tokens)
    got = fp8_grouped_einsum_quant(*args)
    check(got, apart(args))
    for result, expected in zip(got, REFERENCES["fp8_grouped_einsum_quant"](*args), strict=True):
        assert (result.shape, result.stride()) == (expected.shape, expected.stride())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("tokens", "groups", "heads", "rows"),
    [(1, 8, 8, 1024), (7, 3, 5, 128), (40, 1, 2, 384), (90, 5, 1, 640), (300, 2, 10, 256)],
)
def test_it_reads_what_the_inverse_rotation_wrote(
    tokens: int, groups: int, heads: int, rows: int, packed: bool
) -> None:
    o, table = torch.randn(tokens, groups * heads, 512, device="cuda").bfloat16(), torch.randn(9, 64, device="cuda")
    positions = torch.arange(tokens, device="cuda") % 9
    a = REFERENCES["inv_rope_fp8_quant"](o, positions, table, groups, heads, packed)
    _, _, b, scale = products.gemm.Layer("fp8_grouped_einsum", "", rows, heads * 512, groups).arguments(
        1, products.CUDA, 0
    )
    check(fp8_grouped_einsum_quant(*a, b, scale), apart((*a, b, scale)))


@pytest.mark.parametrize("tokens", TOKENS)
def test_rows_of_zeros_and_nan_keep_to_themselves(tokens: int) -> None:
    """And rows so small, or so large, that their scales are the least and the largest there are."""
    a, a_scale, b, b_scale = products.arguments(WO_A[0], tokens)
    a[tokens // 2] = 0
    a_scale[tokens // 3] *= 2.0**-60
    a_scale[tokens - 1] *= 2.0**60
    a[tokens - 1, 3, 7] = torch.nan
    got = fp8_grouped_einsum_quant(a, a_scale, b, b_scale)
    check(got, apart((a, a_scale, b, b_scale)))
    rows = b.shape[0] // a.shape[1]
    nan = got[0][:, 0].float().isnan()
    assert nan[-1, 3 * rows : 4 * rows].all() and nan.sum() == rows


@pytest.mark.parametrize("tokens", [0, 5, 70])
def test_operands_of_any_strides_and_no_token(tokens: int) -> None:
    a, a_scale, b, b_scale = products.arguments(WO_A[0], tokens)
    spread = a.new_empty(tokens, a.shape[1], a.shape[2] + 16)[..., : a.shape[2]].copy_(a)
    wide = torch.cat([b.view(torch.uint8)] * 2, 1).view(b.dtype)
    args = spread, a_scale.contiguous(), wide[:, : b.shape[1]], b_scale.clone()
    check(fp8_grouped_einsum_quant(*args), apart(args))


@pytest.mark.parametrize("tokens", [*TOKENS, 1024, 1027, 4096])
@pytest.mark.parametrize(("first", "second"), list(zip(WO_A, WO_B, strict=True)))
def test_the_next_product_takes_it_as_it_is(first: str, second: str, tokens: int) -> None:
    args = products.arguments(first, tokens)
    _, weight, scale = products.arguments(second, 1)
    for form in (scale, scale.view(torch.float8_e8m0fnu), ue8m0_scale(scale)):
        values = fp8_grouped_einsum_quant(*args)
        products.check("fp8_grouped_einsum", fp8_grouped_einsum, (*values, weight, form))
        got = fp8_grouped_einsum(*values, weight, form).squeeze(1)
        want = fp8_linear(fp8_grouped_einsum(*args).flatten(1), weight, form)
        assert products.gemm.differs([got], [want], tolerance=products.gemm.TOLERANCE["fp8_linear"]) == ""


def laid_out(args: tuple[Any, ...]) -> Tensor:
    """Both results as bytes of one tensor, for the checks that products have in common."""
    return torch.cat([result.flatten().view(torch.uint8) for result in fp8_grouped_einsum_quant(*args)])


@pytest.mark.parametrize("tokens", TOKENS)
def test_a_hundred_repeats_are_equal(tokens: int) -> None:
    products.repeats_are_equal(lambda *args: laid_out(args), products.arguments(WO_A[0], tokens))


@pytest.mark.parametrize("tokens", [1, 32, 64, 100, 128])
def test_streams_and_captures(tokens: int) -> None:
    args = products.arguments(WO_A[0], tokens)
    products.streams_do_not_share_counters(lambda *args: laid_out(args), args)
    fp8_grouped_einsum_quant(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [fp8_grouped_einsum_quant(*args) for _ in range(2)]
    for _ in range(3):
        args[0].copy_(args[0].flip(0))
        graph.replay()
        for got in captured:
            check(got, apart(args))


@pytest.mark.parametrize("tokens", [1, 8, 17, 64, 128])
def test_a_launch_reads_what_the_one_before_has_written(tokens: int) -> None:
    """Launches may start before those in front of them end: both products, each with the last one's result."""
    generator = torch.Generator("cuda").manual_seed(5)

    def layer(groups: int, rows: int, size: int) -> tuple[Tensor, Tensor]:
        _, _, b, scale = products.gemm.Layer("fp8_grouped_einsum", "", rows, size, groups).arguments(
            1, products.CUDA, 3
        )
        return b, scale + 2

    wo_a, wo_b = layer(8, 512, 512), layer(1, 4096, 4096)
    values = torch.randn(tokens, 1, 4096, device="cuda", generator=generator).to(torch.float8_e4m3fn)
    scale = torch.ones(tokens, 1, 32, device="cuda")

    def chain(wait: bool) -> Pair:
        x, x_scale = values, scale
        for _ in range(4):
            for weights, groups in ((wo_a, 8), (wo_b, 1)):
                x, x_scale = x.view(tokens, groups, -1), x_scale.reshape(tokens, groups, -1)
                x, x_scale = fp8_grouped_einsum_quant(x, x_scale, *weights)
                if wait:
                    torch.cuda.synchronize()
        return x, x_scale

    want = chain(wait=True)
    assert want[1].isfinite().all() and want[0].float().std() > 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(wait=False)
    for _ in range(20):
        check(chain(wait=False), want)
        graph.replay()
        check(captured, want)


def test_compiled_on_hopper_an_output_projection_quantises_its_middle_once() -> None:
    """One graph for every number of tokens; on other GPUs as it is written."""
    ops, (_, _, *wo_a), (_, *wo_b) = torch.ops.dsv4, products.arguments(WO_A[0], 1), products.arguments(WO_B[0], 1)
    table = torch.randn(4096, 64, device="cuda")

    def projected(o: Tensor, positions: Tensor) -> Any:
        a = ops.inv_rope_fp8_quant(o, positions, table, 8, 8)
        return ops.fp8_linear(ops.fp8_grouped_einsum(*a, *wo_a).flatten(1), *wo_b)

    options = {"dsv4.impl.inv_rope_fp8_quant": "triton"}
    call = torch.compile(projected, backend="dsv4", fullgraph=True, options=options)
    with torch.no_grad(), decisions.collect() as decided:
        for tokens in (9, 16, 17, 64, 128, 300, 1024, 1027):
            args = torch.randn(tokens, 64, 512, device="cuda").bfloat16(), torch.arange(tokens, device="cuda")
            for operand in args:
                torch._dynamo.mark_dynamic(operand, 0)
            with torch._dynamo.config.patch(error_on_recompile=tokens != 9):
                got = call(*args)
            assert products.gemm.differs([got], [projected(*args)], products.gemm.TOLERANCE["fp8_linear"]) == ""
    hopper = gpu_of(products.CUDA).capability == SM90
    assert [(fusion.into, fusion.fused) for fusion in decided.fusions] == [("fp8_grouped_einsum_quant", hopper)]


def test_the_op_takes_the_kernel() -> None:
    args = products.arguments(WO_A[0], 9)
    check(torch.ops.dsv4.fp8_grouped_einsum_quant(*args), fp8_grouped_einsum_quant(*args))
