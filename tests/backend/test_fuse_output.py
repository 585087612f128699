"""When wo_a quantises its result for wo_b. Results are equal: no order of adding rounds sums of whole numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.passes import merging
from dsv4_compile.selection import proven
from dsv4_compile.testing import assert_bitwise
from tests.backend.functional import Merged, merged

T, G, K = 6, 2, 256
FIRST, SECOND, INTO = "fp8_grouped_einsum", "fp8_linear", "fp8_grouped_einsum_quant"
APART, TOGETHER = {FIRST: 1, SECOND: 1}, {INTO: 1, FIRST: 1}
ops: Any = torch.ops.dsv4


def whole(*shape: int, most: int = 2) -> Tensor:
    return torch.randint(-most, most + 1, shape).to(torch.float8_e4m3fn)


class Layer:
    """An output projection on quantised operands."""

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


def compare(body: Callable[[], Tensor], options: dict[str, Any] | None = None) -> Merged:
    """Results equal those of the graph that is not merged."""
    with torch.no_grad():
        result = merged(body, options)
        assert_bitwise(result.call(), body(), strides=True)
    return result


def test_the_first_product_quantises_for_the_second() -> None:
    result = compare(Layer().whole)
    assert result.ops == TOGETHER
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
def test_any_way_to_lay_the_groups_side_by_side_will_do(view: Callable[[Tensor], Tensor]) -> None:
    layer = Layer()
    assert compare(lambda: layer.second(view(layer.first()))).ops == TOGETHER


def test_a_result_that_somebody_else_wants_stays() -> None:
    layer = Layer()

    def body() -> Tensor:
        z = layer.first()
        return layer.second(z.flatten(1)) + z.sum((1, 2))[:, None]

    result = compare(body)
    assert result.ops == APART
    assert result.reasons == ["the result of fp8_grouped_einsum is used elsewhere too, by aten.sum.dim_IntList"]


def test_a_view_that_somebody_else_wants_stays() -> None:
    layer = Layer()

    def body() -> Tensor:
        z = layer.first().flatten(1)
        return layer.second(z) + z.sum(1)[:, None]

    result = compare(body)
    assert result.ops == APART
    assert result.reasons == ["the result of fp8_grouped_einsum is used elsewhere too, by aten.sum.dim_IntList"]


def test_another_layer_beside_the_second_keeps_them_apart() -> None:
    layer, other = Layer(), torch.randint(-2, 3, (8, 256)).bfloat16()
    result = compare(lambda: layer.second(layer.first().flatten(1), True, other))
    assert result.ops == APART
    assert result.reasons == ["fp8_linear has another layer beside it, whose input is not quantised"]


def test_a_strip_of_two_groups_keeps_them_apart() -> None:
    result = compare(Layer(rows=64).whole)
    assert result.ops == APART
    assert result.reasons == ["groups of 64 rows do not divide into strips of 128"]


def test_tokens_side_by_side_keep_them_apart() -> None:
    layer, wide = Layer(), whole(96, 512, most=1)
    scale = torch.ones(1, 4)
    result = compare(lambda: torch.ops.dsv4.fp8_linear(layer.first().view(T // 2, 512), wide, scale))
    assert result.ops == APART
    assert result.reasons == ["fp8_linear takes the groups of fp8_grouped_einsum in another shape than [T, G * N]"]


@pytest.mark.parametrize(
    "between", [lambda z: z.transpose(0, 1).reshape(T, 256), lambda z: z.flatten(1) * 2, lambda z: z.flatten(1).float()]
)
def test_what_is_no_view_of_the_whole_result_is_nothing_to_merge(between: Callable[[Tensor], Tensor]) -> None:
    layer = Layer()
    result = compare(lambda: layer.second(between(layer.first())))
    assert result.ops == APART and not result.fusions


def test_an_input_that_is_not_quantised_is_nothing_to_merge() -> None:
    layer = Layer()
    result = compare(lambda: layer.second(layer.first().flatten(1), False))
    assert result.ops == APART and not result.fusions


def test_one_graph_serves_every_token_count() -> None:
    layer = Layer()

    def step(a: Tensor, a_scale: Tensor) -> Tensor:
        layer.a, layer.a_scale = a, a_scale
        return layer.whole()

    result = merged(step)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (5, 3, 129):
            a, a_scale = whole(tokens, G, K), torch.ones(tokens, G, K // 128)
            torch._dynamo.mark_dynamic(a, 0)
            torch._dynamo.mark_dynamic(a_scale, 0)
            assert_bitwise(result.call(a, a_scale), step(a, a_scale))
            assert result.ops == TOGETHER


@pytest.fixture
def kernels() -> Iterator[None]:
    """Kernels for the ops on the CPU, as device kernels are registered, and proven on every GPU."""
    library = torch.library.Library("dsv4", "IMPL")
    for name in (FIRST, SECOND, INTO):
        library.impl(name, REFERENCES[name], "CPU")
    with proven.trust():
        yield
    library._destroy()


def on(monkeypatch: pytest.MonkeyPatch, architecture: str) -> None:
    """Choices are made as for a GPU; what runs are the references all the same."""
    describe = merging.describe
    monkeypatch.setattr(
        merging, "describe", lambda *args: dataclasses.replace(describe(*args), architecture=architecture)
    )


@pytest.mark.parametrize(
    ("options", "merges"),
    [
        ({}, True),
        ({"dsv4.fuse.fuse_output": "off"}, False),
        ({"dsv4.fuse": "off"}, False),
        ({"dsv4.impl.fp8_linear": "triton"}, False),
        ({"dsv4.impl.fp8_grouped_einsum": "eager"}, False),
        ({"dsv4.impl.fp8_grouped_einsum_quant": "eager"}, False),
    ],
)
def test_auto_merges_on_hopper_where_the_kernels_would_run_and_nobody_asked_for_the_ops(
    kernels: None, monkeypatch: pytest.MonkeyPatch, options: dict[str, str], merges: bool
) -> None:
    on(monkeypatch, "cuda sm_90")
    assert compare(Layer().whole, options).ops == (TOGETHER if merges else APART)


@pytest.mark.parametrize("architecture", ["cuda sm_80", "cuda sm_100", "cuda gfx942"])
def test_auto_leaves_them_apart_where_few_tokens_would_lose_by_it(
    kernels: None, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    on(monkeypatch, architecture)
    result = compare(Layer().whole, {})
    assert result.ops == APART
    assert result.reasons == [f"{architecture}: there few tokens are quantised within the second product"]
    assert compare(Layer().whole, {"dsv4.fuse": "on"}).ops == TOGETHER


def test_auto_leaves_apart_what_would_run_its_reference() -> None:
    result = compare(Layer().whole, {})
    assert result.ops == APART
    assert [reason.partition(": ")[0] for reason in result.reasons] == [f"{INTO} would run its reference"]


def test_times_are_those_of_all_that_is_called(kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first product takes longer for the quantisation: what counts is that both together do not."""
    us = {FIRST: 5.0, SECOND: 9.0, INTO: 6.0}
    on(monkeypatch, "cuda sm_90")
    monkeypatch.setattr(merging.registry, "microseconds", lambda call, decision: us[call.op])
    result = compare(Layer().whole, {})
    assert result.ops == TOGETHER
    assert result.fusions[0].reason.endswith("measured at such a size: 11.0 us, apart 14.0 us")
    us[SECOND] = 5.0
    assert compare(Layer().whole, {}).reasons == ["measured at such a size: 11.0 us, apart 10.0 us"]
