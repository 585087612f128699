"""The inverse RoPE kernels against the reference, in the checking interpreter, and compiled for every GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsv4_compile.kernels.attention import inv_rope as kernels
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.testing import assert_bitwise, hostile_indices, padded, poisoned_empty, strided
from tests.kernels.gpus import begins_early, sees
from tests.support import fake_triton
from tests.support.bounds import checked
from tests.tools.compiled_facts import compiled_for

interpreted = pytest.mark.interpreted
MAX_POS = 40


def rope_table(rope_dim: int) -> Tensor:
    angle = torch.rand(MAX_POS, rope_dim // 2) * 6.28
    return torch.cat((angle.cos(), angle.sin()), dim=1)


def unrotate(o: Tensor, positions: Tensor, table: Tensor) -> None:
    want = REFERENCES["inv_rope"](o, positions, table)
    with poisoned_empty(), checked(mutated=("p_out",)) as launched:
        got = kernels.inv_rope(o, positions, table)
    assert launched == ["inv_rope_kernel"] * bool(o.numel())
    assert_bitwise(got, want, strides=True)


def quantize(o: Tensor, positions: Tensor, table: Tensor, groups: int, heads: int, packed: bool) -> None:
    want = REFERENCES["inv_rope_fp8_quant"](o, positions, table, groups, heads, packed)
    with poisoned_empty(), checked(mutated=("tensors.p_values", "tensors.p_scale")) as launched:
        got = kernels.inv_rope_fp8_quant(o, positions, table, groups, heads, packed)
    by_tile = kernels.ONE_HEAD_ROWS == 0 and o.shape[2] == 512 and table.shape[1] <= 128
    assert launched == [f"inv_rope_fp8_quant{'_by_tile' * by_tile}_kernel"] * bool(o.shape[0] and groups)
    for actual, expected in zip(got, want, strict=True):
        assert_bitwise(actual, expected, strides=True)
        assert actual.untyped_storage().nbytes() == expected.untyped_storage().nbytes()
        # The zero rows after T are not in the view.
        assert_bitwise(whole(actual), whole(expected))


def whole(x: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("heads", "dim", "rope"), [(3, 512, 64), (5, 64, 16), (1, 128, 128), (2, 256, 0), (3, 32, 22)])
def test_rotating_back_is_exact(heads: int, dim: int, rope: int, dtype: torch.dtype) -> None:
    unrotate(torch.randn(4, heads, dim).to(dtype) * 3, torch.randint(MAX_POS, (4,)), rope_table(rope))


@pytest.fixture(params=["few", "several", "many"])
def rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat any number of rows as few, several or many."""
    if request.param != "few":
        monkeypatch.setattr(kernels, "ONE_HEAD_ROWS", 0)
    if request.param == "many":
        monkeypatch.setattr(kernels, "TWO_HEAD_ROWS", 0)


@interpreted
@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize(
    ("tokens", "groups", "heads", "dim", "rope", "packed"),
    [
        (1, 2, 2, 512, 64, False),
        (6, 2, 1, 512, 128, True),
        (3, 1, 2, 512, 0, False),
        (5, 1, 3, 512, 64, True),
        (4, 3, 1, 128, 16, True),
        (6, 2, 6, 64, 64, False),
        (3, 2, 8, 16, 6, True),
        (2, 1, 1, 1024, 64, False),
    ],
)
def test_values_and_scales_are_exact_and_padding_rows_zero(
    tokens: int, groups: int, heads: int, dim: int, rope: int, packed: bool
) -> None:
    # One head more than the groups have: it is padding and may hold anything.
    o = torch.randn(tokens, groups * heads + 1, dim).bfloat16() * 10.0 ** torch.randint(-9, 4, (tokens, 1, 1))
    o[:, -1] = torch.nan
    quantize(o, torch.randint(MAX_POS, (tokens + 2,)), rope_table(rope), groups, heads, packed)


