"""Tests of a layer in every attention backend: equal outputs and caches, eager and compiled as one graph."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.fx.experimental._config
from torch import Tensor

from dsv4_compile import explain
from dsv4_compile.attention_backends import NAMES, CommonAttentionMetadata, get_backend
from dsv4_compile.attention_backends.v4 import DeepseekV4Metadata
from dsv4_compile.cache import PagedCaches
from dsv4_compile.config import DeepseekV4Config
from dsv4_compile.errors import CompileError
from dsv4_compile.metadata import build_batch_metadata
from dsv4_compile.modules import DeepseekV4Attention
from dsv4_compile.testing import Tolerance, assert_bitwise, assert_close

REQUESTS, MAX_SEQ_LEN, MAX_TOKENS, THRESHOLD = 6, 512, 320, 3
CONFIG = DeepseekV4Config(
    hidden_size=96, num_heads=2, q_lora_rank=48, o_groups=2, o_lora_rank=24, index_n_heads=4, index_topk=16
)
RATIOS = {"swa": 1, "csa": 4, "hca": 128}
SYSTEMS = [
    ("FLASHMLA_SPARSE_DSV4", "fp8_ds_mla"),
    ("FLASHINFER_MLA_SPARSE_DSV4", "bfloat16"),
    ("FLASHINFER_MLA_SPARSE_DSV4", "fp8"),
    ("ROCM_FLASHMLA_SPARSE_DSV4", "fp8_ds_mla"),
]
PROJECTED = Tolerance(abs=4e-3, rel=4.01 / 128, cosine=2e-5)
"""Backends sum keys in different orders, so bfloat16 outputs differ by one step, which two projections add up."""


def layer_of(kind: str, **options: Any) -> DeepseekV4Attention:
    """Make a layer with the same random weights at each call."""
    layer = DeepseekV4Attention(
        CONFIG.with_layers(RATIOS[kind]), 0, max_seq_len=MAX_SEQ_LEN, max_num_batched_tokens=MAX_TOKENS, **options
    )
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
    return layer


class Serving:
    """One layer with the metadata builders of its backend, in an engine that orders decodes first."""

    def __init__(self, layer: DeepseekV4Attention, call: Any = None) -> None:
        self.layer, self.call = layer, layer if call is None else call
        self.device = layer.attn_sink.device
        self.paged = PagedCaches(
            layer.config,
            max_batch_size=REQUESTS,
            max_seq_len=MAX_SEQ_LEN,
            cache_format=layer.cache_format,
            device=self.device,
        )
        backend = layer.selection.backend
        options = {"decode_threshold": THRESHOLD, "device": self.device}
        make_swa = backend.get_swa_builder_cls()
        self.swa = None if make_swa is None else make_swa(MAX_TOKENS, **options)
        self.extra = None
        if self.swa is not None and layer.ratio > 1:
            self.extra = backend.get_builder_cls()(
                MAX_TOKENS, max_model_len=self.paged.max_seq_len, ratio=layer.ratio, **options
            )
        self.lengths = [0] * REQUESTS

    def step(self, counts: list[int], hidden: Tensor) -> Tensor:
        """Run a step of `counts` new tokens of the requests, with padding after them."""
        with torch.inference_mode():
            return self.call(*self.arguments(counts, hidden))

    def arguments(self, counts: list[int], hidden: Tensor) -> tuple[Any, ...]:
        """Append the tokens of a step to the requests and return the layer's arguments for it."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        starts = [sum(counts[:request]) for request in range(REQUESTS + 1)]
        metadata = build_batch_metadata(
            query_start_loc=torch.tensor(starts, dtype=torch.int32, device=self.device),
            seq_lens=torch.tensor(self.lengths, dtype=torch.int32, device=self.device),
            num_tokens=hidden.shape[0],
            block_tables=self.paged.block_tables,
            window=CONFIG.sliding_window,
            max_model_len=self.paged.max_seq_len,
            ratios=self.layer.config.compressed_ratios,
        )
        return hidden.to(self.device), metadata, self.paged.layers[0], self._own(metadata, starts)

    def _own(self, metadata: Any, starts: list[int]) -> DeepseekV4Metadata | None:
        """Return the step's metadata from the backend's own builders."""
        if self.swa is None:
            return None

        def group(name: str) -> CommonAttentionMetadata:
            return CommonAttentionMetadata.of(
                query_start_loc=starts,
                seq_lens=self.lengths,
                block_table=self.paged.block_tables.tensors()[name],
                slot_mapping=metadata.window.slot_mapping,
                positions=metadata.positions,
            )

        extra = None if self.extra is None else self.extra.build(0, group(f"entries_{self.layer.ratio}"))
        return DeepseekV4Metadata(self.swa.build(0, group("window")), extra)


