"""A small engine for one layer: weights, caches, and steps of mixed batches."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsv4_compile.cache import PagedCaches
from dsv4_compile.config import DeepseekV4Config
from dsv4_compile.loading import load_attention
from dsv4_compile.metadata import AttentionMetadata, build_batch_metadata
from dsv4_compile.modules import DeepseekV4Attention

KINDS = ("swa", "csa", "hca")


def our_layer(source: Any, kv_cache_dtype: str, max_seq_len: int, **kwargs: Any) -> DeepseekV4Attention:
    """Make a float32 layer with the weights of a transformers attention."""
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
    """Feeds steps of a mixed batch to one layer, through `call` (for example compiled) or the layer itself."""

    def __init__(
        self,
        layer: DeepseekV4Attention,
        requests: int,
        max_seq_len: int,
        *,
        call: Callable[..., Tensor] | None = None,
        max_step_tokens: int | None = None,
    ) -> None:
        self.layer, self.call = layer, layer if call is None else call
        self.paged = PagedCaches(
            layer.config,
            max_batch_size=requests,
            max_seq_len=max_seq_len,
            max_step_tokens=max_step_tokens,
            cache_format=layer.cache_format,
        )
        self.lengths = [0] * requests

    @torch.inference_mode()
    def step(self, chunks: list[Tensor], padding: int = 0) -> list[Tensor]:
        """Append `chunks[b]` `[n_b, hidden]` to request b (n_b may be 0); return each request's outputs."""
        counts = [c.shape[0] for c in chunks]
        self.lengths = [n + c for n, c in zip(self.lengths, counts, strict=True)]
        hidden = torch.cat([*chunks, chunks[0].new_full((padding, chunks[0].shape[1]), torch.nan)])
        out = self.call(hidden, self.metadata(counts, hidden.shape[0]), self.paged.layers[0])
        return list(out[: sum(counts)].split(counts))

    def metadata(self, counts: list[int], num_tokens: int) -> AttentionMetadata:
        """Return the metadata of a step that appended the last `counts[b]` of `lengths[b]` tokens to request b."""
        return build_batch_metadata(
            query_start_loc=torch.tensor([0, *counts]).cumsum(0).int(),
            seq_lens=torch.tensor(self.lengths, dtype=torch.int32),
            num_tokens=num_tokens,
            block_tables=self.paged.block_tables,
            window=self.layer.config.sliding_window,
            max_model_len=self.paged.max_seq_len,
            ratios=self.layer.config.compressed_ratios,
        )


def random_counts(rng: random.Random, requests: int, longest: int) -> list[int]:
    """Return the tokens of each request in a step, two or more in total: idle, decode, several tokens, prefill."""
    counts = [rng.choice((0, 1, 1, 1, rng.randint(2, 4), rng.randint(5, longest))) for _ in range(requests)]
    return counts if sum(counts) > 1 else [2, *counts[1:]]