@interpreted
@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("block", [(1, 1), (4, 1), (1, 4), (4, 2), (8, 1)])
@pytest.mark.parametrize(("dim", "packed"), [(256, False), (512, True)])
def test_any_block_gives_the_same_result(
    block: tuple[int, int], packed: bool, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_block", lambda rows: block)
    # The interpreter takes as long for a program of one token as for one of four.
    tokens = 3 if block[0] == 1 else 7
    quantize(torch.randn(tokens, 6, dim), torch.randint(MAX_POS, (tokens,)), rope_table(64), 2, 3, packed)


@interpreted
@pytest.mark.parametrize("block", [1, 4, 8])
@pytest.mark.parametrize("dim", [256, 512])
def test_any_number_of_heads_in_a_program_gives_the_same_rotation(
    block: int, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_rows", lambda rows: block)
    unrotate(torch.randn(7, 6, dim), torch.randint(MAX_POS, (7,)), rope_table(64))


@interpreted
@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("spread", [padded, strided, lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)])
def test_heads_of_any_strides(spread: Callable[[Tensor], Tensor]) -> None:
    for dim in (128, 512):
        o, positions, table = (
            spread(torch.randn(3, 4, dim).bfloat16()),
            strided(torch.arange(3)),
            padded(rope_table(16)),
        )
        unrotate(o, positions, table)
        quantize(o, positions, table, 2, 2, False)


@interpreted
@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("dim", [128, 512])
def test_positions_of_padding_rows_may_be_anything(dim: int) -> None:
    for dtype in (torch.int32, torch.int64):
        o, positions = torch.randn(9, 2, dim).bfloat16(), hostile_indices((11,), MAX_POS, dtype=dtype)
        unrotate(o, positions, rope_table(16))
        quantize(o, positions, rope_table(16), 1, 2, True)


@interpreted
@pytest.mark.parametrize("packed", [False, True])
def test_no_token_gives_empty_results(packed: bool) -> None:
    o = torch.randn(0, 4, 128)
    unrotate(o, torch.arange(0), rope_table(16))
    quantize(o, torch.arange(0), rope_table(16), 2, 2, packed)


@interpreted
@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("dim", [256, 512])
def test_a_tile_of_zeros_or_nan_does_not_change_others(dim: int) -> None:
    o = torch.randn(2, 2, dim)
    o[0, 0, :128], o[0, 1, 130], o[1, 0, -1], o[1, 1, 3] = 0, torch.nan, torch.inf, -torch.inf
    quantize(o, torch.tensor([0, 5]), torch.cat((torch.ones(MAX_POS, 32), torch.zeros(MAX_POS, 32)), 1), 1, 2, False)


def test_odd_head_dims_are_unsupported() -> None:
    rest = torch.arange(2), rope_table(16)
    assert kernels.why_unsupported_inv_rope(torch.empty(2, 3, 64), *rest) == ""
    assert "96 is not a power of two" in kernels.why_unsupported_inv_rope(torch.empty(2, 3, 96), *rest)
    assert "384 is not a power of two" in kernels.why_unsupported_inv_rope_fp8_quant(
        torch.empty(2, 3, 384), *rest, 1, 2
    )


@pytest.mark.parametrize("target", fake_triton.TARGETS)
def test_they_compile_ahead_of_time(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    early = sees(monkeypatch, target)
    with compiled_for(target) as compiled:
        for tokens in (20, kernels.TWO_HEAD_ROWS // 64 + 1):
            args = torch.empty(tokens, 64, 512, dtype=torch.bfloat16), torch.arange(tokens), rope_table(64)
            kernels.inv_rope(*args)
            for packed in (False, True):
                kernels.inv_rope_fp8_quant(*args, 8, 8, packed)
    assert [bool(kernel.assembled) for kernel in compiled] == [True] * 6
    assert all(begins_early(binary) == early for binary in compiled[:3])


def test_many_programs_use_pdl_but_launch_no_dependents(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sees(monkeypatch, "sm_90")
    o = torch.empty(kernels.TWO_HEAD_ROWS // 64 + 1, 64, 512, dtype=torch.bfloat16)
    with compiled_for("sm_90") as compiled:
        kernels.inv_rope_fp8_quant(o, torch.arange(len(o)), rope_table(64), 8, 8)
    ptx = compiled[0].asm["ptx"]
    assert -1 < ptx.index(fake_triton.WAIT) < ptx.index("ld.global")
    assert "launch_dependents" not in ptx


def test_a_row_stays_in_its_threads_until_it_is_stored() -> None:
    args = torch.empty(3, 64, 512, dtype=torch.bfloat16), torch.arange(3), rope_table(64)
    with compiled_for("sm_90") as compiled:
        kernels.inv_rope(*args)
        kernels.inv_rope_fp8_quant(*args, 8, 8)
    assert "convert_layout" not in compiled[0].asm["ttgir"]
    for kernel in compiled:
        ptx = kernel.asm["ptx"]
        assert ptx.count("ld.global.v4.b32") >= 4
        assert "st.global.v4.b32" in ptx
        # A contracted multiply and add would round once where the reference rounds twice.
        assert "fma" not in ptx
