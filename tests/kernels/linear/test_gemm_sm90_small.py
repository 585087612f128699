"""The GEMM for few tokens on sm_90, simulated (see simulator/products.py), and compiled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from dsv4_compile.bench import gemm
from dsv4_compile.kernels.hopper.cluster_mailbox import DEFAULT_SHARED_BYTES, max_clusters
from dsv4_compile.kernels.linear import fp8_linear, gemm_sm90_epilogue, gemm_sm90_pair, gemm_sm90_small
from dsv4_compile.kernels.linear import gemm as kernels
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.reference.common.block_scale import quantize_activation, scale_value
from dsv4_compile.testing import assert_bitwise, assert_close
from tests.kernels.linear.test_gemm import NEIGHBOUR, block_scale, e4m3
from tests.simulator.products import GPU, STEM, product, simulated_products
from tests.tools.compiled_facts import Kernel, compiled_for

LAYERS = {f"{model} {x.op} {x.name}": x for model, config in gemm.MODELS.items() for x in gemm.layers(config)}
BF16, F32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
BF16_ROWS = torch.empty(64, 256, dtype=BF16)


def wide_rows(*shape: int, dtype: torch.dtype) -> Tensor:
    """Return rows that start at multiples of 16 bytes, whatever their length."""
    return torch.empty(*shape[:-1], shape[-1] + -shape[-1] % 16, dtype=dtype)[..., : shape[-1]]


@pytest.fixture(scope="module")
def hopper() -> Iterator[Any]:
    with simulated_products() as products:
        yield products


@pytest.mark.parametrize(
    ("tokens", "rows", "size", "dtype", "tiling"),
    [
        (1, 300, 640, BF16, (256, 8, 1, 2)),
        (1, 300, 640, BF16, (64, 4, 3, 2, True)),
        (13, 200, 656, F32, (128, 4, 2, 1)),
        (13, 200, 656, F32, (64, 4, 3, 3)),
        (9, 200, 656, BF16, (64, 4, 2, 1)),
        (9, 200, 656, BF16, (256, 8, 1, 2)),
        (64, 130, 640, BF16, (64, 4, 3, 2, True)),
        (64, 130, 640, BF16, (128, 4, 2, 1)),
        (8, 200, 1280, BF16, (64, 4, 3, 3)),
        (8, 200, 1280, BF16, (64, 4, 2, 1)),
    ],
)
def test_a_gemm_that_quantizes_x_gives_the_reference(
    hopper: Any, tokens: int, rows: int, size: int, dtype: torch.dtype, tiling: tuple[int, ...]
) -> None:
    x, weight, scale = torch.randn(tokens, size).to(dtype), e4m3(rows, size), block_scale(rows, size)
    x[0, :128] = 0
    got = product(hopper, x[:, None], None, weight, scale, dtype, tiling=tiling, quantize=True)
    assert_close(got, REFERENCES["fp8_linear"](x, weight, scale), NEIGHBOUR[dtype])


@pytest.mark.interpreted
def test_an_odd_k_is_quantized_to_the_last_element(hopper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, scale = wide_rows(3, 131, dtype=BF16), wide_rows(128, 131, dtype=E4M3), block_scale(128, 131)
    weight.copy_(e4m3(128, 131))
    x.normal_()[:, -1] = 100
    for module in (fp8_linear, kernels):
        monkeypatch.setattr(module, "gpu_of", lambda device: GPU)
        monkeypatch.setattr(module, "sm90_module", lambda gpu, stem: hopper if stem == STEM else None)
    assert_close(fp8_linear.fp8_linear(x, weight, scale), REFERENCES["fp8_linear"](x, weight, scale), NEIGHBOUR[BF16])


@pytest.mark.parametrize(
    ("tokens", "rows", "rows_2", "size", "sms"),
    [(3, 256, 192, 1024, 10), (16, 128, 130, 640, 4), (40, 256, 100, 1024, 30), (9, 128, 64, 656, 4)],
)
@pytest.mark.parametrize("clusters", [False, True])
def test_two_gemms_of_one_x_are_one_launch(
    hopper: Any, tokens: int, rows: int, rows_2: int, size: int, sms: int, clusters: bool
) -> None:
    pair, counters = hopper.pair, torch.zeros(64, dtype=torch.int32)
    x, weight, scale = torch.randn(tokens, size).bfloat16(), e4m3(rows, size), block_scale(rows, size)
    weight_2, out = torch.randn(rows_2, size).bfloat16(), torch.full((tokens, rows + rows_2), torch.nan)
    assert pair.why_unsupported(x, weight, weight_2, GPU) == ""
    with (
        mock.patch.object(pair, "arrival_counters", lambda count, device: counters),
        mock.patch.object(pair, "max_clusters", pair.max_clusters if clusters else lambda *_: 0),
    ):
        pair.launch(x, weight, scale, weight_2, out, GPU._replace(sms=sms))
    assert not counters.any()
    assert_close(out, REFERENCES["fp8_linear"](x, weight, scale, True, weight_2), NEIGHBOUR[F32])


def test_quantized_x_fits_shared_memory_or_is_quantized_before_the_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three CTAs per SM where they fit, else fewer; with no room at all, a launch before the GEMM."""
    pair, x = gemm_sm90_pair, torch.empty(64, 4096, dtype=BF16)
    weight, weight_2 = torch.empty(1536, 4096, dtype=torch.float8_e4m3fn), torch.empty(1024, 4096, dtype=BF16)
    assert pair.choose_tiling(GPU, 64, *pair.sizes_of(x, weight, weight_2)).ctas_per_sm == 3
    assert pair.why_unsupported(x, weight, weight_2, GPU) == ""
    weight_2 = torch.empty(2560, 4096, dtype=BF16)
    assert "64 tokens leaves no shared memory" in pair.why_unsupported(x, weight, weight_2, GPU)
    assert pair.why_unsupported(x[:32], weight, weight_2, GPU) == ""
    long = torch.empty(32768, 16384, dtype=torch.float8_e4m3fn)
    why = gemm_sm90_small.why_unsupported(torch.empty(16, 1, 16384, dtype=BF16), long, True, GPU)
    assert "leave no shared memory" in why
    hopper = {"linear.gemm_sm90_small": gemm_sm90_small}
    monkeypatch.setattr(fp8_linear, "sm90_module", lambda gpu, stem: hopper.get(stem))
    wo_b = torch.empty(4096, 8192, dtype=torch.float8_e4m3fn)
    within = fp8_linear._quantizes_within
    few = [within(x.flatten()[: n * 8192].view(n, 8192), wo_b, GPU) for n in (0, 1, 8, 9, 16, 32)]
    assert few == [False, True, True, False, False, False]
    assert [within(x[:n], weight, GPU) for n in (16, 17)] == [True, False]


