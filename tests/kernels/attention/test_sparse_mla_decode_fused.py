"""Steps that the Triton decode kernel fuses, interpreted: bit by bit those of the ops that do each step alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.kernels.attention import sparse_mla_decode as kernels
from dsv4_compile.kernels.attention import sparse_mla_decode_triton, split_combine
from dsv4_compile.kernels.attention.sparse_mla_decode_triton import Tiles
from dsv4_compile.kernels.host.gpu import Gpu
from dsv4_compile.kernels.preprocess.q_norm_rope import q_norm_rope
from dsv4_compile.ops.attention.inv_rope import inv_rope, inv_rope_fp8_quant
from dsv4_compile.ops.common.kernels import launcher, refusal
from dsv4_compile.testing import assert_bitwise, padded, poisoned_empty, strided
from tests.ops.attention.sparse_mla_calls import EPS, call, positional
from tests.support.bounds import checked

interpreted = pytest.mark.interpreted
OUTPUTS = ("outputs[0]", "outputs[1]", "outputs[2]", "p_out", "p_lse", "p_scale", "p_values")
BF16: dict[str, Any] = {"fmt": "fp8_ds_mla", "dim": 512, "rope_dim": 64, "dtype": torch.bfloat16}
TILES = [Tiles(16, 16, 4), Tiles(16, 32, 4, keys_first=True, prefetch=True)]
EIGHT = Tiles(8, 16, 4, keys_first=True, prefetch=True)
PLANS = [(tiles, splits) for tiles in TILES for splits in (1, 2)]
ROWS = ("q", "indices", "lens", "extra_indices", "extra_lens", "positions")
Result = tuple[Tensor, Tensor]


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Function that sets the tiles and the number of splits that launchers choose."""

    def choose(tiles: Tiles, splits: int) -> None:
        monkeypatch.setattr(sparse_mla_decode_triton, "choose_tiles", lambda *_: tiles)
        sparse_mla_decode_triton.plan.cache_clear()
        monkeypatch.setattr(split_combine, "split_count", lambda programs, blocks, gpu: min(splits, blocks))

    return choose


def run(form: str, arguments: dict[str, Any], *outputs: Tensor) -> Any:
    """Run a launcher on arguments by name, every access checked, over poisoned memory."""
    with checked(OUTPUTS), poisoned_empty():
        return launcher(form)(*outputs, *positional(arguments, quant=form.endswith("quant")))


def attended(arguments: dict[str, Any], normed: bool = True) -> Result:
    """Run the kernel without options, after the op that norms and rotates queries."""
    q = arguments["q"]
    if normed:
        q = q_norm_rope(q, arguments["positions"], arguments["cos_sin_cache"], EPS)
    out, lse = run("sparse_mla_decode", arguments | {"q": q})
    return out, lse


def assert_equal(got: Result, want: Result, *, strides: bool = True) -> None:
    for a, b in zip(got, want, strict=True):
        assert_bitwise(a, b, strides=strides)


@interpreted
@pytest.mark.parametrize(
    ("tiles", "splits", "normed", "back"),
    [(*plan, True, True) for plan in PLANS]
    + [(TILES[0], 1, True, False), (TILES[1], 2, False, True), (EIGHT, 1, True, True)],
)
def test_fused_steps_are_the_separate_ones(plan: Any, tiles: Tiles, splits: int, normed: bool, back: bool) -> None:
    plan(tiles, splits)
    arguments = call(2, 17, window=37, extra=21, **BF16)
    out, lse = attended(arguments, normed)
    want = inv_rope(out, arguments["positions"], arguments["cos_sin_cache"]) if back else out
    options = {"q_norm_eps": EPS if normed else None, "inverse_rope": back}
    assert_equal(run("sparse_mla_decode", arguments | options), (want, lse))


