"""The fused norm kernel against the reference, in the checking interpreter, and compiled for every GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsv4_compile.kernels.preprocess import fused_q_kv_rmsnorm as kernels
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.testing import Tolerance, assert_close, padded, poisoned_empty, strided
from tests.kernels.gpus import begins_early, sees
from tests.support import fake_triton
from tests.support.bounds import checked
from tests.tools.compiled_facts import compiled_for

interpreted = pytest.mark.interpreted
EPS = 1e-6

NEIGHBOUR = {
    # The sum of squares has a different order, which moves the norm by its last bits.
    torch.float32: Tolerance(abs=1e-7, rel=1e-6, cosine=1e-12),
    torch.bfloat16: Tolerance(abs=1e-6, rel=1.01 / 128, cosine=1e-6),
    torch.float16: Tolerance(abs=1e-6, rel=1.01 / 1024, cosine=1e-8),
}


def check(qr: Tensor, kv: Tensor, q_weight: Tensor, kv_weight: Tensor) -> None:
    want = REFERENCES["fused_q_kv_rmsnorm"](qr, kv, q_weight, kv_weight, EPS)
    with poisoned_empty(), checked(mutated=("tensors.p_q_out", "tensors.p_kv_out")) as launched:
        got = kernels.fused_q_kv_rmsnorm(qr, kv, q_weight, kv_weight, EPS)
    assert launched == ["fused_q_kv_rmsnorm_kernel"] * bool(qr.shape[0])
    for actual, expected in zip(got, want, strict=True):
        assert actual.is_contiguous()
        assert actual.dtype is expected.dtype
        assert_close(actual, expected, NEIGHBOUR[expected.dtype])


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("q_size", "kv_size"), [(1536, 512), (96, 64), (1, 3), (7, 1000)])
def test_rows_of_any_length_are_the_reference(q_size: int, kv_size: int, dtype: torch.dtype) -> None:
    qr, kv = torch.randn(3, q_size).to(dtype) * 5, torch.randn(3, kv_size).to(dtype)
    check(qr, kv, torch.randn(q_size).bfloat16(), torch.randn(kv_size))


@interpreted
@pytest.mark.parametrize("spread", [padded, strided, lambda x: x.t().contiguous().t()])
def test_halves_of_a_projection_are_read_where_they_are(spread: Callable[[Tensor], Tensor]) -> None:
    qr, kv = spread(torch.randn(5, 160).bfloat16()).split((96, 64), dim=1)
    check(qr, kv, strided(torch.randn(96)), strided(torch.randn(64).bfloat16()))


@interpreted
@pytest.mark.parametrize("tokens", [0, 1])
def test_no_token_and_one(tokens: int) -> None:
    check(torch.randn(tokens, 96), torch.randn(tokens, 64).bfloat16(), torch.randn(96), torch.randn(64))


@interpreted
def test_a_row_of_zeros_or_nan_keeps_to_itself() -> None:
    qr, kv = torch.randn(4, 96), torch.randn(4, 64)
    qr[1], kv[2], kv[3, 5] = 0, 0, torch.nan
    check(qr, kv, torch.ones(96), torch.ones(64))


def test_rows_that_do_not_fit_registers_are_unsupported() -> None:
    def why_unsupported(size: int) -> str:
        return kernels.why_unsupported_fused_q_kv_rmsnorm(
            torch.empty(2, size), torch.empty(2, 64), torch.empty(size), torch.empty(64), EPS
        )

    assert why_unsupported(kernels.MAX_SIZE) == ""
    assert f"rows have {kernels.MAX_SIZE + 1} and 64 elements" in why_unsupported(kernels.MAX_SIZE + 1)
    assert why_unsupported(0)


@pytest.mark.parametrize("target", fake_triton.TARGETS)
def test_it_compiles_ahead_of_time(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    early = sees(monkeypatch, target)
    both = torch.empty(3, 1536 + 512, dtype=torch.bfloat16)
    with compiled_for(target) as compiled:
        kernels.fused_q_kv_rmsnorm(both[:, :1536], both[:, 1536:], torch.ones(1536), torch.ones(512), EPS)
    assert [bool(kernel.assembled) for kernel in compiled] == [True]
    assert all(begins_early(binary) == early for binary in compiled)
