"""The sm_90 GEMM with CTAs that share tiles in clusters, simulated (see tests/simulator/cluster.py), and compiled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from dsv4_compile.kernels.hopper.cluster_mailbox import CLUSTER_SIZES, max_clusters
from dsv4_compile.kernels.host.gpu import Gpu, sm90_module
from dsv4_compile.kernels.linear import fp8_grouped_einsum as einsum_kernels
from dsv4_compile.kernels.linear import gemm as kernels
from dsv4_compile.kernels.linear import gemm_sm90_cluster as clusters
from dsv4_compile.kernels.linear.gemm import Operands
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.reference.common.block_scale import quantize_activation
from dsv4_compile.reference.common.quant import ue8m0_scale
from dsv4_compile.testing import assert_bitwise, assert_close
from tests.kernels.linear.test_gemm import NEIGHBOUR, block_scale, e4m3
from tests.kernels.linear.test_gemm_sm90_small import LAYERS
from tests.kernels.linear.test_gemm_sm90_splits import check_registers
from tests.simulator import cluster as simulated_cluster
from tests.simulator import gluon as base
from tests.simulator.copies import EARLY_AND_LATE
from tests.simulator.products import GPU, Pointer, launches, modules, types
from tests.tools.compiled_facts import compiled_for

BF16, F8 = torch.bfloat16, torch.float8_e4m3fn
THREADS = 3 * 128


@pytest.fixture(scope="module", **EARLY_AND_LATE)
def hopper(request: pytest.FixtureRequest) -> Iterator[Any]:
    """With copies that land as early as they may, and as late."""
    element = property(lambda p: types.SimpleNamespace(element_ty=p.memory.dtype))
    with (
        request.param(),
        mock.patch.object(base, "modules", modules),
        mock.patch.object(Pointer, "dtype", element, create=True),
        mock.patch.object(base.Shared, "dtype", property(lambda s: s.data.dtype), create=True),
    ):
        module = base.simulated("linear.gemm_sm90_cluster")
        with simulated_cluster.clustered(module):
            yield module


def launched(hopper: Any, cluster: int, operands: tuple[Tensor | None, ...], out: Tensor, **more: Any) -> None:
    """Launch clusters of so many CTAs, 1 for none, or 0 for unsplit tiles of the first of two weights."""
    choices = {"choose_cluster": lambda *_: cluster, "unsplit_fit": lambda *_: True}
    with mock.patch.multiple(hopper, **choices), torch.no_grad():
        hopper.launch(Operands(*operands), out, GPU, **more)


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return values and scales of x `[T, K]` as one group."""
    values, byte = quantize_activation(x)
    return values[:, None], ue8m0_scale(byte)[:, None]


@pytest.mark.parametrize(
    ("tokens", "groups", "rows", "size", "packed", "cluster"),
    [
        (100, 2, 256, 1024, False, 2),
        (70, 1, 128, 1280, True, 3),
        (130, 1, 256, 1024, False, 4),
        (40, 1, 128, 3328, True, 5),
    ],
)
def test_quantized_x_gives_the_reference(
    hopper: Any, tokens: int, groups: int, rows: int, size: int, packed: bool, cluster: int
) -> None:
    """K-blocks that are shared evenly, or not; more of them than there are ring buffers."""
    heads = size // 64
    o, table = torch.randn(tokens, groups * heads, 64).bfloat16(), torch.randn(9, 16)
    a, a_scale = REFERENCES["inv_rope_fp8_quant"](o, torch.arange(tokens) % 9, table, groups, heads, packed)
    b, b_scale = e4m3(groups * rows, size), block_scale(groups * rows, size)
    b_scale = ue8m0_scale(b_scale) if size // 128 % 4 else b_scale
    out = torch.full((tokens, groups * rows), torch.nan, dtype=BF16)
    launched(hopper, cluster, (a, a_scale, b, b_scale), out)
    assert_close(out, REFERENCES["fp8_grouped_einsum"](a, a_scale, b, b_scale).flatten(1), NEIGHBOUR[BF16])


def test_how_many_k_blocks_are_loaded_ahead_changes_no_bit(hopper: Any) -> None:
    """Fewer than there are ring buffers, and than a CTA has K-blocks, or not."""
    weight, scale, x = e4m3(128, 3328), block_scale(128, 3328), quantized(torch.randn(100, 3328).bfloat16())
    scale, got = ue8m0_scale(scale), []
    for ahead, cluster in ((99, 2), (1, 2), (3, 2), (5, 2)):
        got.append(torch.full((100, 128), torch.nan, dtype=BF16))
        with mock.patch.object(hopper, "K_BLOCKS_AHEAD", ahead):
            launched(hopper, cluster, (*x, weight, scale), got[-1])
        assert_bitwise(got[-1], got[0])
    assert_close(got[0], REFERENCES["fp8_grouped_einsum"](*x, weight, scale).flatten(1), NEIGHBOUR[BF16])