@pytest.mark.parametrize(("rows", "rows_2"), [(0, 128), (128, 0)])
def test_a_weight_without_rows_is_not_paired(hopper: Any, rows: int, rows_2: int) -> None:
    x, weight_2 = torch.randn(3, 256).bfloat16(), torch.randn(rows_2, 256).bfloat16()
    assert "have rows" in hopper.pair.why_unsupported(x, e4m3(rows, 256), weight_2, GPU)


@pytest.mark.parametrize(
    ("tiling", "packed"),
    [((256, 8, 1, 2), False), ((64, 4, 9, 5), True), ((64, 4, 4, 1), False), ((128, 4, 2, 2, True), True)],
)
@pytest.mark.parametrize(("tokens", "groups", "rows"), [(5, 3, 192), (40, 2, 200), (120, 2, 72)])
def test_groups_of_quantized_x_give_the_reference(
    hopper: Any, tokens: int, groups: int, rows: int, tiling: tuple[int, ...], packed: bool
) -> None:
    heads = 10 if tokens != 40 else 20
    o, table = torch.randn(tokens, groups * heads, 64).bfloat16(), torch.randn(9, 16)
    a, a_scale = REFERENCES["inv_rope_fp8_quant"](o, torch.arange(tokens) % 9, table, groups, heads, packed)
    b, b_scale = e4m3(groups * rows, heads * 64), block_scale(groups * rows, heads * 64)
    got = product(hopper, a, a_scale, b, b_scale, BF16, tiling=tiling)
    assert_close(got, REFERENCES["fp8_grouped_einsum"](a, a_scale, b, b_scale).flatten(1), NEIGHBOUR[BF16])


