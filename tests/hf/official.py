"""Not a test: a small checkpoint folder as DeepSeek publishes it, and its model dequantised to float32.

Names, quantisation and dequantisation are written out here, and share no code with the loader.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dsv4_compile.hf.tiny import tiny_model

SIZES: dict[str, Any] = {"moe_intermediate_size": 128, "n_routed_experts": 4, "q_lora_rank": 128}
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "torch_dtype": "bfloat16",
    "vocab_size": 512,
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 128,
    "o_groups": 2,
    "o_lora_rank": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_hash_layers": 1,
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "compress_ratios": [0, 4, 128, 4, 0, 0, 0],
    "num_nextn_predict_layers": 1,
    "dspark_block_size": 5,
    "dspark_noise_token_id": 7,
    "dspark_target_layer_ids": [2, 3],
    "dspark_markov_rank": 32,
    "sliding_window": 32,
    "index_n_heads": 32,
    "index_head_dim": 32,
    "index_topk": 8,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 4,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "max_position_embeddings": 1048576,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "expert_dtype": "fp4",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    },
}
"""`config.json` of four layers (SWA, CSA, HCA, CSA), the first routed by hash, and DSpark's fields."""
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
LINEARS = {"wq_a": "q_a_proj", "wq_b": "q_b_proj", "wkv": "kv_proj", "wo_a": "o_a_proj", "wo_b": "o_b_proj"}
SHARED = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def _power(amax: Tensor, largest: float) -> Tensor:
    return torch.exp2((amax.clamp(min=1e-6) / largest).log2().ceil())


def _blocks(scale: Tensor, rows: int, columns: int) -> Tensor:
    return scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]


def e4m3(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise `[N, K]` with a scale for each block of 128x128."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % 128, 0, -rows % 128))
    amax = padded.abs().unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).amax((1, 3))
    scale = _power(amax, 448.0)
    return (weight / _blocks(scale, rows, columns)).to(torch.float8_e4m3fn), scale.to(torch.float8_e8m0fnu)


def mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise `[N, K]` to two e2m1 a byte, the lower nibble first, with a scale for 32 elements of K."""
    groups = weight.unflatten(1, (-1, 32))
    scale = _power(groups.abs().amax(2), 6.0)
    scaled = groups / scale[..., None]
    code = (scaled.abs()[..., None] - E2M1).abs().argmin(-1) + 8 * (scaled < 0)
    low, high = code.flatten(1)[:, 0::2], code.flatten(1)[:, 1::2]
    return (low + 16 * high).to(torch.uint8).view(torch.int8), scale.to(torch.float8_e8m0fnu)


def dequantised(weight: Tensor, scale: Tensor) -> Tensor:
    """Return `[N, K]` in float32 from either format."""
    if weight.dtype is torch.float8_e4m3fn:
        return weight.float() * _blocks(scale.float(), *weight.shape)
    byte = weight.view(torch.uint8).long()
    code = torch.stack((byte % 16, byte // 16), -1).flatten(1)
    value = E2M1[code % 8] * torch.where(code >= 8, -1.0, 1.0)
    return value * scale.float().repeat_interleave(32, 1)


def official_tensors(model: Any, *, experts: Any = mxfp4, wo_a: Any = e4m3) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint, and round the weights of `model`, in float32, to their values."""
    out: dict[str, Tensor] = {}

    def put(name: str, module: Any, leaf: str = "weight", dtype: torch.dtype = torch.bfloat16) -> None:
        value = getattr(module, leaf).data.to(dtype)
        getattr(module, leaf).data.copy_(value)
        out[name] = value.clone()

    def quantised(name: str, weight: Tensor, quantise: Any) -> None:
        if quantise is None:
            out[f"{name}.weight"] = weight.to(torch.bfloat16)
            weight.copy_(out[f"{name}.weight"])
        else:
            out[f"{name}.weight"], out[f"{name}.scale"] = quantise(weight)
            weight.copy_(dequantised(out[f"{name}.weight"], out[f"{name}.scale"]))

    put("embed.weight", model.model.embed_tokens)
    put("head.weight", model.lm_head)
    put("norm.weight", model.model.norm)
    for leaf in ("fn", "base", "scale"):
        put(f"hc_head_{leaf}", model.model.hc_head, f"hc_{leaf}", torch.float32)
    for i, layer in enumerate(model.model.layers):
        attention, moe, at = layer.self_attn, layer.mlp, f"layers.{i}"
        put(f"{at}.attn_norm.weight", layer.input_layernorm)
        put(f"{at}.ffn_norm.weight", layer.post_attention_layernorm)
        for part, mix in (("attn", layer.attn_hc), ("ffn", layer.ffn_hc)):
            for leaf in ("fn", "base", "scale"):
                put(f"{at}.hc_{part}_{leaf}", mix, leaf, torch.float32)
        for ours, theirs in LINEARS.items():
            quantised(f"{at}.attn.{ours}", getattr(attention, theirs).weight.data, wo_a if ours == "wo_a" else e4m3)
        put(f"{at}.attn.q_norm.weight", attention.q_a_norm)
        put(f"{at}.attn.kv_norm.weight", attention.kv_norm)
        put(f"{at}.attn.attn_sink", attention, "sinks", torch.float32)
        compressor = attention.compressor
        if compressor is not None:
            indexer = getattr(compressor, "indexer", None)
            for prefix, source in (("compressor", compressor), ("indexer.compressor", indexer)):
                if source is not None:
                    put(f"{at}.attn.{prefix}.wkv.weight", source.kv_proj)
                    put(f"{at}.attn.{prefix}.wgate.weight", source.gate_proj)
                    put(f"{at}.attn.{prefix}.ape", source, "position_bias", torch.float32)
                    put(f"{at}.attn.{prefix}.norm.weight", source.kv_norm)
            if indexer is not None:
                quantised(f"{at}.attn.indexer.wq_b", indexer.q_b_proj.weight.data, e4m3)
                put(f"{at}.attn.indexer.weights_proj.weight", indexer.scorer.weights_proj)
        put(f"{at}.ffn.gate.weight", moe.gate)
        if moe.is_hash:
            out[f"{at}.ffn.gate.tid2eid"] = moe.gate.tid2eid.clone()
        else:
            put(f"{at}.ffn.gate.bias", moe.gate, "e_score_correction_bias", torch.float32)
        for ours, theirs in SHARED.items():
            quantised(f"{at}.ffn.shared_experts.{ours}", getattr(moe.shared_experts, theirs).weight.data, e4m3)
        for e in range(len(moe.experts.down_proj)):
            gate, up = moe.experts.gate_up_proj.data[e].chunk(2)
            for name, weight in (("w1", gate), ("w2", moe.experts.down_proj.data[e]), ("w3", up)):
                quantised(f"{at}.ffn.experts.{e}.{name}", weight, experts)
    return out


def write(folder: Path, tensors: dict[str, Tensor], shards: int = 4, **config: Any) -> Path:
    """Write `config.json`, an index and files of about equal size, in the order of `tensors`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    total, done = sum(tensor.nbytes for tensor in tensors.values()), 0
    parts: list[dict[str, Tensor]] = [{} for _ in range(shards)]
    for name, tensor in tensors.items():
        parts[min(done * shards // total, shards - 1)][name] = tensor.contiguous()
        done += tensor.nbytes
    weight_map: dict[str, str] = {}
    for i, part in enumerate(parts, 1):
        file = f"model-{i:05}-of-{shards:05}.safetensors"
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def make(folder: Path, *, seed: int = 0, **formats: Any) -> tuple[Path, Any]:
    """Write a folder, and return it with transformers' model in float32 with the same weights dequantised."""
    model = tiny_model(seed, **SIZES)
    torch.manual_seed(seed)
    return write(folder, official_tensors(model, **formats)), model


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def changed(source: Path, target: Path, change: Callable[[dict[str, Tensor]], None], **config: Any) -> Path:
    """Write a copy of a folder as one file without an index, with tensors edited by `change`."""
    target.mkdir()
    tensors = {name: tensor for file in files(source) for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps(CONFIG | config))
    return target


def copied(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


def weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter and persistent buffer of a loaded model by name, in float32 if it was floating."""
    state = dict(model.state_dict())
    for name, tensor in state.items():
        scale = state.get(f"{name}_scale_inv")
        if name.endswith("_scale_inv"):
            continue
        if scale is None:
            yield name, tensor.float() if tensor.is_floating_point() else tensor
        elif tensor.dim() == 3:
            yield name, torch.stack([dequantised(w, s) for w, s in zip(tensor, scale, strict=True)])
        else:
            yield name, dequantised(tensor, scale)