@pytest.mark.parametrize(("tokens", "ahead"), [(40, None), (64, None), (65, 3), (128, 3), (512, 3)])
def test_tiles_of_two_halves_load_few_k_blocks_ahead(tokens: int, ahead: int | None) -> None:
    weight, scale = torch.empty(1024, 4096, dtype=torch.float8_e4m3fn), torch.empty(8, 32)
    x, x_scale = torch.empty(tokens, 1, 4096, dtype=weight.dtype), torch.empty(tokens, 1, 32)
    with launches(clusters) as calls:
        clusters.launch(Operands(x, x_scale, weight, scale), torch.empty(tokens, 1024, dtype=BF16), GPU)
    assert calls[0]["AHEAD"] == (ahead or calls[0]["RING"])


def test_halves_give_the_reference(hopper: Any) -> None:
    x, weight = torch.randn(200, 2, 512).bfloat16(), torch.randn(2 * 128, 512).bfloat16()
    out = torch.full((200, 256), torch.nan, dtype=BF16)
    launched(hopper, 2, (x, None, weight, None), out)
    assert_close(out, REFERENCES["grouped_linear"](x, weight, 2), NEIGHBOUR[BF16])


@pytest.mark.parametrize(
    ("tokens", "others", "cluster"),
    [(17, 200, 3), (33, 200, 3), (65, 200, 2), (128, 128, 3), (150, 72, 2), (300, 200, 1)],
)
def test_two_gemms_of_one_x_are_one_launch(hopper: Any, tokens: int, others: int, cluster: int) -> None:
    """Others of fewer rows than a tile has, or of no multiple of them: their last tile begins among those in front."""
    x, weight, scale = torch.randn(tokens, 2048).bfloat16(), e4m3(256, 2048), block_scale(256, 2048)
    other, out = torch.randn(others, 2048).bfloat16(), torch.full((tokens, 256 + others), torch.nan)
    assert hopper.why_unsupported_pair(x, weight, scale, other, GPU) == ""
    launched(hopper, cluster, (*quantized(x), weight, scale), out, second=(x, other))
    assert_close(out, REFERENCES["fp8_linear"](x, weight, scale, True, other), NEIGHBOUR[torch.float32])


@pytest.mark.parametrize(
    ("tokens", "rows", "others"),
    [(150, 256, 72), (40, 256, 200), (100, 384, 200), (300, 128, 136), (129, 128, 1000), (33, 128, 8)],
)
def test_unsplit_tiles_of_the_first_weight_give_the_reference(hopper: Any, tokens: int, rows: int, others: int) -> None:
    """Even numbers of tiles are unsplit; the first of an odd number is split, so a single tile is split whole."""
    x, weight, scale = torch.randn(tokens, 1024).bfloat16(), e4m3(rows, 1024), block_scale(rows, 1024)
    other, out = torch.randn(others, 1024).bfloat16(), torch.full((tokens, rows + others), torch.nan)
    launched(hopper, 0, (*quantized(x), weight, scale), out, second=(x, other))
    assert_close(out, REFERENCES["fp8_linear"](x, weight, scale, True, other), NEIGHBOUR[torch.float32])


@pytest.mark.parametrize("tokens", [300, 150])
def test_the_order_of_clusters_changes_no_sum_of_unsplit_tiles(hopper: Any, tokens: int) -> None:
    """Tokens that two tiles multiply are added up in the same order in both: a tile that is split has none of them."""
    x, weight, scale = torch.randn(tokens, 1024).bfloat16(), e4m3(384, 1024), block_scale(384, 1024)
    other = torch.randn(72, 1024).bfloat16()
    got = torch.empty(2, tokens, 456)
    for out, order in zip(got, (iter, reversed), strict=True):
        with mock.patch.object(simulated_cluster.Cluster, "order", order):
            launched(hopper, 0, (*quantized(x), weight, scale), out, second=(x, other))
    assert_bitwise(*got)


