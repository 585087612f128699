"""The product of few tokens on Hopper, simulated (see simulated_products.py), and compiled for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tests.kernels.linear.test_grouped_matmul import NEIGHBOUR, block_scale, e4m3
from torch import Tensor

from dsv4_compile.bench import gemm
from dsv4_compile.kernels.hopper import cluster_mailbox as cluster_hopper
from dsv4_compile.kernels.hopper.cluster_mailbox import clusters_at_once
from dsv4_compile.kernels.linear import fp8_linear
from dsv4_compile.kernels.linear import gemm as kernels
from dsv4_compile.kernels.linear import gemm_sm90_pair as grouped_matmul_pair_hopper
from dsv4_compile.kernels.linear import gemm_sm90_parts as grouped_matmul_shares_hopper
from dsv4_compile.kernels.linear import gemm_sm90_small as grouped_matmul_hopper
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.reference.common.block_scale import quantize_activation, scale_value
from dsv4_compile.testing import assert_bitwise, assert_close, fake_triton
from tests.simulator.products import GPU, STEM, product, simulated_products

LAYERS = {f"{model} {x.op} {x.name}": x for model, config in gemm.MODELS.items() for x in gemm.layers(config)}
BF16, F32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
BF16_ROWS = torch.empty(64, 256, dtype=BF16)


def wide_rows(*shape: int, dtype: torch.dtype) -> Tensor:
    """Rows that start at multiples of 16 bytes, whatever their length."""
    return torch.empty(*shape[:-1], shape[-1] + -shape[-1] % 16, dtype=dtype)[..., : shape[-1]]


@pytest.fixture(scope="module")
def hopper() -> Iterator[Any]:
    with simulated_products() as found:
        yield found


@pytest.mark.parametrize("cut", [(256, 8, 1, 2), (128, 4, 2, 1), (64, 4, 3, 3), (64, 4, 2, 1), (64, 4, 3, 2, True)])
@pytest.mark.parametrize(
    ("tokens", "rows", "size", "dtype"),
    [(1, 300, 640, BF16), (13, 200, 656, F32), (9, 200, 656, BF16), (64, 130, 640, BF16), (8, 200, 1280, BF16)],
)
def test_what_is_quantised_on_the_way_gives_the_reference(
    hopper: Any, tokens: int, rows: int, size: int, dtype: torch.dtype, cut: tuple[int, ...]
) -> None:
    x, weight, scale = torch.randn(tokens, size).to(dtype), e4m3(rows, size), block_scale(rows, size)
    x[0, :128] = 0
    got = product(hopper, x[:, None], None, weight, scale, dtype, cut=cut, quantize=True)
    assert_close(got, REFERENCES["fp8_linear"](x, weight, scale), NEIGHBOUR[dtype])


@pytest.mark.interpreted
def test_an_odd_number_of_elements_is_quantised_to_the_last(hopper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, scale = wide_rows(3, 131, dtype=BF16), wide_rows(128, 131, dtype=E4M3), block_scale(128, 131)
    weight.copy_(e4m3(128, 131))
    x.normal_()[:, -1] = 100
    for module in (fp8_linear, kernels):
        monkeypatch.setattr(module, "gpu_of", lambda device: GPU)
        monkeypatch.setattr(module, "sm90_module", lambda gpu, stem: hopper if stem == STEM else None)
    assert_close(fp8_linear.fp8_linear(x, weight, scale), REFERENCES["fp8_linear"](x, weight, scale), NEIGHBOUR[BF16])


@pytest.mark.parametrize(
    ("tokens", "rows", "others", "size", "processors"),
    [(3, 256, 192, 1024, 10), (16, 128, 130, 640, 4), (40, 256, 100, 1024, 30), (9, 128, 64, 656, 4)],
)
@pytest.mark.parametrize("clusters", [False, True])
def test_two_products_of_one_input_are_one_launch(
    hopper: Any, tokens: int, rows: int, others: int, size: int, processors: int, clusters: bool
) -> None:
    pair, counters = hopper.pair, torch.zeros(64, dtype=torch.int32)
    x, weight, scale = torch.randn(tokens, size).bfloat16(), e4m3(rows, size), block_scale(rows, size)
    other, out = torch.randn(others, size).bfloat16(), torch.full((tokens, rows + others), torch.nan)
    assert pair.pair_refuses(x, weight, other, GPU) == ""
    with (
        mock.patch.object(pair, "arrival_counters", lambda count, device: counters),
        mock.patch.object(pair, "clusters_at_once", pair.clusters_at_once if clusters else lambda *_: 0),
    ):
        pair.launch_pair(x, weight, scale, other, out, GPU._replace(sms=processors))
    assert not counters.any()
    assert_close(out, REFERENCES["fp8_linear"](x, weight, scale, True, other), NEIGHBOUR[F32])


def test_what_programs_quantise_has_room_or_is_quantised_in_front(monkeypatch: pytest.MonkeyPatch) -> None:
    """By less than three programs of a processor where three have none; and by none."""
    pair, x = grouped_matmul_pair_hopper, torch.empty(64, 4096, dtype=BF16)
    weight, others = torch.empty(1536, 4096, dtype=torch.float8_e4m3fn), torch.empty(1024, 4096, dtype=BF16)
    assert pair.choose_cut(GPU, 64, *pair.sizes_of(x, weight, others)).programs == 3
    assert pair.pair_refuses(x, weight, others, GPU) == ""
    refused = pair.pair_refuses(x, weight, torch.empty(2560, 4096, dtype=BF16), GPU)
    assert "hold all" in refused and pair.pair_refuses(x[:32], weight, torch.empty(2560, 4096, dtype=BF16), GPU) == ""
    long = torch.empty(32768, 16384, dtype=torch.float8_e4m3fn)
    assert "hold all" in grouped_matmul_hopper.hopper_refuses(torch.empty(16, 1, 16384, dtype=BF16), long, True, GPU)
    hopper = {"linear.gemm_sm90_small": grouped_matmul_hopper}
    monkeypatch.setattr(fp8_linear, "sm90_module", lambda gpu, stem: hopper.get(stem))
    wo_b = torch.empty(4096, 8192, dtype=torch.float8_e4m3fn)
    within = [fp8_linear._within(x.flatten()[: n * 8192].view(n, 8192), wo_b, GPU) for n in (0, 1, 8, 9, 16, 32)]
    assert within == [False, True, True, False, False, False]
    assert [fp8_linear._within(x[:n], weight, GPU) for n in (16, 17)] == [True, False]


@pytest.mark.parametrize(("rows", "others"), [(0, 128), (128, 0)])
def test_a_weight_without_rows_is_not_paired(hopper: Any, rows: int, others: int) -> None:
    x, other = torch.randn(3, 256).bfloat16(), torch.randn(others, 256).bfloat16()
    assert "have rows" in hopper.pair.pair_refuses(x, e4m3(rows, 256), other, GPU)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("cut", [(256, 8, 1, 2), (64, 4, 9, 5), (64, 4, 4, 1), (128, 4, 2, 2, True)])
@pytest.mark.parametrize(("tokens", "groups", "rows"), [(5, 3, 192), (40, 2, 200), (120, 2, 72)])
def test_groups_that_come_quantised_give_the_reference(
    hopper: Any, tokens: int, groups: int, rows: int, cut: tuple[int, ...], packed: bool
) -> None:
    heads = 10 if tokens != 40 else 20
    o, table = torch.randn(tokens, groups * heads, 64).bfloat16(), torch.randn(9, 16)
    a, a_scale = REFERENCES["inv_rope_fp8_quant"](o, torch.arange(tokens) % 9, table, groups, heads, packed)
    b, b_scale = e4m3(groups * rows, heads * 64), block_scale(groups * rows, heads * 64)
    got = product(hopper, a, a_scale, b, b_scale, BF16, cut=cut)
    assert_close(got, REFERENCES["fp8_grouped_einsum"](a, a_scale, b, b_scale).flatten(1), NEIGHBOUR[BF16])


@pytest.mark.parametrize("tokens", [7, 70])
@pytest.mark.parametrize("cut", [(128, 8, 5, 2), (64, 4, 9, 1), (64, 4, 2, 2, True)])
def test_halves_give_the_reference(hopper: Any, cut: tuple[int, ...], tokens: int) -> None:
    """By tokens or by groups; in the first case a strip must not reach into the next group."""
    for dtype, size in ((BF16, 768), (BF16, 320), (torch.float16, 328)):
        x, weight = torch.randn(tokens, 2, size).to(dtype), torch.randn(2 * 72, size).to(dtype)
        by_group = x.transpose(0, 1).contiguous().transpose(0, 1)
        for one in (x, by_group) if size != 328 else (by_group,):
            got = product(hopper, one, None, weight, None, dtype, cut=cut)
            assert_close(got, REFERENCES["grouped_linear"](x, weight, 2), NEIGHBOUR[dtype])
    assert "whole strips" in hopper.hopper_refuses(x, weight, False, GPU)


@pytest.mark.parametrize("cut", [(128, 8, 2, 1), (128, 4, 3, 3), (128, 4, 2, 2, True), (128, 4, 2, 3, True)])
@pytest.mark.parametrize("tokens", [1, 5, 40, 100])
def test_sums_are_quantised_where_they_are_added_up(hopper: Any, tokens: int, cut: tuple[int, ...]) -> None:
    """Bit for bit as what the same cut gives would be, also a row of nothing and one with a NaN."""
    x, scale = torch.randn(tokens, 2, 512).to(torch.float8_e4m3fn), torch.rand(tokens, 2, 4) + 0.5
    weight, weight_scale = e4m3(2 * 256, 512), block_scale(2 * 256, 512)
    x[0, 0] = 0
    scale[-1, 1, 1] = torch.nan
    sums = product(hopper, x, scale, weight, weight_scale, BF16, cut=cut)
    values, byte = quantize_activation(sums)
    out, out_scale = torch.zeros(tokens, 512, dtype=x.dtype), torch.full((4, tokens), -1.0)
    counters = torch.zeros(64, dtype=torch.int32)
    with (
        mock.patch.object(hopper, "choose_cut", lambda *sizes: hopper.Cut(*cut)),
        mock.patch.object(hopper, "arrival_counters", lambda count, device: counters),
        torch.no_grad(),
    ):
        hopper.launch_hopper(x, scale, weight, weight_scale, out, False, GPU, out_scale)
    assert_bitwise(out, values)
    assert_bitwise(out_scale, scale_value(byte).t())


def test_a_cut_that_quantises_has_whole_strips() -> None:
    for name, layer in LAYERS.items():
        if layer.op == "fp8_grouped_einsum":
            for tokens in (1, 8, 17, 64, 100, 128):
                cut = grouped_matmul_hopper.choose_cut(
                    GPU, tokens, layer.groups, layer.rows, layer.size // 128, False, True
                )
                assert cut.block_n == 128, name


@pytest.mark.parametrize(("tokens", "splits"), [(3, 8), (20, 3), (64, 6), (40, 8)])
def test_the_programs_of_a_cluster_add_up_their_parts_without_memory(hopper: Any, tokens: int, splits: int) -> None:
    x, weight, scale = torch.randn(tokens, 2048).bfloat16(), e4m3(130, 2048), block_scale(130, 2048)
    with mock.patch.object(hopper, "arrival_counters", None):
        got = product(hopper, x[:, None], None, weight, scale, BF16, cut=(64, 4, 2, splits, True), quantize=True)
    assert_close(got, REFERENCES["fp8_linear"](x, weight, scale), NEIGHBOUR[BF16])


def test_a_row_of_nan_keeps_to_itself(hopper: Any) -> None:
    x, weight, scale = torch.randn(5, 256).bfloat16(), e4m3(70, 256), block_scale(70, 256)
    x[2] = torch.nan
    got = product(hopper, x[:, None], None, weight, scale, BF16, cut=(64, 4, 9, 2), quantize=True)
    assert got[2].isnan().all() and not got[[0, 1, 3, 4]].isnan().any()


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_every_choice_fills_the_gpu_but_not_twice(name: str, halves: bool) -> None:
    for tokens in (1, 9, 17, 64, 65, 128):
        every_choice(name, halves, tokens)


def every_choice(name: str, halves: bool, tokens: int) -> None:
    layer = LAYERS[name]
    strips = -(-layer.size // (64 if halves else 128))
    cut = grouped_matmul_hopper.choose_cut(GPU, tokens, layer.groups, layer.rows, strips, halves)
    blocks = -(-tokens // grouped_matmul_hopper.block_of(tokens)) * layer.groups * -(-layer.rows // cut.block_n)
    programs = blocks * cut.splits
    assert cut.splits == 1 or programs <= cut.programs * GPU.sms
    assert cut.cluster == (cut.splits > 1)
    assert not cut.cluster or blocks <= clusters_at_once(GPU, cut.splits, cut.programs)
    assert programs >= 0.7 * GPU.sms


@pytest.mark.parametrize(
    ("layer", "tokens", "cut"),
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
def test_layers_of_flash_get_the_cuts_that_were_the_fastest(layer: str, tokens: int, cut: tuple[int, ...]) -> None:
    """On an H200 with torch 2.11, Triton 3.6."""
    of = LAYERS[f"Flash {layer}"]
    halves = of.op == "grouped_linear"
    strips = of.size // (64 if halves else 128)
    assert grouped_matmul_hopper.choose_cut(GPU, tokens, of.groups, of.rows, strips, halves) == cut


@pytest.mark.parametrize("tokens", [32, 64])
@pytest.mark.parametrize(
    ("changed", "cut"),
    [
        ({"quantize": True}, (128, 4, 2, 6, True)),
        ({"whole": True}, (128, 4, 2, 6, True)),
        ({"halves": True}, (64, 4, 2, 3, True)),
        ({"strips": 32}, (64, 4, 2, 3, True)),
        ({"rows": 8192}, (64, 4, 3, 2, True)),
        ({"rows": 16384}, (64, 4, 2, 1, False)),
    ],
)
def test_small_tiles_of_three_programs_are_for_few_of_many_strips_that_come_quantised(
    tokens: int, changed: dict[str, Any], cut: tuple[int, ...]
) -> None:
    of = {"gpu": GPU, "tokens": tokens, "groups": 1, "rows": 4096, "strips": 64, "halves": False}
    assert grouped_matmul_hopper.choose_cut(**of) == (64, 4, 3, 5, True)
    assert grouped_matmul_hopper.choose_cut(**of | changed) == cut


@pytest.mark.parametrize("cut", [(64, 4, 3, 1), (128, 4, 2, 2), (128, 8, 1, 1), (256, 8, 1, 2)])
@pytest.mark.parametrize("tokens", [8, 64, 100])
def test_it_compiles_for_hopper_and_as_many_programs_fit_as_it_says(
    tokens: int, cut: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever x is made of; and the matrix unit reads both operands where the copies left them."""
    monkeypatch.setattr(kernels, "gpu_of", lambda device: GPU)
    monkeypatch.setattr(kernels, "sm90_module", lambda gpu, stem: grouped_matmul_hopper if stem == STEM else None)
    monkeypatch.setattr(grouped_matmul_hopper, "choose_cut", lambda *sizes: grouped_matmul_hopper.Cut(*cut))
    x, a = torch.empty(tokens, 1, 2048, dtype=BF16), torch.empty(tokens, 8, 2048, dtype=torch.float8_e4m3fn)
    weight, scale = torch.empty(4096, 2048, dtype=a.dtype), torch.empty(32, 16, dtype=torch.uint8)
    with fake_triton.compiled_for(fake_triton.HOPPER) as compiled:
        if tokens == 8:
            kernels.grouped_matmul(x.float(), None, weight, scale, BF16, quantize=True)
        kernels.grouped_matmul(a, torch.empty(tokens, 8, 16), weight, scale, BF16)
        if tokens <= 64:
            kernels.grouped_matmul(x, None, torch.empty(4096, 2048, dtype=BF16), None, BF16)
    kinds = "k32.f32.e4m3.e4m3", "k32.f32.e4m3.e4m3", "k16.f32.bf16.bf16"
    for kernel, kind in zip(compiled, {8: kinds, 64: kinds[1:], 100: kinds[:1]}[tokens], strict=True):
        assert (kernel.metadata.shared + 1024) * cut[2] <= 228 * 1024
        assert f"wgmma.mma_async.sync.aligned.m64n{min(tokens, 64)}{kind}" in kernel.asm["ptx"]
        assert "cp.async.bulk.tensor.2d" in kernel.asm["ptx"]
        assert "griddepcontrol.wait" in kernel.asm["ptx"]
        assert fake_triton.machine_code(kernel)


