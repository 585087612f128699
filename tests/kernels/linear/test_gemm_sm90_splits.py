"""Splits of the GEMM for few tokens on sm_90, their K-blocks and registers, simulated and compiled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dsv4_compile.kernels.linear import gemm_sm90_pair, gemm_sm90_small
from dsv4_compile.kernels.linear.gemm import Operands
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.reference.common.block_scale import quantize_activation, scale_value
from dsv4_compile.testing import assert_bitwise, assert_close
from tests.kernels.linear.test_gemm import NEIGHBOUR, block_scale, e4m3
from tests.simulator.copies import EARLY_AND_LATE
from tests.simulator.products import GPU, product, simulated_products
from tests.tools.compiled_facts import compiled_for

BF16 = torch.bfloat16
SM_REGISTERS = 1 << 16


@pytest.fixture(scope="module", **EARLY_AND_LATE)
def hopper(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Yield the simulated kernels, with copies that land as early as they may, and as late."""
    with request.param(), simulated_products() as products:
        yield products


UNEVEN = (64, (128, 8, 1, 7, True)), (14, (128, 4, 2, 7, True)), (60, (256, 8, 1, 7, True))
UNEVEN += (20, (64, 4, 1, 7)), (50, (128, 8, 1, 1)), (64, (128, 4, 2, 3, True))
FIVE = tuple((tokens, (64, 4, 3, 5, True)) for tokens in (17, 32, 50, 64))


@pytest.mark.parametrize(
    ("tokens", "tiling", "quantize"),
    [(*of, False) for of in UNEVEN + FIVE] + [(*of, True) for of in UNEVEN + FIVE if of[1][3] > 3 or of[0] < 32],
)
def test_the_last_split_of_a_tile_may_have_fewer_k_blocks(
    hopper: Any, tokens: int, tiling: tuple[int, ...], quantize: bool
) -> None:
    """The last of 26 K-blocks are fewer than those of other splits, and fewer than ring buffers."""
    weight, scale = e4m3(200, 26 * 128), block_scale(200, 26 * 128)
    x = torch.randn(tokens, 26 * 128).bfloat16()
    if quantize:
        got = product(hopper, x[:, None], None, weight, scale, BF16, tiling=tiling, quantize=True)
    else:
        values, byte = quantize_activation(x)
        got = product(hopper, values[:, None], scale_value(byte)[:, None], weight, scale, BF16, tiling=tiling)
    assert_close(got, REFERENCES["fp8_linear"](x, weight, scale), NEIGHBOUR[BF16])


@pytest.mark.parametrize("tokens", [5, 64])
def test_a_deeper_ring_changes_no_bit(hopper: Any, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it matter where x is quantized: K-blocks are added in order."""
    weight, scale, x = e4m3(200, 10 * 128), block_scale(200, 10 * 128), torch.randn(tokens, 10 * 128).bfloat16()
    values, byte = quantize_activation(x)
    known = scale_value(byte)[:, None]
    tiling = (64, 4, 2, 1)
    want = product(hopper, values[:, None], known, weight, scale, BF16, tiling=tiling)
    for ring in (2, 5, 10):
        monkeypatch.setattr(hopper, "ring_depth", lambda *_, ring=ring: ring)
        assert_bitwise(product(hopper, values[:, None], known, weight, scale, BF16, tiling=tiling), want)
        assert_bitwise(product(hopper, x[:, None], None, weight, scale, BF16, tiling=tiling, quantize=True), want)


TILES = (64, (128, 8, 1, 3, True)), (64, (256, 8, 1, 6, True)), (64, (64, 4, 3, 5, True)), (32, (64, 4, 3, 5, True))
TILES += (64, (128, 4, 2, 6, True)), (128, (128, 4, 2, 3, True)), (8, (128, 4, 2, 6, True)), (64, (64, 4, 2, 1))


@pytest.mark.parametrize(
    ("tokens", "tiling", "way"),
    [(*tile, "quantizes x") for tile in TILES if tile[0] <= 32]
    + [(*tile, "quantized") for tile in TILES]
    + [(*tile, "quantized result") for tile in TILES if tile[1][0] == 128],
)
def test_nothing_is_spilled_and_code_is_not_repeated(
    tokens: int, tiling: tuple[int, ...], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Registers suffice for the CTAs per SM. Each operand, but not an x to quantize, has one copy before the loop, and
    one in it unless the ring holds all K-blocks."""
    monkeypatch.setattr(gemm_sm90_small, "choose_tiling", lambda *_: gemm_sm90_small.SmallTiling(*tiling))
    x = torch.empty(tokens, 1, 4096, dtype=BF16 if way == "quantizes x" else torch.float8_e4m3fn)
    x_scale = None if way == "quantizes x" else torch.empty(tokens, 1, 32)
    weight, scale = torch.empty(1024, 4096, dtype=torch.float8_e4m3fn), torch.empty(8, 32, dtype=torch.uint8)
    out, out_scale = torch.empty(tokens, 1024, dtype=BF16), None
    if way == "quantized result":
        out, out_scale = out.to(weight.dtype), torch.empty(8, tokens)
    with compiled_for("sm_90") as compiled:
        operands = Operands(x, x_scale, weight, scale)
        gemm_sm90_small.launch(operands, out, way == "quantizes x", GPU, out_scale)
    (kernel,) = compiled
    # To the compiler's shared memory, a cluster's mailbox and the reserve of every CTA are added.
    assert (kernel.packed_metadata[2] + kernel.resources()["SHARED"]) * tiling[2] <= 228 * 1024
    assert f"wgmma.mma_async.sync.aligned.m64n{min(tokens, 64)}k32.f32.e4m3.e4m3" in kernel.asm["ptx"]
    quantize = way == "quantizes x"
    of, depth = gemm_sm90_small.tiling_of(x, weight, GPU, quantize)
    resident = gemm_sm90_small.ring_depth(of, min(tokens, 64), depth, quantize) == depth
    assert kernel.asm["ptx"].count("cp.async.bulk.tensor.2d") == (2 - quantize) * (2 - resident)
    # With one group and one tile of tokens a CTA locates its tile without a division.
    divisions = kernel.asm["ptx"].count("div.s32") + kernel.asm["ptx"].count("rem.s32")
    assert (divisions > 0) == (tokens > 64)
    check_registers(kernel, 32 * tiling[1] * tiling[2])


@pytest.mark.parametrize("tokens", [1, 64])
def test_two_gemms_of_one_x_are_in_registers(tokens: int) -> None:
    x, out = torch.empty(tokens, 4096, dtype=BF16), torch.empty(tokens, 2560)
    weight, scale = torch.empty(1536, 4096, dtype=torch.float8_e4m3fn), torch.empty(12, 32, dtype=torch.uint8)
    with compiled_for("sm_90") as compiled:
        gemm_sm90_pair.launch(x, weight, scale, torch.empty(1024, 4096, dtype=BF16), out, GPU)
    (kernel,) = compiled
    assert kernel.asm["ptx"].count("cp.async.bulk.tensor.2d") == 1 + 4
    check_registers(kernel, 32 * gemm_sm90_pair.WARPS * gemm_sm90_pair.CTAS_PER_SM)


def check_registers(kernel: Any, threads: int) -> None:
    """Nothing is spilled, and an SM has registers for so many threads."""
    used = kernel.resources()
    assert used["STACK"] == used["LOCAL"] == 0
    assert used["REG"] * threads <= SM_REGISTERS