def test_sums_of_unsplit_tiles_are_those_of_any_cta(hopper: Any) -> None:
    """Both halves of both tiles have the same 64 tokens; split tiles are those of clusters of two, bit for bit."""
    x, weight, scale = torch.randn(64, 1024).bfloat16().repeat(4, 1), e4m3(128, 1024), block_scale(128, 1024)
    other = torch.randn(200, 1024).bfloat16()
    unsplit, split = torch.empty(256, 328), torch.empty(256, 328)
    for out, cluster in ((unsplit, 0), (split, 2)):
        launched(hopper, cluster, (*quantized(x), weight, scale), out, second=(x, other))
    assert_bitwise(unsplit, unsplit[:64].repeat(4, 1))
    assert_bitwise(unsplit[:, 128:].contiguous(), split[:, 128:].contiguous())


@pytest.mark.parametrize("tokens", [70, 128])
def test_sums_are_quantized_where_they_are_combined(hopper: Any, tokens: int) -> None:
    """Bit for bit like the quantized output of the same launch; a NaN keeps to its token and tile of 128 columns."""
    x, scale = torch.randn(tokens, 2, 1024).to(F8), torch.rand(tokens, 2, 8) + 0.5
    scale[-1, 1, 1] = torch.nan
    weight, weight_scale = e4m3(2 * 256, 1024), block_scale(2 * 256, 1024)
    sums, values = torch.empty(tokens, 512, dtype=BF16), torch.empty(tokens, 512, dtype=F8)
    by_tile = torch.empty(4, tokens)
    launched(hopper, 2, (x, scale, weight, weight_scale), sums)
    launched(hopper, 2, (x, scale, weight, weight_scale), values, out_scale=by_tile)
    want, byte = quantize_activation(sums)
    assert_bitwise(values, want)
    assert_bitwise(by_tile, ue8m0_scale(byte).t())
    assert sums[-1, 256:].isnan().all() and not sums[:-1].isnan().any() and not sums[-1, :256].isnan().any()


@pytest.mark.parametrize("tokens", [65, 128, 200])
def test_a_tokens_sums_do_not_depend_on_the_others(hopper: Any, tokens: int) -> None:
    """The last of a batch are multiplied twice where they do not fill half a tile."""
    x, weight, scale = torch.randn(tokens, 1024).bfloat16(), e4m3(128, 1024), block_scale(128, 1024)
    got, alone = torch.empty(tokens, 128, dtype=BF16), torch.empty(64, 128, dtype=BF16)
    launched(hopper, 2, (*quantized(x), weight, scale), got)
    launched(hopper, 2, (*quantized(x[-64:]), weight, scale), alone)
    assert_bitwise(got[-64:], alone)


@pytest.mark.parametrize(
    ("layer", "tokens", "cluster"),
    [
        ("fp8_linear wq_a + wkv", 256, 4),
        ("fp8_linear wq_a + wkv", 384, 3),
        ("fp8_linear wq_a + wkv", 512, 2),
        ("fp8_linear wq_b", 128, 0),
        ("fp8_linear indexer wq_b", 128, 0),
        ("fp8_linear wo_b", 128, 3),
        ("fp8_linear wo_b", 256, 2),
        ("fp8_linear wo_b", 384, 0),
        ("fp8_grouped_einsum wo_a", 128, 2),
        ("fp8_grouped_einsum wo_a", 129, 0),
    ],
)
def test_layers_of_flash_get_the_clusters_that_were_the_fastest(layer: str, tokens: int, cluster: int) -> None:
    """On an H200 with torch 2.11, Triton 3.6."""
    of = LAYERS[f"Flash {layer}"]
    weight = torch.empty(of.groups * of.rows, of.size, dtype=F8)
    assert clusters.choose_cluster(GPU, [clusters.weight_tiles(tokens, of.groups, weight)]) == cluster


@pytest.mark.parametrize(
    ("others", "tokens", "cluster"), [(1024, 64, 4), (1024, 128, 4), (1024, 256, 2), (1024, 512, 0), (2624, 128, 3)]
)
def test_rows_of_hidden_get_the_clusters_that_were_the_fastest(others: int, tokens: int, cluster: int) -> None:
    weights = torch.empty(1536, 4096, dtype=F8), torch.empty(others, 4096, dtype=BF16)
    assert clusters.choose_cluster(GPU, [clusters.weight_tiles(tokens, 1, weight) for weight in weights]) == cluster


