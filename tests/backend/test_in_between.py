"""What stands between ops that are merged, or that it keeps apart: how it is called, and what moves in front."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.testing import assert_bitwise
from tests.backend.functional import merged
from tests.backend.test_merging import EPS, Layer, compare

ops: Any = torch.ops.dsv4


@pytest.fixture
def foreign() -> Iterator[Any]:
    """Somebody else's op, which writes what it is given."""

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
    assert result.reasons == ["dsv4_in_between.halve_ writes window_cache in between"]


def test_a_foreign_op_that_writes_what_is_taken_is_named(foreign: Any) -> None:
    layer = Layer()

    def between(place: str, caches: dict[str, Tensor]) -> None:
        if place == "norm":
            layer.score = caches["main"].new_ones(layer.score.shape)
            foreign(layer.score)

    result = compare(between, layer=layer)
    assert result.ops["preprocess_insert"] == result.ops["save_partial_states"] == 1
    assert result.reasons == ["dsv4_in_between.halve_ stands between and writes what they use"]


def test_a_cache_that_is_one_of_several_results_has_the_name_of_what_gives_them() -> None:
    layer = Layer()

    def run(caches: dict[str, Tensor]) -> list[Tensor]:
        qr, kv = ops.fused_q_kv_rmsnorm(layer.latent, layer.kv, layer.q_weight, layer.kv_weight, EPS)
        # A maximum along a dim gives two results; the cache that is written is one of them.
        window = caches["window"].max(dim=1, keepdim=True).values
        ops.kv_rope_insert(kv, window, layer.slots * 0, layer.positions, layer.table, 1, "plain")
        return [qr, window]

    layer.run = lambda caches, between: run(caches)  # type: ignore[method-assign]
    assert compare(layer=layer, keep=slice(0, 2)).reasons == ["aten.max.dim writes window_cache in between"]


@torch.no_grad()
def test_where_a_part_of_a_cache_begins_is_calculated_in_front() -> None:
    layer = Layer()

    def run(window: Tensor, latent: Tensor) -> Tensor:
        qr, kv = ops.fused_q_kv_rmsnorm(latent, layer.kv, layer.q_weight, layer.kv_weight, EPS)
        part = window[(qr.shape[0] + 1) // 3 :]
        ops.kv_rope_insert(kv, part, layer.slots, layer.positions, layer.table, 64, "plain")
        return qr

    expected = torch.randn(4, 64, layer.kv.shape[1])
    got = expected.clone()
    result = merged(run, dynamic=True)
    assert_bitwise(result.call(got, layer.latent), run(expected, layer.latent))
    assert_bitwise(got, expected)
    assert result.ops == {"preprocess_insert": 1}
