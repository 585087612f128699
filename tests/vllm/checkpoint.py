"""A small random DeepSeek-V4 under DeepSeek's names, in bfloat16, sized so that every part of a layer matters."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dsv4_compile.reference.common.block_scale import dequantize_weight
from dsv4_compile.reference.common.quant import dequantize_mxfp4, quantize_mxfp4

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "torch_dtype": "bfloat16",
    "vocab_size": 512,
    "hidden_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 128,
    "o_lora_rank": 64,
    "o_groups": 2,
    "num_experts_per_tok": 4,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "topk_method": "noaux_tc",
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 1024,
    },
    "compress_ratios": [0, 4, 128, 4],
    "num_hash_layers": 1,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "swiglu_limit": 10.0,
    "sliding_window": 128,
    "index_n_heads": 8,
    "index_head_dim": 128,
    "index_topk": 512,
    "num_nextn_predict_layers": 0,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "expert_dtype": "fp8",
    "initializer_range": 0.02,
    "use_cache": True,
}


class Weights:
    """Random tensors by their names in the checkpoint, drawn on `device`."""

    def __init__(self, config: Mapping[str, Any], device: str = "cpu") -> None:
        self.config, self.random, self.tensors = config, torch.Generator(device).manual_seed(1), dict[str, Tensor]()

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random, device=self.random.device)

    def matrix(self, name: str, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> None:
        self.tensors[name] = (self.normal(*shape) * scale * shape[-1] ** -0.5).to(dtype)

    def norm(self, name: str, dim: int) -> None:
        self.tensors[name] = (1 + 0.1 * self.normal(dim)).to(torch.bfloat16)

    def hyper_connection(self, name: str) -> None:
        streams, hidden = self.config["hc_mult"], self.config["hidden_size"]
        mixes = (2 + streams) * streams
        self.matrix(f"{name}_fn", mixes, streams * hidden, dtype=torch.float32)
        self.tensors |= {f"{name}_base": self.normal(mixes) * 0.5, f"{name}_scale": torch.ones(3)}

    def compressor(self, prefix: str, dim: int, ratio: int) -> None:
        width, hidden = (2 if ratio == 4 else 1) * dim, self.config["hidden_size"]
        self.tensors[f"{prefix}ape"] = self.normal(ratio, width) * 0.5
        for name in ("wkv", "wgate"):
            self.matrix(f"{prefix}{name}.weight", width, hidden)
        self.norm(f"{prefix}norm.weight", dim)

    def attention(self, prefix: str, ratio: int) -> None:
        c = self.config
        hidden, rank, heads, dim = c["hidden_size"], c["q_lora_rank"], c["num_attention_heads"], c["head_dim"]
        groups, low = c["o_groups"], c["o_lora_rank"]
        self.tensors[f"{prefix}attn_sink"] = self.normal(heads)
        self.norm(f"{prefix}q_norm.weight", rank)
        self.norm(f"{prefix}kv_norm.weight", dim)
        self.matrix(f"{prefix}wq_a.weight", rank, hidden)
        self.matrix(f"{prefix}wq_b.weight", heads * dim, rank)
        self.matrix(f"{prefix}wkv.weight", dim, hidden)
        self.matrix(f"{prefix}wo_a.weight", groups * low, heads * dim // groups)
        self.matrix(f"{prefix}wo_b.weight", hidden, groups * low, scale=2.0)
        if ratio > 1:
            self.compressor(f"{prefix}compressor.", dim, ratio)
        if ratio == 4:
            self.compressor(f"{prefix}indexer.compressor.", c["index_head_dim"], ratio)
            self.matrix(f"{prefix}indexer.wq_b.weight", c["index_n_heads"] * c["index_head_dim"], rank)
            self.matrix(f"{prefix}indexer.weights_proj.weight", c["index_n_heads"], hidden)

    def experts(self, prefix: str, hashed: bool) -> None:
        c = self.config
        experts, hidden, width = c["n_routed_experts"], c["hidden_size"], c["moe_intermediate_size"]
        self.matrix(f"{prefix}gate.weight", experts, hidden)
        if hashed:
            of = {"generator": self.random, "device": self.random.device}
            rows = [torch.randperm(experts, **of) for _ in range(c["vocab_size"])]
            self.tensors[f"{prefix}gate.tid2eid"] = torch.stack(rows)[:, : c["num_experts_per_tok"]].int()
        else:
            self.tensors[f"{prefix}gate.bias"] = self.normal(experts) * 0.01
        for name in [f"experts.{i}" for i in range(experts)] + ["shared_experts"]:
            self.matrix(f"{prefix}{name}.w1.weight", width, hidden)
            self.matrix(f"{prefix}{name}.w3.weight", width, hidden)
            self.matrix(f"{prefix}{name}.w2.weight", hidden, width)

    def model(self) -> dict[str, Tensor]:
        c = self.config
        hidden, streams = c["hidden_size"], c["hc_mult"]
        self.matrix("embed.weight", c["vocab_size"], hidden, scale=hidden**0.5)
        self.matrix("head.weight", c["vocab_size"], hidden, scale=4.0)
        self.norm("norm.weight", hidden)
        self.matrix("hc_head_fn", streams, streams * hidden, dtype=torch.float32)
        self.tensors |= {"hc_head_base": self.normal(streams), "hc_head_scale": torch.ones(1)}
        for i in range(c["num_hidden_layers"]):
            prefix = f"layers.{i}."
            for block in ("attn", "ffn"):
                self.norm(f"{prefix}{block}_norm.weight", hidden)
                self.hyper_connection(f"{prefix}hc_{block}")
            self.attention(f"{prefix}attn.", c["compress_ratios"][i])
            self.experts(f"{prefix}ffn.", hashed=i < c["num_hash_layers"])
        return self.tensors


QUANTISED: dict[str, Any] = {
    "moe_intermediate_size": 128,
    "expert_dtype": "fp4",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
}
"""Changes of `CONFIG` for weights as V4-Flash has them: `QuantisedWeights`."""
E4M3 = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b")
"""Matrices of attention, and of its indexer, in e4m3; those of compressors are not."""


class QuantisedWeights(Weights):
    """Random tensors in the formats of V4-Flash: routed experts in MXFP4, the shared one and attention in e4m3.

    With `dequantised`, the same values in bfloat16, which holds them exactly, but for attention.
    """

    def __init__(self, config: Mapping[str, Any], dequantised: bool = False) -> None:
        super().__init__(config)
        self.dequantised = dequantised

    def matrix(self, name: str, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> None:
        super().matrix(name, *shape, scale=scale, dtype=dtype)
        stem, value = name.removesuffix(".weight"), self.tensors[name].float()
        if ".ffn.experts." in name:
            weight, byte = quantize_mxfp4(value)
            scales, wide = byte.view(torch.float8_e8m0fnu), dequantize_mxfp4(weight, byte)
        elif ".shared_experts." in name or (
            ".attn." in name and stem.rsplit(".", 1)[-1] in E4M3 and "compressor" not in stem
        ):
            tiles = value.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
            scale = torch.exp2((tiles.abs().amax((1, 3)).clamp_min(1e-12) / 448).log2().ceil())
            weight = (tiles / scale[:, None, :, None]).flatten(2).flatten(0, 1).to(torch.float8_e4m3fn)
            scales = scale.to(torch.float8_e8m0fnu)
            wide = dequantize_weight(weight, scales)
        else:
            return
        if self.dequantised and ".ffn." in name:
            self.tensors[name] = wide.to(torch.bfloat16)
            return
        self.tensors[name] = weight.view(torch.int8) if weight.dtype is torch.uint8 else weight
        self.tensors[f"{stem}.scale"] = scales


def write(folder: Path, **changes: Any) -> Path:
    """Write config.json and model.safetensors of `CONFIG` with `changes`."""
    return write_weights(folder, Weights(CONFIG | changes))


def write_dense(folder: Path) -> Path:
    """Write the model with as many experts as a token goes to, so that no rounding chooses others."""
    return write(folder, n_routed_experts=CONFIG["num_experts_per_tok"])


def write_quantised(folder: Path, dequantised: bool, **changes: Any) -> Path:
    """Write a model of `QuantisedWeights`; with `dequantised`, its configuration leaves experts out."""
    config = CONFIG | QUANTISED | changes
    if dequantised:
        parts = ("experts", "shared_experts.gate_up_proj", "shared_experts.down_proj")
        left_out = [f"model.layers.{i}.ffn.{name}" for i in range(config["num_hidden_layers"]) for name in parts]
        config |= {"quantization_config": config["quantization_config"] | {"ignored_layers": left_out}}
    return write_weights(folder, QuantisedWeights(config, dequantised))


def write_weights(folder: Path, weights: Weights) -> Path:
    """Write config.json and model.safetensors of a model's random weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(weights.config))
    tensors = {name: tensor.contiguous().cpu() for name, tensor in weights.model().items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


if __name__ == "__main__":
    write(Path(sys.argv[1]))
