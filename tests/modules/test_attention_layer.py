"""Whole layers against Hugging Face's unquantised attention: every kind, any split of the tokens into steps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4_compile.cache import CacheFormat, PagedCaches
from dsv4_compile.config import DeepseekV4Config
from dsv4_compile.loading import hf_name, load_attention
from dsv4_compile.metadata import build_batch_metadata
from dsv4_compile.modules import DeepseekV4Attention
from dsv4_compile.testing import hf_layer

KINDS = ("swa", "csa", "hca")


def our_layer(source: torch.nn.Module, kv_cache_dtype: str, max_seq_len: int, **kwargs) -> DeepseekV4Attention:
    layer = DeepseekV4Attention(
        DeepseekV4Config.from_hf(source.config),
        0,
        kv_cache_dtype=kv_cache_dtype,
        dtype=torch.float32,
        max_seq_len=max_seq_len,
        **kwargs,
    )
    load_attention(layer, source.state_dict(), naming="hf")
    return layer


class Engine:
    """Feeds steps of a mixed batch to one layer, the way an engine would."""

    def __init__(self, layer: DeepseekV4Attention, requests: int, max_seq_len: int, **kwargs) -> None:
        self.layer = layer
        self.paged = PagedCaches(
            layer.config,
            max_batch_size=requests,
            max_seq_len=max_seq_len,
            cache_format=layer.cache_format,
            **kwargs,
        )
        self.lengths = [0] * requests

    @torch.inference_mode()
    def step(self, chunks: list[Tensor], padding: int = 0) -> list[Tensor]:
        """Append `chunks[b]` `[n_b, hidden]` to request b (n_b may be 0); return each request's outputs."""
        counts = [c.shape[0] for c in chunks]
        self.lengths = [n + c for n, c in zip(self.lengths, counts, strict=True)]
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        hidden = torch.cat([*chunks, torch.full((padding, chunks[0].shape[1]), torch.nan)])
        metadata = build_batch_metadata(
            query_start_loc=starts,
            seq_lens=torch.tensor(self.lengths, dtype=torch.int32),
            num_tokens=hidden.shape[0],
            block_tables=self.paged.block_tables,
            window=self.layer.config.sliding_window,
            max_model_len=self.paged.max_seq_len,
            ratios=self.layer.config.compressed_ratios,
        )
        out = self.layer(hidden, metadata, self.paged.layers[0])
        return list(out[: sum(counts)].split(counts))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "steps", [[300], [1, 5, 44, 250], [1] * 140 + [160]], ids=["whole", "chunked", "token-by-token"]
)
def test_any_split_into_steps_gives_the_unquantised_layer(kind: str, steps: list[int]) -> None:
    source = hf_layer.hf_attention(hf_layer.hf_config(kind, hf_layer.SMALL))
    hidden = torch.randn(sum(steps), source.config.hidden_size)
    expected = hf_layer.evaluate(source, hidden)
    engine = Engine(our_layer(source, "float32", 512), 1, 512)
    got = torch.cat([engine.step([chunk])[0] for chunk in hidden.split(steps)])
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_mixed_batch_equals_each_request_alone(kind: str) -> None:
    """Decodes, multi-token decodes, chunked prefills, a fresh prefill and padding rows share one step."""
    source = hf_layer.hf_attention(hf_layer.hf_config(kind, hf_layer.SMALL))
    plans = [[131, 1, 1], [60, 3, 70], [0, 150, 40], [7, 0, 128], [0, 0, 5]]
    sequences = [torch.randn(sum(plan), source.config.hidden_size) for plan in plans]
    engine = Engine(our_layer(source, "float32", 512), len(plans), 512, max_step_tokens=150)
    pieces = [sequence.split(plan) for sequence, plan in zip(sequences, plans, strict=True)]
    outputs = [engine.step([p[i] for p in pieces], padding=i) for i in range(3)]
    for b, sequence in enumerate(sequences):
        got = torch.cat([out[b] for out in outputs])
        torch.testing.assert_close(got, hf_layer.evaluate(source, sequence), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_rows_are_zero_and_leave_the_caches_alone(kind: str) -> None:
    source = hf_layer.hf_attention(hf_layer.hf_config(kind, hf_layer.SMALL))
    layer = our_layer(source, "float32", 256)
    engine = Engine(layer, 2, 256)
    engine.step([torch.randn(20, 96), torch.randn(9, 96)])
    before = {name: t.clone() for name, t in engine.paged.layers[0].tensors().items()}
    metadata = build_batch_metadata(
        query_start_loc=torch.zeros(3, dtype=torch.int32),
        seq_lens=torch.zeros(2, dtype=torch.int32),
        num_tokens=4,
        block_tables=engine.paged.block_tables,
        window=layer.config.sliding_window,
        max_model_len=256,
        ratios=layer.config.compressed_ratios,
    )
    with torch.inference_mode():
        out = layer(torch.randn(4, 96), metadata, engine.paged.layers[0])
    assert torch.equal(out, torch.zeros_like(out))
    for name, tensor in engine.paged.layers[0].tensors().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dims", [hf_layer.FLASH, hf_layer.PRO], ids=["flash", "pro"])
def test_real_dimensions(kind: str, dims: dict[str, int]) -> None:
    """float32 caches reproduce the unquantised layer to rounding; fp8_ds_mla caches keep its direction."""
    source = hf_layer.hf_attention(hf_layer.hf_config(kind, dims))
    hidden = torch.randn(136, source.config.hidden_size)
    expected = hf_layer.evaluate(source, hidden)
    exact = torch.cat(Engine(our_layer(source, "float32", 256), 1, 256).step([hidden]))
    assert (exact - expected).abs().max() < 1e-5
    quantised = torch.cat(Engine(our_layer(source, "fp8_ds_mla", 256), 1, 256).step([hidden]))
    assert torch.nn.functional.cosine_similarity(quantised, expected, dim=-1).min() > 0.999


def test_every_parameter_has_a_hugging_face_name() -> None:
    for kind in KINDS:
        source = hf_layer.hf_attention(hf_layer.hf_config(kind, hf_layer.SMALL))
        layer = our_layer(source, "float32", 256)
        assert {hf_name(name) for name, _ in layer.named_parameters()} == set(dict(source.named_parameters()))


def test_cache_format_words() -> None:
    assert CacheFormat.resolve("auto", model_dtype=torch.float32).kv_dtype is torch.float32
    assert CacheFormat.resolve("fp8_ds_mla").indexer == "indexer_fp8"
    assert CacheFormat.resolve("fp8", "mxfp4").indexer == "indexer_mxfp4"
    with pytest.raises(ValueError, match="E202"):
        CacheFormat.resolve("int8")
    with pytest.raises(ValueError, match="E202"):
        CacheFormat.resolve("auto", "int8")