@pytest.mark.parametrize("tokens", [8, 32, 64])
def test_a_launch_of_clusters_is_told_so(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of how many programs, and that each has room for its share; arguments come in the order of the kernel's."""
    monkeypatch.setattr(grouped_matmul_hopper, "choose_cut", lambda *_: grouped_matmul_hopper.Cut(64, 4, 2, 8, True))
    x, weight = torch.empty(tokens, 1, 512, dtype=BF16), torch.empty(256, 512, dtype=BF16)
    launches: list[tuple[Any, ...]] = []
    with fake_triton.compiled_for(fake_triton.HOPPER) as compiled:
        launch = lambda kernel, grid: lambda *args: launches.append((kernel, grid, args))  # noqa: E731
        monkeypatch.setattr(fake_triton.CompiledKernel, "__getitem__", launch)
        grouped_matmul_hopper.launch_hopper(x, None, weight, None, torch.empty(tokens, 256), False, GPU)
    ((kernel, grid, args),) = launches
    assert kernel is compiled[0] and grid == (4, 1, 1)
    warps, programs, shared = kernel.packed_metadata
    assert (warps, programs) == (4, 8)
    written = next(Path(path) for name, path in kernel.metadata_group.items() if name.endswith(".json"))
    compilers = json.loads(written.read_text())["shared"]
    assert shared >= max(grouped_matmul_shares_hopper.bytes_put(tokens, 64), compilers) > 0
    names = grouped_matmul_hopper.grouped_matmul_hopper_kernel.arg_names
    given = dict(zip(names, args, strict=True))
    assert (given["tokens"], given["SPLITS"], given["CLUSTER"], given["num_warps"]) == (tokens, 8, True, 4)
    ptx = kernel.asm["ptx"]
    sent = "mbarrier_init.release", "arrive.relaxed", "wait.acquire", "complete_tx::bytes.v4.f32"
    sent += "parity.acquire.cluster", "st.global"
    fetched = "st.shared.f32", "arrive.release", "wait.acquire", "ld.shared::cluster", "st.global", "arrive.relaxed"
    place = 0
    for instruction in fetched if tokens == 64 else sent:
        place = ptx.index(instruction, place)
    assert ptx.count("barrier.cluster.arrive") == (2 if tokens == 64 else 1)
    # Both pieces of memory that PTX names are there.
    assert fake_triton.machine_code(kernel)


@pytest.mark.parametrize("splits", range(2, 9))
@pytest.mark.parametrize("block_m", [8, 16, 32, 64])
def test_shares_cover_a_tile_and_fit_into_what_every_program_has(splits: int, block_m: int) -> None:
    """An inbox, of which no program may have more than 48 KiB, or a tile that others fetch."""
    for each in (1, 8, 9):
        share = grouped_matmul_shares_hopper.tokens_of_share(splits, block_m, each)
        assert share % 2 == 0 and share <= block_m <= share * splits
        for block_n in (64, 128):
            inbox = grouped_matmul_shares_hopper.bytes_of_inbox(splits, block_m, block_n, each)
            put = grouped_matmul_shares_hopper.bytes_put(block_m, block_n)
            assert (inbox > 0) != (put > 0)
            assert 4 * splits * share * block_n < inbox <= cluster_hopper.UNASKED_BYTES or inbox == 0


def test_the_quantisation_in_front_lets_the_product_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_linear, "gpu_of", lambda device: GPU)
    with fake_triton.compiled_for(fake_triton.HOPPER) as compiled:
        fp8_linear.quantize_activation(torch.empty(64, 4096, dtype=BF16))
    ptx = compiled[0].asm["ptx"]
    assert (
        -1 < ptx.index("griddepcontrol.launch_dependents") < ptx.index("griddepcontrol.wait") < ptx.index("ld.global")
    )
    assert compiled[0].metadata.launch_pdl


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"x": e4m3(129, 1, 256), "quantize": False}, "up to 128 tokens"),
        ({"x": e4m3(65, 1, 256), "weight": e4m3(65537, 256), "quantize": False}, "more than 16777216 bytes"),
        ({"x": torch.empty(65, 1, 256, dtype=BF16)}, "up to 64 tokens"),
        ({"x": torch.empty(129, 1, 256, dtype=BF16), "weight": BF16_ROWS, "quantize": False}, "up to 128 tokens"),
        ({"x": torch.empty(256, 1, 4, dtype=BF16).permute(2, 1, 0)}, "rows"),
        ({"weight": torch.empty(64, 250, dtype=torch.float8_e4m3fn)}, "multiples of 16 bytes"),
        ({"x": wide_rows(4, 1, 255, dtype=BF16), "weight": wide_rows(64, 255, dtype=E4M3)}, "in pairs"),
        ({"quantize": False}, "the weight's dtype"),
        ({"x": torch.empty(4, 1, 256), "weight": torch.empty(64, 256), "quantize": False}, "one or two bytes"),
    ],
)
def test_what_it_does_not_take_is_the_portable_kernels(wrong: dict[str, Any], reason: str) -> None:
    call = {"x": torch.empty(4, 1, 256, dtype=BF16), "weight": e4m3(64, 256), "quantize": True, "gpu": GPU}
    assert grouped_matmul_hopper.hopper_refuses(**call) == ""
    assert reason in grouped_matmul_hopper.hopper_refuses(**call | wrong)
