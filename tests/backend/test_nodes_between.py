"""Nodes between the ops of a group: those that prevent fusion are named, those that compute an input are moved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.testing import assert_bitwise
from tests.backend.functional import fused
from tests.backend.test_fusion import EPS, Layer, compare

ops: Any = torch.ops.dsv4


@pytest.fixture
def foreign() -> Iterator[Any]:
    """Register an op of a foreign library that writes its argument."""

    def halve(x: Tensor) -> None:
        x.mul_(0.5)

    library = torch.library.Library("dsv4_in_between", "DEF")
    library.define("halve_(Tensor(a!) x) -> ()")
    library.impl("halve_", halve, "CompositeExplicitAutograd")
    torch.library.register_fake("dsv4_in_between::halve_", lambda x: None, lib=library)
    yield torch.ops.dsv4_in_between.halve_
    library._destroy()


def test_a_foreign_op_that_writes_a_cache_is_named(foreign: Any) -> None:
    result = compare(lambda place, caches: foreign(caches["window"]) if place == "norm" else None)
    assert "preprocess_insert" not in result.ops
    assert result.reasons == ["dsv4_in_between.halve_ writes window_cache between the ops"]


def test_a_foreign_op_that_writes_an_input_is_named(foreign: Any) -> None:
    layer = Layer()

    def between(place: str, caches: dict[str, Tensor]) -> None:
        if place == "norm":
            layer.score = caches["main"].new_ones(layer.score.shape)
            foreign(layer.score)

    result = compare(between, layer=layer)
    assert result.ops["preprocess_insert"] == result.ops["save_partial_states"] == 1
    assert result.reasons == ["an input of the group depends on dsv4_in_between.halve_, which writes a buffer"]


def test_a_cache_that_is_one_of_several_results_is_reported_with_the_op_that_returns_it() -> None:
    layer = Layer()

    def run(caches: dict[str, Tensor]) -> list[Tensor]:
        qr, kv = ops.fused_q_kv_rmsnorm(layer.latent, layer.kv, layer.q_weight, layer.kv_weight, EPS)
        # A maximum along a dim has two results; one of them is the cache.
        window = caches["window"].max(dim=1, keepdim=True).values
        ops.kv_rope_insert(kv, window, layer.slots * 0, layer.positions, layer.table, 1, "plain")
        return [qr, window]

    layer.run = lambda caches, between: run(caches)  # type: ignore[method-assign]
    assert compare(layer=layer, keep=slice(0, 2)).reasons == ["aten.max.dim writes window_cache between the ops"]


@torch.no_grad()
def test_the_offset_of_a_view_of_a_cache_is_computed_before_the_fused_op() -> None:
    layer = Layer()

    def run(window: Tensor, latent: Tensor) -> Tensor:
        qr, kv = ops.fused_q_kv_rmsnorm(latent, layer.kv, layer.q_weight, layer.kv_weight, EPS)
        view = window[(qr.shape[0] + 1) // 3 :]
        ops.kv_rope_insert(kv, view, layer.slots, layer.positions, layer.table, 64, "plain")
        return qr

    expected = torch.randn(4, 64, layer.kv.shape[1])
    got = expected.clone()
    result = fused(run, dynamic=True)
    assert_bitwise(result.call(got, layer.latent), run(expected, layer.latent))
    assert_bitwise(got, expected)
    assert result.ops == {"preprocess_insert": 1}
