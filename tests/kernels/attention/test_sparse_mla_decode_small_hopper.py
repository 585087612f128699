"""The Hopper decode kernel for few tokens, simulated: see simulated_gluon.py for what that means."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dsv4_compile.ops.attention.inv_rope import inv_rope, inv_rope_fp8_quant
from dsv4_compile.ops.attention.sparse_mla_decode import sparse_mla_decode
from dsv4_compile.testing import assert_bitwise
from tests.ops.attention.sparse_mla_calls import EPS, call, positional
from tests.simulator.decode import BF16, assert_same, run
from tests.simulator.gluon import simulated

pytestmark = pytest.mark.interpreted


@pytest.fixture(scope="module")
def small() -> Any:
    return simulated("attention.sparse_mla_decode_sm90_few_tokens")


@pytest.mark.parametrize(("splits", "heads"), [(1, 16), (3, 64), (1, 5), (2, 33), (9, 128)])
def test_hostile_rows_give_the_references_result(small: Any, splits: int, heads: int) -> None:
    arguments = call(3, heads, window=130, extra=350, **BF16)
    want = sparse_mla_decode(*positional(arguments)[:13])
    assert_same(run(small, arguments, splits), want)


ONCE = [(9, (16, 64, 4, True, True)), (6, (16, 128, 8, True, True)), (5, (32, 128, 8, True, True))]


@pytest.mark.parametrize(
    ("splits", "shape"), [(1, (16, 128, 16)), (2, (32, 64, 8)), (3, (32, 128, 16)), (4, ONCE[2][1]), *ONCE]
)
def test_programs_of_every_shape(small: Any, monkeypatch: pytest.MonkeyPatch, splits: int, shape: Any) -> None:
    arguments = call(2, 40, window=130, extra=350, **BF16)
    want = sparse_mla_decode(*positional(arguments | {"q_norm_eps": EPS}))
    monkeypatch.setattr(small, "shape_of", lambda *_: small.Shape(*shape))
    assert_same(run(small, arguments, splits, q_norm_eps=EPS), want)


def test_what_arrives_while_it_waits_is_attended(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read before the kernel in front has ended is of another step: slots, lengths, positions, queries."""
    arguments = call(3, 40, window=130, extra=350, **BF16)
    want = sparse_mla_decode(*positional(arguments | {"q_norm_eps": EPS}))
    late = {name: arguments[name] for name in ("q", "indices", "lens", "extra_indices", "extra_lens", "positions")}
    true = {name: x.clone() for name, x in late.items()}

    def spoil() -> None:
        for x in late.values():
            x.copy_(x.flatten().flip(0).view(x.shape) // 2)

    def arrive() -> None:
        for name, x in late.items():
            x.copy_(true[name])

    names = small.sparse_mla_decode_small_hopper_kernel.function.__globals__
    monkeypatch.setitem(names, "gdc_launch_dependents", spoil)
    monkeypatch.setitem(names, "gdc_wait", arrive)
    for shape in (small.NARROW, small.ONCE[1]._replace(late=False)):
        monkeypatch.setattr(small, "shape_of", lambda *_, shape=shape: shape)
        assert_same(run(small, arguments, 6, q_norm_eps=EPS), want)


def test_a_block_alone_is_attended_as_in_a_row_of_blocks(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a program has one block, code for one and code for several give the same bits."""
    arguments = call(2, 40, window=130, extra=350, **BF16)
    results = []
    for once in (False, True):
        monkeypatch.setattr(small, "shape_of", lambda *_, once=once: small.Shape(16, 64, 4, True, once))
        results.append(run(small, arguments, 9, q_norm_eps=EPS, inverse_rope=True))
    for a, b in zip(*results, strict=True):
        assert_bitwise(a, b)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("sink", [None, -math.inf, math.inf])
def test_sinks_that_take_nothing_or_everything(small: Any, splits: int, sink: float | None) -> None:
    arguments = call(2, 64, window=70, extra=10, **BF16)
    arguments["attn_sink"] = None if sink is None else torch.full((64,), sink)
    want = sparse_mla_decode(*positional(arguments)[:13])
    got = run(small, arguments, splits)
    assert_same(got, want)
    assert sink != math.inf or (got[0] == 0).all()


@pytest.mark.parametrize("splits", [1, 2])
def test_both_ends_are_fused_as_by_the_ops_of_their_own(small: Any, splits: int) -> None:
    arguments = call(2, 72, window=70, extra=10, **BF16)
    want = sparse_mla_decode(*positional(arguments | {"q_norm_eps": EPS}))
    out, lse = run(small, arguments, splits, q_norm_eps=EPS)
    assert_same((out, lse), want)
    got = run(small, arguments, splits, q_norm_eps=EPS, inverse_rope=True)
    assert_bitwise(got[0], inv_rope(out, arguments["positions"], arguments["cos_sin_cache"]))
    assert_bitwise(got[1], lse)


@pytest.mark.parametrize(
    ("tokens", "heads", "groups", "splits"),
    [(1, 64, (8, 8, True), 1), (5, 64, (3, 21, False), 1), (2, 70, (7, 10, False), 1), (2, 64, (1, 64, True), 2)],
)
def test_quantised_rows_are_those_of_the_op_of_its_own(
    small: Any, tokens: int, heads: int, groups: tuple[int, int, bool], splits: int
) -> None:
    arguments = call(tokens, heads, window=70, extra=10, **BF16)
    out, _ = run(small, arguments, splits)
    want = inv_rope_fp8_quant(out, arguments["positions"], arguments["cos_sin_cache"], *groups)
    for a, b in zip(run(small, arguments, splits, groups, inverse_rope=True), want, strict=True):
        assert_bitwise(a, b, strides=True)
