"""DeepSeek-V3.2: sparse attention in the latent space, its metadata, and the example layer against plain attention."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.attention_backends import CommonAttentionMetadata
from dsv4_compile.attention_backends.flashinfer_v32 import (
    FlashInferMLASparseAttention,
    FlashInferMLASparseMetadata,
    FlashInferMLASparseMetadataBuilder,
    v32_shape,
)
from dsv4_compile.attention_backends.v32_layer import DeepseekV32SparseAttention
from dsv4_compile.config import Rope
from dsv4_compile.rope_tables import cos_sin_cache
from dsv4_compile.testing import assert_bitwise, assert_close, random_cache
from dsv4_compile.testing.batch import Batch, random_table, row, slot, table_tensor
from tests.attention_backends.fakes import FlashInfer
from tests.attention_backends.systems import batch_of

TOPK, MAX_LEN, REQUESTS = 24, 320, 10


class Step:
    """A mixed batch over one paged cache of `block_size`, and an indexer's choice for each token."""

    def __init__(self, rng: random.Random, block_size: int = 64, topk: int = TOPK) -> None:
        self.batch: Batch = batch_of(rng, "mixed")
        self.block_size, self.topk = block_size, topk
        self.table = random_table(rng, REQUESTS, layout.cdiv(MAX_LEN, block_size))
        self.chosen = [rng.sample(range(position + 1), min(position + 1, topk)) for _, position in self.batch.tokens()]

    def topk_indices(self) -> Tensor:
        rows = [row(chosen, self.topk) for chosen in self.chosen]
        return torch.tensor(rows, dtype=torch.int32)

    def positions(self) -> Tensor:
        return torch.tensor([max(position, 0) for _, position in self.batch.tokens()])

    def metadata(self, builder: FlashInferMLASparseMetadataBuilder | None = None) -> FlashInferMLASparseMetadata:
        slots = [slot(self.table, *token, self.block_size) for token in self.batch.tokens()]
        common = CommonAttentionMetadata.of(
            query_start_loc=self.batch.query_start_loc().tolist(),
            seq_lens=self.batch.seq_lens,
            block_table=table_tensor(self.table),
            slot_mapping=torch.tensor(slots, dtype=torch.int64),
        )
        builder = builder or FlashInferMLASparseMetadataBuilder(400, block_size=self.block_size, topk_tokens=self.topk)
        return builder.build(0, common)


def exact(step: Step, q: Tensor, cache: Tensor, scale: float, value_dim: int) -> Tensor:
    """float64 `[T, H, value_dim]`."""
    out = torch.zeros(*q.shape[:2], value_dim, dtype=torch.float64)
    rows = cache.flatten(0, 1)
    for token, ((request, _), chosen) in enumerate(zip(step.batch.tokens(), step.chosen, strict=True)):
        slots = [slot(step.table, request, index, step.block_size) for index in chosen]
        if slots:
            keys = rows[slots].double()
            out[token] = torch.softmax(scale * q[token].double() @ keys.T, -1) @ keys[:, :value_dim]
    return out


@pytest.mark.parametrize("block_size", [32, 64])
@pytest.mark.parametrize(
    ("engine", "dtype"), [("dsv4", torch.bfloat16), ("dsv4", torch.float16), ("library", torch.bfloat16)]
)
def test_backend_gives_the_exact_answer(
    block_size: int, engine: str, dtype: torch.dtype, flashinfer: FlashInfer, seed: int
) -> None:
    step = Step(random.Random(seed), block_size)
    pages = REQUESTS * len(step.table[0])
    cache = random_cache(
        "plain", pages, block_size, live=pages * block_size, head_dim=layout.V32_HEAD_DIM, dtype=dtype
    ).cache
    q = torch.randn(step.batch.num_tokens, 3, layout.V32_HEAD_DIM).to(dtype)
    module = FlashInferMLASparseAttention(v32_shape(3, 0.05), engine)
    out = module(q.split((512, 64), dim=-1), cache, step.metadata(), step.topk_indices())
    assert out.dtype is dtype
    assert_close(out, exact(step, q, cache, 0.05, 512))
    assert len(flashinfer.calls) == (engine == "library")


def test_rows_behind_the_batch_are_zero(seed: int) -> None:
    step = Step(random.Random(seed))
    pages = REQUESTS * len(step.table[0])
    cache = torch.randn(pages, 64, 48)
    shape = v32_shape(2, 0.1, head_size=48, value_dim=32)
    q = torch.randn(step.batch.num_tokens + 7, 2, 48)
    topk = torch.nn.functional.pad(step.topk_indices(), (0, 0, 0, 7), value=5)
    out = FlashInferMLASparseAttention(shape)(q, cache, step.metadata(), topk)
    assert out.shape == (q.shape[0], 2, 32)
    assert not out[-7:].any()


def test_metadata_is_exact_and_stays_where_it_is(seed: int) -> None:
    rng = random.Random(seed)
    builder = FlashInferMLASparseMetadataBuilder(400, topk_tokens=TOPK)
    addresses = set()
    for _ in range(5):
        step = Step(rng)
        metadata = step.metadata(builder)
        assert metadata.req_id_per_token.tolist() == [max(request, 0) for request, _ in step.batch.tokens()]
        assert not builder.req_id_per_token_buffer[step.batch.num_tokens :].any()
        assert (metadata.block_size, metadata.topk_tokens) == (64, TOPK)
        assert metadata.max_query_len == max(b - a for a, b in pairwise(step.batch.query_start_loc().tolist()))
        addresses.add(metadata.req_id_per_token.data_ptr())
    assert len(addresses) == 1


