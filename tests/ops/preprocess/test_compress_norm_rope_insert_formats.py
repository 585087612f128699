from __future__ import annotations

import math
import struct

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as hf

from dsv4_compile import layout
from dsv4_compile.testing import assert_bitwise
from tests.ops.preprocess.compressor_engine import Engine, one_request
from tests.support import scalar

RATIOS = pytest.mark.parametrize("ratio", [4, 128])
BYTE_FORMATS = ("fp8_ds_mla", "indexer_fp8", "indexer_mxfp4")


def row_bytes(engine: Engine, entry: Tensor) -> tuple[bytes, bytes]:
    """Data and scale bytes of a float32 entry, by the scalar formats."""
    values = entry.tolist()
    if engine.fmt == "fp8_ds_mla":
        return scalar.mla_row(values)
    values = [scalar.bf16(v) for v in values]
    if engine.fmt == "indexer_fp8":
        data, byte = scalar.quantize_tile(values, layout.KV_AMAX_FLOOR)
        return data, struct.pack("<f", 2.0 ** (byte - layout.UE8M0_BIAS))
    codes, scale = [], []
    for start in range(0, engine.dim, layout.MX_TILE):
        tile = values[start : start + layout.MX_TILE]
        exponent = scalar.ue8m0_exponent(max(layout.MXFP4_AMAX_FLOOR, *map(abs, tile)), layout.E2M1_MAX)
        codes += [scalar.e2m1_code(math.ldexp(v, -exponent)) for v in tile]
        scale.append(exponent + layout.UE8M0_BIAS)
    return bytes(low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)), bytes(scale)


@RATIOS
@pytest.mark.parametrize("fmt", BYTE_FORMATS)
def test_byte_caches_hold_the_rounded_entry_and_stay_untouched_elsewhere(ratio: int, fmt: str) -> None:
    dim = 512 if fmt == "fp8_ds_mla" else 128
    engine = Engine(ratio, fmt=fmt, dim=dim, rope_dim=64, max_len=256)
    exact = engine.unrounded()
    history = torch.randn(256 if ratio == 128 else 17, engine.width) * 3
    stride, pages = engine.cache.stride(0), engine.cache.shape[0]
    storage = engine.cache.as_strided((pages * stride,), (1,))
    expected = bytearray(storage.numpy().tobytes())
    for cache in (engine, exact):
        cache.run(one_request(range(len(history))), history)
    for index, entry in enumerate(exact.entries(0, len(history) // ratio)):
        slot = engine.slots(engine.cache_table, engine.block, torch.tensor(0), torch.tensor(index)).item()
        scalar.store(expected, fmt, stride, engine.block, slot, *row_bytes(engine, entry))
    assert storage.numpy().tobytes() == bytes(expected)


def test_per_tensor_fp8_rows_are_rounded_straight_from_float32() -> None:
    scale = torch.tensor([0.03125])
    engine = Engine(4, fmt="fp8", kv_scale=scale)
    exact = engine.unrounded()
    history = torch.randn(8, engine.width)
    for cache in (engine, exact):
        cache.run(one_request(range(8)), history)
    codes = [[scalar.e4m3_code(v / 0.03125) for v in row] for row in exact.entries(0, 2).tolist()]
    stored = engine.cache[engine.cache_table[0, 0], :2]
    assert stored.tolist() == codes


def test_bfloat16_rows_are_rounded_once() -> None:
    engine = Engine(4, dtype=torch.bfloat16)
    exact = engine.unrounded()
    history = torch.randn(12, engine.width)
    for cache in (engine, exact):
        cache.run(one_request(range(12)), history)
    assert_bitwise(engine.entries(0, 3), exact.entries(0, 3).bfloat16())


def sylvester(n: int) -> Tensor:
    return torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(n)] for i in range(n)]).double() * n**-0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hadamard_transforms_the_rotated_entry(dtype: torch.dtype) -> None:
    """float32 rows are never rounded to bfloat16; bfloat16 rows are, before the transform and after."""
    engine = Engine(4, hadamard=True, dtype=dtype)
    plain = engine.unrounded(dtype)
    history = torch.randn(8, engine.width)
    for cache in (engine, plain):
        cache.run(one_request(range(8)), history)
    expected = plain.entries(0, 2).double() @ sylvester(16)
    bound = 1e-6 if dtype is torch.float32 else 2.0**-8
    torch.testing.assert_close(engine.entries(0, 2).double(), expected, rtol=bound, atol=1e-6)
    assert engine.entries(0, 2).dtype is dtype


