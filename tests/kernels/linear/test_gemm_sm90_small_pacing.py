"""A weight loaded a few K-blocks at a time on sm_90: which is, and that what is multiplied has arrived."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from dsv4_compile.kernels.linear import gemm_sm90_small
from dsv4_compile.kernels.linear.gemm import Operands
from dsv4_compile.kernels.linear.gemm_sm90_operands import SM_SHARED_BYTES
from dsv4_compile.kernels.linear.gemm_sm90_small import SmallTiling, paced_k_blocks, ring_depth
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.testing import assert_bitwise, assert_close
from tests.kernels.linear.test_gemm import NEIGHBOUR, block_scale, e4m3
from tests.simulator.copies import landing_late
from tests.simulator.products import GPU, launches, product, simulated_products
from tests.tools.compiled_facts import compiled_for

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
ALONE = (64, 4, 2, 1)
"""A tiling with CTAs that share no tile."""


@pytest.fixture(scope="module")
def hopper() -> Iterator[Any]:
    with landing_late(), simulated_products() as products:
        yield products


@pytest.mark.parametrize("pace", [0, 1, 2, 3, 5])
@pytest.mark.parametrize(("ring", "k_blocks"), [(6, 6), (7, 6), (4, 9), (6, 1)])
def test_what_is_multiplied_has_arrived(
    hopper: Any, pace: int, ring: int, k_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the number in flight, all K-blocks in the ring or not, scaled or not."""
    monkeypatch.setattr(hopper, "ring_depth", lambda *_: ring)
    monkeypatch.setattr(hopper, "paced_k_blocks", lambda *_: pace)
    weight, scale = e4m3(130, 128 * k_blocks), block_scale(130, 128 * k_blocks)
    x, x_scale = e4m3(9, 1, 128 * k_blocks), torch.rand(9, 1, k_blocks) + 0.5
    got = product(hopper, x, x_scale, weight, scale, BF16, tiling=ALONE)
    assert_close(got, REFERENCES["fp8_grouped_einsum"](x, x_scale, weight, scale).flatten(1), NEIGHBOUR[BF16])
    halves = torch.randn(9, 1, 64 * k_blocks).bfloat16(), torch.randn(130, 64 * k_blocks).bfloat16()
    got = product(hopper, halves[0], None, halves[1], None, BF16, tiling=ALONE)
    assert_close(got, REFERENCES["grouped_linear"](*halves, 1), NEIGHBOUR[BF16])


def test_pacing_changes_no_bit(hopper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x, x_scale = e4m3(40, 1, 1280), torch.rand(40, 1, 10) + 0.5
    weight, scale = e4m3(200, 1280), block_scale(200, 1280)
    got = []
    for pace in (0, 2):
        monkeypatch.setattr(hopper, "paced_k_blocks", lambda *_, pace=pace: pace)
        got.append(product(hopper, x, x_scale, weight, scale, BF16, tiling=ALONE))
    assert_bitwise(*got)


def test_64_kib_of_each_sm_are_in_flight() -> None:
    """CTAs that share SMs, but no tile, and quantize nothing fetch so much while more K-blocks are left than these."""
    wide, small = SmallTiling(128, 4, 2, 1), SmallTiling(64, 4, 2, 1)
    wave = 2 * GPU.sms
    assert paced_k_blocks(GPU, wide, wave, 6, False) == 2
    assert paced_k_blocks(GPU, wide, GPU.sms, 6, False) == 4
    assert paced_k_blocks(GPU, small, wave, 6, False) == 4
    assert paced_k_blocks(GPU, wide._replace(ctas_per_sm=1), GPU.sms, 6, False) == 0
    # What starts after others does not count, and all that there is room for is not paced.
    assert paced_k_blocks(GPU, wide, 2 * wave, 6, False) == 2
    assert paced_k_blocks(GPU, SmallTiling(256, 8, 3, 1), 10 * wave, 6, False) == 1
    assert paced_k_blocks(GPU, wide, wave, 2, False) == 0
    assert paced_k_blocks(GPU, wide, 1, 6, False) == 0
    assert paced_k_blocks(GPU, wide._replace(splits=2, cluster=True), wave, 6, False) == 0
    assert paced_k_blocks(GPU, wide, wave, 6, True) == 0


@pytest.mark.parametrize(
    ("rows", "size", "tokens", "dtype", "pace"),
    [
        (32768, 1024, 1, E4M3, 2),
        (32768, 1024, 64, E4M3, 2),
        (40960, 1024, 32, E4M3, 2),
        (65536, 1536, 8, E4M3, 2),
        (32768, 1024, 32, BF16, 2),
        (8192, 1024, 128, E4M3, 0),
        (1536, 4096, 8, E4M3, 0),
        (4096, 8192, 8, BF16, 0),
        (8192, 4096, 64, BF16, 0),
    ],
)
def test_layers_whose_weights_were_faster_so_are_paced(
    rows: int, size: int, tokens: int, dtype: torch.dtype, pace: int
) -> None:
    """wq_b, with an indexer's too, of V4-Pro and in bfloat16; not one that the tokens of two tiles read, and so on."""
    x, weight = torch.empty(tokens, 1, size, dtype=dtype), torch.empty(rows, size, dtype=dtype)
    scaled = dtype is E4M3
    scales = (torch.empty(tokens, 1, size // 128), torch.empty(rows // 128, size // 128)) if scaled else (None, None)
    with launches(gemm_sm90_small) as calls:
        out = torch.empty(tokens, rows, dtype=BF16)
        gemm_sm90_small.launch(Operands(x, scales[0], weight, scales[1]), out, False, GPU)
    assert calls[0]["config"].pace == pace


@pytest.mark.parametrize(("ctas_per_sm", "tokens"), [(1, 8), (2, 8), (2, 64), (3, 8), (3, 64)])
def test_a_paced_weight_leaves_room_for_as_many_ctas(ctas_per_sm: int, tokens: int) -> None:
    """The barriers of a whole ring's pace included."""
    tiling = SmallTiling(64, 4, ctas_per_sm, 1)
    x, x_scale = torch.empty(tokens, 1, 4096, dtype=E4M3), torch.empty(tokens, 1, 32)
    weight, scale = torch.empty(4096, 4096, dtype=E4M3), torch.empty(32, 32)
    ring = ring_depth(tiling, tokens, 32, False)
    with (
        compiled_for("sm_90") as compiled,
        mock.patch.object(gemm_sm90_small, "choose_tiling", lambda *_: tiling),
        mock.patch.object(gemm_sm90_small, "paced_k_blocks", lambda *_: ring - 1),
    ):
        gemm_sm90_small.launch(Operands(x, x_scale, weight, scale), torch.empty(tokens, 4096), False, GPU)
    (kernel,) = compiled
    used = kernel.resources()
    assert (kernel.packed_metadata[2] + used["SHARED"]) * ctas_per_sm <= SM_SHARED_BYTES
    assert used["STACK"] == used["LOCAL"] == 0
    assert kernel.asm["ptx"].count("cp.async.bulk.tensor.2d") == 4