def layer_of(dtype: torch.dtype) -> DeepseekV32SparseAttention:
    layer = DeepseekV32SparseAttention(
        40,
        3,
        q_lora_rank=24,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
        dtype=dtype,
    )
    for parameter in layer.parameters():
        parameter.data.copy_(torch.randn(parameter.shape) * 0.2 + (parameter.dim() == 1))
    return layer


def rotated(x: Tensor, position: int) -> Tensor:
    """Interleaved RoPE of the last dim, theta 10000, float64."""
    pairs = x.double().unflatten(-1, (-1, 2))
    angle = position * 10000.0 ** -(torch.arange(pairs.shape[-2], dtype=torch.float64) / pairs.shape[-2])
    even, odd = pairs[..., 0], pairs[..., 1]
    return torch.stack((even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos()), -1).flatten(-2)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()


class Plain:
    """V3.2 attention without latent tricks: keys and values of all heads from every token's hidden state."""

    def __init__(self, layer: DeepseekV32SparseAttention) -> None:
        self.weights = {name: value.double() for name, value in layer.state_dict().items()}

    def __call__(self, history: list[Tensor], chosen: list[int]) -> Tensor:
        w = self.weights
        position, hidden = len(history) - 1, history[-1].double()
        q = (w["q_b_proj.weight"] @ norm(w["q_a_proj.weight"] @ hidden, w["q_a_layernorm.weight"])).view(3, 24)
        q = torch.cat((q[:, :16], rotated(q[:, 16:], position)), -1)
        keys, values = [], []
        for index in chosen:
            latent, key = (w["kv_a_proj_with_mqa.weight"] @ history[index].double()).split((32, 8))
            up = (w["kv_b_proj.weight"] @ norm(latent, w["kv_a_layernorm.weight"])).view(3, 28)
            keys.append(torch.cat((up[:, :16], rotated(key, index).expand(3, 8)), -1))
            values.append(up[:, 16:])
        weights = torch.softmax(torch.einsum("hd,nhd->hn", q, torch.stack(keys)) * 24**-0.5, -1)
        return w["o_proj.weight"] @ torch.einsum("hn,nhv->hv", weights, torch.stack(values)).flatten()


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_layer_equals_attention_over_unabsorbed_keys_and_values(backend: str | None, seed: int) -> None:
    """A prefill of three requests, then steps of one token each; compiled, all steps share one graph."""
    rng = random.Random(seed)
    layer = layer_of(torch.float32)
    plain, table = Plain(layer), random_table(rng, 3, 2)
    call: Any = layer if backend is None else torch.compile(layer, backend=backend, fullgraph=True, dynamic=True)
    cache = torch.full((6, 64, 40), torch.nan)
    rope = cos_sin_cache(Rope(10000.0, 8), 128, "cpu")
    builder = FlashInferMLASparseMetadataBuilder(64, topk_tokens=9)
    histories: list[list[Tensor]] = [[], [], []]
    for number, counts in enumerate(((5, 12, 3), (1, 1, 1), (2, 1, 4), (1, 6, 1))):
        hidden, want, topk = [], [], []
        for request, count in enumerate(counts):
            for _ in range(count):
                hidden.append(torch.randn(40))
                histories[request].append(hidden[-1])
                visible = len(histories[request])
                chosen = rng.sample(range(visible), min(visible, 9))
                topk.append(row(chosen, 9))
                want.append(plain(histories[request], chosen))
        lens = [len(history) for history in histories]
        tokens = [(r, p) for r, count in enumerate(counts) for p in range(lens[r] - count, lens[r])]
        metadata = builder.build(
            0,
            CommonAttentionMetadata.of(
                query_start_loc=[sum(counts[:r]) for r in range(4)],
                seq_lens=lens,
                block_table=table_tensor(table),
                slot_mapping=torch.tensor([slot(table, *token, 64) for token in tokens]),
            ),
        )
        positions = torch.tensor([position for _, position in tokens])
        with torch.inference_mode(), torch._dynamo.config.patch(error_on_recompile=number > 0):
            out = call(torch.stack(hidden), positions, rope, cache, metadata, torch.tensor(topk, dtype=torch.int32))
        torch.testing.assert_close(out.double(), torch.stack(want), rtol=1e-4, atol=1e-5)


def test_library_and_ops_agree_to_the_bit(flashinfer: FlashInfer, seed: int) -> None:
    step = Step(random.Random(seed))
    cache = torch.randn(REQUESTS * len(step.table[0]), 64, layout.V32_HEAD_DIM).bfloat16()
    q = torch.randn(step.batch.num_tokens, 2, layout.V32_HEAD_DIM).bfloat16()
    a, b = (
        FlashInferMLASparseAttention(v32_shape(2, 0.05), engine)(q, cache, step.metadata(), step.topk_indices())
        for engine in ("dsv4", "library")
    )
    assert_bitwise(a, b)