@pytest.mark.parametrize("fmt", ["indexer_fp8", "indexer_mxfp4"])
def test_hadamard_comes_before_the_quantisation(fmt: str) -> None:
    engine = Engine(4, fmt=fmt, dim=128, rope_dim=64, hadamard=True)
    exact = engine.unrounded(torch.bfloat16)
    history = torch.randn(16, engine.width)
    for cache in (engine, exact):
        cache.run(one_request(range(16)), history)
    transformed = exact.entries(0, 4).double() @ sylvester(128)
    # Half the widest step, against a largest magnitude that is at least the value in its middle: 16 of 272 in e4m3 and
    # 1 of 5 in e2m1. Then one bfloat16 rounding.
    bound = {"indexer_fp8": 16 / 272, "indexer_mxfp4": 1 / 5}[fmt]
    error = (engine.entries(0, 4).double() - transformed).abs()
    assert (error <= (bound + 2.0**-7) * transformed.abs().amax(-1, keepdim=True)).all()
    assert 1 - torch.cosine_similarity(engine.entries(0, 4).double(), transformed).min() < 0.02


def hf_config(**changes: object) -> DeepseekV4Config:
    yarn = {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
    }
    return DeepseekV4Config(
        hidden_size=32,
        head_dim=32,
        qk_rope_head_dim=8,
        q_lora_rank=16,
        index_head_dim=16,
        index_n_heads=4,
        index_topk=2,
        layer_types=["compressed_sparse_attention"],
        num_hidden_layers=1,
        max_position_embeddings=1024,
        rope_scaling=yarn,
        **changes,
    )


@pytest.mark.parametrize("kind", ["HCA", "CSA", "indexer"])
def test_float32_entries_are_those_of_hugging_face(kind: str) -> None:
    config, tokens = hf_config(), 260
    module = (hf.DeepseekV4HCACompressor if kind == "HCA" else hf.DeepseekV4CSACompressor)(config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.5)
    hidden, positions = torch.randn(1, tokens, 32), torch.arange(tokens)
    captured: list[Tensor] = []
    if kind == "indexer":
        module.indexer.scorer.register_forward_pre_hook(lambda _, args: captured.append(args[1]))
    with torch.no_grad():
        compressed = module(hidden, torch.randn(1, tokens, 16), positions[None], None, 0)[0][0, 0]
    source = module.indexer if kind == "indexer" else module
    expected = captured[0][0] if kind == "indexer" else compressed

    ratio, dim = (128 if kind == "HCA" else 4), source.head_dim
    engine = Engine(ratio, dim=dim)
    cos, sin = source.rotary_emb(hidden, positions[None], layer_type="compress")
    engine.table = torch.cat((cos, sin), dim=-1)[0]
    engine.ape, engine.norm_weight = source.position_bias.detach(), source.kv_norm.weight.detach()
    with torch.no_grad():
        inputs = torch.cat((source.kv_proj(hidden), source.gate_proj(hidden)), dim=-1)[0]
    for start, stop in ((0, 3), (3, 131), (131, tokens)):
        engine.run(one_request(range(start, stop)), inputs[start:stop])
    assert len(expected) == tokens // ratio
    torch.testing.assert_close(engine.entries(0, tokens // ratio), expected, rtol=1e-5, atol=1e-5)