@pytest.mark.parametrize("tokens", [7, 70])
@pytest.mark.parametrize("tiling", [(128, 8, 5, 2), (64, 4, 9, 1), (64, 4, 2, 2, True)])
def test_elements_of_two_bytes_give_the_reference(hopper: Any, tiling: tuple[int, ...], tokens: int) -> None:
    """By tokens or by groups; in the first case a K-block must not reach into the next group."""
    for dtype, size in ((BF16, 768), (BF16, 320), (torch.float16, 328)):
        x, weight = torch.randn(tokens, 2, size).to(dtype), torch.randn(2 * 72, size).to(dtype)
        by_group = x.transpose(0, 1).contiguous().transpose(0, 1)
        for one in (x, by_group) if size != 328 else (by_group,):
            got = product(hopper, one, None, weight, None, dtype, tiling=tiling)
            assert_close(got, REFERENCES["grouped_linear"](x, weight, 2), NEIGHBOUR[dtype])
    assert "whole K-blocks" in hopper.why_unsupported(x, weight, False, GPU)


@pytest.mark.parametrize("tiling", [(128, 8, 2, 1), (128, 4, 3, 3), (128, 4, 2, 2, True), (128, 4, 2, 3, True)])
@pytest.mark.parametrize("tokens", [1, 5, 40, 100])
def test_results_are_quantized_where_they_are_combined(hopper: Any, tokens: int, tiling: tuple[int, ...]) -> None:
    """Bit-identical to quantizing the results of the same tiling, also for a row of zeros and one with a NaN."""
    x, scale = torch.randn(tokens, 2, 512).to(torch.float8_e4m3fn), torch.rand(tokens, 2, 4) + 0.5
    weight, weight_scale = e4m3(2 * 256, 512), block_scale(2 * 256, 512)
    x[0, 0] = 0
    scale[-1, 1, 1] = torch.nan
    sums = product(hopper, x, scale, weight, weight_scale, BF16, tiling=tiling)
    values, byte = quantize_activation(sums)
    out, out_scale = torch.zeros(tokens, 512, dtype=x.dtype), torch.full((4, tokens), -1.0)
    counters = torch.zeros(64, dtype=torch.int32)
    with (
        mock.patch.object(hopper, "choose_tiling", lambda *sizes: hopper.SmallTiling(*tiling)),
        mock.patch.object(hopper, "arrival_counters", lambda count, device: counters),
        torch.no_grad(),
    ):
        hopper.launch(kernels.Operands(x, scale, weight, weight_scale), out, False, GPU, out_scale)
    assert_bitwise(out, values)
    assert_bitwise(out_scale, scale_value(byte).t())


def test_a_tiling_that_quantizes_results_has_tiles_of_128_rows() -> None:
    for name, layer in LAYERS.items():
        if layer.op == "fp8_grouped_einsum":
            for tokens in (1, 8, 17, 64, 100, 128):
                tiling = gemm_sm90_small.choose_tiling(
                    GPU, tokens, layer.groups, layer.rows, layer.size // 128, False, True
                )
                assert tiling.block_n == 128, name


@pytest.mark.parametrize(("tokens", "splits"), [(3, 8), (20, 3), (64, 6), (40, 8)])
def test_clusters_combine_partial_sums_without_memory(hopper: Any, tokens: int, splits: int) -> None:
    x, weight, scale = torch.randn(tokens, 2048).bfloat16(), e4m3(130, 2048), block_scale(130, 2048)
    with mock.patch.object(hopper, "arrival_counters", None):
        got = product(hopper, x[:, None], None, weight, scale, BF16, tiling=(64, 4, 2, splits, True), quantize=True)
    assert_close(got, REFERENCES["fp8_linear"](x, weight, scale), NEIGHBOUR[BF16])


def test_a_row_of_nan_keeps_to_itself(hopper: Any) -> None:
    x, weight, scale = torch.randn(5, 256).bfloat16(), e4m3(70, 256), block_scale(70, 256)
    x[2] = torch.nan
    got = product(hopper, x[:, None], None, weight, scale, BF16, tiling=(64, 4, 9, 2), quantize=True)
    assert got[2].isnan().all() and not got[[0, 1, 3, 4]].isnan().any()


