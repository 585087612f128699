"""DeepSeek-V3.2: sparse attention in the latent space, its metadata, and the example layer against plain attention."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.attention_backends import CommonAttentionMetadata
from dsv4_compile.attention_backends.v32.attention import FlashInferMLASparseMetadataBuilder
from dsv4_compile.attention_backends.v32.layer import DeepseekV32SparseAttention
from dsv4_compile.config import Rope
from dsv4_compile.errors import InputError
from dsv4_compile.rope_tables import cos_sin_cache
from dsv4_compile.testing import assert_bitwise, assert_close
from dsv4_compile.testing.batch import random_table, row, slot, table_tensor
from tests.attention_backends.fakes import FlashInfer
from tests.attention_backends.systems import batch_of
from tests.attention_backends.v32 import TOPK, V32Case, V32Layer


def case_of(rng: random.Random, **options: Any) -> V32Case:
    return V32Case(rng, batch_of(rng, "mixed"), **options)


@pytest.mark.parametrize("block_size", [32, 64])
@pytest.mark.parametrize(
    ("engine", "dtype"), [("dsv4", torch.bfloat16), ("dsv4", torch.float16), ("library", torch.bfloat16)]
)
def test_backend_output_is_exact(
    block_size: int, engine: str, dtype: torch.dtype, flashinfer: FlashInfer, seed: int
) -> None:
    case = case_of(random.Random(seed), block_size=block_size, dtype=dtype)
    layer = V32Layer(case, engine)
    out = layer.module(*layer.arguments(case))
    assert out.dtype is dtype
    assert_close(out, case.expected())
    assert len(flashinfer.calls) == (engine == "library")


def test_queries_in_two_parts_equal_concatenated_queries(seed: int) -> None:
    case = case_of(random.Random(seed))
    layer = V32Layer(case)
    q, *others = layer.arguments(case)
    parts = q.split((layout.V32_LATENT_DIM, layout.ROPE_DIM), dim=-1)
    assert_bitwise(layer.module(parts, *others), layer.module(q, *others))


def test_padding_rows_are_zero_and_do_not_change_other_rows(seed: int) -> None:
    case = case_of(random.Random(seed))
    layer = V32Layer(case)
    q, cache, metadata, topk = layer.arguments(case)
    more = torch.nn.functional.pad(q, (0, 0, 0, 0, 0, 7), value=1.0)
    out = layer.module(more, cache, metadata, torch.nn.functional.pad(topk, (0, 0, 0, 7), value=5))
    assert_bitwise(out[:-7], layer.module(q, cache, metadata, topk))
    assert not out[-7:].any()


def test_library_and_ops_agree_bitwise(flashinfer: FlashInfer, seed: int) -> None:
    case = case_of(random.Random(seed))
    ours, theirs = (V32Layer(case, engine) for engine in ("dsv4", "library"))
    assert_bitwise(ours.module(*ours.arguments(case)), theirs.module(*theirs.arguments(case)))
    assert flashinfer.calls == [(case.batch.num_tokens, TOPK)]
    q, _, *others = theirs.arguments(case)
    with pytest.raises(InputError, match="with gaps"):
        theirs.module(q, case.cache, *others)


def test_metadata_is_exact_at_a_fixed_address(seed: int) -> None:
    rng = random.Random(seed)
    layer = V32Layer(case_of(rng))
    addresses = set()
    for _ in range(5):
        case = case_of(rng)
        metadata = layer.metadata(case)
        assert metadata.req_id_per_token.tolist() == [max(request, 0) for request, _ in case.batch.tokens()]
        assert not layer.builder.req_id_per_token_buffer[case.batch.num_tokens :].any()
        assert (metadata.block_size, metadata.topk_tokens) == (64, TOPK)
        assert metadata.max_query_len == max(case.batch.query_lens)
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
    """Unabsorbed V3.2 attention: keys and values of all heads from every token's hidden state."""

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
    """Run a prefill of three requests, then steps of a few tokens; compiled steps use one graph."""
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
