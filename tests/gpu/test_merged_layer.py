"""Layers of real size, compiled with every op merged that can be: results, caches, and launches before attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from dsv4_compile import layout
from dsv4_compile.cache import PagedCaches
from dsv4_compile.config import DeepseekV4Config
from dsv4_compile.metadata import AttentionMetadata, build_batch_metadata
from dsv4_compile.modules import DeepseekV4Attention
from dsv4_compile.selection import decisions

DEVICE = "cuda"
RATIOS = {"swa": 1, "hca": layout.HCA_RATIO, "csa": layout.CSA_RATIO}
LAUNCHES = {"swa": 3, "hca": 3, "csa": 4}
"""Most launches before attention, projections included; those of the indexer's own kernels come on top."""
INDEXER = ("indexer", "select", "topk")
INDEXER_QUERIES = "triton_per_fused"
"""RoPE and quantisation of the indexer's queries, where Inductor generates them: the one loop before attention."""
CONTEXT, REQUESTS = 512, 8
APART = {"dsv4.fuse": "off", "dsv4.impl": "eager"}
MERGED = {"dsv4.fuse": "on", "dsv4.impl": "triton"}


class Served:
    """A layer with random weights and its caches; decode steps of one token a request follow a prefill."""

    def __init__(self, kind: str, device: str = DEVICE) -> None:
        self.config, self.device = DeepseekV4Config.flash().with_layers(RATIOS[kind]), device
        self.layer = DeepseekV4Attention(
            self.config, 0, kv_cache_dtype="fp8_ds_mla", dtype=torch.bfloat16, device=device, max_seq_len=2 * CONTEXT
        )
        generator = torch.Generator(device).manual_seed(0)
        with torch.no_grad():
            for parameter in self.layer.parameters():
                values = torch.randn(parameter.shape, device=device, generator=generator)
                parameter.copy_(values * parameter.shape[-1] ** -0.5)

    def steps(self, options: dict[str, Any], counts: list[int]) -> tuple[list[Tensor], PagedCaches, Any]:
        """Outputs of a prefill, CONTEXT // 8 tokens a request, and of steps of `counts`; the caches; the last call."""
        torch.compiler.reset()
        call = torch.compile(self.layer, backend="dsv4", fullgraph=True, options=options)
        caches = PagedCaches(
            self.config,
            max_batch_size=REQUESTS,
            max_seq_len=CONTEXT,
            cache_format=self.layer.cache_format,
            device=self.device,
        )
        generator, length, outputs = torch.Generator(self.device).manual_seed(1), 0, []
        for count in [CONTEXT // 8, *counts]:
            length += count
            hidden = torch.randn(REQUESTS * count, self.config.hidden_size, device=self.device, generator=generator)
            hidden = hidden.bfloat16()
            metadata = self.metadata(caches, length, count)
            with torch.inference_mode():
                outputs.append(call(hidden, metadata, caches.layers[0]))
        return outputs, caches, lambda: call(hidden, metadata, caches.layers[0])

    def metadata(self, caches: PagedCaches, length: int, count: int) -> AttentionMetadata:
        starts = torch.arange(REQUESTS + 1, dtype=torch.int32, device=self.device) * count
        return build_batch_metadata(
            query_start_loc=starts,
            seq_lens=torch.full((REQUESTS,), length, dtype=torch.int32, device=self.device),
            num_tokens=REQUESTS * count,
            block_tables=caches.block_tables,
            window=self.config.sliding_window,
            max_model_len=caches.max_seq_len,
            ratios=self.config.compressed_ratios,
        )


@pytest.mark.parametrize("kind", RATIOS)
def test_a_merged_layer_gives_what_its_parts_give(kind: str) -> None:
    served, counts = Served(kind), [1, 1, 3, 130]
    expected, old, _ = served.steps(APART, counts)
    with decisions.collect() as decided:
        got, new, _ = served.steps(MERGED, counts)
    merged = {"preprocess_insert", "sparse_mla_decode"}
    merged |= {"indexer_q_rope_quant", "indexer_topk_slots"} if kind == "csa" else set()
    assert {fusion.into for fusion in decided.fusions if fusion.fused} == merged
    for a, b in zip(got, expected, strict=True):
        # bfloat16 sums in a different order; a score near a tie may select the other entry in a CSA layer.
        assert torch.nn.functional.cosine_similarity(a.float(), b.float(), dim=-1).median() > 0.9995
    for name, cache in new.layers[0].tensors().items():
        wrong = (cache != old.layers[0].tensors()[name]).float().mean()
        assert wrong < 2e-2, f"{wrong:.1%} of {name}"


@pytest.mark.parametrize("kind", RATIOS)
def test_launches_before_attention_of_a_decode_step(kind: str) -> None:
    _, _, call = Served(kind).steps(MERGED, [1, 1])
    with torch.inference_mode():
        call()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            call()
            torch.cuda.synchronize()
    launches = sorted(
        (event for event in profiled.events() if event.device_type.name == "CUDA"),
        key=lambda event: event.time_range.start,
    )
    names = [event.name for event in launches]
    print(f"{kind}: {len(names)} launches", *names, sep="\n  ")
    assert any("sparse_mla_decode" in name for name in names), names
    before = names[: next(i for i, name in enumerate(names) if "sparse_mla_decode" in name)]
    layer_kernels = [
        name for name in before if not any(word in name for word in INDEXER) and not name.startswith("Memset")
    ]
    if kind == "csa":
        generated = next((name for name in layer_kernels if name.startswith(INDEXER_QUERIES)), None)
        layer_kernels = [name for name in layer_kernels if name != generated]
    assert len(layer_kernels) <= LAUNCHES[kind], before
