"""A small DeepSeek-V4.1 with every part of the real model, for examples and tests."""

from __future__ import annotations

from typing import Any

import torch

from .config import V41Config
from .draft_config import V41DraftConfig
from .model import V41Model
from .ngrams import token_map
from .tensors import model_tensors

TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_layers": 8,
    "num_heads": 4,
    "head_dim": 64,
    "rope_dim": 16,
    "q_lora_rank": 32,
    "o_lora_rank": 32,
    "o_groups": 2,
    "sliding_window": 8,
    "compress_ratios": (0, 0, 2, 2, 1, 1, 1, 1, 0, 0, 0),
    "kv_sources": (2, 4),
    "index_sources": (2, 4, 6),
    "candidate_source": 4,
    "candidate_blocks": 3,
    "candidate_block_size": 4,
    "index_n_heads": 8,
    "index_head_dim": 32,
    "index_topk": 6,
    "num_experts": 8,
    "experts_per_token": 2,
    "intermediate_size": 32,
    "engram_layers": (1, 3),
    "engram_rows": (434, 606),
    "engram_heads": 2,
    "engram_head_dim": 32,
    "engram_vocab_size": 61,
    "engram_compressed_vocab": 24,
    "image_token_id": -1,
}
"""Sizes in which every kind of layer, source and selection occurs within 40 tokens."""
TINY_DRAFTS = V41DraftConfig(
    stages=3, block=5, noise_token=63, taps=(5, 6, 7), markov_rank=16, num_experts=4, experts_per_token=2
)
"""Draft layers of `TINY`."""


def tiny_config(**overrides: Any) -> V41Config:
    """Return the configuration of 8 layers: window only, ratio 2, and ratio 1 with candidates; engrams at 1 and 3."""
    return V41Config(**(TINY | overrides))


def tiny_token_map(config: V41Config) -> torch.Tensor:
    """Return the compressed id of each token: the id modulo the size of the compressed vocabulary."""
    return token_map(config, [token % config.engram_compressed_vocab for token in range(config.vocab_size)])


def tiny_model(
    seed: int = 0, *, dtype: torch.dtype = torch.float32, drafts: V41DraftConfig | None = None, **overrides: Any
) -> V41Model:
    """Return a random `tiny_config` model with floating weights, on the CPU, with draft layers if there are `drafts`.

    The target's weights do not depend on them.
    """
    config, generator = tiny_config(**overrides), torch.Generator().manual_seed(seed)
    with torch.device("cpu"):
        model = V41Model(config, dtype, drafts=drafts)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        names = {expected.parameter for expected in model_tensors(config, drafts)}
        for name in sorted(names, key=lambda name: (name.startswith("mtp."), name)):
            tensor = parameters[name]
            if name.endswith(("norm.weight", "q_weight", "k_weight", "scale")):
                tensor.normal_(1.0, 0.1, generator=generator)
            elif tensor.dim() == 1 or "embed" in name:
                tensor.normal_(0.0, 0.5, generator=generator)
            else:
                tensor.normal_(0.0, tensor.shape[-1] ** -0.5, generator=generator)
        model.token_map.copy_(tiny_token_map(config))
    return model
