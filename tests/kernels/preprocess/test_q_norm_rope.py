"""Kernels of `q_norm_rope` and `q_norm_rope_kv_insert` against the reference, and compiled for every GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.kernels.preprocess import q_norm_rope as kernels
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.ops.common.kernels import launcher
from dsv4_compile.reference.preprocess.q_norm_rope import QNormRopeKvInsertArguments
from dsv4_compile.testing import assert_bitwise, assert_close, hostile_indices, padded, poisoned_empty, strided
from dsv4_compile.testing.compare import Tolerance
from tests.kernels.gpus import begins_early, sees, shared_out
from tests.kernels.preprocess.test_kv_rope_insert import BLOCK, MAX_POS, PAGES, poisoned_cache, rope_table
from tests.support import fake_triton
from tests.support.bounds import checked
from tests.tools.compiled_facts import compiled_for

interpreted = pytest.mark.interpreted
EPS = 1e-6
NORMED = {
    # The sum of squares has a different order, which moves the norm by its last bits.
    torch.float32: Tolerance(abs=2e-6, rel=1e-6, cosine=1e-12),
    torch.bfloat16: Tolerance(abs=1e-6, rel=1.01 / 128, cosine=1e-6),
    torch.float16: Tolerance(abs=1e-6, rel=1.01 / 1024, cosine=1e-8),
    torch.float8_e4m3fn: Tolerance(abs=2.0**-9, rel=1.01 / 8, cosine=1e-5),
}
"""Queries by output dtype: at most the neighbouring value."""


def queries(q: Tensor, positions: Tensor, table: Tensor, *more: Any) -> Tensor:
    """Compare what the kernel returns with the reference, strides included."""
    want = REFERENCES["q_norm_rope"](q, positions, table, EPS, *more)
    with poisoned_empty(), checked(mutated=("p_out",)) as launched:
        got = kernels.q_norm_rope(q, positions, table, EPS, *more)
    assert launched == ["q_norm_rope_kv_insert_kernel"] * bool(got.numel())
    assert got.stride() == want.stride()
    assert_close(got.float(), want.float(), NORMED[want.dtype])
    assert got.dtype is want.dtype
    return got


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("heads", "dim", "rope"), [(3, 512, 64), (5, 64, 16), (1, 128, 128), (2, 256, 0)])
def test_queries_are_the_reference(heads: int, dim: int, rope: int, dtype: torch.dtype) -> None:
    queries(torch.randn(4, heads, dim).to(dtype) * 3, torch.randint(MAX_POS, (4,)), rope_table(rope))


@interpreted
def test_a_rope_dim_need_not_be_a_power_of_two() -> None:
    queries(torch.randn(3, 2, 128), torch.randint(MAX_POS, (3,)), rope_table(22))


@interpreted
@pytest.mark.parametrize("tile", [(1, 1), (2, 1), (4, 1), (8, 2)])
def test_any_tile_gives_the_same_result(tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    q, positions, table = torch.randn(3, 5, 64).bfloat16(), torch.randint(MAX_POS, (3,)), rope_table(16)
    with checked(mutated=("p_out",)):
        want = kernels.q_norm_rope(q, positions, table, EPS, 7)
    monkeypatch.setattr(kernels, "tile", lambda rows: tile)
    assert_bitwise(queries(q, positions, table, 7), want)


@interpreted
@pytest.mark.parametrize("padded_heads", [0, 3, 8])
@pytest.mark.parametrize("scale", [None, 0.0123])
def test_heads_are_padded_with_zeros(padded_heads: int, scale: float | None) -> None:
    q, table = torch.randn(3, 3, 64).bfloat16(), rope_table(16)
    got = queries(q, torch.arange(3), table, padded_heads, None if scale is None else torch.tensor([scale]))
    assert not got[:, 3:].contiguous().view(torch.uint8).any()


@interpreted
@pytest.mark.parametrize("spread", [padded, strided, lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)])
def test_queries_are_read_where_they_are(spread: Callable[[Tensor], Tensor]) -> None:
    queries(spread(torch.randn(3, 4, 64).bfloat16()), strided(torch.randint(MAX_POS, (3,))), padded(rope_table(16)))


@interpreted
def test_positions_of_padding_rows_may_be_anything() -> None:
    q, table = torch.randn(6, 2, 64).bfloat16(), rope_table(16)
    for dtype in (torch.int32, torch.int64):
        queries(q, hostile_indices((9,), MAX_POS, dtype=dtype), table)


@interpreted
@pytest.mark.parametrize("shape", [(0, 3, 64), (2, 0, 64), (1, 1, 64)])
def test_empty_and_single_rows(shape: tuple[int, int, int]) -> None:
    queries(torch.randn(*shape), torch.arange(2), rope_table(16))


@interpreted
@pytest.mark.parametrize("fmt", layout.KV_FORMATS)
def test_one_launch_does_both_for_slices_of_one_projection(fmt: str) -> None:
    projection = padded(torch.randn(7, 4 * 512).bfloat16())
    q, kv = projection[:, : 3 * 512].unflatten(1, (3, 512)), projection[:, 3 * 512 :]
    slots, positions, table = torch.tensor([2, -1, 7, 0, 3]), torch.randint(MAX_POS, (8,)), rope_table(64)
    results = []
    for name in ("reference", "kernel"):
        fn = REFERENCES["q_norm_rope_kv_insert"] if name == "reference" else launcher("q_norm_rope_kv_insert")
        storage, cache = poisoned_cache(fmt, 512)
        with checked(mutated=("p_out", "p_cache")) as launched:
            results.append((fn(q, kv, cache, slots, positions, table, EPS, BLOCK, fmt, 4), storage))
        assert launched == ["q_norm_rope_kv_insert_kernel"] * (name == "kernel")
    (want, want_cache), (got, got_cache) = results
    assert_bitwise(got_cache, want_cache)
    assert_close(got, want, NORMED[torch.bfloat16])


def test_unsupported_calls_have_a_reason() -> None:
    rest = torch.arange(2), rope_table(16)
    assert kernels.why_unsupported_q_norm_rope(torch.randn(2, 3, 64), *rest, EPS) == ""
    assert "96 is not a power of two" in kernels.why_unsupported_q_norm_rope(torch.randn(2, 3, 96), *rest, EPS)
    after_kv = torch.empty(0), torch.arange(2), *rest, EPS, BLOCK, "plain"
    for q_dims, kv_dims, reason in (
        (64, 64, ""),
        (96, 96, "96 is not a power of two"),
        (64, 128, "queries have 64 dims and keys 128"),
    ):
        call = QNormRopeKvInsertArguments(torch.randn(2, 3, q_dims), torch.randn(2, kv_dims), *after_kv)
        why = kernels.why_unsupported_q_norm_rope_kv_insert(call)
        assert reason in why and bool(reason) == bool(why)


@pytest.mark.parametrize("target", fake_triton.TARGETS)
def test_it_compiles_ahead_of_time(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    early = sees(monkeypatch, target)
    q, kv = torch.empty(3, 64, 512, dtype=torch.bfloat16), torch.empty(3, 512, dtype=torch.bfloat16)
    rest, one = (torch.arange(3), torch.arange(3), rope_table(64), EPS), torch.ones(1)
    formats = shared_out(list(layout.KV_FORMATS))[target]
    with compiled_for(target) as compiled:
        for fmt in formats:
            cache = layout.allocate_cache(fmt, PAGES, 64)
            scales = (one, one) if fmt == "fp8" else (None, None)
            launcher("q_norm_rope_kv_insert")(q, kv, cache, *rest, 64, fmt, 128, *scales)
    assert len(compiled) == len(formats)
    for kernel in compiled:
        assert kernel.assembled
    assert all(begins_early(binary) == early for binary in compiled)


def test_rows_move_sixteen_bytes_at_a_time_and_stay_in_their_thread() -> None:
    q = torch.empty(3, 64, 512, dtype=torch.bfloat16)
    with compiled_for("sm_90") as compiled:
        kernels.q_norm_rope(q, torch.arange(3), rope_table(64), EPS)
    ttgir, ptx = compiled[0].asm["ttgir"], compiled[0].asm["ptx"]
    assert "convert_layout" not in ttgir
    assert ptx.count("ld.global.v4.b32") >= 4
    assert ptx.count("st.global.v4.b32") >= 2
    # A contracted multiply and add would round once where the reference rounds twice.
    assert "fma" not in ptx
