"""Four layers of V4-Flash's dimensions with random weights: attention in e4m3 with block scales, the rest bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.vllm.checkpoint import CONFIG, Weights, write_weights

BLOCK, LARGEST = 128, 448.0
"""Rows and columns that share a scale, and the largest number of e4m3."""
FP8 = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b")
"""Matrices of attention, and of its indexer, in e4m3; those of compressors are not."""
REAL: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 64,
    "q_lora_rank": 1024,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "num_experts_per_tok": 6,
    "index_n_heads": 64,
    "max_position_embeddings": 65536,
    "expert_dtype": "fp4",  # makes vLLM read the scales of attention as e8m0; the experts are bfloat16
    "rope_scaling": CONFIG["rope_scaling"] | {"factor": 16, "original_max_position_embeddings": 65536},
}
"""Settings that differ from the small model. Vocabulary and experts (16) are below V4-Flash's."""


def real_config(**changes: Any) -> dict[str, Any]:
    """Return the configuration with `changes`: `REAL`, and e4m3 attention with experts without quantisation."""
    config = CONFIG | REAL | changes
    layers = [f"model.layers.{i}" for i in range(config["num_hidden_layers"])]
    parts = ("experts.routed_experts", "shared_experts.gate_up_proj", "shared_experts.down_proj", "shared_experts")
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "scale_fmt": "ue8m0",
        "weight_block_size": [BLOCK, BLOCK],
        "ignored_layers": [f"{layer}.ffn.{name}" for layer in layers for name in parts],
    }
    return config


class Fp8Weights(Weights):
    """Random tensors with e4m3 matrices of attention and scales of powers of two."""

    def matrix(self, name: str, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> None:
        super().matrix(name, *shape, scale=scale, dtype=dtype)
        stem = name.removesuffix(".weight")
        if ".attn." not in name or "compressor" in name or stem.rsplit(".", 1)[-1] not in FP8:
            return
        rows, columns = shape
        tiles = self.tensors[name].float().view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        scales = torch.exp2((tiles.abs().amax((1, 3)).clamp_min(1e-12) / LARGEST).log2().ceil())
        scaled = tiles / scales[:, None, :, None]
        self.tensors[name] = scaled.view(rows, columns).to(torch.float8_e4m3fn)
        self.tensors[f"{stem}.scale"] = scales.to(torch.float8_e8m0fnu)


def write_real(folder: Path, **changes: Any) -> Path:
    """Write config.json and model.safetensors, 3.7 GiB."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return write_weights(folder, Fp8Weights(real_config(**changes), device))
