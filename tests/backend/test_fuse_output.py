"""Fusion of wo_a with the quantization of its result for wo_b. Values are integers, so results are equal."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.passes import fusion
from dsv4_compile.selection import decisions, proven
from dsv4_compile.testing import assert_bitwise
from tests.backend.functional import Fused, fused

T, G, K = 6, 2, 256
FIRST, SECOND, INTO = "fp8_grouped_einsum", "fp8_linear", "fp8_grouped_einsum_quant"
UNFUSED, FUSED = {FIRST: 1, SECOND: 1}, {INTO: 1, FIRST: 1}
ops: Any = torch.ops.dsv4


def whole(*shape: int, most: int = 2) -> Tensor:
    return torch.randint(-most, most + 1, shape).to(torch.float8_e4m3fn)


class Layer:
    """An output projection with quantized operands."""

    def __init__(self, rows: int = 128) -> None:
        self.a, self.a_scale = whole(T, G, K), torch.ones(T, G, K // 128)
        self.wo_a, self.wo_a_scale = whole(G * rows, K), torch.ones(-(-G * rows // 128), K // 128)
        self.wo_b = whole(96, G * rows, most=1)
        self.wo_b_scale = torch.full((1, -(-G * rows // 128)), 127, dtype=torch.uint8)

    def first(self) -> Tensor:
        out: Tensor = ops.fp8_grouped_einsum(self.a, self.a_scale, self.wo_a, self.wo_a_scale)
        return out

    def second(self, x: Tensor, *options: Any) -> Tensor:
        out: Tensor = ops.fp8_linear(x, self.wo_b, self.wo_b_scale, *options)
        return out

    def whole(self) -> Tensor:
        return self.second(self.first().flatten(1)) * 2


def compare(body: Callable[[], Tensor], options: dict[str, Any] | None = None) -> Fused:
    """Compare the results with those of the unfused graph."""
    with torch.no_grad():
        result = fused(body, options)
        assert_bitwise(result.call(), body(), strides=True)
    return result


def test_the_first_gemm_quantizes_for_the_second() -> None:
    result = compare(Layer().whole)
    assert result.ops == FUSED
    (fusion,) = result.fusions
    assert (fusion.by, fusion.ops, fusion.into, fusion.fused) == ("fuse_output", (FIRST, SECOND), INTO, True)


@pytest.mark.parametrize(
    "view",
    [
        lambda z: z.reshape(T, 2 * 128),
        lambda z: z.view(-1, 256),
        lambda z: z.flatten(1).view(T, 1, 256).squeeze(1),
        lambda z: z.view(T, 256).unsqueeze(0).squeeze(0),
    ],
)
def test_any_view_that_concatenates_the_groups_is_fused(view: Callable[[Tensor], Tensor]) -> None:
    layer = Layer()
    assert compare(lambda: layer.second(view(layer.first()))).ops == FUSED


def test_a_result_with_another_user_is_not_fused() -> None:
    layer = Layer()

    def body() -> Tensor:
        z = layer.first()
        return layer.second(z.flatten(1)) + z.sum((1, 2))[:, None]

    result = compare(body)
    assert result.ops == UNFUSED
    assert result.reasons == ["the result of fp8_grouped_einsum is also used by aten.sum.dim_IntList"]


def test_a_view_with_another_user_is_not_fused() -> None:
    layer = Layer()

    def body() -> Tensor:
        z = layer.first().flatten(1)
        return layer.second(z) + z.sum(1)[:, None]

    result = compare(body)
    assert result.ops == UNFUSED
    assert result.reasons == ["the result of fp8_grouped_einsum is also used by aten.sum.dim_IntList"]


def test_a_linear_with_a_second_layer_is_not_fused() -> None:
    layer, other = Layer(), torch.randint(-2, 3, (8, 256)).bfloat16()
    result = compare(lambda: layer.second(layer.first().flatten(1), True, other))
    assert result.ops == UNFUSED
    assert result.reasons == ["fp8_linear has a second layer (beside=), whose input is not quantized"]


def test_groups_that_share_a_scale_are_not_fused() -> None:
    result = compare(Layer(rows=64).whole)
    assert result.ops == UNFUSED
    assert result.reasons == ["a group has 64 rows, not a multiple of 128, the elements of a scale"]


def test_a_view_that_concatenates_tokens_is_not_fused() -> None:
    layer, wide = Layer(), whole(96, 512, most=1)
    scale = torch.ones(1, 4)
    result = compare(lambda: torch.ops.dsv4.fp8_linear(layer.first().view(T // 2, 512), wide, scale))
    assert result.ops == UNFUSED
    assert result.reasons == ["fp8_linear does not take the result of fp8_grouped_einsum as [T, G * N]"]


@pytest.mark.parametrize(
    "between", [lambda z: z.transpose(0, 1).reshape(T, 256), lambda z: z.flatten(1) * 2, lambda z: z.flatten(1).float()]
)
def test_an_input_that_is_not_a_view_of_the_result_is_no_candidate(between: Callable[[Tensor], Tensor]) -> None:
    layer = Layer()
    result = compare(lambda: layer.second(between(layer.first())))
    assert result.ops == UNFUSED and not result.fusions


def test_an_input_that_is_not_quantized_is_no_candidate() -> None:
    layer = Layer()
    result = compare(lambda: layer.second(layer.first().flatten(1), False))
    assert result.ops == UNFUSED and not result.fusions


def test_one_graph_serves_every_token_count() -> None:
    layer = Layer()

    def step(a: Tensor, a_scale: Tensor) -> Tensor:
        layer.a, layer.a_scale = a, a_scale
        return layer.whole()

    result = fused(step)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (5, 3, 129):
            a, a_scale = whole(tokens, G, K), torch.ones(tokens, G, K // 128)
            torch._dynamo.mark_dynamic(a, 0)
            torch._dynamo.mark_dynamic(a_scale, 0)
            assert_bitwise(result.call(a, a_scale), step(a, a_scale))
            assert result.ops == FUSED


@pytest.fixture
def kernels() -> Iterator[None]:
    """Register the references of the ops as CPU kernels, proven on every GPU."""
    library = torch.library.Library("dsv4", "IMPL")
    for name in (FIRST, SECOND, INTO):
        library.impl(name, REFERENCES[name], "CPU")
    with proven.trust():
        yield
    library._destroy()


def on(monkeypatch: pytest.MonkeyPatch, architecture: str) -> None:
    """Choose implementations as on `architecture`; the references run."""
    describe = fusion.describe
    monkeypatch.setattr(
        fusion, "describe", lambda *args: dataclasses.replace(describe(*args), architecture=architecture)
    )


@pytest.mark.parametrize(
    ("options", "fuses"),
    [
        ({}, True),
        ({"dsv4.fuse.fuse_output": "off"}, False),
        ({"dsv4.fuse": "off"}, False),
        ({"dsv4.impl.fp8_linear": "triton"}, False),
        ({"dsv4.impl.fp8_grouped_einsum": "eager"}, False),
        ({"dsv4.impl.fp8_grouped_einsum_quant": "eager"}, False),
    ],
)
def test_auto_fuses_on_hopper_if_the_kernels_would_run_and_no_op_is_demanded(
    kernels: None, monkeypatch: pytest.MonkeyPatch, options: dict[str, str], fuses: bool
) -> None:
    on(monkeypatch, "cuda sm_90")
    assert compare(Layer().whole, options).ops == (FUSED if fuses else UNFUSED)


@pytest.mark.parametrize("architecture", ["cuda sm_80", "cuda sm_100", "cuda gfx942"])
def test_auto_does_not_fuse_on_architectures_where_few_tokens_get_slower(
    kernels: None, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    on(monkeypatch, architecture)
    result = compare(Layer().whole, {})
    assert result.ops == UNFUSED
    assert result.reasons == [f"{architecture}: with few tokens the second GEMM quantizes its input itself"]
    assert compare(Layer().whole, {"dsv4.fuse": "on"}).ops == FUSED


def test_auto_does_not_fuse_into_an_op_that_would_run_its_reference() -> None:
    result = compare(Layer().whole, {})
    assert result.ops == UNFUSED
    assert [reason.partition(": ")[0] for reason in result.reasons] == [f"{INTO} would run its reference"]


def test_compared_times_include_all_calls(kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first GEMM takes longer because it quantizes; the sum of both decides."""
    us = {FIRST: 5.0, SECOND: 9.0, INTO: 6.0}
    on(monkeypatch, "cuda sm_90")
    impls = {FIRST: "inductor", SECOND: "inductor", INTO: "triton"}
    foreseen = {op: decisions.Decision(op, impl, f"as {op}") for op, impl in impls.items()}
    monkeypatch.setattr(fusion.registry, "foresee", lambda call, options: foreseen[call.op])
    monkeypatch.setattr(fusion.registry, "microseconds", lambda call, decision: us[call.op])
    result = compare(Layer().whole, {})
    assert result.ops == FUSED
    times = "measured at the nearest size: fused 11.0 us, separate 14.0 us"
    assert result.fusions[0].reason == f"triton: as {INTO}; {times}"
    us[SECOND] = 5.0
    assert compare(Layer().whole, {}).reasons == ["measured at the nearest size: fused 11.0 us, separate 10.0 us"]
