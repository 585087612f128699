"""DeepSeek-V3.2's indexer against its definition, and a layer with an indexer, eager and compiled."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile.attention_backends import CommonAttentionMetadata
from dsv4_compile.attention_backends.v32.attention import FlashInferMLASparseMetadataBuilder
from dsv4_compile.attention_backends.v32.indexer import DeepseekV32Indexer, DeepseekV32IndexerMetadataBuilder
from dsv4_compile.attention_backends.v32.layer import DeepseekV32SparseAttention
from dsv4_compile.config import Rope
from dsv4_compile.errors import CompileError, GraphError, InputError
from dsv4_compile.rope_tables import cos_sin_cache
from dsv4_compile.testing import assert_bitwise
from dsv4_compile.testing.batch import random_table, slot, table_tensor

HIDDEN, RANK, HEADS, DIM, ROPE, TOPK, BLOCK, REQUESTS = 40, 24, 3, 128, 8, 9, 32, 3
STEPS = ((5, 12, 3), (1, 1, 1), (2, 0, 4), (1, 6, 1))
TABLE = cos_sin_cache(Rope(10000.0, ROPE), 128, "cpu")


def indexer_of(cache_dtype: str, dtype: torch.dtype, **options: Any) -> DeepseekV32Indexer:
    indexer = DeepseekV32Indexer(
        HIDDEN, RANK, num_heads=HEADS, topk=TOPK, cache_dtype=cache_dtype, rope_dim=ROPE, dtype=dtype, **options
    )
    for parameter in indexer.parameters():
        parameter.data.copy_(torch.randn(parameter.shape) * 0.3 + (parameter.dim() == 1))
    return indexer


class Batches:
    """Steps of three requests over one block table, each followed by padding tokens."""

    def __init__(self, rng: random.Random) -> None:
        self.table, self.lens = random_table(rng, REQUESTS, 4), [0] * REQUESTS

    def step(self, counts: tuple[int, ...], padding: int = 2) -> tuple[CommonAttentionMetadata, list[tuple[int, int]]]:
        self.lens = [length + count for length, count in zip(self.lens, counts, strict=True)]
        tokens = [(r, p) for r, count in enumerate(counts) for p in range(self.lens[r] - count, self.lens[r])]
        slots = [slot(self.table, *token, BLOCK) for token in tokens] + [-1] * padding
        common = CommonAttentionMetadata.of(
            query_start_loc=[sum(counts[:r]) for r in range(REQUESTS + 1)],
            seq_lens=self.lens,
            block_table=table_tensor(self.table),
            slot_mapping=torch.tensor(slots),
        )
        return common, tokens


def rotated(x: Tensor, position: int, interleaved: bool) -> Tensor:
    """Apply float64 RoPE to the first dims, with pairs half apart or neighbouring."""
    head, rest = x[..., :ROPE].double(), x[..., ROPE:].double()
    angle = position * 10000.0 ** -(torch.arange(ROPE // 2, dtype=torch.float64) / (ROPE // 2))
    a, b = (head[..., 0::2], head[..., 1::2]) if interleaved else head.chunk(2, -1)
    one, two = a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()
    turned = torch.stack((one, two), -1).flatten(-2) if interleaved else torch.cat((one, two), -1)
    return torch.cat((turned, rest), -1)


class Plain:
    """Scores of a token with all earlier tokens, in float64 and without caches."""

    def __init__(self, indexer: DeepseekV32Indexer) -> None:
        self.weights = {name: value.double() for name, value in indexer.state_dict().items()}
        self.interleaved = indexer.interleaved

    def key(self, hidden: Tensor, position: int) -> Tensor:
        key = self.weights["wk.weight"] @ hidden.double()
        key = (key - key.mean()) * (key.var(correction=0) + 1e-6).rsqrt()
        return rotated(key * self.weights["k_norm.weight"] + self.weights["k_norm.bias"], position, self.interleaved)

    def scores(self, history: list[Tensor], qr: Tensor) -> tuple[Tensor, float]:
        """Return the scores, and their upper bound by Cauchy-Schwarz."""
        last = len(history) - 1
        q = rotated((self.weights["wq_b.weight"] @ qr.double()).view(HEADS, DIM), last, self.interleaved)
        keys = torch.stack([self.key(hidden, position) for position, hidden in enumerate(history)])
        w = self.weights["weights_proj.weight"] @ history[-1].double()
        scale = (DIM * HEADS) ** -0.5
        size = float((w.abs() * q.norm(dim=-1)).sum() * keys.norm(dim=-1).max()) * scale
        return (w[:, None] * (q @ keys.T).relu()).sum(0) * scale, size


def run(indexer: DeepseekV32Indexer, rng: random.Random, plain: Plain) -> Any:
    """Yield the selection of each token, the exact scores and their upper bound."""
    batches, builder = Batches(rng), DeepseekV32IndexerMetadataBuilder(64, block_size=BLOCK)
    cache = torch.zeros(
        indexer.get_cache_shape(REQUESTS * 4, BLOCK),
        dtype=torch.uint8 if indexer.cache_format != "plain" else indexer.wk.weight.dtype,
    )
    histories: list[list[Tensor]] = [[] for _ in range(REQUESTS)]
    for counts in STEPS:
        common, tokens = batches.step(counts)
        hidden = torch.randn(common.num_actual_tokens, HIDDEN).to(indexer.wk.weight.dtype)
        qr = torch.randn(common.num_actual_tokens, RANK).to(hidden.dtype)
        positions = torch.tensor([position for _, position in tokens] + [0] * 2)
        with torch.inference_mode():
            selected = indexer(hidden, qr, positions, TABLE, cache, builder.build(0, common))
        for token, (request, _) in enumerate(tokens):
            histories[request].append(hidden[token])
            yield selected[token].tolist(), *plain.scores(histories[request], qr[token])
        assert (selected[len(tokens) :] == -1).all()


@pytest.mark.parametrize("interleaved", [False, True])
def test_float_keys_select_exactly_the_top_k(interleaved: bool, seed: int) -> None:
    indexer = indexer_of("bfloat16", torch.float32, interleaved=interleaved)
    for selected, scores, _ in run(indexer, random.Random(seed), Plain(indexer)):
        best = sorted(scores.sort(descending=True, stable=True).indices[:TOPK].tolist())
        assert selected == best + [-1] * (TOPK - len(best))


@pytest.mark.parametrize(("cache_dtype", "hadamard"), [("fp8", False), ("fp8", True), ("bfloat16", True)])
def test_quantised_keys_select_nearly_the_top_k(cache_dtype: str, hadamard: bool, seed: int) -> None:
    indexer = indexer_of(cache_dtype, torch.bfloat16, hadamard=hadamard)
    for selected, scores, size in run(indexer, random.Random(seed), Plain(indexer)):
        chosen = [index for index in selected if index >= 0]
        assert len(set(chosen)) == len(chosen) == min(TOPK, len(scores)) and chosen == sorted(chosen)
        # e4m3 rotates a vector of 128 dims by half a percent; both scores have two such vectors.
        assert scores[chosen].min() >= scores.topk(len(chosen)).values[-1] - 0.04 * size


def test_metadata_is_exact_at_fixed_addresses(seed: int) -> None:
    batches, builder = Batches(random.Random(seed)), DeepseekV32IndexerMetadataBuilder(64, block_size=BLOCK)
    addresses = set()
    for counts in STEPS:
        common, tokens = batches.step(counts)
        metadata = builder.build(0, common)
        assert metadata.req_id_per_token.tolist() == [request for request, _ in tokens] + [0, 0]
        assert metadata.context_lens.tolist() == [position + 1 for _, position in tokens] + [0, 0]
        assert not builder.context_lens[common.num_actual_tokens :].any()
        addresses.add((metadata.req_id_per_token.data_ptr(), metadata.context_lens.data_ptr()))
    assert len(addresses) == 1


@pytest.mark.parametrize("cache_dtype", ["fp8", "bfloat16"])
def test_layer_with_indexer_equals_layer_with_given_indices_in_one_graph(cache_dtype: str, seed: int) -> None:
    """Compare a layer that has an indexer with one that gets the same indices as an argument."""
    dims = {"q_lora_rank": RANK, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": ROPE, "v_head_dim": 12}
    indexer = indexer_of(cache_dtype, torch.bfloat16)
    layer = DeepseekV32SparseAttention(HIDDEN, HEADS, indexer=indexer, **dims)
    told = DeepseekV32SparseAttention(HIDDEN, HEADS, **dims)
    for name, parameter in layer.named_parameters():
        if not name.startswith("indexer."):
            parameter.data.copy_(torch.randn(parameter.shape) * 0.2 + (parameter.dim() == 1))
            told.get_parameter(name).data.copy_(parameter.data)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    batches = Batches(random.Random(seed))
    build_index = DeepseekV32IndexerMetadataBuilder(64, block_size=BLOCK).build
    build = FlashInferMLASparseMetadataBuilder(64, block_size=BLOCK, topk_tokens=TOPK).build
    dtype = torch.bfloat16 if cache_dtype == "bfloat16" else torch.uint8
    caches = [torch.zeros(REQUESTS * 4, BLOCK, 40, dtype=torch.bfloat16) for _ in range(3)]
    index_caches = [torch.zeros(indexer.get_cache_shape(REQUESTS * 4, BLOCK), dtype=dtype) for _ in range(3)]
    for number, counts in enumerate(STEPS):
        common, tokens = batches.step(counts)
        hidden = torch.randn(common.num_actual_tokens, HIDDEN).bfloat16()
        positions = torch.tensor([position for _, position in tokens] + [0] * 2)
        metadata, index_metadata = build(0, common), build_index(0, common)
        with torch.inference_mode(), torch._dynamo.config.patch(error_on_recompile=number > 0):
            out = compiled(hidden, positions, TABLE, caches[0], metadata, None, index_caches[0], index_metadata)
        with torch.inference_mode():
            eager = layer(hidden, positions, TABLE, caches[1], metadata, None, index_caches[1], index_metadata)
            qr = torch.nn.functional.rms_norm(layer.q_a_proj(hidden), (RANK,), layer.q_a_layernorm.weight, 1e-6)
            topk = indexer(hidden, qr, positions, TABLE, index_caches[2], index_metadata)
            expected = told(hidden, positions, TABLE, caches[2], metadata, topk)
        assert_bitwise(eager, expected)
        assert_bitwise(out, eager)
        assert_bitwise(index_caches[0], index_caches[1])


def test_invalid_arguments_raise() -> None:
    with pytest.raises(InputError, match="fp8 keys have 128 dims"):
        DeepseekV32Indexer(HIDDEN, RANK, head_dim=64)
    with pytest.raises(InputError, match="E202"):
        DeepseekV32Indexer(HIDDEN, RANK, cache_dtype="int8")
    with pytest.raises(CompileError, match="FLASHINFER_MLA_SPARSE"):
        DeepseekV32SparseAttention(HIDDEN, HEADS, engine="library")


@pytest.mark.parametrize("builder", [DeepseekV32IndexerMetadataBuilder, FlashInferMLASparseMetadataBuilder])
def test_batch_over_the_capacity_of_a_builder_raises(builder: type[Any], seed: int) -> None:
    counts, padding = (5, 12, 3), 2
    common, _ = Batches(random.Random(seed)).step(counts, padding)
    tokens = sum(counts) + padding
    assert builder(tokens, block_size=BLOCK).build(0, common).req_id_per_token.shape == (tokens,)
    with pytest.raises(GraphError, match="E401") as raised:
        builder(tokens - 1, block_size=BLOCK).build(0, common)
    for told in (f"{tokens} tokens", f"max_num_batched_tokens={tokens - 1}", f"allocate for {tokens} tokens"):
        assert told in str(raised.value)