@pytest.mark.parametrize("two_bytes", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_every_choice_fills_the_gpu_but_not_twice(name: str, two_bytes: bool) -> None:
    for tokens in (1, 9, 17, 64, 65, 128):
        every_choice(name, two_bytes, tokens)


def every_choice(name: str, two_bytes: bool, tokens: int) -> None:
    layer = LAYERS[name]
    k_blocks = -(-layer.size // (64 if two_bytes else 128))
    tiling = gemm_sm90_small.choose_tiling(GPU, tokens, layer.groups, layer.rows, k_blocks, two_bytes)
    tiles = -(-tokens // gemm_sm90_small.block_of(tokens)) * layer.groups * -(-layer.rows // tiling.block_n)
    ctas = tiles * tiling.splits
    assert tiling.splits == 1 or ctas <= tiling.ctas_per_sm * GPU.sms
    assert tiling.cluster == (tiling.splits > 1)
    assert not tiling.cluster or tiles <= max_clusters(GPU, tiling.splits, tiling.ctas_per_sm)
    assert ctas >= 0.7 * GPU.sms


@pytest.mark.parametrize(
    ("layer", "tokens", "tiling"),
    [
        ("fp8_linear wq_a + wkv", 8, (128, 4, 2, 8, True)),
        ("fp8_linear wq_a + wkv", 64, (64, 4, 1, 4, True)),
        ("fp8_linear wq_a + wkv", 128, (64, 4, 2, 4, True)),
        ("fp8_linear wq_b", 8, (128, 4, 2, 1, False)),
        ("fp8_linear wq_b", 64, (128, 4, 2, 1, False)),
        ("fp8_linear indexer wq_b", 8, (128, 4, 2, 3, True)),
        ("fp8_linear indexer wq_b", 64, (64, 4, 1, 1, False)),
        ("fp8_linear indexer wq_b", 128, (64, 4, 2, 1, False)),
        ("fp8_linear wq_b + indexer wq_b", 8, (128, 4, 3, 1, False)),
        ("fp8_linear wq_b + indexer wq_b", 64, (128, 4, 3, 1, False)),
        ("fp8_linear wo_b", 8, (128, 4, 2, 6, True)),
        ("fp8_linear wo_b", 32, (64, 4, 3, 5, True)),
        ("fp8_linear wo_b", 64, (64, 4, 3, 5, True)),
        ("fp8_linear wo_b", 128, (128, 4, 2, 3, True)),
        ("fp8_grouped_einsum wo_a", 8, (128, 4, 2, 3, True)),
        ("fp8_grouped_einsum wo_a", 64, (64, 4, 2, 2, True)),
        ("fp8_grouped_einsum wo_a", 128, (64, 4, 2, 1, False)),
        ("fp8_grouped_einsum wo_b", 16, (128, 4, 2, 6, True)),
        ("fp8_grouped_einsum wo_b", 32, (64, 4, 3, 5, True)),
        ("fp8_grouped_einsum wo_b", 64, (64, 4, 3, 5, True)),
        ("fp8_grouped_einsum wo_b", 128, (128, 4, 2, 3, True)),
        ("grouped_linear wo_a", 8, (64, 4, 2, 2, True)),
        ("grouped_linear wo_a", 64, (64, 4, 1, 1, False)),
        ("grouped_linear wq_a + wkv", 64, (64, 4, 2, 8, True)),
        ("grouped_linear wo_b", 64, (64, 4, 2, 3, True)),
    ],
)
def test_layers_of_flash_get_the_fastest_tilings(layer: str, tokens: int, tiling: tuple[int, ...]) -> None:
    """On an H200 with torch 2.11, Triton 3.6."""
    of = LAYERS[f"Flash {layer}"]
    two_bytes = of.op == "grouped_linear"
    k_blocks = of.size // (64 if two_bytes else 128)
    assert gemm_sm90_small.choose_tiling(GPU, tokens, of.groups, of.rows, k_blocks, two_bytes) == tiling


@pytest.mark.parametrize("tokens", [32, 64])
@pytest.mark.parametrize(
    ("changed", "tiling"),
    [
        ({"quantize": True}, (128, 4, 2, 6, True)),
        ({"whole": True}, (128, 4, 2, 6, True)),
        ({"two_bytes": True}, (64, 4, 2, 3, True)),
        ({"k_blocks": 32}, (64, 4, 2, 3, True)),
        ({"rows": 8192}, (64, 4, 3, 2, True)),
        ({"rows": 16384}, (64, 4, 2, 1, False)),
    ],
)
def test_three_ctas_of_small_tiles_share_an_sm_for_few_tiles_of_many_k_blocks_of_quantized_x(
    tokens: int, changed: dict[str, Any], tiling: tuple[int, ...]
) -> None:
    of = {"gpu": GPU, "tokens": tokens, "groups": 1, "rows": 4096, "k_blocks": 64, "two_bytes": False}
    assert gemm_sm90_small.choose_tiling(**of) == (64, 4, 3, 5, True)
    assert gemm_sm90_small.choose_tiling(**of | changed) == tiling


@pytest.mark.parametrize("tiling", [(64, 4, 3, 1), (128, 4, 2, 2), (128, 8, 1, 1), (256, 8, 1, 2)])
@pytest.mark.parametrize("tokens", [8, 64, 100])
def test_it_compiles_and_as_many_ctas_fit_as_the_tiling_says(
    tokens: int, tiling: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every dtype of x; the tensor core reads both operands where the copies left them."""
    monkeypatch.setattr(kernels, "gpu_of", lambda device: GPU)
    monkeypatch.setattr(kernels, "sm90_module", lambda gpu, stem: gemm_sm90_small if stem == STEM else None)
    monkeypatch.setattr(gemm_sm90_small, "choose_tiling", lambda *sizes: gemm_sm90_small.SmallTiling(*tiling))
    x, a = torch.empty(tokens, 1, 2048, dtype=BF16), torch.empty(tokens, 8, 2048, dtype=torch.float8_e4m3fn)
    weight, scale = torch.empty(4096, 2048, dtype=a.dtype), torch.empty(32, 16, dtype=torch.uint8)
    with compiled_for("sm_90") as compiled:
        if tokens == 8:
            kernels.grouped_gemm(kernels.Operands(x.float(), None, weight, scale), BF16, quantize=True)
        kernels.grouped_gemm(kernels.Operands(a, torch.empty(tokens, 8, 16), weight, scale), BF16)
        if tokens <= 64:
            kernels.grouped_gemm(kernels.Operands(x, None, torch.empty(4096, 2048, dtype=BF16), None), BF16)
    kinds = "k32.f32.e4m3.e4m3", "k32.f32.e4m3.e4m3", "k16.f32.bf16.bf16"
    for kernel, kind in zip(compiled, {8: kinds, 64: kinds[1:], 100: kinds[:1]}[tokens], strict=True):
        assert (kernel.metadata.shared + 1024) * tiling[2] <= 228 * 1024
        assert f"wgmma.mma_async.sync.aligned.m64n{min(tokens, 64)}{kind}" in kernel.asm["ptx"]
        assert "cp.async.bulk.tensor.2d" in kernel.asm["ptx"]
        assert "griddepcontrol.wait" in kernel.asm["ptx"]
        assert kernel.assembled


def _shared(compiled: Any) -> int:
    return compiled.metadata.shared


@pytest.mark.parametrize("tokens", [8, 32, 64])
def test_a_launch_asks_for_clusters(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches name the CTAs of a cluster and the shared memory of loads; arguments have the order of the kernel."""
    monkeypatch.setattr(gemm_sm90_small, "choose_tiling", lambda *_: gemm_sm90_small.SmallTiling(64, 4, 2, 8, True))
    x, weight = torch.empty(tokens, 1, 512, dtype=BF16), torch.empty(256, 512, dtype=BF16)
    launches: list[tuple[Any, ...]] = []
    with compiled_for("sm_90") as compiled:
        launch = lambda kernel, grid: lambda *args: launches.append((kernel, grid, args))  # noqa: E731
        monkeypatch.setattr(Kernel, "__getitem__", launch)
        operands = kernels.Operands(x, None, weight, None)
        gemm_sm90_small.launch(operands, torch.empty(tokens, 256), False, GPU)
    ((kernel, grid, args),) = launches
    assert kernel is compiled[0] and grid == (4, 1, 1)
    warps, ctas, shared = kernel.packed_metadata
    assert (warps, ctas) == (4, 8)
    compilers = kernel.ask(_shared)
    assert shared >= max(gemm_sm90_epilogue.combine_fetched_bytes(tokens, 64), compilers) > 0
    names = gemm_sm90_small.gemm_sm90_small_kernel.arg_names
    arguments = dict(zip(names, args, strict=True))
    config = arguments["config"]
    assert (arguments["tokens"], config.splits, config.cluster, arguments["num_warps"]) == (tokens, 8, True, 4)
    ptx = kernel.asm["ptx"]
    sent = "mbarrier_init.release", "arrive.relaxed", "wait.acquire", "complete_tx::bytes.v4.f32"
    sent += "parity.acquire.cluster", "st.global"
    fetched = "st.shared.f32", "arrive.release", "wait.acquire", "ld.shared::cluster", "st.global", "arrive.relaxed"
    offset = 0
    for instruction in fetched if tokens == 64 else sent:
        offset = ptx.index(instruction, offset)
    assert ptx.count("barrier.cluster.arrive") == (2 if tokens == 64 else 1)
    # Both pieces of shared memory that the PTX names exist.
    assert kernel.assembled


@pytest.mark.parametrize("splits", range(2, 9))
@pytest.mark.parametrize("block_m", [8, 16, 32, 64])
def test_combiners_cover_a_tile_and_mailboxes_fit_default_shared_memory(splits: int, block_m: int) -> None:
    """Partial sums use either a mailbox of 48 KiB at most, or fetches."""
    for rows in (1, 8, 9):
        combined = gemm_sm90_epilogue.tokens_per_combiner(splits, block_m, rows)
        assert combined % 2 == 0 and combined <= block_m <= combined * splits
        for block_n in (64, 128):
            mailbox = gemm_sm90_epilogue.combine_mailbox_bytes(splits, block_m, block_n, rows)
            fetched = gemm_sm90_epilogue.combine_fetched_bytes(block_m, block_n)
            assert (mailbox > 0) != (fetched > 0)
            assert 4 * splits * combined * block_n < mailbox <= DEFAULT_SHARED_BYTES or mailbox == 0


def test_quantization_before_the_gemm_lets_it_start_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_linear, "gpu_of", lambda device: GPU)
    with compiled_for("sm_90") as compiled:
        fp8_linear.quantize_activation(torch.empty(64, 4096, dtype=BF16))
    ptx = compiled[0].asm["ptx"]
    assert (
        -1 < ptx.index("griddepcontrol.launch_dependents") < ptx.index("griddepcontrol.wait") < ptx.index("ld.global")
    )
    assert compiled[0].metadata.launch_pdl


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"x": e4m3(129, 1, 256), "quantize": False}, "up to 128 tokens, not 129"),
        ({"x": e4m3(65, 1, 256), "weight": e4m3(65537, 256), "quantize": False}, "up to 16777216 bytes"),
        ({"x": torch.empty(65, 1, 256, dtype=BF16)}, "up to 64 tokens, not 65"),
        (
            {"x": torch.empty(129, 1, 256, dtype=BF16), "weight": BF16_ROWS, "quantize": False},
            "up to 128 tokens, not 129",
        ),
        ({"x": torch.empty(256, 1, 4, dtype=BF16).permute(2, 1, 0)}, "rows of x"),
        ({"weight": torch.empty(64, 250, dtype=torch.float8_e4m3fn)}, "multiples of 16 bytes"),
        ({"x": wide_rows(4, 1, 255, dtype=BF16), "weight": wide_rows(64, 255, dtype=E4M3)}, "in pairs"),
        ({"quantize": False}, "the weight's dtype"),
        ({"x": torch.empty(4, 1, 256), "weight": torch.empty(64, 256), "quantize": False}, "one or two bytes"),
    ],
)
def test_it_says_why_operands_are_unsupported(wrong: dict[str, Any], reason: str) -> None:
    call = {"x": torch.empty(4, 1, 256, dtype=BF16), "weight": e4m3(64, 256), "quantize": True, "gpu": GPU}
    assert gemm_sm90_small.why_unsupported(**call) == ""
    assert reason in gemm_sm90_small.why_unsupported(**call | wrong)
