"""The sm_90 GEMM of many tokens, simulated (see tests/simulator/gluon.py), and compiled."""

from __future__ import annotations

import itertools
import types
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from dsv4_compile.bench import gemm
from dsv4_compile.kernels.linear import gemm_sm90_large as large
from dsv4_compile.kernels.linear.gemm import Operands
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.reference.common.block_scale import quantize_activation
from dsv4_compile.reference.common.quant import ue8m0_scale
from dsv4_compile.testing import assert_close
from tests.kernels.gpus import GPUS
from tests.kernels.linear.test_gemm import NEIGHBOUR, block_scale, e4m3
from tests.kernels.linear.test_gemm_sm90_small import LAYERS
from tests.simulator import copies
from tests.simulator import gluon as base
from tests.simulator.products import modules
from tests.simulator.values import Pointer
from tests.tools.compiled_facts import compiled_for

GPU = GPUS["sm_90"][0]
BF16 = torch.bfloat16
SMS = 5  # few, so that a CTA has several items


@pytest.fixture(scope="module", **copies.EARLY_AND_LATE)
def hopper(request: pytest.FixtureRequest) -> Any:
    """With copies that land as early as they may, and as late."""
    with (
        request.param(),
        mock.patch.object(base, "modules", modules),
        mock.patch.object(copies, "THREADS", 32),
        mock.patch.object(base.Shared, "dtype", property(lambda s: s.data.dtype), create=True),
        mock.patch.object(
            Pointer, "dtype", property(lambda p: types.SimpleNamespace(element_ty=p.memory.dtype)), create=True
        ),
    ):
        yield base.simulated("linear.gemm_sm90_large")


def product(
    hopper: Any, x: Tensor, x_scale: Tensor | None, weight: Tensor, scale: Tensor | None, splits: int, blocks: int = 1
) -> Tensor:
    """Return the GEMM of a launch with so many splits and blocks of rows per tile."""
    operands = Operands(x, x_scale, weight, scale)
    counters, out = torch.zeros(64, dtype=torch.int32), torch.full((len(x), len(weight)), torch.nan, dtype=BF16)
    assert hopper.why_unsupported(operands, False, out) == ""
    with (
        mock.patch.object(hopper, "choose_splits", lambda *sizes: splits),
        mock.patch.object(hopper, "choose_blocks", lambda *sizes: blocks),
        mock.patch.object(hopper, "arrival_counters", lambda count, device: counters),
        torch.no_grad(),
    ):
        hopper.launch(operands, out, GPU._replace(sms=SMS))
    assert not counters.any()
    return out


@pytest.mark.parametrize(
    ("tokens", "groups", "rows", "size", "packed", "splits", "blocks"),
    [
        (100, 2, 256, 1024, False, 1, 1),
        (300, 2, 128, 512, True, 1, 1),
        (70, 1, 384, 1024, True, 2, 1),
        (130, 1, 256, 1024, False, 4, 1),
        (300, 2, 512, 1024, True, 1, 2),
        (70, 1, 256, 1024, False, 1, 2),
    ],
)
def test_quantized_x_gives_the_reference(
    hopper: Any, tokens: int, groups: int, rows: int, size: int, packed: bool, splits: int, blocks: int
) -> None:
    """Items that are tiles of one block of rows or of two, and splits of them."""
    heads = size // 64
    o, table = torch.randn(tokens, groups * heads, 64).bfloat16(), torch.randn(9, 16)
    a, a_scale = REFERENCES["inv_rope_fp8_quant"](o, torch.arange(tokens) % 9, table, groups, heads, packed)
    b, b_scale = e4m3(groups * rows, size), block_scale(groups * rows, size)
    got = product(hopper, a, a_scale, b, b_scale, splits, blocks)
    assert_close(got, REFERENCES["fp8_grouped_einsum"](a, a_scale, b, b_scale).flatten(1), NEIGHBOUR[BF16])


@pytest.mark.parametrize("form", [torch.float32, torch.uint8])
def test_scales_of_the_weight_come_in_either_form(hopper: Any, form: torch.dtype) -> None:
    x, weight, byte = torch.randn(70, 512).bfloat16(), e4m3(256, 512), block_scale(256, 512)
    values, x_byte = quantize_activation(x)
    scale = ue8m0_scale(byte) * 1.25 if form is torch.float32 else byte
    got = product(hopper, values[:, None], ue8m0_scale(x_byte)[:, None], weight, scale, 1)
    assert_close(got, REFERENCES["fp8_linear"](x, weight, scale), NEIGHBOUR[BF16])
    operands = Operands(values[:, None], None, weight, byte.t().contiguous().t())
    assert "words of four" in hopper.why_unsupported(operands, False, got)


@pytest.mark.parametrize(("tokens", "splits", "blocks"), [(300, 2, 1), (200, 1, 1), (200, 1, 2)])
def test_halves_give_the_reference(hopper: Any, tokens: int, splits: int, blocks: int) -> None:
    x, weight = torch.randn(tokens, 2, 512).bfloat16(), torch.randn(2 * blocks * 128, 512).bfloat16()
    got = product(hopper, x, None, weight, None, splits, blocks)
    assert_close(got, REFERENCES["grouped_linear"](x, weight, 2), NEIGHBOUR[BF16])


