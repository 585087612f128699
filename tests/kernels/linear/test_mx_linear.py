"""`mx_linear` against the reference, in the checking interpreter, and compiled for every GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.kernels.host import pdl
from dsv4_compile.kernels.linear import gemm
from dsv4_compile.kernels.linear import mx_linear as kernels
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.reference.common.quant import ue8m0_scale
from dsv4_compile.reference.linear.mx_linear import rounded_input
from dsv4_compile.testing import assert_bitwise, assert_close, padded, poisoned_empty, strided
from tests.kernels.gpus import GPUS, begins_early, shared_out
from tests.kernels.linear.test_gemm import NEIGHBOUR, WRITTEN, e4m3
from tests.kernels.moe.programs import random_order
from tests.support.bounds import checked
from tests.tools.compiled_facts import compiled_for

interpreted = pytest.mark.interpreted
E8M0, BF16, F32 = torch.float8_e8m0fnu, torch.bfloat16, torch.float32


def block_scale(rows: int, size: int) -> Tensor:
    """Return uint8 scales of 32x32 blocks: every block's differs from its neighbours'."""
    shape = -(-rows // 32), -(-size // 32)
    return (124 + torch.arange(shape[0] * shape[1]) % 5).view(shape).to(torch.uint8)


def check(x: Tensor, weight: Tensor, scale: Tensor, quantize: bool = True, seed: int = 0) -> Tensor:
    want, tokens = REFERENCES["mx_linear"](x, weight, scale, quantize), x.numel() // x.shape[-1]
    with poisoned_empty(), checked(mutated=WRITTEN) as seen, random_order(seed):
        got = kernels.mx_linear(x, weight, scale, quantize)
    rounds = quantize and tokens > kernels.FEW_TOKENS
    assert seen == ["round_input_kernel"] * rounds + ["gemm_kernel"] * (tokens > 0)
    assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
    assert_close(got, want, NEIGHBOUR[want.dtype])
    return got


@interpreted
@pytest.mark.parametrize("dtype", [BF16, F32, torch.float16])
@pytest.mark.parametrize(("tokens", "rows", "size"), [(1, 256, 640), (5, 130, 224), (17, 70, 160), (66, 5, 96)])
def test_inputs_in_mxfp8_are_multiplied_as_by_the_reference(
    tokens: int, rows: int, size: int, dtype: torch.dtype
) -> None:
    check(torch.randn(tokens, size).to(dtype), e4m3(rows, size), block_scale(rows, size), seed=tokens)


@interpreted
@pytest.mark.parametrize("dtype", [BF16, F32, torch.float16])
@pytest.mark.parametrize(("tokens", "rows", "size"), [(1, 64, 128), (5, 33, 40), (66, 130, 200)])
def test_exact_inputs_are_multiplied_as_by_the_reference(tokens: int, rows: int, size: int, dtype: torch.dtype) -> None:
    check(torch.randn(tokens, size).to(dtype), e4m3(rows, size), block_scale(rows, size), False)


@interpreted
@pytest.mark.parametrize("tokens", [6, 20])
def test_x_is_rounded_like_in_the_reference(tokens: int) -> None:
    """With one weight of 1 per column a result is a rounded input: no sum can hide a bit."""
    x = torch.randn(tokens, 128) * 10.0 ** torch.randint(-12, 4, (tokens, 1))
    x[0, :64], x[1, 3], x[2], x[3, 40] = 0, 1e-38, torch.randn(128).bfloat16().float(), 3e38
    weight, scale = torch.eye(128).to(torch.float8_e4m3fn), torch.full((4, 4), 127, dtype=torch.uint8)
    assert_bitwise(check(x, weight, scale), rounded_input(x, True) + 0.0)  # a sum with zeros has no -0


@interpreted
def test_every_magnitude_is_rounded_as_by_the_reference() -> None:
    x = torch.arange(0, 1 << 31, (1 << 31) // (1 << 14)).to(torch.int32).view(F32).view(-1, 128)
    x = torch.where(x.isfinite(), x, 1.0) * torch.tensor([1.0, -1.0]).repeat(64)
    with poisoned_empty(), checked(mutated=WRITTEN):
        assert_bitwise(kernels.round_input(x).float(), rounded_input(x, True))


@interpreted
@pytest.mark.parametrize("form", [F32, torch.uint8, E8M0])
def test_scales_come_in_every_form(form: torch.dtype) -> None:
    byte = block_scale(130, 320)
    scale = ue8m0_scale(byte) * 1.25 if form is F32 else byte.view(form)
    weight = padded(e4m3(130, 320))
    check(torch.randn(3, 2, 320).bfloat16(), weight, padded(scale) if form is F32 else scale)
    check(torch.randn(3, 320), weight, scale, False)


@interpreted
def test_scales_at_the_ends_of_their_range_are_exact() -> None:
    """Inputs of 2^100 or 2^-100 bring them back; a byte of 255 is NaN, in its rows alone."""
    weight = torch.eye(128).to(torch.float8_e4m3fn)
    for byte, value in ((7, 2.0**100), (247, 2.0**-100), (1, 2.0**60), (253, 2.0**-120)):
        scale = torch.full((4, 4), byte, dtype=torch.uint8)
        got = check(torch.full((2, 128), value).bfloat16(), weight, scale, False)
        assert got.isfinite().all() and (got != 0).all()
    scale = torch.full((4, 4), 127, dtype=torch.uint8)
    scale[1, 2] = 255
    with poisoned_empty(), checked(mutated=WRITTEN):
        got = kernels.mx_linear(torch.ones(2, 128).bfloat16(), weight, scale)
    assert got[:, 32:64].isnan().all() and got[:, :32].isfinite().all() and got[:, 64:].isfinite().all()


@interpreted
@pytest.mark.parametrize("splits", [1, 2, 3])
def test_splits_are_combined_in_order_and_counters_left_zero(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    counters = torch.zeros(64, dtype=torch.int32)
    monkeypatch.setattr(gemm, "arrival_counters", lambda count, device: counters)
    monkeypatch.setattr(gemm, "choose_tiling", lambda *sizes: gemm.GemmTiling(4 << splits, 64, 4, 2, splits))
    monkeypatch.setattr(gemm, "plan", gemm.plan.__wrapped__)
    x, weight, scale = torch.randn(20, 384).bfloat16(), e4m3(70, 384), block_scale(70, 384)
    first = check(x, weight, scale)
    assert_bitwise(check(x, weight, scale), first)
    assert not counters.any()


@interpreted
@pytest.mark.parametrize("spread", [padded, strided, lambda x: x.t().contiguous().t()])
def test_arguments_are_read_where_they_are(spread: Callable[[Tensor], Tensor]) -> None:
    scale = block_scale(70, 160)
    for tokens in (4, 19):
        x = spread(torch.randn(tokens, 160).bfloat16())
        check(x, spread(e4m3(70, 160)), scale.t().contiguous().t())
    check(x, e4m3(70, 160), strided(ue8m0_scale(scale)), False)


@interpreted
def test_a_row_of_zeros_or_nan_keeps_to_itself_and_no_token_gives_an_empty_result() -> None:
    weight, scale = e4m3(70, 224), block_scale(70, 224)
    for tokens in (5, 18):
        x = torch.randn(tokens, 224)
        x[1], x[2] = 0, torch.nan
        got = check(x, weight, scale)
        assert not got[1].any() and got[2].isnan().all()
    assert check(x[:0], weight, scale).shape == (0, 70)


def test_unsupported_calls_say_why() -> None:
    weight, scale = torch.empty(8, 0).to(torch.float8_e4m3fn), torch.empty(1, 0)
    assert "K is 0" in kernels.why_unsupported_mx_linear(torch.empty(2, 0), weight, scale)
    assert kernels.why_unsupported_mx_linear(torch.empty(2, 32), e4m3(8, 32), block_scale(8, 32)) == ""


def compile_all(target: str, monkeypatch: pytest.MonkeyPatch, tokens: int) -> list[Any]:
    """Return the kernels of `wo_b` for `tokens` tokens."""
    for module in (pdl, gemm):
        monkeypatch.setattr(module, "gpu_of", lambda device: GPUS[target][0])
    x, scale = torch.empty(tokens, 8192, dtype=BF16), torch.empty(160, 256, dtype=torch.uint8)
    with compiled_for(target) as compiled:
        kernels.mx_linear(x, torch.empty(5120, 8192, dtype=torch.float8_e4m3fn), scale)
    return compiled


@pytest.mark.parametrize(
    ("target", "tokens"),
    [(target, tokens) for target, counts in shared_out((5, 16, 40, 300)).items() for tokens in counts],
)
def test_they_compile_ahead_of_time_within_shared_memory(
    target: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = compile_all(target, monkeypatch, tokens)
    assert len(compiled) == 1 + (tokens > kernels.FEW_TOKENS)
    for kernel in compiled:
        assert kernel.assembled and kernel.metadata.shared <= GPUS[target][1] * 1024
    if target == "sm_90":
        assert tokens <= 8 or "wgmma" in compiled[-1].asm["ptx"]
        assert not compiled[-1].resources()["LOCAL"]
    if tokens == 40 and target.startswith("sm_"):  # 300 are too many CTAs for PDL
        assert begins_early(compiled[0])


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_float32_products_compile_within_shared_memory(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "gpu_of", lambda device: GPUS[target][0])
    x, weight = torch.empty(66, 1024), torch.empty(4096, 1024, dtype=torch.float8_e4m3fn)
    with compiled_for(target) as compiled:
        kernels.mx_linear(x, weight, torch.empty(128, 32, dtype=torch.uint8), False)
    assert compiled[0].assembled and compiled[0].metadata.shared <= GPUS[target][1] * 1024


def test_other_numbers_of_tokens_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = ([kernel.hash for kernel in compile_all("sm_90", monkeypatch, tokens)] for tokens in (300, 304))
    assert first == second