@interpreted
@pytest.mark.parametrize(
    "sizes", [{}, {"fmt": "fp8", "dim": 16}, {"dtype": torch.float16, "dim": 128, "rope_dim": 128}]
)
def test_other_dims_and_dtypes(sizes: dict[str, Any]) -> None:
    arguments = call(4, 3, **sizes)
    out, lse = attended(arguments)
    want = inv_rope(out, arguments["positions"], arguments["cos_sin_cache"]), lse
    assert_equal(run("sparse_mla_decode", arguments | {"q_norm_eps": EPS, "inverse_rope": True}), want)


@interpreted
@pytest.mark.parametrize(
    ("tiles", "splits", "packed", "tokens", "heads", "groups", "size"),
    [
        *((*plan, packed, 1, 17, 3, 5) for plan in PLANS for packed in (True, False)),
        (*PLANS[1], True, 5, 17, 17, 1),
        (*PLANS[0], False, 6, 3, 1, 3),
        (*PLANS[3], False, 4, 4, 2, 2),
    ],
)
def test_quantised_rows_are_those_of_the_separate_op(
    plan: Any, tiles: Tiles, splits: int, packed: bool, tokens: int, heads: int, groups: int, size: int
) -> None:
    plan(tiles, splits)
    arguments = call(tokens, heads, window=20, extra=20, **BF16)
    out, _ = attended(arguments)
    want = inv_rope_fp8_quant(out, arguments["positions"], arguments["cos_sin_cache"], groups, size, packed)
    options = {"q_norm_eps": EPS, "n_groups": groups, "heads_per_group": size, "packed_scales": packed}
    got = run("sparse_mla_decode_quant", arguments | options | {"inverse_rope": True})
    assert_equal(got, want)
    beyond = got[1].as_strided((groups, want[1].shape[2], -(-tokens // 4) * 4), (*got[1].stride()[1:], 1))
    assert (beyond[..., tokens:] == 0).all()


@interpreted
@pytest.mark.parametrize("dim", [128, 256])
def test_smaller_heads_are_quantised_tile_by_tile(dim: int) -> None:
    arguments = call(3, 4, dim=dim) | {"n_groups": 2, "inverse_rope": False}
    still = torch.cat((torch.ones(1, 8), torch.zeros(1, 8)), dim=1)
    want = inv_rope_fp8_quant(attended(arguments, normed=False)[0], arguments["positions"], still, 2, 2)
    assert_equal(run("sparse_mla_decode_quant", arguments), want)


@interpreted
@pytest.mark.parametrize("splits", [1, 2])
def test_rows_without_keys_stay_zero_and_finite(plan: Any, splits: int) -> None:
    plan(TILES[0], splits)
    arguments = call(3, 2, window=40, **BF16) | {"q_norm_eps": EPS, "inverse_rope": True}
    arguments["q"] = torch.full_like(arguments["q"], math.nan)
    arguments["lens"], arguments["extra_lens"] = torch.zeros_like(arguments["lens"]), -arguments["extra_lens"].abs()
    out, lse = run("sparse_mla_decode", arguments)
    assert (out == 0).all() and (lse == math.inf).all()
    values, scale = run("sparse_mla_decode_quant", arguments | {"n_groups": 2})
    assert (values.float() == 0).all() and scale.isfinite().all()


@interpreted
@pytest.mark.parametrize("fmt", ["plain", "fp8_ds_mla"])
def test_results_go_into_strided_buffers(fmt: str) -> None:
    arguments = call(4, 3, **(BF16 if fmt == "fp8_ds_mla" else {})) | {"q_norm_eps": EPS, "inverse_rope": True}
    want = run("sparse_mla_decode", arguments)
    out, lse = (padded(torch.full_like(x, math.nan)) for x in want)
    assert run("sparse_mla_decode_out", arguments, out, lse) is None
    assert_equal((out, lse), want, strides=False)
    spread = {name: strided(arguments[name]) for name in ("q", "positions", "cos_sin_cache", "attn_sink")}
    assert_equal(run("sparse_mla_decode", arguments | spread), want)


@interpreted
@pytest.mark.parametrize("partial_bytes", [1, 2**28])
def test_a_row_does_not_depend_on_its_batch(monkeypatch: pytest.MonkeyPatch, partial_bytes: int) -> None:
    """A batch has a number of tokens, widths of rows and a number of launches; the GPU has a number of SMs."""
    monkeypatch.setattr(split_combine, "INVARIANT_KEYS", 32)
    monkeypatch.setattr(split_combine, "MAX_PARTIAL_BYTES", partial_bytes)
    arguments = call(6, 3, window=100, extra=70, **BF16) | {"q_norm_eps": EPS, "inverse_rope": True}
    arguments |= {"lens": torch.tensor([100, 7, 0, 33, 64, 1]), "extra_lens": torch.tensor([70, 1, 0, 64, 3, 0])}
    invariant = arguments | {"batch_invariant": True}
    out, lse = run("sparse_mla_decode", invariant)
    for t in range(6):
        one = {name: invariant[name][t : t + 1] for name in ROWS}
        for name, count in (("indices", "lens"), ("extra_indices", "extra_lens")):
            one[name] = one[name][:, : int(one[count])]
        monkeypatch.setattr(kernels, "gpu_of", lambda _, n=t: Gpu("interpreter", 0, 100 * n + 1))
        assert_equal(run("sparse_mla_decode", invariant | one), (out[t : t + 1], lse[t : t + 1]), strides=False)
    monkeypatch.setattr(kernels, "gpu_of", lambda _: Gpu("interpreter", 0, 1))
    plain = run("sparse_mla_decode", arguments)
    assert not all(torch.equal(a, b) for a, b in zip(plain, (out, lse), strict=True))


def test_splits_follow_from_a_rows_own_blocks() -> None:
    gpu, row = Gpu("cuda", 90, 132), (64, 512)
    split_plan = split_combine.split_plan
    assert split_plan((1, *row), 1, 10, 64, gpu) == (10, 1, 1, torch.float32)
    assert split_plan((512, *row), 1, 10, 64, gpu)[:3] == (1, 1, 512)
    assert split_plan((32, *row), 1, 20, 32, gpu, float16=True) == (4, 1, 32, torch.float16)
    assert split_plan((32, *row), 1, 10, 64, gpu, invariant=True, float16=True).dtype is torch.float32
    for tokens in (1, 132, 70_000):
        plan = split_plan((tokens, *row), 1, 10, 64, gpu, invariant=True)
        assert (plan.splits, plan.min_blocks) == (3, 4)
        assert plan.tokens * 4 * plan.splits * 64 * 512 <= split_combine.MAX_PARTIAL_BYTES
    assert split_plan((9, *row), 1, 10, 64, gpu, splits=5, invariant=True)[:2] == (5, 1)


@pytest.mark.parametrize(
    ("form", "change", "reason"),
    [
        ("", {"q": torch.zeros(3, 2, 48)}, "power of two"),
        ("", {"q": torch.zeros(3, 2, 8)}, "at least 16"),
        ("_quant", {"packed_scales": True, "q": torch.zeros(3, 2, 256)}, "multiple of 512"),
        ("_quant", {"q": torch.zeros(3, 2, 64)}, "multiple of 128"),
        ("_out", {"out": torch.zeros(3, 2, 128)[..., ::2]}, "last dim of out is contiguous"),
        ("_out", {"lse": torch.zeros(3, 4)[:, ::2]}, "last dim of lse is contiguous"),
    ],
)
def test_unsupported_calls_say_why(form: str, change: dict[str, Any], reason: str) -> None:
    arguments = call(3, 2, dim=512) | {"q_norm_eps": EPS, "inverse_rope": True}
    added = {"_out": {"out": None, "lse": None}, "_quant": {"n_groups": 2}}.get(form, {})
    why_unsupported = refusal(f"sparse_mla_decode{form}")
    assert why_unsupported is not None
    assert why_unsupported(**arguments | added) == ""
    assert reason in why_unsupported(**arguments | added | change)
