"""How K-blocks of x are quantized inside a GEMM on sm_90: every bfloat16, and how the loads are compiled."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.kernels.linear import gemm_sm90_pair, gemm_sm90_small
from dsv4_compile.kernels.linear.gemm import Operands
from dsv4_compile.reference.common.block_scale import quantize_activation
from dsv4_compile.reference.common.quant import ue8m0_scale
from dsv4_compile.testing import assert_bitwise
from tests.simulator import gluon as simulated_gluon
from tests.simulator import ptx as simulated_ptx
from tests.simulator.products import GPU, simulated_products
from tests.simulator.values import Value
from tests.support.fake_triton import instructions
from tests.tools.compiled_facts import compiled_for

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
HIDDEN, PROJECTED, COMPRESSED, INDEXED = 4096, 1536, 1024, 2560
"""V4-Flash: of hidden, rows of wq_a and wkv, of HCA's compressor, of CSA's and its indexer's."""
TO_E4M3 = "{ .reg .b16 a; cvt.rn.satfinite.e4m3x2.f32 a, $1, $2; mov.b32 $0, {a, a}; }"


@pytest.fixture(scope="module")
def operands() -> Iterator[types.ModuleType]:
    with simulated_products():
        yield simulated_gluon.simulated("linear.gemm_sm90_operands")


def every_bfloat16() -> Tensor:
    """All 65536, neighbours in one K-block."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(BF16).view(-1, 128)


@pytest.mark.parametrize("largest", [None, 0.0, 1e-38, 2.0**-32, 448.0, 449.0, 3e4, 3.38e38, torch.inf, torch.nan])
def test_pairs_of_bfloat16_are_quantized_to_the_bits_of_the_reference(operands: Any, largest: float | None) -> None:
    """In K-blocks of neighbours, and of values with one far larger magnitude."""
    x = every_bfloat16()
    if largest is not None:
        x = torch.where(x.float().abs() > largest, x.sign() * largest * 2**-9, x)
        x[:, 77] = -largest
    codes, scale = operands.quantize_pairs(Value(x.view(torch.int32)))
    values, byte = quantize_activation(x)
    assert_bitwise(scale.data[:, None], ue8m0_scale(byte))
    got, nan = codes.data.view(E4M3).float(), values.float().isnan()
    assert torch.equal(got.isnan(), nan)
    assert_bitwise(got.masked_fill(nan, 0), values.float().masked_fill(nan, 0))


@pytest.mark.parametrize(
    ("text", "sources", "expected"),
    [
        ("prmt.b32 $0, $1, 0, 0x9180;", [0x12F38456], 0xFF840056),
        ("shl.b32 $0, $1, 16;", [0x12345678], 0x56780000),
        ("and.b32 $0, $1, $2;", [0xF0F0F0F0, 0x3C3C3C3C], 0x30303030),
        ("max.u16x2 $0, $1, $2;", [0x80010002, 0x7FFF0003], 0x80010003),
        # 1.5 times -2, and 2^-127 times 2.
        ("mul.rn.bf16x2 $0, $1, $2;", [0x3FC00040, 0xC0004000], 0xC0400080),
        # 448 and 1000, which saturates; -0 and the tie between 0 and the smallest e4m3.
        (TO_E4M3, [0x43E00000, 0x447A0000], 0x7E7E7E7E),
        (TO_E4M3, [0x80000000, 0x3A800000], 0x80008000),
    ],
)
def test_simulated_instructions(text: str, sources: list[int], expected: int) -> None:
    args = [simulated_ptx.word(torch.tensor([source])) for source in sources]
    (got,) = simulated_ptx.elementwise(text, ",".join("r" * (len(args) + 1)), args, [torch.int32], 1)
    assert int(simulated_ptx.unsigned(got)) == expected


def test_an_instruction_that_is_not_simulated_raises() -> None:
    with pytest.raises(NotImplementedError, match="vabsdiff4"):
        simulated_ptx.run("vabsdiff4.u32.u32.u32 $0, $1, $2, $3;", {})


def order_of(binary: Any) -> tuple[list[int], int, int]:
    """Numbers of a compiled kernel's loads, of its first use of one, and of its first store after one."""
    names = instructions(binary)
    started = [place for place, name in enumerate(names) if "LDG.E.128" in name]
    used = next(place for place, name in enumerate(names) if ".U16x2" in name)
    return started, used, next(place for place, name in enumerate(names) if "STS" in name and place > started[0])


def compiled(tokens: int, beside: int) -> Any:
    """V4-Flash's GEMM of hidden, alone or with a second one in one launch."""
    x, out = torch.empty(tokens, HIDDEN, dtype=BF16), torch.empty(tokens, PROJECTED + beside)
    weight, scale = torch.empty(PROJECTED, HIDDEN, dtype=E4M3), torch.empty(PROJECTED // 128, HIDDEN // 128)
    with compiled_for("sm_90") as binaries:
        if beside:
            other = torch.empty(beside, HIDDEN, dtype=BF16)
            assert gemm_sm90_pair.why_unsupported(x, weight, other, GPU) == ""
            gemm_sm90_pair.launch(x, weight, scale, other, out, GPU)
        else:
            gemm_sm90_small.launch(Operands(x[:, None], None, weight, scale), out.to(BF16), True, GPU)
    return binaries[0]


@pytest.mark.parametrize(
    ("tokens", "beside", "loads"),
    [
        (8, 0, 4),
        (16, 0, 8),
        (32, 0, 32),
        (64, 0, 32),
        (8, COMPRESSED, 4),
        (16, COMPRESSED, 8),
        (32, COMPRESSED, 16),
        (64, COMPRESSED, 32),
        (8, INDEXED, 8),
        (16, INDEXED, 16),
        (32, INDEXED, 32),
    ],
)
def test_loads_of_few_tokens_are_on_their_way_before_one_is_waited_for(tokens: int, beside: int, loads: int) -> None:
    """So that a CTA waits for memory once. Of more than 16 a load may wait for others, but for no store.

    A load brings 8 K-blocks, 8 elements to a thread.
    """
    kernel = compiled(tokens, beside)
    started, used, stored = kernel.ask(order_of)
    assert len(started) == loads
    assert max(started) < (used if tokens <= 16 else stored)
    assert kernel.resources()["STACK"] == 0
