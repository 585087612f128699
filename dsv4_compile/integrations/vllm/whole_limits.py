"""Configurations of vLLM that keep the plug-in from replacing decoder layers, with reasons.

They come on top of those of `limits`, which hold for attention too.
"""

from __future__ import annotations

from typing import Any

from ... import layout
from ...parallel.split import Whole
from .experts import E4M3, EXPERTS, FLOAT, MXFP4, Formats, unquantised
from .limits import why_undivided

_MODEL: dict[str, tuple[Any, str]] = {
    "scoring_func": ("sqrtsoftplus", "the router's op scores by the root of softplus"),
    "norm_topk_prob": (True, "the router's op divides weights by their sum"),
    "topk_method": ("noaux_tc", "the router's op adds a bias to what it chooses by"),
    "hidden_act": ("silu", "the experts' op is SwiGLU"),
}
"""Settings of the model that have one value, and why; one that its configuration does not have is not looked at."""
_PARALLEL = {
    "data_parallel_size": (1, "ranks that share experts have not been run"),
    "enable_eplb": (False, "experts have one copy and one place here"),
}
EXPERT_DTYPES = ("fp4", "fp8")
_SIDES = {FLOAT: 1, MXFP4: layout.MX_TILE, E4M3: layout.WEIGHT_TILE}
"""Elements that share a scale, by format."""


def why_unsupported(config: Any) -> list[str]:
    """Return a reason for each setting of a `vllm.config.VllmConfig` that keeps layers from being replaced."""
    hf, model = config.model_config.hf_config, config.model_config
    reasons = [
        *_unequal(hf, _MODEL),
        *_unequal(config.parallel_config, _PARALLEL),
        *_experts(hf),
        *_quantisation(hf),
        *_undivided(hf, config.parallel_config),
    ]
    if not getattr(hf, "quantization_config", None) and getattr(model, "quantization", None):
        reasons.append(f"quantization={model.quantization!r} of a checkpoint without: weights are kept as they come")
    if getattr(model, "enable_prompt_embeds", False):
        reasons.append("enable_prompt_embeds: layers that route by hash need token ids")
    backend = str(getattr(getattr(config, "kernel_config", None), "moe_backend", "auto"))
    if backend != "auto":
        reasons.append(f"moe_backend={backend!r}: it is for vLLM's experts, which do not run")
    return reasons


def _unequal(source: Any, wanted: dict[str, tuple[Any, str]]) -> list[str]:
    got = {name: getattr(source, name, value) for name, (value, _) in wanted.items()}
    return [f"{name}={got[name]!r}: {why}" for name, (value, why) in wanted.items() if got[name] != value]


def _experts(hf: Any) -> list[str]:
    reasons = []
    shared = getattr(hf, "n_shared_experts", None)
    if shared not in (None, 0, 1):
        reasons.append(f"n_shared_experts={shared}: the experts' op takes one, and checkpoints with more are unknown")
    if getattr(hf, "swiglu_limit", None) is None:
        reasons.append("swiglu_limit=None: the experts' op clamps")
    if getattr(hf, "vision_n_layers", 0):
        reasons.append(f"vision_n_layers={hf.vision_n_layers}: the router's op has no other bias for tokens of images")
    return reasons


def _quantisation(hf: Any) -> list[str]:
    config = getattr(hf, "quantization_config", None)
    if not config:
        return []
    reasons = []
    expert_dtype = getattr(hf, "expert_dtype", "fp4")
    if expert_dtype not in EXPERT_DTYPES:
        reasons.append(f"expert_dtype={expert_dtype!r}: experts are {' or '.join(EXPERT_DTYPES)}")
    if config.get("moe_quant_algo"):
        reasons.append(f"moe_quant_algo={config['moe_quant_algo']!r}: there is no op for such experts")
    for name in unquantised(config):
        if "ffn" in name and not EXPERTS.match(name):
            reasons.append(f"{name!r} is not quantised: the experts of a layer are left out as a whole")
    layers = [Formats.of(hf, index) for index in range(hf.num_hidden_layers)]
    used = {layer.routed for layer in layers}
    if getattr(hf, "n_shared_experts", None):
        used |= {layer.shared for layer in layers}
    side = max(_SIDES[name] for name in used)
    if hf.moe_intermediate_size % side:
        reasons.append(f"moe_intermediate_size={hf.moe_intermediate_size}: quantised experts have a multiple of {side}")
    return reasons


def _undivided(hf: Any, parallel: Any) -> list[str]:
    """Return why ranks cannot have equal parts of the experts."""
    width, layers = hf.moe_intermediate_size, [Formats.of(hf, index) for index in range(hf.num_hidden_layers)]
    sizes = [Whole("rows of an expert", width, max(_SIDES[layer.routed] for layer in layers))]
    if getattr(parallel, "enable_expert_parallel", False):
        sizes = [Whole("experts", hf.n_routed_experts)]
    if getattr(hf, "n_shared_experts", None):
        sizes.append(Whole("rows of the shared expert", width, max(_SIDES[layer.shared] for layer in layers)))
    number = getattr(parallel, "tensor_parallel_size", 1)
    why = why_undivided(sizes, number) if number > 1 else ""
    return [why] if why else []
