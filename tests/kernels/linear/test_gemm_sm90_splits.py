"""What the programs of a product of few tokens on Hopper have of a tile: their parts of it, simulated and compiled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.kernels.linear.test_grouped_matmul import NEIGHBOUR, block_scale, e4m3

from dsv4_compile.kernels.linear import gemm_sm90_pair as grouped_matmul_pair_hopper
from dsv4_compile.kernels.linear import gemm_sm90_small as grouped_matmul_hopper
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.reference.common.block_scale import quantize_activation, scale_value
from dsv4_compile.testing import assert_bitwise, assert_close, fake_triton
from tests.simulator.copies import EARLY_AND_LATE
from tests.simulator.products import GPU, product, simulated_products

BF16 = torch.bfloat16
PROCESSOR_REGISTERS = 1 << 16


@pytest.fixture(scope="module", **EARLY_AND_LATE)
def hopper(request: pytest.FixtureRequest) -> Iterator[Any]:
    """With copies that land as early as they may, and as late."""
    with request.param(), simulated_products() as found:
        yield found


UNEVEN = (64, (128, 8, 1, 7, True)), (14, (128, 4, 2, 7, True)), (60, (256, 8, 1, 7, True))
UNEVEN += (20, (64, 4, 1, 7)), (50, (128, 8, 1, 1)), (64, (128, 4, 2, 3, True))
FIVE = tuple((tokens, (64, 4, 3, 5, True)) for tokens in (17, 32, 50, 64))


@pytest.mark.parametrize(
    ("tokens", "cut", "quantize"),
    [(*of, False) for of in UNEVEN + FIVE] + [(*of, True) for of in UNEVEN + FIVE if of[1][3] > 3 or of[0] < 32],
)
def test_the_last_program_of_a_tile_may_have_fewer_strips(
    hopper: Any, tokens: int, cut: tuple[int, ...], quantize: bool
) -> None:
    """Of 26: than the others, and than it has buffers."""
    weight, scale = e4m3(200, 26 * 128), block_scale(200, 26 * 128)
    x = torch.randn(tokens, 26 * 128).bfloat16()
    if quantize:
        got = product(hopper, x[:, None], None, weight, scale, BF16, cut=cut, quantize=True)
    else:
        values, byte = quantize_activation(x)
        got = product(hopper, values[:, None], scale_value(byte)[:, None], weight, scale, BF16, cut=cut)
    assert_close(got, REFERENCES["fp8_linear"](x, weight, scale), NEIGHBOUR[BF16])


@pytest.mark.parametrize("tokens", [5, 64])
def test_a_deeper_ring_changes_no_bit(hopper: Any, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it matter where x is quantised: strips are added in their order."""
    weight, scale, x = e4m3(200, 10 * 128), block_scale(200, 10 * 128), torch.randn(tokens, 10 * 128).bfloat16()
    values, byte = quantize_activation(x)
    known = scale_value(byte)[:, None]
    cut = (64, 4, 2, 1)
    want = product(hopper, values[:, None], known, weight, scale, BF16, cut=cut)
    for ring in (2, 5, 10):
        monkeypatch.setattr(hopper, "deepest_ring", lambda *_, ring=ring: ring)
        assert_bitwise(product(hopper, values[:, None], known, weight, scale, BF16, cut=cut), want)
        assert_bitwise(product(hopper, x[:, None], None, weight, scale, BF16, cut=cut, quantize=True), want)


TILES = (64, (128, 8, 1, 3, True)), (64, (256, 8, 1, 6, True)), (64, (64, 4, 3, 5, True)), (32, (64, 4, 3, 5, True))
TILES += (64, (128, 4, 2, 6, True)), (128, (128, 4, 2, 3, True)), (8, (128, 4, 2, 6, True)), (64, (64, 4, 2, 1))


@pytest.mark.parametrize(
    ("tokens", "cut", "way"),
    [(*tile, "quantised here") for tile in TILES if tile[0] <= 32]
    + [(*tile, "quantised") for tile in TILES]
    + [(*tile, "quantised result") for tile in TILES if tile[1][0] == 128],
)
def test_everything_is_in_registers_and_nothing_is_there_twice(
    tokens: int, cut: tuple[int, ...], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many registers as there are for so many programs; a copy for each operand in front of the loop, but not of
    what is quantised, and in it, unless all strips have room."""
    monkeypatch.setattr(grouped_matmul_hopper, "choose_cut", lambda *_: grouped_matmul_hopper.Cut(*cut))
    x = torch.empty(tokens, 1, 4096, dtype=BF16 if way == "quantised here" else torch.float8_e4m3fn)
    x_scale = None if way == "quantised here" else torch.empty(tokens, 1, 32)
    weight, scale = torch.empty(1024, 4096, dtype=torch.float8_e4m3fn), torch.empty(8, 32, dtype=torch.uint8)
    out, out_scale = torch.empty(tokens, 1024, dtype=BF16), None
    if way == "quantised result":
        out, out_scale = out.to(weight.dtype), torch.empty(8, tokens)
    with fake_triton.compiled_for(fake_triton.HOPPER) as compiled:
        launch = grouped_matmul_hopper.launch_hopper
        launch(x, x_scale, weight, scale, out, way == "quantised here", GPU, out_scale)
    (kernel,) = compiled
    # Beside the compiler's there is an inbox, in a cluster, and what a program of any kind takes.
    assert (kernel.packed_metadata[2] + fake_triton.resources(kernel)["SHARED"]) * cut[2] <= 228 * 1024
    assert f"wgmma.mma_async.sync.aligned.m64n{min(tokens, 64)}k32.f32.e4m3.e4m3" in kernel.asm["ptx"]
    quantize = way == "quantised here"
    of, each = grouped_matmul_hopper.cut_of(x, weight, GPU, quantize)
    all_at_once = grouped_matmul_hopper.deepest_ring(of, min(tokens, 64), each, quantize) == each
    assert kernel.asm["ptx"].count("cp.async.bulk.tensor.2d") == (2 - quantize) * (2 - all_at_once)
    # Of one group, and of tokens that share a tile, a program finds its tile without a division.
    divisions = kernel.asm["ptx"].count("div.s32") + kernel.asm["ptx"].count("rem.s32")
    assert (divisions > 0) == (tokens > 64)
    held(kernel, 32 * cut[1] * cut[2])


@pytest.mark.parametrize("tokens", [1, 64])
def test_two_products_of_one_input_are_in_registers(tokens: int) -> None:
    x, out = torch.empty(tokens, 4096, dtype=BF16), torch.empty(tokens, 2560)
    weight, scale = torch.empty(1536, 4096, dtype=torch.float8_e4m3fn), torch.empty(12, 32, dtype=torch.uint8)
    with fake_triton.compiled_for(fake_triton.HOPPER) as compiled:
        grouped_matmul_pair_hopper.launch_pair(x, weight, scale, torch.empty(1024, 4096, dtype=BF16), out, GPU)
    (kernel,) = compiled
    assert kernel.asm["ptx"].count("cp.async.bulk.tensor.2d") == 1 + 4
    held(kernel, 32 * grouped_matmul_pair_hopper.WARPS * grouped_matmul_pair_hopper.PROGRAMS)


def held(kernel: Any, threads: int) -> None:
    """Nothing is spilled, and a processor has registers for so many threads."""
    used = fake_triton.resources(kernel)
    assert used["STACK"] == used["LOCAL"] == 0
    assert used["REG"] * threads <= PROCESSOR_REGISTERS
