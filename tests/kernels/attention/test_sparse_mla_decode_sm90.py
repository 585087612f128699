"""The decode kernel for sm_90, simulated by tests/simulator/gluon.py."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.kernels.attention import split_combine
from dsv4_compile.ops.attention.inv_rope import inv_rope, inv_rope_fp8_quant
from dsv4_compile.ops.attention.sparse_mla_decode import sparse_mla_decode
from dsv4_compile.testing import assert_bitwise
from tests.ops.attention.sparse_mla_calls import EPS, call, normed_by_a_factor, positional
from tests.simulator import gluon as simulated_gluon
from tests.simulator.copies import simulated
from tests.simulator.decode import BF16, PLAIN, assert_same, row_alone, run
from tests.simulator.values import Value

pytestmark = pytest.mark.interpreted


@pytest.fixture(scope="module")
def hopper() -> Any:
    return simulated("attention.sparse_mla_decode_sm90")


@pytest.mark.parametrize(("splits", "heads"), [(1, 128), (3, 64), (1, 100), (2, 33)])
def test_hostile_rows_give_the_references_result(hopper: Any, splits: int, heads: int) -> None:
    arguments = call(3, heads, window=130, extra=150, **BF16)
    want = sparse_mla_decode(*positional(arguments)[:13])
    assert_same(run(hopper, arguments, splits), want)


def magnify(cache: Tensor, block: int, exponent: int) -> None:
    """Multiply all values of `fp8_ds_mla` pages by a power of two."""
    row = layout.FP8_DS_MLA.data
    scales = cache[:, block * row : block * (row + layout.FP8_DS_MLA.scale)]
    scales += exponent  # bytes, which wrap around where nothing is stored
    rope = cache[:, : block * row].unflatten(1, (block, row))[..., layout.NOPE_DIM :]
    rope.copy_((rope.contiguous().view(torch.bfloat16) * 2.0**exponent).view(torch.uint8))


@pytest.mark.parametrize("exponents", [(-100, -100), (90, 90), (-60, 60)])
def test_partial_results_keep_values_of_any_magnitude(hopper: Any, exponents: tuple[int, int]) -> None:
    arguments = call(2, 64, window=70, extra=40, **BF16)
    arguments |= {"q": torch.zeros(2, 64, 512).bfloat16(), "attn_sink": None}
    for cache, block, exponent in zip(("k_cache", "extra_k_cache"), (64, 2), exponents, strict=True):
        magnify(arguments[cache], block, exponent)
    want, got = sparse_mla_decode(*positional(arguments)[:13]), run(hopper, arguments, 3)
    assert_same(*((out.float() * 2.0 ** -max(exponents), lse) for out, lse in (got, want)))


def test_values_of_a_split_that_are_not_finite_leave_the_rest_of_its_row(hopper: Any) -> None:
    arguments = call(2, 64, window=30, extra=70, **BF16)
    arguments |= {"lens": torch.tensor([30, 0]), "extra_lens": torch.tensor([0, 32])}  # a split each
    rows = arguments["k_cache"][:, : 64 * layout.FP8_DS_MLA.data].unflatten(1, (64, -1))[..., layout.NOPE_DIM :]
    values = rows.contiguous().view(torch.bfloat16)
    values[:, ::2, 3], values[..., 7], values[..., 11] = math.inf, 3e38, -3e38
    rows.copy_(values.view(torch.uint8))
    # The infinite keys have no weight, and make NaN of their dim alone; sums of the large ones overflow.
    arguments["q"].zero_()[..., layout.NOPE_DIM + 3] = -1
    want, got = run(hopper, arguments, 1), run(hopper, arguments, 2)
    assert want[0].isnan().any() and want[0].isinf().any() and want[0].isfinite().any()
    assert_same(got, want)


@pytest.mark.parametrize(("splits", "heads"), [(3, 64), (2, 33)])
def test_rows_of_bfloat16_are_copied(hopper: Any, splits: int, heads: int) -> None:
    arguments = call(3, heads, window=130, extra=150, **PLAIN)
    want = sparse_mla_decode(*positional(arguments)[:13])
    assert_same(run(hopper, arguments, splits), want)


@pytest.mark.parametrize(("splits", "sink"), [(1, None), (2, -math.inf), (1, math.inf), (2, math.inf)])
def test_sinks_that_keep_all_or_nothing_of_the_output(hopper: Any, splits: int, sink: float | None) -> None:
    arguments = call(2, 64, window=70, extra=10, **BF16)
    arguments["attn_sink"] = None if sink is None else torch.full((64,), sink)
    want = sparse_mla_decode(*positional(arguments)[:13])
    got = run(hopper, arguments, splits)
    assert_same(got, want)
    assert sink != math.inf or (got[0] == 0).all()


def assert_normed(hopper: Any, arguments: dict[str, Any], splits: int) -> tuple[Tensor, Tensor]:
    """Check a call with norm and RoPE inside against the definition, and closer against what the kernel computes."""
    got: tuple[Tensor, Tensor] = run(hopper, arguments, splits, q_norm_eps=EPS)
    assert_same(got, sparse_mla_decode(*positional(arguments | {"q_norm_eps": EPS})), "lse_normed")
    q = normed_by_a_factor(arguments["q"], arguments["positions"], arguments["cos_sin_cache"])
    out, lse = sparse_mla_decode(*positional(arguments | {"q": q})[:13])
    assert_same(got, (out.bfloat16(), lse))
    return got


@pytest.mark.parametrize(("splits", "heads"), [(1, 64), (2, 64), (1, 128), (3, 100), (1, 33)])
def test_queries_are_normed_and_rotated_inside(hopper: Any, splits: int, heads: int) -> None:
    assert_normed(hopper, call(2, heads, window=70, extra=10, **BF16), splits)


@pytest.mark.parametrize("magnitude", [0.0, 1e-30, 1e-3, 1e15, 1e25])
def test_queries_of_any_magnitude_are_normed(hopper: Any, magnitude: float) -> None:
    """The squares of the largest overflow, so that they count as zero, as in `q_norm_rope`."""
    arguments = call(2, 64, window=70, extra=10, **BF16)
    arguments |= {"lens": torch.tensor([70, 5]), "extra_lens": torch.tensor([10, 0])}
    arguments["q"][:, ::3] *= magnitude
    assert all(x.isfinite().all() for x in assert_normed(hopper, arguments, 1))


@pytest.mark.parametrize(("value", "dim"), [(math.nan, 5), (math.inf, layout.HEAD_DIM - 3)])
def test_values_of_a_query_that_are_not_finite_stay_with_its_head(hopper: Any, value: float, dim: int) -> None:
    arguments = call(2, 64, window=70, extra=10, **BF16)
    arguments |= {"lens": torch.tensor([70, 5]), "extra_lens": torch.tensor([10, 0])}
    usual = run(hopper, arguments, 1, q_norm_eps=EPS)
    arguments["q"][0, 17, dim] = value
    got = run(hopper, arguments, 1, q_norm_eps=EPS)
    assert got[0][0, 17].isnan().all() and got[1][0, 17].isnan()
    assert usual[0].isfinite().all() and usual[1].isfinite().all()
    for a, b in zip(got, usual, strict=True):
        a[0, 17] = b[0, 17]
        assert_bitwise(a, b)


@pytest.mark.parametrize("splits", [1, 2])
def test_outputs_are_rotated_back_as_by_inv_rope(hopper: Any, splits: int) -> None:
    arguments = call(2, 72, window=70, extra=10, **BF16)
    out, lse = run(hopper, arguments, splits)
    got = run(hopper, arguments, splits, inverse_rope=True)
    assert_bitwise(got[0], inv_rope(out, arguments["positions"], arguments["cos_sin_cache"]))
    assert_bitwise(got[1], lse)


@pytest.mark.parametrize(
    ("tokens", "heads", "groups", "splits"),
    [
        (1, 64, (8, 8, True), 1),
        (5, 64, (3, 21, False), 1),
        (3, 128, (2, 60, True), 1),
        (2, 70, (7, 10, False), 1),
        (2, 64, (1, 64, True), 2),
    ],
)
def test_quantised_rows_are_those_of_inv_rope_fp8_quant(
    hopper: Any, tokens: int, heads: int, groups: tuple[int, int, bool], splits: int
) -> None:
    arguments = call(tokens, heads, window=70, extra=10, **BF16)
    out, _ = run(hopper, arguments, splits)
    want = inv_rope_fp8_quant(out, arguments["positions"], arguments["cos_sin_cache"], *groups)
    got = run(hopper, arguments, splits, groups, inverse_rope=True)
    for a, b in zip(got, want, strict=True):
        assert_bitwise(a, b, strides=True)
    rows = got[1].as_strided((groups[0], got[1].shape[2], -(-tokens // 4) * 4), (*got[1].stride()[1:], 1))
    assert (rows[..., tokens:] == 0).all()


def test_a_row_of_one_split_gives_the_same_bits_combined_or_not(hopper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_combine, "INVARIANT_KEYS", 128)
    arguments = call(3, 64, window=70, extra=10, **BF16)
    arguments |= {"lens": torch.tensor([70, 0, 33]), "extra_lens": torch.tensor([10, 0, 0])}
    alone = run(hopper, arguments, 0, batch_invariant=True)
    wide = {name: torch.cat([arguments[name]] * 4, dim=1) for name in ("indices", "extra_indices")}
    combined = run(hopper, arguments | wide, 0, batch_invariant=True)
    for a, b in zip(alone, combined, strict=True):
        assert_bitwise(a, b)


def test_a_row_does_not_depend_on_its_batch(hopper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_combine, "INVARIANT_KEYS", 128)
    monkeypatch.setattr(split_combine, "MAX_PARTIAL_BYTES", 1)  # a launch for each token
    arguments = call(3, 64, window=200, extra=130, **BF16)
    arguments |= {"lens": torch.tensor([200, 70, 3]), "extra_lens": torch.tensor([130, 0, 1])}
    options = {"q_norm_eps": EPS, "inverse_rope": True, "batch_invariant": True}
    want = run(hopper, arguments, 0, **options)
    monkeypatch.setattr(split_combine, "MAX_PARTIAL_BYTES", 2**28)
    for t in range(3):
        for got, expected in zip(run(hopper, row_alone(arguments, t), 0, **options), want, strict=True):
            assert_bitwise(got, expected[t : t + 1])


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.uint8], ids=str
)
def test_unwritten_shared_memory_is_not_made_zero_by_a_factor_of_zero(dtype: torch.dtype) -> None:
    """The simulation must show what finite garbage hides. Bytes may be e4m3, too."""
    language = simulated_gluon.modules()[f"{simulated_gluon.GLUON}.language"]
    ring = language.allocate_shared_memory(dtype, [2, 16, 32], None)
    keys = ring.reinterpret(torch.float8_e4m3fn, [2, 16, 32], None) if dtype is torch.uint8 else ring
    zeros = Value(torch.zeros(64, 16))
    assert simulated_gluon.multiply(zeros, keys.index(1), None, use_acc=False).data.isnan().all()


def test_unwritten_integers_in_shared_memory_are_no_index() -> None:
    language = simulated_gluon.modules()[f"{simulated_gluon.GLUON}.language"]
    assert (language.allocate_shared_memory(torch.int32, [4], None).load(None).data < 0).all()


@pytest.mark.parametrize("name", ["wait", "arrive"])
def test_a_kernel_without_its_barriers_fails(hopper: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The simulation proves nothing unless it fails for a kernel that is wrong."""
    barriers = hopper.sparse_mla_decode_sm90_kernel.function.__globals__["mbarrier"]
    monkeypatch.setattr(barriers, name, lambda *_, **__: None)
    monkeypatch.setattr(simulated_gluon, "SECONDS", 0.5)
    arguments = call(1, 64, window=250, extra=150, **BF16)
    arguments |= {"lens": torch.tensor([250]), "extra_lens": torch.tensor([150])}
    with pytest.raises(AssertionError):
        assert_same(run(hopper, arguments, 1), sparse_mla_decode(*positional(arguments)[:13]))
