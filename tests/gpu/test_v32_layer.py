"""A layer of DeepSeek-V3.2 with its indexer at its real sizes: one graph for every batch, decodes captured."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.fx.experimental._config
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.attention_backends import CommonAttentionMetadata
from dsv4_compile.attention_backends.v32.attention import FlashInferMLASparseMetadataBuilder
from dsv4_compile.attention_backends.v32.indexer import DeepseekV32Indexer, DeepseekV32IndexerMetadataBuilder
from dsv4_compile.attention_backends.v32.layer import DeepseekV32SparseAttention
from dsv4_compile.config import Rope
from dsv4_compile.rope_tables import cos_sin_cache
from dsv4_compile.testing import assert_bitwise
from dsv4_compile.testing.batch import Batch, random_table, slot, table_tensor
from tests.attention_backends import record
from tests.attention_backends.systems import batch_of
from tests.gpu.test_attention_backends import assert_similar, compiled

HIDDEN, HEADS, TOPK, BLOCK, REQUESTS, MAX_LEN, MAX_TOKENS = 256, 8, 64, 64, 10, 320, 400


class Engine:
    """One layer, its two caches over one block table, and its builders."""

    def __init__(self, layer: DeepseekV32SparseAttention, seed: int) -> None:
        assert layer.indexer is not None
        self.layer, self.table = layer, random_table(random.Random(seed), REQUESTS, layout.cdiv(MAX_LEN, BLOCK))
        pages, generator = REQUESTS * len(self.table[0]), torch.Generator("cuda").manual_seed(seed)
        rows = torch.randn(pages, BLOCK, layout.V32_HEAD_DIM, device="cuda", generator=generator)
        self.cache = rows.bfloat16()
        self.index_cache = torch.zeros(layer.indexer.get_cache_shape(pages, BLOCK), dtype=torch.uint8, device="cuda")
        self.rope = cos_sin_cache(Rope(10000.0, layout.ROPE_DIM), MAX_LEN, torch.device("cuda"))
        self.builders = (
            FlashInferMLASparseMetadataBuilder(MAX_TOKENS, block_size=BLOCK, topk_tokens=TOPK, device="cuda"),
            DeepseekV32IndexerMetadataBuilder(MAX_TOKENS, block_size=BLOCK, device="cuda"),
        )

    def arguments(self, batch: Batch, hidden: Tensor) -> tuple[Any, ...]:
        tokens = batch.tokens()
        common = CommonAttentionMetadata.of(
            query_start_loc=batch.query_start_loc().tolist(),
            seq_lens=batch.seq_lens,
            block_table=table_tensor(self.table).to("cuda"),
            slot_mapping=torch.tensor([slot(self.table, *token, BLOCK) for token in tokens], device="cuda"),
        )
        positions = torch.tensor([max(position, 0) for _, position in tokens], device="cuda")
        metadata, indexer_metadata = (builder.build(0, common) for builder in self.builders)
        return hidden, positions, self.rope, self.cache, metadata, None, self.index_cache, indexer_metadata


@pytest.fixture
def layer(seed: int) -> DeepseekV32SparseAttention:
    generator = torch.Generator("cuda").manual_seed(seed)
    indexer = DeepseekV32Indexer(HIDDEN, 128, topk=TOPK, device="cuda")
    attention = DeepseekV32SparseAttention(HIDDEN, HEADS, q_lora_rank=128, indexer=indexer, device="cuda")
    for parameter in attention.parameters():
        values = torch.randn(parameter.shape, device="cuda", generator=generator)
        parameter.data.copy_(values * parameter.shape[-1] ** -0.5 + (parameter.dim() == 1))
    return attention


def test_fifty_batches_run_one_graph(layer: DeepseekV32SparseAttention, seed: int) -> None:
    rng, call = random.Random(seed), compiled(layer)
    ours, plain = Engine(layer, seed), Engine(layer, seed)
    with torch.fx.experimental._config.patch(use_duck_shape=False):
        run_fifty(rng, call, layer, ours, plain)


def run_fifty(rng: random.Random, call: Any, layer: DeepseekV32SparseAttention, ours: Engine, plain: Engine) -> None:
    for number in range(50):
        batch = batch_of(rng, "mixed")
        hidden = torch.randn(batch.num_tokens, HIDDEN, device="cuda").bfloat16()
        real = torch.tensor([request >= 0 for request, _ in batch.tokens()], device="cuda")
        with torch.inference_mode():
            with torch._dynamo.config.patch(error_on_recompile=number > 0):
                out = call(*ours.arguments(batch, hidden))
            assert_similar(out[real], layer(*plain.arguments(batch, hidden))[real])


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_captured_decodes_are_those_of_the_calls(how: str, layer: DeepseekV32SparseAttention, seed: int) -> None:
    rng, call = random.Random(seed), layer if how == "eager" else compiled(layer)
    ours, plain = Engine(layer, seed), Engine(layer, seed)
    graph, held, out = torch.cuda.CUDAGraph(), None, None
    for number in range(5):
        batch = Batch((1,) * 7 + (0,), (*(rng.randint(1, 300) for _ in range(7)), 0), padding=1)
        hidden = torch.randn(batch.num_tokens, HIDDEN, device="cuda").bfloat16()
        new = ours.arguments(batch, hidden)
        with torch.inference_mode():
            if held is None:
                held = new
                call(*held)
                torch.cuda.synchronize()
                with torch.cuda.graph(graph):
                    out = call(*held)
            for mine, fresh in zip(record.tensors(held), record.tensors(new), strict=True):
                if mine.data_ptr() != fresh.data_ptr():
                    mine.copy_(fresh)
            graph.replay()
            assert out is not None
            assert_bitwise(out[:7], call(*plain.arguments(batch, hidden))[:7], label=f"step {number}")
    assert_bitwise(ours.index_cache, plain.index_cache)
