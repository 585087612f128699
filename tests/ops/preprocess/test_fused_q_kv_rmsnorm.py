from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsv4_compile.errors import InputError
from dsv4_compile.ops.preprocess.fused_q_kv_rmsnorm import fused_q_kv_rmsnorm

EPS = 1e-6


def projection(
    tokens: int, q_lora: int = 96, dim: int = 64, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor]:
    """Both halves as the views of one GEMM output that they are in a model."""
    return torch.randn(tokens, q_lora + dim).to(dtype).split([q_lora, dim], dim=1)


def weights(q_lora: int = 96, dim: int = 64, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    return torch.randn(q_lora).to(dtype), torch.randn(dim).to(dtype)


def exact(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x / (x.pow(2).sum(-1, keepdim=True) / x.shape[-1] + EPS).sqrt() * weight.double()


@pytest.mark.parametrize("tokens", [1, 3, 130])
def test_bfloat16_is_the_exact_value_rounded_once(tokens: int) -> None:
    """A second rounding, of the normalised value before the weight, would miss by more than half an ulp."""
    inputs, gains = projection(tokens), weights()
    for got, x, weight in zip(fused_q_kv_rmsnorm(*inputs, *gains, EPS), inputs, gains, strict=True):
        want = exact(x, weight)
        ulp = torch.exp2(torch.floor(torch.log2(want.abs().clamp_min(1e-30))) - 7)
        assert ((got.double() - want).abs() <= 0.501 * ulp).all()


def test_float32_stays_float32() -> None:
    inputs, gains = projection(5, dtype=torch.float32), weights(dtype=torch.float32)
    for got, x, weight in zip(fused_q_kv_rmsnorm(*inputs, *gains, EPS), inputs, gains, strict=True):
        assert got.dtype is torch.float32
        torch.testing.assert_close(got.double(), exact(x, weight), rtol=1e-6, atol=1e-6)


def test_halves_and_weights_may_differ_in_dtype() -> None:
    qr, kv = projection(4)
    q_weight, kv_weight = weights(dtype=torch.float32)
    q_out, kv_out = fused_q_kv_rmsnorm(qr, kv.float(), q_weight, kv_weight, EPS)
    assert (q_out.dtype, kv_out.dtype) == (torch.bfloat16, torch.float32)


def test_a_zero_row_gives_zeros() -> None:
    gains = weights()
    q_out, kv_out = fused_q_kv_rmsnorm(torch.zeros(2, 96), torch.zeros(2, 64), *gains, EPS)
    assert not q_out.any()
    assert not kv_out.any()


def test_rows_do_not_influence_each_other() -> None:
    (qr, kv), gains = projection(6), weights()
    poisoned = qr.clone(), kv.clone()
    poisoned[0][3] = torch.nan
    poisoned[1][3] = torch.inf
    clean, dirty = fused_q_kv_rmsnorm(qr, kv, *gains, EPS), fused_q_kv_rmsnorm(*poisoned, *gains, EPS)
    keep = torch.tensor([0, 1, 2, 4, 5])
    for a, b in zip(clean, dirty, strict=True):
        assert torch.equal(a[keep], b[keep])


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "views of one projection"])
def test_outputs_are_fresh_and_contiguous(tokens: int, strided: bool) -> None:
    inputs = tuple(x if strided else x.contiguous() for x in projection(tokens))
    for out, x in zip(fused_q_kv_rmsnorm(*inputs, *weights(), EPS), inputs, strict=True):
        assert out.shape == x.shape
        assert out.stride() == (x.shape[1], 1)
        assert tokens == 0 or out.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    "inputs",
    [
        pytest.param(lambda: projection(5), id="views"),
        pytest.param(lambda: projection(1), id="one row"),
        pytest.param(lambda: (torch.randn(0, 96), torch.randn(0, 64)), id="empty"),
        pytest.param(lambda: projection(3, dtype=torch.float32), id="float32"),
        pytest.param(lambda: (torch.randn(96, 4).t(), torch.randn(64, 4).t()), id="column major"),
    ],
)
def test_opcheck(inputs: Callable[[], tuple[Tensor, Tensor]]) -> None:
    torch.library.opcheck(fused_q_kv_rmsnorm, (*inputs(), *weights(), EPS))


def test_compiles_once_for_every_token_count() -> None:
    gains = weights()

    def step(x: Tensor) -> Tensor:
        q_out, kv_out = fused_q_kv_rmsnorm(*x.split([96, 64], dim=1), *gains, EPS)
        return torch.cat((q_out, kv_out), dim=1) * 2

    compiled = torch.compile(step, backend="inductor", fullgraph=True)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (4, 9, 33):
            x = torch.randn(tokens, 160).bfloat16()
            torch._dynamo.mark_dynamic(x, 0)
            assert torch.equal(compiled(x), step(x))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(2, 8), torch.ones(3, 4), torch.ones(8), torch.ones(4)), "same tokens"),
        ((torch.ones(2, 8), torch.ones(2, 4), torch.ones(8), torch.ones(5)), "kv_weight covers"),
        ((torch.ones(2, 8, 1), torch.ones(2, 4), torch.ones(8), torch.ones(4)), r"qr \[T, Lq\]"),
        ((torch.ones(2, 8), torch.ones(2, 4).int(), torch.ones(8), torch.ones(4)), r"kv \[T, D\]"),
    ],
)
def test_wrong_arguments_are_refused(arguments: tuple[Tensor, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        fused_q_kv_rmsnorm(*arguments, EPS)