@pytest.mark.parametrize(
    ("rows", "size", "others", "tokens", "programs"),
    [
        (1536, 4096, 1024, 257, 2 * (36 + 24)),
        (1536, 4096, 1024, 384, 2 * (36 + 24)),
        (1536, 4096, 1024, 385, 48 + 2 * 32),
        (1536, 4096, 1024, 512, 48 + 2 * 32),
        (1536, 4096, 1024, 513, 60 + 40),
        (1536, 4096, 1024, 768, 72 + 48),
        (1536, 4096, 1024, 897, 0),
        (1536, 4096, 2624, 256, 2 * (24 + 42)),
        (1536, 4096, 2624, 257, 36 + 63),
        (1536, 4096, 2624, 512, 48 + 84),
        (1536, 4096, 2624, 513, 0),
        (2048, 7168, 1024, 256, 2 * (32 + 16)),
        (2048, 7168, 1024, 257, 48 + 2 * 24),
        (2048, 7168, 1024, 512, 64 + 2 * 32),
        (2048, 7168, 2624, 128, 3 * (16 + 21)),
        (2048, 7168, 2624, 256, 32 + 2 * 42),
        (1664, 4096, 1272, 300, 40 + 2 * 30),
        (4096, 1024, 4096, 128, 32 + 32),
        (4096, 1024, 4096, 64, 0),
    ],
)
def test_ctas_take_unsplit_tiles_where_not_all_can_be_split(
    rows: int, size: int, others: int, tokens: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the rows of HCA and CSA in Flash and Pro; 39 tiles, one of them split; too few K-blocks to split. In
    clusters, or each by itself."""
    launches = []

    def launch(kernel: Any, count: int, cluster: int, *args: Any, **constants: Any) -> None:
        launches.append((count, cluster))

    monkeypatch.setattr(clusters, "launch_clusters", launch)
    monkeypatch.setattr(clusters, "launch_kernel", lambda kernel, grid, *args, **constants: launch(kernel, *grid, 1))
    x, plain = torch.empty(tokens, 1, size, dtype=F8), torch.empty(tokens, size, dtype=BF16)
    weight, other = torch.empty(rows, size, dtype=F8), torch.empty(others, size, dtype=BF16)
    x_scale, scale = torch.empty(tokens, 1, size // 128), torch.empty(rows // 128, size // 128)
    unsupported = clusters.why_unsupported_pair(plain, weight, scale, other, GPU)
    if programs == 0:
        assert "run at once" in unsupported
    else:
        out = torch.empty(tokens, rows + others)
        clusters.launch(Operands(x, x_scale, weight, scale), out, GPU, second=(plain, other))
        tiles = -(-tokens // 128) * (-(-rows // 128) + -(-others // 128))
        cluster = 3 if programs % 3 == 0 and tokens == 128 else 2
        assert unsupported == "" and launches == [(programs, 1 if programs == tiles else cluster)]


@pytest.mark.parametrize("size", CLUSTER_SIZES)
def test_a_smaller_gpu_has_fewer_clusters(size: int) -> None:
    for programs in (1, 2, 3, 4):
        on_h200, on_less = (max_clusters(Gpu("cuda", 90, n), size, programs) for n in (132, 114))
        assert on_h200 * size <= 132 * programs and on_less * size <= 114 * programs


WAYS = ["e4m3", "e4m3 quantized", "halves", "both", "unsplit"]


@pytest.mark.parametrize("tokens", [64, 128])
@pytest.mark.parametrize("way", WAYS)
def test_it_compiles_for_hopper(way: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without spills, and with nothing but K-blocks where sums are stored before everything else."""
    rooms = []

    def launch(kernel: Any, programs: int, cluster: int, room: int, *args: Any, **constants: Any) -> None:
        rooms.append(room)
        kernel[(programs,)](*args, **constants)

    monkeypatch.setattr(clusters, "launch_clusters", launch)
    x, plain = torch.empty(tokens, 1, 4096, dtype=F8), torch.empty(tokens, 4096, dtype=BF16)
    weight, other = torch.empty(1536, 4096, dtype=F8), torch.empty(1024, 4096, dtype=BF16)
    scales, out = (torch.empty(tokens, 1, 32), torch.empty(12, 32)), torch.empty(tokens, 1536, dtype=BF16)
    with compiled_for("sm_90") as compiled:
        if way == "halves":
            clusters.launch(Operands(plain[:, None], None, other, None), out[:, :1024], GPU)
        elif way in ("both", "unsplit"):
            if way == "unsplit":
                monkeypatch.setattr(clusters, "choose_cluster", lambda *_: 0)
            out = torch.empty(tokens, 2560)
            clusters.launch(Operands(x, scales[0], weight, scales[1]), out, GPU, second=(plain, other))
        else:
            out_scale = torch.empty(12, tokens) if way == "e4m3 quantized" else None
            out = out.to(F8) if way == "e4m3 quantized" else out
            clusters.launch(Operands(x, scales[0], weight, scales[1]), out, GPU, out_scale)
    (kernel,) = compiled
    ptx = kernel.asm["ptx"]
    for instruction, wanted in (("k32.f32.e4m3.e4m3", way != "halves"), ("k16.f32.bf16.bf16", way in WAYS[2:])):
        assert (f"wgmma.mma_async.sync.aligned.m64n128{instruction}" in ptx) == wanted
    # Every warp of the three partitions waits at two cluster barriers.
    assert kernel.metadata.num_warps == THREADS // 32
    assert ptx.count("barrier.cluster.arrive") == ptx.count("barrier.cluster.wait") == 2 * 3
    ring = clusters.ring_depth(tokens) * (clusters.TILE_ROWS + tokens) * clusters.K_BLOCK_BYTES
    first = r"add\.s32 \t%r\d+, %r\d+, (\d+);\n\t// begin inline asm\n\t@%p\d+ mbarrier.init"
    barriers = [int(x) for x in ptx.findall(first)]
    assert rooms[0] <= ring <= min(barriers) and ring < kernel.metadata.shared
    check_registers(kernel, THREADS)


def test_what_it_does_not_take() -> None:
    x, weight, scale = torch.empty(200, 1, 2048, dtype=F8), e4m3(256, 2048), block_scale(256, 2048)
    plain, other = torch.empty(200, 2048, dtype=BF16), torch.empty(192, 2048, dtype=BF16)
    both = clusters.why_unsupported_pair

    def one(x: Tensor, weight: Tensor, quantize: bool = False) -> str:
        return clusters.why_unsupported(Operands(x, None, weight, scale), quantize, GPU)

    assert one(x, weight) == "" == both(plain, weight, scale, other, GPU)
    assert "x must come quantized" in one(plain[:, None], weight, True)
    assert "multiple of 128 rows" in one(x, weight[:200])
    assert "run at once" in one(x[..., :1024], weight[:, :1024])
    assert "up to 64 tokens are few tokens" in one(x[:64], weight)
    assert "up to 16 tokens are few tokens" in both(plain[:16], weight, scale, other, GPU)
    assert both(plain[:17], weight, scale, other, GPU) == ""
    assert "short weights" in one(x[:128], weight)
    assert "run at once" in one(x[:1].expand(20000, 1, 2048), weight)
    assert "multiple of 8" in both(plain, weight, scale, other[:190], GPU)
    assert "words of four" in both(plain, weight, scale.t().contiguous().t(), other, GPU)
    assert "one dtype of two bytes" in both(plain, weight, scale, other.half(), GPU)
    assert "have rows" in both(plain, weight, scale, other[:0], GPU)
    assert "16 bytes" in both(torch.empty(200, 2056, dtype=BF16)[:, 1:2049], weight, scale, other, GPU)


class Chosen(Exception):
    """By a launcher that is not to launch."""


@pytest.mark.parametrize("tokens", [64, 65, 128])
def test_more_tokens_than_a_tile_of_few_has_are_for_clusters(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """But those of weights that are read twice in less time."""
    few = sm90_module(GPU, "linear.gemm_sm90_small")
    assert few is not None

    def chosen(name: str) -> Any:
        def launch(*args: Any, **more: Any) -> None:
            raise Chosen(name)

        return launch

    monkeypatch.setattr(clusters, "launch", chosen("clusters"))
    monkeypatch.setattr(few, "launch", chosen("few"))
    for module in (kernels, einsum_kernels):
        monkeypatch.setattr(module, "gpu_of", lambda device: GPU)

    def way(call: Any, *args: Any) -> str:
        with pytest.raises(Chosen) as caught:
            call(*args)
        return str(caught.value)

    x, weight, scale = torch.empty(tokens, 8, 4096, dtype=F8), torch.empty(8192, 4096, dtype=F8), torch.empty(64, 32)
    many = "clusters" if tokens > 64 else "few"
    assert way(einsum_kernels.fp8_grouped_einsum_quant, x, torch.empty(tokens, 8, 32), weight, scale) == many
    one = x[:, :1], torch.empty(tokens, 1, 32)
    assert way(kernels.grouped_gemm, Operands(*one, weight, scale), BF16) == many
    assert way(kernels.grouped_gemm, Operands(*one, weight[:1536], scale), BF16) == "few"
