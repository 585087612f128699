"""The Triton GEMM against the reference, in the checking interpreter, and compiled for every GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.kernels.linear import fp8_grouped_einsum as einsum_kernels
from dsv4_compile.kernels.linear import fp8_linear as linear_kernels
from dsv4_compile.kernels.linear import gemm as kernels
from dsv4_compile.kernels.linear import grouped_linear as grouped_kernels
from dsv4_compile.kernels.linear.fp8_linear import why_unsupported_torch, widened
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.reference.common.block_scale import dequantize_weight, quantize_activation
from dsv4_compile.reference.common.quant import ue8m0_scale
from dsv4_compile.testing import Tolerance, assert_bitwise, assert_close, padded, poisoned_empty, strided
from tests.kernels.gpus import GPUS, shared_out
from tests.support.bounds import checked
from tests.tools.compiled_facts import compiled_for

interpreted = pytest.mark.interpreted
E8M0 = torch.float8_e8m0fnu
WRITTEN = ("p_out", "p_partial", "p_arrived", *(f"results[{i}]" for i in range(3)))
GEMM = "gemm_kernel"

NEIGHBOUR = {
    # float32 sums of unit-variance terms in a different order; cancellation decides the relative error.
    torch.float32: Tolerance(abs=2e-4, rel=1e-5, cosine=1e-11),
    torch.bfloat16: Tolerance(abs=2e-4, rel=1.01 / 128, cosine=1e-6),
    torch.float16: Tolerance(abs=2e-4, rel=1.01 / 1024, cosine=1e-8),
}


@pytest.fixture(autouse=True)
def portable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the Triton kernel on every GPU; those of sm_90 have separate test files."""
    monkeypatch.setattr(kernels, "sm90_module", lambda gpu, stem: None)


def e4m3(*shape: int) -> Tensor:
    return torch.randn(shape).to(torch.float8_e4m3fn)


