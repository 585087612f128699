"""Fusion of the indexer's top-k with the map to slots, and of its queries with a cast; results are equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.testing import assert_bitwise
from dsv4_compile.testing.samples import op_samples
from tests.backend.functional import Fused, fused

HEADS, D = 4, 128
ops: Any = torch.ops.dsv4
Results = list[Tensor]


class Layer:
    """The indexer of a CSA layer after a float32 projection."""

    def __init__(self) -> None:
        args = op_samples("indexer_topk_slots")[0]
        _, _, _, self.cache, self.table, self.owner, self.lens, self.block, self.fmt, self.topk, *rest = args
        self.extra, self.valid, self.extra_block = rest
        self.tokens = len(self.valid)
        self.q = torch.randn(self.tokens, HEADS, D).bfloat16()
        self.weights = torch.randn(self.tokens, HEADS) * 1.01
        self.positions, self.rope = torch.arange(self.tokens), torch.randn(32, 64)

    def queries(self, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, scale, folded = ops.indexer_q_rope_quant(self.q, self.positions, self.rope, weights, self.fmt, True)
        return q, scale, folded

    def select(self, *queries: Tensor) -> Tensor:
        chosen: Tensor = ops.indexer_logits_topk(
            *queries, self.cache, self.table, self.owner, self.lens, self.block, self.fmt, self.topk
        )
        return chosen

    def slots(self, chosen: Tensor, owner: Tensor | None = None) -> tuple[Tensor, Tensor]:
        owner = self.owner if owner is None else owner
        slots, lens = ops.global_topk(chosen, owner, self.extra, self.valid, self.extra_block)
        return slots, lens

    def whole(self) -> Results:
        return list(self.slots(self.select(*self.queries(self.weights.to(torch.bfloat16)))))


def compare(body: Callable[[], Results], options: dict[str, Any] | None = None) -> Fused:
    """Compare the results with those of the unfused graph."""
    with torch.no_grad():
        result = fused(body, options)
        for got, want in zip(result.call(), body(), strict=True):
            assert_bitwise(got, want)
    return result


def test_the_topk_and_its_map_become_one_op_and_the_weights_are_not_cast() -> None:
    result = compare(Layer().whole)
    assert result.ops == {"indexer_q_rope_quant": 1, "indexer_topk_slots": 1}
    assert result.targets["convert_element_type"] == 0
    assert [(f.by, f.ops, f.into) for f in result.fusions] == [
        ("fuse_indexer", ("convert_element_type", "indexer_q_rope_quant"), "indexer_q_rope_quant"),
        ("fuse_indexer", ("indexer_logits_topk", "global_topk"), "indexer_topk_slots"),
    ]
    assert all(fusion.fused for fusion in result.fusions)


def test_inputs_of_the_map_may_be_computed_after_the_topk() -> None:
    layer = Layer()

    def body() -> Results:
        chosen = layer.select(*layer.queries(layer.weights))
        return list(ops.global_topk(chosen, layer.owner, layer.extra + 1, layer.lens > 2, layer.extra_block))

    assert compare(body).ops["indexer_topk_slots"] == 1


@pytest.mark.parametrize("index", [0, 1])
def test_one_of_the_results_may_be_unused(index: int) -> None:
    layer = Layer()
    assert compare(lambda: [layer.whole()[index]]).ops["indexer_topk_slots"] == 1


def test_a_topk_with_another_user_is_not_fused() -> None:
    layer = Layer()

    def body() -> Results:
        chosen = layer.select(*layer.queries(layer.weights))
        return [*layer.slots(chosen), chosen + 1]

    result = compare(body)
    assert result.ops["global_topk"] == 1
    assert result.reasons == ["the result of indexer_logits_topk is also used by aten.add.Tensor"]


def test_a_map_with_another_token_to_req_is_not_fused() -> None:
    layer = Layer()
    result = compare(lambda: list(layer.slots(layer.select(*layer.queries(layer.weights)), layer.owner.clone())))
    assert result.ops["global_topk"] == 1
    assert result.reasons == ["global_topk has a different token_to_req"]


def test_a_map_whose_input_depends_on_the_topk_is_not_fused() -> None:
    layer = Layer()

    def body() -> Results:
        chosen = layer.select(*layer.queries(layer.weights))
        valid = chosen[:, 0] >= 0
        return list(ops.global_topk(chosen, layer.owner, layer.extra, valid, layer.extra_block))

    assert compare(body).reasons == ["the result of indexer_logits_topk is also used by aten.select.int"]


def test_a_map_whose_table_is_computed_from_a_buffer_written_between_is_not_fused() -> None:
    layer = Layer()

    def body() -> Results:
        chosen = layer.select(*layer.queries(layer.weights))
        window, kv = torch.zeros(1, 64, 64), torch.ones(1, 64)
        first = torch.zeros(1, dtype=torch.int64)
        ops.kv_rope_insert(kv, window, first, first, layer.rope, 64, "plain")
        extra = layer.extra + window[0, 1, 0].int()
        return list(ops.global_topk(chosen, layer.owner, extra, layer.valid, layer.extra_block))

    result = compare(body)
    assert result.ops["global_topk"] == 1
    assert result.reasons == ["an input of the group depends on kv_rope_insert, which writes a buffer"]


def test_rounded_weights_with_another_user_are_not_fused() -> None:
    layer = Layer()

    def body() -> Results:
        rounded = layer.weights.to(torch.bfloat16)
        return [layer.queries(rounded)[2], rounded + 1]

    result = compare(body)
    assert result.reasons == ["the rounded weights are also used by aten.add.Tensor"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_only_a_cast_of_float32_to_the_dtype_of_q_is_fused(dtype: torch.dtype) -> None:
    layer = Layer()
    result = compare(lambda: [layer.queries(layer.weights.to(dtype))[2]])
    assert result.targets["convert_element_type"] == (dtype is torch.float16)
    assert len(result.fusions) == (dtype is torch.bfloat16)


@pytest.fixture
def kernels() -> Iterator[None]:
    """Register the references of the ops as CPU kernels."""
    library = torch.library.Library("dsv4", "IMPL")
    for name in ("indexer_topk_slots", "indexer_logits_topk", "global_topk"):
        library.impl(name, REFERENCES[name], "CPU")
    yield
    library._destroy()


@pytest.mark.parametrize(
    ("options", "fuses"),
    [
        ({}, True),
        ({"dsv4.fuse.fuse_indexer": "off"}, False),
        ({"dsv4.fuse": "off"}, False),
        ({"dsv4.impl.global_topk": "triton"}, False),
        ({"dsv4.impl.indexer_topk_slots": "eager"}, False),
    ],
)
def test_auto_fuses_if_the_kernel_would_run_and_no_op_is_demanded(
    kernels: None, options: dict[str, str], fuses: bool
) -> None:
    result = compare(Layer().whole, options)
    assert result.ops["indexer_topk_slots"] == fuses
    assert result.ops["global_topk"] == (not fuses)


def test_auto_does_not_fuse_into_an_op_that_would_run_its_reference() -> None:
    result = compare(Layer().whole, {})
    assert result.ops == {"indexer_q_rope_quant": 1, "indexer_logits_topk": 1, "global_topk": 1}
    assert [reason.partition(": ")[0] for reason in result.reasons] == [
        "indexer_q_rope_quant would run its reference",
        "indexer_topk_slots would run its reference",
    ]