def tiles_of(layer: str, tokens: int) -> tuple[gemm.Layer, int]:
    """A layer of V4-Flash, and its tiles of one block of rows."""
    of = LAYERS[f"Flash {layer}"]
    return of, -(-tokens // large.TILE_TOKENS) * of.groups * of.rows // large.TILE_ROWS


@pytest.mark.parametrize(
    ("layer", "tokens", "splits"),
    [
        ("fp8_linear wq_a + wkv", 256, 4),
        ("fp8_linear wq_a + wkv", 512, 2),
        ("fp8_linear wq_b", 128, 1),
        ("fp8_linear wo_b", 256, 2),
        ("fp8_linear wo_b", 512, 1),
        ("fp8_grouped_einsum wo_a", 256, 1),
    ],
)
def test_layers_of_flash_get_the_splits_that_were_the_fastest(layer: str, tokens: int, splits: int) -> None:
    """On an H200 with torch 2.11, Triton 3.6."""
    of, tiles = tiles_of(layer, tokens)
    assert large.choose_splits(GPU, tiles, of.size // 128) == splits


@pytest.mark.parametrize(
    ("layer", "tokens", "blocks"),
    [
        ("fp8_linear wq_a + wkv", 512, 1),
        ("fp8_linear wq_a + wkv", 4096, 1),
        ("fp8_linear wq_b", 128, 2),
        ("fp8_linear wq_b", 512, 2),
        ("fp8_linear wo_b", 512, 1),
        ("fp8_linear wo_b", 1024, 2),
        ("fp8_grouped_einsum wo_a", 256, 1),
        ("fp8_grouped_einsum wo_a", 512, 2),
    ],
)
def test_layers_of_flash_get_the_tiles_that_were_the_fastest(layer: str, tokens: int, blocks: int) -> None:
    of, tiles = tiles_of(layer, tokens)
    assert large.choose_blocks(GPU, tiles, of.rows) == blocks


def test_tiles_of_two_blocks_are_whole_ones_and_as_many_as_sms() -> None:
    """Partial sums in memory are those of one block."""
    for tiles, rows in itertools.product(range(2, 600, 2), (128, 256, 384, 1024)):
        if large.choose_blocks(GPU, tiles, rows) == 2:
            assert rows % 256 == 0 and large.choose_splits(GPU, tiles // 2, 64) == 1


@pytest.mark.parametrize("form", [torch.float32, torch.uint8, None])
@pytest.mark.parametrize(("rows", "blocks"), [(2048, 1), (8192, 2)])
@pytest.mark.parametrize("out_dtype", [BF16, torch.float32])
def test_it_compiles_for_hopper(form: torch.dtype | None, rows: int, blocks: int, out_dtype: torch.dtype) -> None:
    """Without spills, however many sums a thread has."""
    dtype = BF16 if form is None else torch.float8_e4m3fn
    x, weight = torch.empty(300, 4096, dtype=dtype), torch.empty(rows, 4096, dtype=dtype)
    scales = (None, None) if form is None else (torch.empty(300, 1, 32), torch.empty(rows // 128, 32, dtype=form))
    out = torch.empty(300, rows, dtype=out_dtype)
    with compiled_for("sm_90") as compiled:
        large.launch(Operands(x[:, None], scales[0], weight, scales[1]), out, GPU)
    (kernel,) = compiled
    used = kernel.resources()
    assert used["STACK"] == used["LOCAL"] == 0
    assert kernel.metadata.shared <= large.SM_SHARED_BYTES - large.CTA_RESERVED_BYTES
    ptx, halves = kernel.asm["ptx"], form is None
    instructions = 2 * 4 * blocks  # halves of the tokens, steps of a K-block, blocks
    assert ptx.count("wgmma.mma_async.sync") == instructions
    assert f"wgmma.mma_async.sync.aligned.m64n128{'k16.f32.bf16.bf16' if halves else 'k32.f32.e4m3.e4m3'}" in ptx
    assert ptx.index("cp.async.bulk.tensor.2d") < ptx.index("griddepcontrol.wait")
    assert kernel.metadata.launch_pdl


def test_what_it_does_not_take() -> None:
    x, weight, scale = torch.empty(200, 1, 512, dtype=torch.float8_e4m3fn), e4m3(256, 512), block_scale(256, 512)
    out = torch.empty(200, 256, dtype=BF16)

    def unsupported(x: Tensor, weight: Tensor, out: Tensor, quantize: bool = False) -> str:
        return large.why_unsupported(Operands(x, None, weight, scale), quantize, out)

    assert unsupported(x, weight, out) == ""
    assert "x must come quantized" in unsupported(x.bfloat16(), weight, out, True)
    assert "multiple of 128 rows" in unsupported(x, weight[:200], out)
    assert "the weight's dtype" in unsupported(x.bfloat16(), weight, out)
    # A row stride of 1036 bytes is no multiple of 16, as TMA requires.
    beside = torch.empty(200, 259)[:, :256]
    assert "16 bytes" in unsupported(x, weight, beside)
