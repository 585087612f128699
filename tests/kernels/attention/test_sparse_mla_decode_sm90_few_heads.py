"""The decode kernel for few heads on sm_90, simulated by tests/simulator/gluon.py."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from dsv4_compile.kernels.attention import split_combine
from dsv4_compile.ops.attention.inv_rope import inv_rope, inv_rope_fp8_quant
from dsv4_compile.ops.attention.sparse_mla_decode import sparse_mla_decode
from dsv4_compile.testing import assert_bitwise
from tests.ops.attention.sparse_mla_calls import EPS, call, positional
from tests.simulator import copies
from tests.simulator import gluon as simulated_gluon
from tests.simulator.copies import simulated
from tests.simulator.decode import BF16, PLAIN, assert_same, row_alone, run

pytestmark = pytest.mark.interpreted


@pytest.fixture(scope="module")
def few() -> Iterator[Any]:
    with mock.patch.object(copies, "THREADS", 256):  # two warpgroups copy
        yield simulated("attention.sparse_mla_decode_sm90_few_heads")


@pytest.mark.parametrize(("splits", "heads"), [(1, 8), (3, 16), (1, 5), (2, 17), (1, 32)])
def test_hostile_rows_give_the_references_result(few: Any, splits: int, heads: int) -> None:
    arguments = call(3, heads, window=130, extra=350, **BF16)
    want = sparse_mla_decode(*positional(arguments)[:13])
    assert_same(run(few, arguments, splits), want)


@pytest.mark.parametrize(("splits", "heads"), [(1, 8), (3, 16), (1, 5), (1, 32)])
def test_rows_of_bfloat16_are_copied(few: Any, splits: int, heads: int) -> None:
    arguments = call(3, heads, window=130, extra=350, **PLAIN)
    want = sparse_mla_decode(*positional(arguments)[:13])
    assert_same(run(few, arguments, splits), want)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("sink", [None, -math.inf, math.inf])
def test_sinks_that_keep_all_or_nothing_of_the_output(few: Any, splits: int, sink: float | None) -> None:
    arguments = call(2, 8, window=70, extra=10, **BF16)
    arguments["attn_sink"] = None if sink is None else torch.full((8,), sink)
    want = sparse_mla_decode(*positional(arguments)[:13])
    got = run(few, arguments, splits)
    assert_same(got, want)
    assert sink != math.inf or (got[0] == 0).all()


@pytest.mark.parametrize("splits", [1, 2])
def test_prologue_and_epilogue_are_those_of_the_separate_ops(few: Any, splits: int) -> None:
    arguments = call(2, 12, window=70, extra=10, **BF16)
    want = sparse_mla_decode(*positional(arguments | {"q_norm_eps": EPS}))
    out, lse = run(few, arguments, splits, q_norm_eps=EPS)
    assert_same((out, lse), want)
    got = run(few, arguments, splits, q_norm_eps=EPS, inverse_rope=True)
    assert_bitwise(got[0], inv_rope(out, arguments["positions"], arguments["cos_sin_cache"]))
    assert_bitwise(got[1], lse)


@pytest.mark.parametrize(
    ("tokens", "heads", "groups", "splits"),
    [(1, 8, (1, 8, True), 1), (5, 24, (3, 8, False), 1), (3, 32, (2, 16, True), 1), (2, 10, (1, 10, False), 2)],
)
def test_quantised_rows_are_those_of_inv_rope_fp8_quant(
    few: Any, tokens: int, heads: int, groups: tuple[int, int, bool], splits: int
) -> None:
    arguments = call(tokens, heads, window=70, extra=10, **BF16)
    out, _ = run(few, arguments, splits)
    want = inv_rope_fp8_quant(out, arguments["positions"], arguments["cos_sin_cache"], *groups)
    for a, b in zip(run(few, arguments, splits, groups, inverse_rope=True), want, strict=True):
        assert_bitwise(a, b, strides=True)


def test_a_row_does_not_depend_on_its_batch(few: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_combine, "INVARIANT_KEYS", 128)
    monkeypatch.setattr(split_combine, "MAX_PARTIAL_BYTES", 1)  # a launch for each token
    arguments = call(3, 8, window=200, extra=130, **BF16)
    arguments |= {"lens": torch.tensor([200, 70, 3]), "extra_lens": torch.tensor([130, 0, 1])}
    want = run(few, arguments, 0, batch_invariant=True)
    monkeypatch.setattr(split_combine, "MAX_PARTIAL_BYTES", 2**28)
    for t in range(3):
        for got, expected in zip(run(few, row_alone(arguments, t), 0, batch_invariant=True), want, strict=True):
            assert_bitwise(got, expected[t : t + 1])


@pytest.mark.parametrize("name", ["wait", "arrive"])
def test_a_kernel_without_its_barriers_fails(few: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The simulation proves nothing unless it fails for a kernel that is wrong."""
    barriers = few.sparse_mla_decode_sm90_few_heads_kernel.function.__globals__["mbarrier"]
    monkeypatch.setattr(barriers, name, lambda *_, **__: None)
    monkeypatch.setattr(simulated_gluon, "SECONDS", 0.5)
    arguments = call(1, 8, window=250, extra=150, **BF16)
    arguments |= {"lens": torch.tensor([250]), "extra_lens": torch.tensor([150])}
    with pytest.raises(AssertionError):
        assert_same(run(few, arguments, 1), sparse_mla_decode(*positional(arguments)[:13]))
