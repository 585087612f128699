"""The attention backends on a GPU, by themselves and in layers: eager, compiled as one graph, captured."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.fx.experimental._config
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile._compat import device_architecture
from dsv4_compile.attention_backends.v32.layer import DeepseekV32SparseAttention
from dsv4_compile.backend import dsv4
from dsv4_compile.config import Rope
from dsv4_compile.rope_tables import cos_sin_cache
from dsv4_compile.testing import assert_bitwise
from tests.attention_backends import record
from tests.attention_backends.systems import MAX_MODEL_LEN, Setup, batch_of, library_setups, setups
from tests.attention_backends.v32 import V32Case, V32Layer
from tests.modules.test_attention_backend import (
    CONFIG,
    MAX_SEQ_LEN,
    REQUESTS,
    SYSTEMS,
    Serving,
    layer_of,
    random_counts,
)

HERE = device_architecture(torch.device("cuda")) if torch.cuda.is_available() else "cpu"
CASES = [*setups(), *library_setups(HERE)]
DECODES = [setup for setup in CASES if setup.phase == "decode"]
MIXED = [*setups(("mixed",), ratios=(4,)), *library_setups(HERE, ("mixed",), ratios=(4,))]
LAYERS = [("DSV4_PAGED", "fp8_ds_mla"), *SYSTEMS]
BATCHES = 50


@pytest.mark.parametrize("setup", CASES, ids=str)
def test_backend_gives_the_exact_answer(setup: Setup) -> None:
    with torch.inference_mode():
        record.eager(setup, "cuda")


@pytest.mark.parametrize("setup", MIXED, ids=str)
def test_compiled_attends_every_batch_with_one_graph(setup: Setup) -> None:
    with torch.inference_mode():
        record.compiled(setup, "cuda")


@pytest.mark.parametrize("setup", DECODES, ids=str)
def test_captured_decode_serves_other_batches(setup: Setup) -> None:
    with torch.inference_mode():
        record.captured(setup, "cuda")


def compiled(layer: Any) -> Any:
    return torch.compile(layer, backend=dsv4, fullgraph=True, dynamic=True)


def assert_similar(out: Tensor, expected: Tensor) -> None:
    """Compare bfloat16 sums of a different order; a score near a tie may select the other entry."""
    assert torch.isfinite(out).all()
    assert torch.nn.functional.cosine_similarity(out.float(), expected.float(), dim=-1).median() > 0.999


@pytest.mark.parametrize(("name", "kv_cache_dtype"), LAYERS)
def test_fifty_batches_of_a_layer_run_one_graph(name: str, kv_cache_dtype: str, seed: int) -> None:
    rng = random.Random(seed)
    layer = layer_of("csa", attention_backend=name, kv_cache_dtype=kv_cache_dtype, device="cuda")
    eager, graph = Serving(layer), Serving(layer, compiled(layer))
    with torch.fx.experimental._config.patch(use_duck_shape=False):
        for number in range(BATCHES):
            counts = random_counts(rng)
            if max(map(sum, zip(counts, graph.lengths, strict=True))) > MAX_SEQ_LEN:
                eager.lengths = graph.lengths = [0] * REQUESTS
            hidden = torch.randn(sum(counts), CONFIG.hidden_size).bfloat16()
            with torch._dynamo.config.patch(error_on_recompile=number > 0):
                out = graph.step(counts, hidden)
            assert_similar(out, eager.step(counts, hidden))


@pytest.mark.parametrize("compile_it", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("setup", library_setups(HERE, ("mixed",), ratios=(4,)), ids=str)
def test_a_layer_on_its_library_is_the_layer(setup: Setup, compile_it: bool, seed: int) -> None:
    rng, options = random.Random(seed), {"attention_backend": setup.name, "kv_cache_dtype": setup.kv_cache_dtype}
    ours, theirs = (layer_of("csa", device="cuda", engine=engine, **options) for engine in ("dsv4", "library"))
    plain, library = Serving(ours), Serving(theirs, compiled(theirs) if compile_it else None)
    with torch.fx.experimental._config.patch(use_duck_shape=False):
        for number in range(8):
            counts = random_counts(rng)
            hidden = torch.randn(sum(counts), CONFIG.hidden_size).bfloat16()
            with torch._dynamo.config.patch(error_on_recompile=number > 0):
                out = library.step(counts, hidden)
            assert_similar(out, plain.step(counts, hidden))


def test_fifty_batches_of_a_v32_layer_run_one_graph(seed: int) -> None:
    rng = random.Random(seed)
    layer = DeepseekV32SparseAttention(256, 8, q_lora_rank=128, device="cuda")
    for parameter in layer.parameters():
        parameter.data.copy_(torch.randn(parameter.shape) * parameter.shape[-1] ** -0.5 + (parameter.dim() == 1))
    rope = cos_sin_cache(Rope(10000.0, layout.ROPE_DIM), MAX_MODEL_LEN, "cuda")
    call, builder = compiled(layer), V32Layer(V32Case(rng, batch_of(rng, "mixed")), device="cuda")
    for number in range(BATCHES):
        case = V32Case(rng, batch_of(rng, "mixed"))
        _, cache, metadata, topk = builder.arguments(case)
        positions = torch.tensor([position for _, position in case.batch.tokens()], device="cuda")
        real = positions >= 0
        hidden = torch.randn(len(positions), 256, device="cuda").bfloat16()
        rows = cache.clone()
        with torch.inference_mode():
            with torch._dynamo.config.patch(error_on_recompile=number > 0):
                out = call(hidden, positions, rope, cache, metadata, topk)
            expected = layer(hidden, positions, rope, rows, metadata, topk)
        assert_similar(out[real], expected[real])


@pytest.mark.parametrize("how", ["swa", "csa", "hca", "csa compiled"])
@pytest.mark.parametrize(("name", "kv_cache_dtype"), LAYERS)
def test_captured_decodes_of_a_layer_are_those_of_its_calls(
    name: str, kv_cache_dtype: str, how: str, seed: int
) -> None:
    rng = random.Random(seed)
    layer = layer_of(how[:3], attention_backend=name, kv_cache_dtype=kv_cache_dtype, device="cuda")
    call = compiled(layer) if "compiled" in how else layer
    plain, ours = Serving(layer, call), Serving(layer, call)
    for _ in range(4):
        counts = [rng.randint(4, 50) for _ in range(REQUESTS)]
        hidden = torch.randn(sum(counts), CONFIG.hidden_size).bfloat16()
        for serving in (plain, ours):
            serving.call = layer
            serving.step(counts, hidden)
            serving.call = call
    ones, graph, arguments, out = [1] * REQUESTS, torch.cuda.CUDAGraph(), None, None
    for _ in range(6):
        hidden = torch.randn(REQUESTS, CONFIG.hidden_size).bfloat16()
        new = ours.arguments(ones, hidden)
        with torch.inference_mode():
            if arguments is None:
                arguments = new
                call(*arguments)  # compiles; the replay writes the same rows again
                torch.cuda.synchronize()
                with torch.cuda.graph(graph):
                    out = call(*arguments)
            for mine, fresh in zip(of_the_step(arguments), of_the_step(new), strict=True):
                mine.copy_(fresh)
            graph.replay()
        assert_bitwise(out, plain.step(ones, hidden))
    for cache_name, cache in ours.paged.layers[0].tensors().items():
        assert_bitwise(cache, getattr(plain.paged.layers[0], cache_name), label=cache_name)


def of_the_step(arguments: tuple[Any, ...]) -> list[Tensor]:
    """The arguments of a layer's call that change from step to step: all but the caches."""
    hidden, metadata, _, indexer_metadata = arguments
    return record.tensors((hidden, metadata, indexer_metadata))
