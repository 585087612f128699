"""The decode kernel for few tokens on sm_90, simulated by tests/simulator/gluon.py."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dsv4_compile.ops.attention.inv_rope import inv_rope, inv_rope_fp8_quant
from dsv4_compile.ops.attention.sparse_mla_decode import sparse_mla_decode
from dsv4_compile.ops.common.invariance import STEP
from dsv4_compile.testing import assert_bitwise
from tests.ops.attention.sparse_mla_calls import EPS, call, positional
from tests.simulator.copies import simulated
from tests.simulator.decode import BF16, PLAIN, assert_same, row_alone, run

pytestmark = pytest.mark.interpreted


@pytest.fixture(scope="module")
def small() -> Any:
    return simulated("attention.sparse_mla_decode_sm90_few_tokens")


@pytest.mark.parametrize(("splits", "heads"), [(1, 16), (3, 64), (1, 5), (2, 33), (9, 128)])
def test_hostile_rows_give_the_references_result(small: Any, splits: int, heads: int) -> None:
    arguments = call(3, heads, window=130, extra=350, **BF16)
    want = sparse_mla_decode(*positional(arguments)[:13])
    assert_same(run(small, arguments, splits), want)


@pytest.mark.parametrize(("splits", "heads"), [(3, 64), (2, 33)])
def test_rows_of_bfloat16_are_copied(small: Any, splits: int, heads: int) -> None:
    arguments = call(3, heads, window=130, extra=350, **PLAIN)
    want = sparse_mla_decode(*positional(arguments)[:13])
    assert_same(run(small, arguments, splits), want)


ONE_BLOCK = [(9, (16, 64, 4, True, True)), (6, (16, 128, 8, True, True)), (5, (32, 128, 8, True, True))]


@pytest.mark.parametrize(
    ("splits", "tiling"), [(1, (16, 128, 16)), (2, (32, 64, 8)), (3, (32, 128, 16)), (4, ONE_BLOCK[2][1]), *ONE_BLOCK]
)
def test_every_tiling(small: Any, monkeypatch: pytest.MonkeyPatch, splits: int, tiling: Any) -> None:
    arguments = call(2, 40, window=130, extra=350, **BF16)
    want = sparse_mla_decode(*positional(arguments | {"q_norm_eps": EPS}))
    monkeypatch.setattr(small, "choose_tiling", lambda *_: small.Tiling(*tiling))
    assert_same(run(small, arguments, splits, q_norm_eps=EPS), want)


def test_inputs_written_before_the_wait_are_attended(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the previous kernel has ended, slots, lengths, positions and queries are those of an older step."""
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

    names = small.sparse_mla_decode_sm90_few_tokens_kernel.function.__globals__
    monkeypatch.setitem(names, "gdc_launch_dependents", spoil)
    monkeypatch.setitem(names, "gdc_wait", arrive)
    for tiling in (small.NARROW, small.ONE_BLOCK[1]._replace(late=False)):
        monkeypatch.setattr(small, "choose_tiling", lambda *_, tiling=tiling: tiling)
        assert_same(run(small, arguments, 6, q_norm_eps=EPS), want)


def test_code_for_one_block_gives_the_bits_of_code_for_several(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = call(2, 40, window=130, extra=350, **BF16)
    results = []
    for one in (False, True):
        monkeypatch.setattr(small, "choose_tiling", lambda *_, one=one: small.Tiling(16, 64, 4, True, one))
        results.append(run(small, arguments, 9, q_norm_eps=EPS, inverse_rope=True))
    for a, b in zip(*results, strict=True):
        assert_bitwise(a, b)


@pytest.mark.parametrize("choice", [0, 1, 2])
def test_a_row_of_a_step_does_not_depend_on_its_batch_or_its_width(
    small: Any, monkeypatch: pytest.MonkeyPatch, choice: int
) -> None:
    """In each tiling of batch-invariant calls."""
    tiling = (*small.ONE_BLOCK, small.MANY_HEADS)[choice]
    arguments = call(3, 72, window=140, extra=130, **BF16)
    arguments |= {"lens": torch.tensor([140, 70, 3]), "extra_lens": torch.tensor([130, 0, 1])}
    options = {"q_norm_eps": EPS, "inverse_rope": True}
    exact = sparse_mla_decode(*positional(arguments | options))
    # The simulator's GEMMs add in an order that depends on their shapes; the GPU's do not, see tests/gpu.
    monkeypatch.setattr(small, "invariant_tiling", lambda *_: tiling)
    want = run(small, arguments, 0, level=STEP, **options)
    assert_same(want, exact, "lse_normed")
    for t in range(3):
        alone = run(small, row_alone(arguments, t), 0, level=STEP, **options)
        for got, expected in zip(alone, want, strict=True):
            assert_bitwise(got, expected[t : t + 1])


@pytest.mark.parametrize(("splits", "sink"), [(1, None), (2, -math.inf), (1, math.inf), (2, math.inf)])
def test_sinks_that_keep_all_or_nothing_of_the_output(small: Any, splits: int, sink: float | None) -> None:
    arguments = call(2, 64, window=70, extra=10, **BF16)
    arguments["attn_sink"] = None if sink is None else torch.full((64,), sink)
    want = sparse_mla_decode(*positional(arguments)[:13])
    got = run(small, arguments, splits)
    assert_same(got, want)
    assert sink != math.inf or (got[0] == 0).all()


@pytest.mark.parametrize("splits", [1, 2])
def test_prologue_and_epilogue_are_those_of_the_separate_ops(small: Any, splits: int) -> None:
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
def test_quantised_rows_are_those_of_inv_rope_fp8_quant(
    small: Any, tokens: int, heads: int, groups: tuple[int, int, bool], splits: int
) -> None:
    arguments = call(tokens, heads, window=70, extra=10, **BF16)
    out, _ = run(small, arguments, splits)
    want = inv_rope_fp8_quant(out, arguments["positions"], arguments["cos_sin_cache"], *groups)
    for a, b in zip(run(small, arguments, splits, groups, inverse_rope=True), want, strict=True):
        assert_bitwise(a, b, strides=True)
