"""Hugging Face's DeepSeek-V4 attention, unquantised and without a cache, as the independent evaluation of a layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DeepseekV4Config as HFConfig
from transformers.models.deepseek_v4 import modeling_deepseek_v4

hf: Any = modeling_deepseek_v4

LAYER_TYPES = {
    "swa": "sliding_attention",
    "csa": "compressed_sparse_attention",
    "hca": "heavily_compressed_attention",
}
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1}
SMALL = {
    "hidden_size": 96,
    "num_attention_heads": 4,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 48,
    "o_groups": 2,
    "o_lora_rank": 24,
    "sliding_window": 32,
    "index_n_heads": 32,
    "index_head_dim": 32,
    "index_topk": 8,
}
FLASH: dict[str, int] = {}
PRO = {
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "index_topk": 1024,
}


def hf_config(kind: str, dims: dict[str, int], max_position_embeddings: int = 1048576) -> HFConfig:
    """A one-layer configuration of the given kind and dimensions."""
    settings: dict[str, Any] = {
        "num_hidden_layers": 1,
        "layer_types": [LAYER_TYPES[kind]],
        "rope_scaling": YARN,
        "max_position_embeddings": max_position_embeddings,
        **dims,
    }
    return HFConfig(**settings)


def hf_attention(config: HFConfig, seed: int = 0) -> Any:
    """The layer with random weights of unit gain: every projection keeps the scale of its input."""
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        layer = hf.DeepseekV4Attention(config, 0)
    # RoPE buffers cannot come from the meta device; parameters can, and are filled here.
    layer = layer.to_empty(device="cpu")
    for module in layer.modules():
        if isinstance(module, hf.DeepseekV4RotaryEmbedding):
            type(module).__init__(module, config)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.normal_(generator=generator)
            if name.endswith("norm.weight"):
                parameter.mul_(0.1).add_(1)
            elif parameter.dim() == 1 or name.endswith("position_bias"):
                parameter.mul_(0.5)
            else:
                parameter.mul_(parameter.shape[-1] ** -0.5)
    layer.config._attn_implementation = "eager"
    return layer.eval().requires_grad_(False)


@torch.no_grad()
def evaluate(layer: Any, hidden: Tensor) -> Tensor:
    """Output `[S, hidden]` of a layer from `hf_attention` for one sequence `[S, hidden]` from position 0."""
    config, length = layer.config, hidden.shape[0]
    positions = torch.arange(length)[None]
    rotary = hf.DeepseekV4RotaryEmbedding(config)
    embeddings = {name: rotary(hidden[None], position_ids=positions, layer_type=name) for name in ("main", "compress")}
    distance = torch.arange(length)[:, None] - torch.arange(length)[None]
    visible = (distance >= 0) & (distance < config.sliding_window)
    mask = torch.where(visible, 0.0, float("-inf"))[None, None]
    return layer(hidden[None], embeddings, positions, mask)[0][0]