def block_scale(rows: int, size: int) -> Tensor:
    """Return uint8 scales: every block's differs from its neighbours'."""
    shape = -(-rows // 128), -(-size // 128)
    return (125 + torch.arange(shape[0] * shape[1]) % 3).view(shape).to(torch.uint8)


def check(op: str, launch: Callable[..., Tensor], args: tuple[Any, ...], launched: list[str]) -> Tensor:
    want = REFERENCES[op](*args)
    with poisoned_empty(), checked(mutated=WRITTEN) as seen:
        got = launch(*args)
    assert seen == launched
    assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
    assert_close(got, want, NEIGHBOUR[want.dtype])
    return got


def linear(x: Tensor, weight: Tensor, scale: Tensor, quantize: bool = True) -> Tensor:
    tokens = x.numel() // x.shape[-1]
    launched = ["quantize_activation_kernel"] * (quantize and tokens > kernels.FEW_TOKENS) + [GEMM] * (tokens > 0)
    return check("fp8_linear", linear_kernels.fp8_linear, (x, weight, scale, quantize), launched)


@interpreted
@pytest.mark.parametrize(
    ("quantize", "dtype"), [(True, torch.bfloat16), (True, torch.float32), (False, torch.bfloat16)]
)
@pytest.mark.parametrize(("tokens", "rows", "size"), [(1, 256, 640), (5, 130, 200), (33, 70, 129), (66, 5, 100)])
def test_fp8_linear_is_the_reference(tokens: int, rows: int, size: int, quantize: bool, dtype: torch.dtype) -> None:
    linear(torch.randn(tokens, size).to(dtype), e4m3(rows, size), block_scale(rows, size), quantize)


@interpreted
@pytest.mark.parametrize("tokens", [3, 66])
def test_another_layer_of_the_same_input_is_written_beside(tokens: int) -> None:
    x, weight, scale, other = torch.randn(tokens, 200), e4m3(70, 200), block_scale(70, 200), torch.randn(9, 200)
    for dtype in (torch.float32, torch.bfloat16):
        args = x.to(dtype), weight, scale, True, other.to(dtype)
        with poisoned_empty():
            got = linear_kernels.fp8_linear(*args)
        assert_close(got, REFERENCES["fp8_linear"](*args), NEIGHBOUR[torch.float32])


@interpreted
def test_x_is_quantized_in_the_gemm_like_in_the_reference() -> None:
    """With one weight of 1 per K-block a result is a quantized input times its scale: no sum can hide a bit."""
    weight = torch.zeros(256, 256)
    weight[torch.arange(256), torch.arange(256)] = 1
    x = torch.randn(6, 256) * 10.0 ** torch.randint(-12, 4, (6, 1))
    x[0, :128], x[1, 3], x[2] = 0, 1e-38, torch.randn(256).bfloat16().float()
    args = x, weight.to(torch.float8_e4m3fn), torch.ones(2, 2)
    assert_bitwise(linear(*args), REFERENCES["fp8_linear"](*args))


@interpreted
@pytest.mark.parametrize(("tokens", "size"), [(5, 1200), (70, 128), (1, 4), (9, 129)])
def test_many_tokens_are_quantized_exactly_before_the_gemm(tokens: int, size: int) -> None:
    for x in (torch.randn(tokens, size) * 1e-3, padded(torch.randn(tokens, size).bfloat16())):
        values, byte = quantize_activation(x)
        with poisoned_empty(), checked(mutated=WRITTEN):
            got, scale = linear_kernels.quantize_activation(x)
        assert_bitwise(got, values)
        assert_bitwise(scale, ue8m0_scale(byte))


@interpreted
@pytest.mark.parametrize("form", [torch.float32, torch.uint8, E8M0])
def test_torch_gets_quantized_x_and_float32_scales(form: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """`scaled_mm` runs on GPUs only and is replaced by a GEMM of the same operands."""
    monkeypatch.setattr(linear_kernels, "why_unsupported_torch", lambda *call: "")
    monkeypatch.setattr(linear_kernels, "multiply_by_torch", dequantized_product)
    x, byte = torch.randn(70, 256).bfloat16(), block_scale(640, 256)
    scale = ue8m0_scale(byte) if form is torch.float32 else byte.view(form)
    check("fp8_linear", linear_kernels.fp8_linear, (x, e4m3(640, 256), scale), ["quantize_activation_kernel"])


@interpreted
@pytest.mark.parametrize("form", [torch.float32, torch.uint8, E8M0])
def test_torch_gets_a_single_group_of_quantized_x(form: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(einsum_kernels, "why_unsupported_torch", lambda *call: "")
    monkeypatch.setattr(einsum_kernels, "multiply_by_torch", dequantized_product)
    byte = block_scale(640, 256)
    scale = ue8m0_scale(byte) if form is torch.float32 else byte.view(form)
    values, by_token = e4m3(70, 1, 256), 2.0 ** torch.randint(-3, 3, (70, 1, 2)).float()
    by_k_block = by_token.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    weight, launch = e4m3(640, 256), einsum_kernels.fp8_grouped_einsum
    check("fp8_grouped_einsum", launch, (values, by_k_block, weight, scale), [])
    # Operands that scaled_mm cannot read, and several groups, use our kernel.
    for call in ((values, by_token), (strided(values), by_k_block), (values.view(70, 2, 128), by_token.view(70, 2, 1))):
        size = call[0].shape[2]
        check("fp8_grouped_einsum", launch, (*call, weight[:, :size], scale[:, : size // 128]), [GEMM])


def test_scales_are_widened_as_the_reference_does() -> None:
    byte = torch.arange(256).to(torch.uint8).view(16, 16)
    for scale in (byte, byte.view(E8M0), ue8m0_scale(byte)):
        assert_bitwise(widened(scale).flatten()[:255], ue8m0_scale(byte).flatten()[:255])
        assert widened(scale)[-1, -1].isnan()


def dequantized_product(values: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    assert scale.stride() == (1, len(values)) and weight_scale.dtype is scale.dtype is torch.float32
    x = values.float() * scale.repeat_interleave(128, 1)
    return (x @ dequantize_weight(weight, weight_scale).t()).bfloat16()


def test_torch_multiplies_many_tokens_of_whole_blocks_on_sm_90(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    weight, scale = torch.empty(256, 512, dtype=torch.float8_e4m3fn), torch.empty(2, 4)
    sm_90, sm_100 = GPUS["sm_90"][0], GPUS["sm_100"][0]
    assert why_unsupported_torch(sm_90, 4096, weight, scale, torch.bfloat16) == ""
    for wrong in (
        (sm_100, 4096, weight, scale, torch.bfloat16),
        (sm_90, 64, weight, scale, torch.bfloat16),
        (sm_90, 4099, weight, scale, torch.bfloat16),
        (sm_90, 4096, weight[:, :384], scale[:, :3], torch.bfloat16),
        (sm_90, 4096, weight[:200], scale, torch.bfloat16),
        (sm_90, 4096, weight, scale, torch.float32),
        (sm_90, 4096, weight, scale.t(), torch.bfloat16),
    ):
        assert why_unsupported_torch(*wrong)
    # A torch built for an older CUDA raises at the call.
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert "12.8" in why_unsupported_torch(sm_90, 4096, weight, scale, torch.bfloat16)


@interpreted
@pytest.mark.parametrize("splits", [1, 2, 3])
def test_splits_are_combined_in_order_and_counters_left_zero(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    counters = torch.zeros(64, dtype=torch.int32)
    monkeypatch.setattr(kernels, "arrival_counters", lambda count, device: counters)
    monkeypatch.setattr(kernels, "choose_tiling", lambda *sizes: kernels.GemmTiling(4 << splits, 64, 4, 2, splits))
    monkeypatch.setattr(kernels, "plan", kernels.plan.__wrapped__)
    x, weight, scale = torch.randn(20, 384).bfloat16(), e4m3(70, 384), block_scale(70, 384)
    first = linear(x, weight, scale)
    assert_bitwise(linear(x, weight, scale), first)
    assert not counters.any()


@interpreted
@pytest.mark.parametrize("form", [torch.float32, torch.uint8, E8M0])
def test_scales_come_in_every_form(form: torch.dtype) -> None:
    byte = block_scale(130, 300)
    scale = ue8m0_scale(byte) * 1.25 if form is torch.float32 else byte.view(form)
    linear(torch.randn(3, 2, 300), padded(e4m3(130, 300)), padded(scale) if form is torch.float32 else scale)


@interpreted
@pytest.mark.parametrize("spread", [padded, strided, lambda x: x.t().contiguous().t()])
def test_slices_of_a_projection_are_read_where_they_are(spread: Callable[[Tensor], Tensor]) -> None:
    for tokens in (4, 65):
        linear(spread(torch.randn(tokens, 160).bfloat16()), strided(e4m3(40, 160)), block_scale(40, 160))


@interpreted
def test_a_row_of_zeros_or_nan_keeps_to_itself() -> None:
    x, weight, scale = torch.randn(5, 200), e4m3(70, 200), block_scale(70, 200)
    x[1], x[2] = 0, torch.nan
    got = linear(x, weight, scale)
    assert not got[1].any()
    assert got[2].isnan().all()


@interpreted
def test_no_token_gives_an_empty_result() -> None:
    linear(torch.randn(0, 128), e4m3(40, 128), block_scale(40, 128))
    check("grouped_linear", grouped_kernels.grouped_linear, (torch.randn(0, 128), torch.randn(6, 64), 2), [])
    quantized = e4m3(0, 2, 128), torch.ones(0, 2, 1), e4m3(40, 128), block_scale(40, 128)
    check("fp8_grouped_einsum", einsum_kernels.fp8_grouped_einsum, quantized, [])


@interpreted
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("tokens", "groups", "heads", "rows"), [(1, 2, 4, 64), (5, 3, 10, 40), (70, 1, 2, 130)])
def test_grouped_einsum_reads_what_the_inverse_rotation_wrote(
    tokens: int, groups: int, heads: int, rows: int, packed: bool
) -> None:
    o, table = torch.randn(tokens, groups * heads, 64).bfloat16(), torch.randn(9, 16)
    a = REFERENCES["inv_rope_fp8_quant"](o, torch.arange(tokens) % 9, table, groups, heads, packed)
    b = e4m3(groups * rows, heads * 64)
    args = *a, b, block_scale(*b.shape)
    check("fp8_grouped_einsum", einsum_kernels.fp8_grouped_einsum, args, [GEMM])


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("tokens", "groups", "rows", "size"), [(1, 2, 64, 256), (5, 3, 40, 33), (70, 2, 130, 200)])
def test_grouped_linear_is_the_reference(tokens: int, groups: int, rows: int, size: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(tokens, groups, size).to(dtype), torch.randn(groups * rows, size).to(dtype)
    spread = x.transpose(0, 1).contiguous().transpose(0, 1)
    for one in (x.flatten(1), spread):
        check("grouped_linear", grouped_kernels.grouped_linear, (one, weight, groups), [GEMM])


@pytest.mark.parametrize("groups", [1, 3])
def test_gemms_of_groups_by_torch_write_their_slices(groups: int) -> None:
    x, weight = torch.randn(70, groups, 40), torch.randn(groups * 20, 40)
    for one in (x, x.transpose(0, 1).contiguous().transpose(0, 1), strided(x)):
        got = grouped_kernels.multiply_by_torch(one, weight, torch.float32)
        want = REFERENCES["grouped_linear"](x, weight, groups)
        assert (got.shape, got.stride()) == (want.shape, want.stride())
        torch.testing.assert_close(got, want)


def test_k_of_zero_is_unsupported() -> None:
    x, weight = torch.empty(2, 4, 0), torch.empty(8, 0)
    assert "K is 0" in grouped_kernels.why_unsupported_grouped_linear(x, weight, 4)
    assert grouped_kernels.why_unsupported_grouped_linear(torch.empty(2, 4, 3), torch.empty(8, 3), 4) == ""
    quantized = x.to(torch.float8_e4m3fn), torch.empty(2, 4, 0), weight.to(torch.float8_e4m3fn), torch.empty(1, 0)
    assert "K is 0" in einsum_kernels.why_unsupported_fp8_grouped_einsum(*quantized)
    assert "K is 0" in linear_kernels.why_unsupported_fp8_linear(x, *quantized[2:])


def compile_all(target: str, monkeypatch: pytest.MonkeyPatch, tokens: int) -> list[Any]:
    """Return the kernels of an output projection and of `wq_a` for `tokens` tokens."""
    monkeypatch.setattr(kernels, "gpu_of", lambda device: GPUS[target][0])
    x, scale = torch.empty(tokens, 4096, dtype=torch.bfloat16), torch.empty(12, 32, dtype=torch.uint8)
    a = torch.empty(8, tokens, 4096, dtype=torch.float8_e4m3fn).transpose(0, 1)
    a_scale = torch.empty(8, 32, -(-tokens // 4) * 4)[..., :tokens].permute(2, 0, 1)
    weight = torch.empty(1536, 4096, dtype=torch.float8_e4m3fn)
    with compiled_for(target) as compiled:
        linear_kernels.fp8_linear(x, weight, scale)
        einsum_kernels.fp8_grouped_einsum(a, a_scale, weight, scale)
        grouped_kernels.grouped_linear(x, torch.empty(1536, 512, dtype=torch.bfloat16), 8)
    return compiled


@pytest.mark.parametrize(
    ("target", "tokens"),
    [("sm_90", 64), *((target, tokens) for target, counts in shared_out((5, 300)).items() for tokens in counts)],
)
def test_they_compile_ahead_of_time_within_shared_memory(
    target: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kernel in compile_all(target, monkeypatch, tokens):
        assert kernel.assembled
        assert kernel.metadata.shared <= GPUS[target][1] * 1024


F8, BF16, F32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
KINDS = ((BF16, True, F8), (F32, True, F8), (BF16, False, F8), (F32, False, F8), (F8, False, F8), (BF16, False, BF16))
"""Dtype of x, whether the GEMM quantizes it, and dtype of the weight, for every kind of call."""


@pytest.mark.parametrize(
    ("target", "tokens", "kind"),
    [
        ("sm_90", 64, (F32, True, F8)),
        ("sm_90", 66, (F32, False, F8)),
        ("sm_120", 33, (F32, False, F8)),
        ("gfx942", 300, (F32, False, F8)),
        ("sm_90", 64, (F8, False, F8)),
        ("sm_120", 64, (BF16, False, BF16)),
    ],
)
def test_shared_memory_of_a_tiling_is_known_before_it_is_compiled(
    target: str, tokens: int, kind: tuple[torch.dtype, bool, torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, kib = GPUS[target]
    known: list[int] = []

    def needed(*args: Any) -> int:
        known.append(shared_bytes(*args))
        return known[-1]

    shared_bytes = kernels.shared_bytes
    monkeypatch.setattr(kernels, "gpu_of", lambda device: gpu)
    monkeypatch.setattr(kernels, "shared_bytes", needed)
    dtype, quantize, weight_dtype = kind
    scale = torch.empty(32, 8, dtype=torch.uint8) if weight_dtype is F8 else None
    x, x_scale = torch.empty(tokens, 1, 1024, dtype=dtype), torch.empty(tokens, 1, 8) if dtype is F8 else None
    with compiled_for(target) as compiled:
        operands = kernels.Operands(x, x_scale, torch.empty(4096, 1024, dtype=weight_dtype), scale)
        kernels.grouped_gemm(operands, BF16, quantize=quantize)
    assert compiled[0].metadata.shared <= known[-1] <= kib * 1024


@pytest.mark.parametrize("target", GPUS)
def test_every_tiling_fits_the_shared_memory_of_its_gpu(target: str) -> None:
    gpu, kib = GPUS[target]
    for tokens in (1, 9, 17, 33, 65):
        tiling = kernels.choose_tiling(gpu, tokens, 1, 4096, 8)
        for dtype, quantize, weight_dtype in (*KINDS, (F32, False, F32)):
            operand = dtype.itemsize if not quantize and dtype is not F8 else 2 if gpu.backend == "hip" else 1
            sizes = 128 if weight_dtype is F8 else 64, dtype.itemsize, weight_dtype.itemsize, operand
            fitting = kernels._fitting(gpu, tiling, *sizes)
            assert kernels.shared_bytes(gpu, fitting, *sizes) <= kib * 1024
            assert fitting.stages > 1
            assert fitting == tiling or dtype is F32


def test_other_numbers_of_tokens_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = ([kernel.hash for kernel in compile_all("sm_90", monkeypatch, tokens)] for tokens in (300, 304))
    assert first == second


def test_weights_go_from_memory_to_the_tensor_cores_of_sm_90(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "gpu_of", lambda device: GPUS["sm_90"][0])
    x, scale = torch.empty(16, 1024, dtype=torch.bfloat16), torch.empty(4, 8, dtype=torch.uint8)
    with compiled_for("sm_90") as compiled:
        linear_kernels.fp8_linear(x, torch.empty(512, 1024, dtype=torch.float8_e4m3fn), scale)
    ptx = compiled[0].asm["ptx"]
    assert "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3" in ptx
    assert "cp.async.cg.shared.global" in ptx
    # The weight does not pass through registers.
    assert "ldmatrix.sync.aligned.m8n8.x4.shared" not in ptx


@pytest.mark.parametrize("tokens", [1, 8, 16, 32, 64, 65, 128, 4096])
@pytest.mark.parametrize(
    ("groups", "rows", "size"), [(1, 1536, 4096), (1, 32768, 1024), (1, 4096, 8192), (8, 1024, 4096)]
)
def test_few_tokens_fill_the_gpu_once(tokens: int, groups: int, rows: int, size: int) -> None:
    gpu, k_blocks = GPUS["sm_90"][0], size // 128
    tiling = kernels.choose_tiling(gpu, tokens, groups, rows, k_blocks)
    tiles = -(-tokens // tiling.block_m) * groups * -(-rows // tiling.block_n)
    assert (tiling.splits - 1) * -(-k_blocks // tiling.splits) < k_blocks
    assert tiling.splits == 1 or tiles * tiling.splits <= 2 * gpu.sms
    if tokens <= kernels.FEW_TOKENS:
        assert tiles * tiling.splits >= 0.7 * gpu.sms