def random_counts(rng: random.Random) -> list[int]:
    """Return two to four decodes of one to three tokens, then two or more prefills."""
    decodes = rng.randint(2, 4)
    counts = sorted(rng.randint(1, THRESHOLD) for _ in range(decodes))
    return counts + [rng.randint(THRESHOLD + 1, 45) for _ in range(REQUESTS - decodes)]


@pytest.mark.parametrize("kind", RATIOS)
@pytest.mark.parametrize(("name", "kv_cache_dtype"), SYSTEMS)
def test_outputs_and_caches_equal_those_of_the_paged_backend(
    name: str, kv_cache_dtype: str, kind: str, seed: int
) -> None:
    rng = random.Random(seed)
    ours = Serving(layer_of(kind, attention_backend=name, kv_cache_dtype=kv_cache_dtype))
    paged = Serving(layer_of(kind, attention_backend="DSV4_PAGED", kv_cache_dtype=kv_cache_dtype))
    for _ in range(3):
        counts = random_counts(rng)
        hidden = torch.randn(sum(counts) + rng.randint(0, 2), CONFIG.hidden_size).bfloat16()
        assert_close(ours.step(counts, hidden), paged.step(counts, hidden), PROJECTED)
    for cache_name, cache in ours.paged.layers[0].tensors().items():
        assert_bitwise(cache, paged.paged.layers[0].tensors()[cache_name], label=cache_name)


@pytest.mark.parametrize(("name", "kv_cache_dtype"), [SYSTEMS[0], SYSTEMS[2], SYSTEMS[3]])
def test_compiled_layer_is_one_graph_for_every_batch(name: str, kv_cache_dtype: str, seed: int) -> None:
    rng = random.Random(seed)
    layer = layer_of("csa", attention_backend=name, kv_cache_dtype=kv_cache_dtype)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    eager, graph = Serving(layer), Serving(layer, compiled)
    with torch.fx.experimental._config.patch(use_duck_shape=False):
        for number in range(4):
            counts = random_counts(rng)
            hidden = torch.randn(sum(counts), CONFIG.hidden_size).bfloat16()
            with torch._dynamo.config.patch(error_on_recompile=number > 0):
                assert_bitwise(graph.step(counts, hidden), eager.step(counts, hidden))


def test_a_layer_records_its_backend_and_raises_for_an_unsupported_one() -> None:
    layer = layer_of("swa")
    assert layer.selection.backend is get_backend("DSV4_PAGED")
    with pytest.raises(CompileError, match="head size 64"):
        DeepseekV4Attention(DeepseekV4Config(head_dim=64, rope_dim=16), 0, attention_backend="FLASHMLA_SPARSE_DSV4")
    assert explain(torch.nn.Sequential(layer), backend="eager").decisions[0].impl == "DSV4_PAGED"


def test_explain_lists_each_backend_that_was_not_chosen() -> None:
    lines = explain(torch.nn.Sequential(layer_of("swa")), backend="eager").text().splitlines()
    first = lines.index("ATTENTION BACKEND")
    assert lines[first + 2].split()[:2] == ["DSV4_PAGED", "1"]
    assert [line.split()[0] for line in lines[first + 3 :] if line.split()[1:2] == ["not"]] == list(NAMES[1:])
