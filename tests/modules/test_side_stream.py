"""Tests of the indexer's selection on a side stream: equal results, and waits in the right places."""

from __future__ import annotations

import itertools
import random
import re
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.fx.experimental._config
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from dsv4_compile.errors import CompileError
from dsv4_compile.modules import side_stream
from dsv4_compile.modules.linear import Linear
from dsv4_compile.modules.side_stream import join, select_on_side_stream
from dsv4_compile.modules.stacked import Stack
from dsv4_compile.testing import assert_bitwise
from tests.modules.test_attention_backend import CONFIG, SYSTEMS, Serving, layer_of, random_counts

LAYERS = [("DSV4_PAGED", "fp8_ds_mla"), *SYSTEMS]


@pytest.mark.parametrize(("name", "kv_cache_dtype"), LAYERS)
def test_a_layer_with_a_side_stream_equals_one_without(
    name: str, kv_cache_dtype: str, seed: int, gemms_by_size: None
) -> None:
    rng, options = random.Random(seed), {"attention_backend": name, "kv_cache_dtype": kv_cache_dtype}
    without, with_it = (Serving(layer_of("csa", aux_stream=aux, **options)) for aux in (False, True))
    for layer in (without.layer, with_it.layer):
        # A side stream divides the GEMMs otherwise, and larger ones need not have their bits: one for each projection.
        layer.hidden_stacks = torch.nn.ModuleList(Stack((projection,)) for projection in layer._hidden_projections())
        layer.latent_stacks = torch.nn.ModuleList(Stack((projection,)) for projection in layer._latent_projections())
        # Head weights are rounded by the GEMM or by an op: they are elements of hidden, exact in both.
        torch.nn.init.eye_(layer.indexer.weights_proj.weight)
    for _ in range(3):
        counts = random_counts(rng)
        hidden = torch.randn(sum(counts) + rng.randint(0, 2), CONFIG.hidden_size).bfloat16()
        assert_bitwise(with_it.step(counts, hidden), without.step(counts, hidden))


def test_quantised_weights_select_the_same_on_a_side_stream(seed: int) -> None:
    without, with_it = (
        Serving(layer_of("csa", kv_cache_dtype="fp8_ds_mla", fp8=True, aux_stream=a)) for a in (False, True)
    )
    for serving in (without, with_it):
        for scale in serving.layer.parameters():
            if scale.dtype is torch.float8_e8m0fnu:
                scale.data.fill_(0.25)
    counts = random_counts(random.Random(seed))
    hidden = torch.randn(sum(counts), CONFIG.hidden_size).bfloat16()
    out = with_it.step(counts, hidden)
    assert torch.isfinite(out).all() and out.any()
    assert_bitwise(out, without.step(counts, hidden))


def test_compiled_code_selects_before_q_and_joins_before_attention(seed: int) -> None:
    rng = random.Random(seed)
    layer = layer_of("csa", kv_cache_dtype="fp8_ds_mla", aux_stream=True)
    compiled = torch.compile(layer, backend="dsv4", fullgraph=True, dynamic=True, options={"dsv4.fuse": "on"})
    eager, graph = Serving(layer), Serving(layer, compiled)
    counts = random_counts(rng)
    hidden = torch.randn(sum(counts), CONFIG.hidden_size).bfloat16()
    with torch.fx.experimental._config.patch(use_duck_shape=False):
        out, code = run_and_get_code(graph.step, counts, hidden)
        assert_bitwise(out, eager.step(counts, hidden))
        with torch._dynamo.config.patch(error_on_recompile=True):
            counts = random_counts(rng)
            hidden = torch.randn(sum(counts), CONFIG.hidden_size).bfloat16()
            assert_bitwise(graph.step(counts, hidden), eager.step(counts, hidden))
    calls = re.findall(
        r"(dsv4_stream\.select|extern_kernels\.mm|dsv4_stream\.join|sparse_mla_decode)(?:\.default)?\(", code[-1]
    )
    start = calls.index("dsv4_stream.select")
    assert calls[start : start + 4] == [
        "dsv4_stream.select",
        "extern_kernels.mm",
        "dsv4_stream.join",
        "sparse_mla_decode",
    ]
    # Memory of the side stream stays allocated until the join, and nothing is copied before it.
    waited = re.search(r"dsv4_stream\.join\.default\((\w+), \[(.*)\]", code[-1])
    assert waited is not None
    between = code[-1][code[-1].index("dsv4_stream.select.default(") : waited.start()]
    for buffer in re.findall(r"buf\d+", waited[2]):
        assert not re.search(rf"(del|= ){buffer}\b", between)
    assert re.search(rf"mm\(.*out={waited[1]}\)", between)


def test_no_two_streams_share_a_side_stream_and_the_pool_may_run_out() -> None:
    pool, current = itertools.cycle(SimpleNamespace(cuda_stream=n) for n in range(1, side_stream.POOL + 1)), []
    side_stream._unused_stream.cache_clear()
    with (
        mock.patch.object(side_stream, "_USED", set()),
        mock.patch.object(torch.cuda, "Stream", lambda device: next(pool)),
        mock.patch.object(torch.cuda, "current_stream", lambda device: current[-1]),
    ):
        side_of: dict[int, int] = {}
        for stream in range(100, 140):
            current.append(SimpleNamespace(cuda_stream=stream))
            side_of[stream] = side_stream.side_stream(torch.device("cuda", 0)).cuda_stream
            assert side_stream.side_stream(torch.device("cuda", 0)).cuda_stream == side_of[stream]
        current.append(SimpleNamespace(cuda_stream=5))
        assert side_stream.side_stream(torch.device("cuda", 1)).cuda_stream != 5
    side_stream._unused_stream.cache_clear()
    assert len(set(side_of.values())) == 40
    assert [stream for stream, side in side_of.items() if side == stream] == list(range(100 + side_stream.POOL, 140))


@pytest.mark.parametrize("kind", ["swa", "hca"])
def test_layers_without_an_indexer_use_no_side_stream(kind: str) -> None:
    assert not layer_of(kind, aux_stream=True).aux_stream


def test_a_projection_of_another_type_raises_on_a_side_stream() -> None:
    class Adapted(Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    hidden = torch.randn(6, CONFIG.hidden_size).bfloat16()
    serving = Serving(layer_of("csa", kv_cache_dtype="fp8_ds_mla", aux_stream=True))
    assert serving.layer.indexer is not None
    weight = serving.layer.indexer.wq_b.weight
    serving.layer.indexer.wq_b = Adapted(*weight.shape, dtype=weight.dtype)
    with pytest.raises(CompileError, match="Adapted"):
        serving.step([1] * 6, hidden)


@pytest.mark.parametrize("slots", [True, False])
def test_ops_pass_opcheck(slots: bool) -> None:
    tokens, heads, dim, rank = 3, 2, 16, 8
    table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    rope = torch.rand(16, 8)
    arguments: tuple[Tensor | int | str | bool | None, ...] = (
        torch.randn(tokens, rank),
        torch.randn(heads * dim, rank),
        None,
        False,
        torch.randn(tokens, heads),
        torch.arange(tokens),
        rope,
        torch.randn(4, 4, dim),
        table,
        torch.tensor([0, 1, 1], dtype=torch.int32),
        torch.tensor([3, 8, 0], dtype=torch.int32),
        4,
        "plain",
        False,
        4,
        table if slots else None,
        torch.tensor([True, True, False]),
        4,
    )
    torch.library.opcheck(select_on_side_stream, arguments)
    torch.library.opcheck(join, (torch.randn(3), [torch.randn(2), torch.randn(4)]))
