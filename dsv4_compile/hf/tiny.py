"""A small random DeepSeek-V4 with every part of the real model, for the demo, examples and tests."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from .._compat import kept_in_float32
from .model.draft_kinds import KINDS
from .model.draft_model import DraftModel
from .model.draft_settings import DSPARK, MTP, DraftSettings
from .model.taps import Taps

FLASH: dict[str, Any] = {
    "vocab_size": 129280,
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 64,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "hc_sinkhorn_iters": 20,
    "sliding_window": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
}
"""Sizes of V4-Flash, for `tiny_config`."""
REAL_ATTENTION: dict[str, Any] = {
    "hidden_size": 1024,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 512,
    "o_groups": 2,
    "o_lora_rank": 256,
    "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
    "hc_sinkhorn_iters": 20,
    "sliding_window": 128,
    "index_n_heads": 16,
    "index_head_dim": 128,
    "index_topk": 512,
}
"""Sizes of a model of two layers whose heads, window and top-k are V4-Flash's, for `tiny_config`."""
_LAYERS = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")


def tiny_config(**overrides: Any) -> DeepseekV4Config:
    """Return a configuration of four layers (SWA, CSA, HCA, CSA) with mHC, hash-routed and routed experts, and YaRN.

    `index_topk` is 8, so the indexer leaves entries out from 36 tokens on. With 32 index heads no two scores are
    exactly zero, which would be ties that implementations break differently.
    """
    values: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 128,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "head_dim": 64,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 64,
        "o_groups": 2,
        "o_lora_rank": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "layer_types": [*_LAYERS, _LAYERS[1]],
        "num_hash_layers": 1,
        "hc_sinkhorn_iters": 4,
        "sliding_window": 32,
        "index_n_heads": 32,
        "index_head_dim": 32,
        "index_topk": 8,
        "max_position_embeddings": 1048576,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 65536,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    return DeepseekV4Config(**{**values, **overrides})


def tiny_model(seed: int = 0, *, dtype: torch.dtype = torch.float32, **overrides: Any) -> DeepseekV4ForCausalLM:
    """Return a random `tiny_config` model in eval mode.

    Random values replace the zeros and ones of transformers' initialisation, so that sinks, position biases, norms,
    routing bias and the hash table all have an effect.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DeepseekV4ForCausalLM(tiny_config(**overrides))

    randomise(model, generator)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not kept_in_float32(model, name):
                parameter.data = parameter.data.to(dtype)
    return model.eval()


def tiny_drafts(
    model: Any, kind: str = "dspark", seed: int = 0, *, num_drafts: int | None = None, stages: int = 3
) -> DraftModel:
    """Return random draft layers for `model`, a `tiny_model` before or after convert, in its dtype and on its device.

    Args:
        kind: "dspark", with `stages` stages that read the last two layers, or "mtp".
        num_drafts: tokens that are drafted (None = 5 for DSpark, 2 for MTP).
    """
    config, weight = model.config, model.get_input_embeddings().weight
    layers = config.num_hidden_layers
    if kind == MTP:
        settings = DraftSettings(MTP, 1, num_drafts or 2, Taps((layers - 1,), mean=False))
    else:
        taps = Taps(tuple(range(max(0, layers - 2), layers)))
        settings = DraftSettings(DSPARK, stages, num_drafts or 5, taps, noise_token=7, markov_rank=32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drafts = KINDS[kind](config, settings)
    randomise(drafts, torch.Generator().manual_seed(seed + 1))
    for name, parameter in drafts.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if kept_in_float32(drafts, name) else weight.dtype)
        parameter.requires_grad_(False)
    return drafts.to(weight.device).eval()


def layers_in_turn(layers: int) -> dict[str, Any]:
    """Return what gives `tiny_config` that many layers: SWA, then CSA and HCA in turn."""
    kinds = [_LAYERS[0], *(_LAYERS[1 + i % 2] for i in range(layers - 1))]
    return {"num_hidden_layers": layers, "layer_types": kinds}


def random_model(config: DeepseekV4Config, device: torch.device) -> DeepseekV4ForCausalLM:
    """Return a random model in eval mode that is made on `device`, in bfloat16 except what stays in float32."""
    with device:
        model = DeepseekV4ForCausalLM._from_config(config, dtype=torch.bfloat16)
    randomise(model, torch.Generator(device).manual_seed(0))
    for name, parameter in model.named_parameters():
        if kept_in_float32(model, name):
            parameter.data = parameter.data.float()
    return model.eval()


@torch.no_grad()
def randomise(model: DeepseekV4ForCausalLM | DraftModel, generator: torch.Generator) -> None:
    """Fill parameters and routing tables of `model` with random values by `generator`, which is on its device."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith("tid2eid"):
            experts = torch.rand(
                *tensor.shape[:1], model.config.n_routed_experts, generator=generator, device=tensor.device
            )
            tensor.copy_(experts.argsort(dim=1)[:, : tensor.shape[1]])
        elif name.endswith("norm.weight"):
            tensor.normal_(1.0, 0.1, generator=generator)
        elif name.endswith(("sinks", "position_bias", "e_score_correction_bias", "_hc.base", "hc_base")):
            tensor.normal_(0.0, 0.5, generator=generator)
        elif "inv_freq" not in name and tensor.dim() > 1:
            tensor.normal_(0.0, tensor.shape[-1] ** -0.5, generator=generator)


def quiet_libraries() -> None:
    """Silence warnings about RoPE factors, TF32 and online softmax that a small float32 model would repeat."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")
    warnings.filterwarnings("ignore", "\\s*Online softmax is disabled")
