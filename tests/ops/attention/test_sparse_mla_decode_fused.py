"""Sparse attention with norm and RoPE before, inverse RoPE and quantisation after it: equal to the separate ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.errors import InputError
from dsv4_compile.ops.attention.sparse_mla_decode import (
    sparse_mla_decode,
    sparse_mla_decode_out,
    sparse_mla_decode_quant,
)
from dsv4_compile.testing import assert_bitwise, check_op, padded, strided
from tests.ops.attention.sparse_mla_calls import EPS, call, positional

BF16: dict[str, Any] = {"fmt": "fp8_ds_mla", "dim": 512, "rope_dim": 64, "dtype": torch.bfloat16}
ROPE = ("positions", "cos_sin_cache")


def by_steps(arguments: dict[str, Any], q_norm_eps: float | None, inverse_rope: bool) -> tuple[Tensor, Tensor]:
    """Compute attention with an op for each step."""
    plain = {name: value for name, value in arguments.items() if name not in ROPE}
    rope = [arguments[name] for name in ROPE]
    if q_norm_eps is not None:
        plain["q"] = torch.ops.dsv4.q_norm_rope(plain["q"], *rope, q_norm_eps)
    out, lse = sparse_mla_decode(**plain)
    return (torch.ops.dsv4.inv_rope(out, *rope) if inverse_rope else out), lse


@pytest.mark.parametrize("sizes", [BF16, {}, {"fmt": "fp8"}], ids=["fp8_ds_mla", "float32", "fp8"])
@pytest.mark.parametrize(("eps", "inverse"), [(EPS, False), (None, True), (EPS, True), (None, False)])
def test_fused_steps_are_the_separate_ones_bit_by_bit(sizes: dict[str, Any], eps: float | None, inverse: bool) -> None:
    arguments = call(5, 3, **sizes)
    got = sparse_mla_decode(**arguments, q_norm_eps=eps, inverse_rope=inverse)
    for a, b in zip(got, by_steps(arguments, eps, inverse), strict=True):
        assert_bitwise(a, b, strides=True)


def test_rotating_queries_and_keys_alike_changes_no_score_and_the_output_is_rotated_back() -> None:
    """With one position for all, attention of rotated keys, rotated back, equals attention of the original keys."""
    arguments = call(4, 2, extra=None, sink=False)
    arguments["positions"] = torch.full((4,), 7)
    cache, unit = arguments["k_cache"], arguments["q"] * torch.rsqrt(arguments["q"].square().mean(-1, True) + EPS)
    back = torch.cat((arguments["cos_sin_cache"][:, :8], -arguments["cos_sin_cache"][:, 8:]), dim=1)
    rotated = torch.ops.dsv4.inv_rope(cache, torch.full((3,), 7), back)
    want, want_lse = sparse_mla_decode(**arguments | {"q": unit})
    got, lse = sparse_mla_decode(**arguments | {"k_cache": rotated}, q_norm_eps=EPS, inverse_rope=True)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, want_lse, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("tokens", [1, 4, 5])
@pytest.mark.parametrize(("groups", "heads_per_group", "heads"), [(2, 2, 5), (1, 0, 3), (3, 0, 6)])
def test_quantised_output_is_that_of_the_separate_op(
    packed: bool, tokens: int, groups: int, heads_per_group: int, heads: int
) -> None:
    arguments = call(tokens, heads, **BF16)
    got = sparse_mla_decode_quant(
        **arguments, q_norm_eps=EPS, n_groups=groups, heads_per_group=heads_per_group, packed_scales=packed
    )
    out, _ = by_steps(arguments, EPS, inverse_rope=False)
    rope = [arguments[name] for name in ROPE]
    want = torch.ops.dsv4.inv_rope_fp8_quant(out, *rope, groups, heads_per_group or heads // groups, packed)
    for a, b in zip(got, want, strict=True):
        assert_bitwise(a, b, strides=True)


def test_quantising_without_rotation_is_a_rotation_by_zero() -> None:
    arguments = call(3, 4, **BF16)
    still = torch.cat((torch.ones(1, 32), torch.zeros(1, 32)), dim=1)
    want = sparse_mla_decode_quant(**arguments | {"cos_sin_cache": still}, n_groups=2)
    plain = {name: value for name, value in arguments.items() if name not in ROPE}
    for a, b in zip(sparse_mla_decode_quant(**plain, inverse_rope=False, n_groups=2), want, strict=True):
        assert_bitwise(a, b, strides=True)


def test_outputs_go_into_given_buffers_of_any_strides() -> None:
    arguments = call(4, 3) | {"q_norm_eps": EPS, "inverse_rope": True}
    want = sparse_mla_decode(**arguments)
    for spread in (torch.clone, padded, strided):
        out, lse = (spread(torch.full_like(x, torch.nan)) for x in want)
        assert sparse_mla_decode_out(out, lse, **arguments) is None
        assert_bitwise(out, want[0])
        assert_bitwise(lse, want[1])


def test_a_row_does_not_depend_on_its_batch(gemms_by_size: None) -> None:
    arguments = call(9, 3, **BF16) | {"q_norm_eps": EPS, "inverse_rope": True, "batch_invariant": True}
    out, lse = sparse_mla_decode(**arguments)
    rows = ("q", "indices", "lens", "extra_indices", "extra_lens", "positions")
    for t in (0, 4, 8):
        alone = sparse_mla_decode(**arguments | {name: arguments[name][t : t + 1] for name in rows})
        assert_bitwise(alone[0][0], out[t])
        assert_bitwise(alone[1][0], lse[t])


def test_op_contract() -> None:
    fused, rows = {"q_norm_eps": EPS, "inverse_rope": True}, {"q_norm_eps": EPS}
    small, large = call(), call(3, 4, **BF16)
    check_op(
        sparse_mla_decode, [positional(x) for x in (small | fused, call(0) | fused, call(1) | rows, large | fused)]
    )
    args = positional(small | fused)
    out, lse = torch.randn(3, 2, 64), torch.randn(3, 2)
    check_op(sparse_mla_decode_out, [(out, lse, *args), (padded(out), strided(lse), *args)])
    quant = {"n_groups": 2, "heads_per_group": 2}
    plain = {name: value for name, value in large.items() if name not in ROPE} | {"inverse_rope": False}
    cases = (large | rows | quant, large | quant | {"packed_scales": True}, plain, call(0, 4, **BF16) | quant)
    check_op(sparse_mla_decode_quant, [positional(x, quant=True) for x in cases])


def test_it_compiles_once_for_every_token_count() -> None:
    arguments = call(9, 4, **BF16) | {"q_norm_eps": EPS}
    rows = ("q", "indices", "lens", "extra_indices", "extra_lens", "positions")
    rest = {name: value for name, value in arguments.items() if name not in rows}

    def step(*tensors: Tensor) -> tuple[Tensor, ...]:
        named = dict(zip(rows, tensors, strict=True)) | rest
        out, lse = torch.zeros_like(named["q"]), named["q"].new_zeros(named["q"].shape[:2], dtype=torch.float32)
        sparse_mla_decode_out(out, lse, **named, inverse_rope=True)
        return out, lse, *sparse_mla_decode_quant(**named, n_groups=2)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (4, 9, 6):
            tensors = [arguments[name][:tokens].clone() for name in rows]
            for x in tensors:
                torch._dynamo.mark_dynamic(x, 0)
            for a, b in zip(compiled(*tensors), step(*tensors), strict=True):
                assert_bitwise(a, b, strides=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": None}, "without positions"),
        ({"cos_sin_cache": None}, "without cos_sin_cache"),
        ({"positions": None, "cos_sin_cache": None, "q_norm_eps": None}, "with inverse_rope, without positions or"),
        ({"positions": None, "cos_sin_cache": None, "inverse_rope": False}, "with q_norm_eps, without positions or"),
        ({"positions": torch.zeros(2, dtype=torch.int64)}, "2 rows for 3 tokens"),
        ({"positions": torch.zeros(3)}, "positions"),
        ({"cos_sin_cache": torch.zeros(4, 128)}, "at most 64"),
        ({"q": torch.zeros(3, 2, 64).to(torch.float8_e4m3fn)}, "q_norm_eps normalises"),
    ],
)
def test_options_that_need_each_other_raise_alone(change: dict[str, Any], message: str) -> None:
    arguments = call() | {"q_norm_eps": EPS, "inverse_rope": True} | change
    with pytest.raises(InputError, match=message):
        sparse_mla_decode(**arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_groups": 3, "heads_per_group": 2}, "at least 3 x 2 heads"),
        ({"n_groups": 0}, "at least 0 x"),
        ({"n_groups": 2, "heads_per_group": -1}, "at least 2 x -1"),
        ({"positions": None, "cos_sin_cache": None}, "with inverse_rope, without"),
    ],
)
def test_groups_that_q_does_not_have_raise(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        sparse_mla_decode_quant(**call(3, 4, **BF16) | change)
    with pytest.raises(InputError, match="whole tiles"):
        sparse_mla_decode_quant(**call(3, 3), n_groups=3)


@pytest.mark.parametrize(
    ("out", "lse"),
    [
        (torch.zeros(3, 2, 64).bfloat16(), torch.zeros(3, 2)),
        (torch.zeros(4, 2, 64), torch.zeros(3, 2)),
        (torch.zeros(3, 2, 64), torch.zeros(3, 1)),
        (torch.zeros(3, 2, 64), torch.zeros(3, 2).double()),
    ],
)
def test_buffers_that_do_not_fit_raise(out: Tensor, lse: Tensor) -> None:
    with pytest.raises(InputError, match="E201"):
        sparse_mla_decode_out(out, lse, **call())
