"""`fp8_grouped_einsum_quant` against its two steps, in the checking interpreter; compiled for every GPU."""

from __future__ import annotations

import pytest
import torch

from dsv4_compile.kernels.linear import fp8_grouped_einsum as kernels
from dsv4_compile.kernels.linear import fp8_linear, gemm
from dsv4_compile.kernels.linear.fp8_grouped_einsum import fp8_grouped_einsum
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.reference.common.block_scale import quantize_activation
from dsv4_compile.reference.common.quant import ue8m0_scale
from dsv4_compile.testing import assert_bitwise, padded, poisoned_empty, strided
from tests.kernels.gpus import GPUS, shared_out
from tests.kernels.linear.test_gemm import GEMM, WRITTEN, block_scale, e4m3
from tests.support.bounds import checked
from tests.tools.compiled_facts import compiled_for

interpreted = pytest.mark.interpreted
OP, QUANTIZE = "fp8_grouped_einsum_quant", "quantize_activation_kernel"
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def portable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the Triton kernel on every GPU; those of sm_90 have separate test files."""
    monkeypatch.setattr(gemm, "sm90_module", lambda gpu, stem: None)


def operands(tokens: int, groups: int, rows: int, heads: int = 4, packed: bool = False) -> Operands:
    """Return operands as the inverse RoPE writes them."""
    o, table = torch.randn(tokens, groups * heads, 64).bfloat16(), torch.randn(9, 16)
    a = REFERENCES["inv_rope_fp8_quant"](o, torch.arange(tokens) % 9, table, groups, heads, packed)
    b = e4m3(groups * rows, heads * 64)
    return *a, b, block_scale(*b.shape)


def check(args: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    """Check that the result is bit-identical to quantizing that of `fp8_grouped_einsum`."""
    with poisoned_empty(), checked(mutated=WRITTEN) as seen:
        got = kernels.fp8_grouped_einsum_quant(*args)
    assert seen == ([GEMM, QUANTIZE] if args[0].numel() else [])
    with poisoned_empty():
        z = fp8_grouped_einsum(*args).flatten(1)
    values, byte = quantize_activation(z)
    for result, want, expected in zip(got, (values, ue8m0_scale(byte)), REFERENCES[OP](*args), strict=True):
        assert_bitwise(result, want[:, None])
        assert (result.shape, result.stride()) == (expected.shape, expected.stride())
    return got


@interpreted
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("tokens", "groups", "rows"), [(1, 2, 128), (5, 3, 256), (70, 1, 128), (0, 2, 128)])
def test_values_and_scales_are_those_of_the_two_steps(tokens: int, groups: int, rows: int, packed: bool) -> None:
    check(operands(tokens, groups, rows, packed=packed))


@interpreted
def test_operands_are_read_where_they_are() -> None:
    a, a_scale, b, b_scale = operands(5, 2, 128)
    check((strided(a), strided(a_scale), padded(b), padded(b_scale)))


@interpreted
def test_a_row_of_zeros_or_nan_keeps_to_itself() -> None:
    a, a_scale, b, b_scale = operands(5, 2, 128)
    a[1], a[3, 1, 7] = 0, torch.nan
    values, scale = check((a, a_scale, b, b_scale))
    assert not values[1].float().any()
    assert values[3, 0, 128:].isnan().all() and not values[3, 0, :128].isnan().any()
    assert scale[3, 0, 1] == 2.0**127 and scale[3, 0, 0] < 1e9


def test_k_of_zero_is_unsupported() -> None:
    a, a_scale, b, b_scale = operands(2, 2, 128)
    assert kernels.why_unsupported_fp8_grouped_einsum_quant(a, a_scale, b, b_scale) == ""
    nothing = a[..., :0], a_scale[..., :0], b[:, :0], b_scale[:, :0]
    assert "K is 0" in kernels.why_unsupported_fp8_grouped_einsum_quant(*nothing)


@pytest.mark.parametrize(
    ("target", "tokens"), [(target, n) for target, counts in shared_out((5, 300)).items() for n in counts]
)
def test_both_launches_compile_ahead_of_time(target: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gemm, fp8_linear):
        monkeypatch.setattr(module, "gpu_of", lambda device: GPUS[target][0])
    with compiled_for(target) as compiled:
        kernels.fp8_grouped_einsum_quant(*operands(tokens, 8, 256, heads=8))
    assert [kernel.metadata.name for kernel in compiled] == [GEMM, QUANTIZE]
    assert all(kernel.assembled for kernel in compiled)
