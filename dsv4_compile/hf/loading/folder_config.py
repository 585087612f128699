"""Configuration of a folder as transformers' objects, made of the known fields of its JSON files alone."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import DeepseekV4Config as HfConfig
from transformers import GenerationConfig

from ...checkpoints.config_fields import DRAFTS, GENERATION, MODEL, check_fields, known
from ...checkpoints.header import Stored
from ...checkpoints.json_text import read_json
from ...checkpoints.paths import shown
from ...config import DeepseekV4Config
from ...errors import check, error
from ...layout import MX_TILE, WEIGHT_TILE

_log = logging.getLogger("dsv4_compile.hf")
_NEEDED: dict[str, Any] = {
    "hidden_act": "silu",
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "n_shared_experts": 1,
    "attention_bias": False,
    "mlp_bias": False,
}
"""Values of a configuration that the ops around attention stand for."""
_SCORED = ("forced_bos_token_id", "forced_eos_token_id", "bad_words_ids")
"""Fields of `generation_config.json` by whose tokens scores are indexed."""
_QUANTISED: dict[str, Any] = {
    "quant_method": "fp8",
    "weight_block_size": [WEIGHT_TILE, WEIGHT_TILE],
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
}
"""Fields of `quantization_config` that every quantised DeepSeek-V4 has."""
_MATRICES = 3
"""Matrices of an expert: gate, up and down."""
_LAYER = re.compile(r"layers\.([0-9]{1,9})\.")
_EXPERT = re.compile(r"layers\.[0-9]{1,9}\.ffn\.experts\.([0-9]{1,9})\.w[123]\.weight")


def model_config(raw: Mapping[str, Any]) -> Any:
    """Return transformers' configuration, with eager attention, or raise E205 for a model that cannot be loaded.

    Keys that are not in `MODEL` do not reach transformers, which fetches and runs code that some of them name.
    """
    ours = DeepseekV4Config.from_hf(raw)
    check_fields(raw, MODEL)
    fields, unknown = known(raw, MODEL)
    unknown = sorted(set(unknown).difference(DRAFTS))  # read with draft layers
    if unknown:
        _log.info("config.json: keys that are not read: %s", ", ".join(unknown[:20]))
    if fields.get("quantization_config") is not None:
        _check_quantization(fields["quantization_config"])
    if fields.get("compress_ratios") is not None:
        # For ratios transformers knows 0 alone as the name of sliding window only.
        fields = {**fields, "compress_ratios": [0 if ratio == 1 else ratio for ratio in fields["compress_ratios"]]}
    try:
        config: Any = HfConfig.from_dict(fields | {"attn_implementation": "eager"})
    except Exception as fault:  # strict dataclasses of transformers raise several classes
        raise error("E205", got="a config.json that transformers does not read", why=str(fault)) from None
    _check_same(ours, DeepseekV4Config.from_hf(config))
    for name, value in _NEEDED.items():
        got = getattr(config, name, value)
        check(got == value, "E205", got=f"{name}={got!r}", why=f"DeepSeek-V4 has {name}={value!r}")
    check(
        config.num_experts_per_tok <= config.n_routed_experts,
        "E205",
        got=f"num_experts_per_tok={config.num_experts_per_tok} of n_routed_experts={config.n_routed_experts}",
    )
    for name in ("pad_token_id", "bos_token_id"):
        token = getattr(config, name)
        check(
            token is None or token < config.vocab_size,
            "E205",
            got=f"{name}={token} with vocab_size={config.vocab_size}",
        )
    return config


def _check_same(ours: DeepseekV4Config, theirs: DeepseekV4Config) -> None:
    """Raise E205 for keys that contradict each other, of which transformers reads others than this package."""
    for name in ("rope_theta", "compress_rope_theta", "rope_dim", "yarn", "compress_ratios"):
        read = getattr(ours, name), getattr(theirs, name)
        if name == "compress_ratios":  # those of draft layers may follow
            read = read[0][: ours.num_layers], read[1][: ours.num_layers]
        check(
            read[0] == read[1],
            "E205",
            got=f"a config.json with {name}={shown(read[0])}, of which transformers reads {shown(read[1])}",
            why="several keys say it, and not the same",
            fix="keep one of rope_scaling and rope_parameters, and one of compress_ratios and layer_types",
        )


def describe_quantization(config: Any, floating: Sequence[str], *, expert_dtype: str, scale_format: str) -> None:
    """Let a configuration of quantised weights say how they are stored, as transformers reads it.

    Args:
        floating: paths of modules that are not quantised, and could be.
        expert_dtype: "fp8" or "fp4".
        scale_format: "ue8m0" or "float".
    """
    before = getattr(config, "quantization_config", None) or {}
    stored: dict[str, Any] = _QUANTISED | {"scale_fmt": scale_format, "expert_dtype": expert_dtype}
    if floating:  # a list of modules replaces that of transformers, which is the head
        skipped = ("lm_head", *before.get("modules_to_not_convert", ()), *floating)
        stored["modules_to_not_convert"] = list(dict.fromkeys(skipped))
    config.quantization_config = before | stored
    config.expert_dtype = expert_dtype


def _check_quantization(quantization: Mapping[str, Any]) -> None:
    for name, wanted in _QUANTISED.items():
        got = quantization.get(name, wanted)
        check(
            got == wanted,
            "E205",
            got=f"quantization_config with {name}={got!r}",
            why=f"DeepSeek-V4 has {wanted!r}" + ("; V4.1 has blocks of 32x32" if got == [MX_TILE] * 2 else ""),
        )


def check_counts(config: Any, tensors: Mapping[str, Stored]) -> None:
    """Raise E207 for a configuration of more layers or experts than the headers have, before modules are built.

    So the size of the stored tensors bounds the work of a load, whatever `config.json` says.
    """
    layers = {match[1] for name in tensors if (match := _LAYER.match(name))}
    wanted = config.num_hidden_layers
    check(
        wanted <= len(layers),
        "E207",
        got=f"num_hidden_layers={wanted}, where the files have tensors of {len(layers)} layers",
        why="config.json and the files belong to different checkpoints, or files are missing",
    )
    names = [match[1] for name in tensors if (match := _EXPERT.fullmatch(name))]
    fused = [stored.shape[0] for name, stored in tensors.items() if name.endswith(".gate_up_proj") and stored.nbytes]
    experts = max([len(set(names)), *fused])
    check(
        config.n_routed_experts <= experts,
        "E207",
        got=f"n_routed_experts={config.n_routed_experts}, where the files have {experts}",
        why="config.json and the files belong to different checkpoints, or files are missing",
    )
    matrices = _MATRICES * (wanted - len(fused)) * config.n_routed_experts
    check(
        matrices <= 2 * len(names) + 1000,
        "E207",
        got=f"{len(names)} matrices of experts in the files",
        why=f"{wanted} layers of {config.n_routed_experts} experts have {matrices}",
    )


def generation_config(folder: Path, vocab_size: int) -> GenerationConfig | None:
    """Return the folder's generation configuration, or None if it has none. Raises E209 for odd values."""
    file = folder / "generation_config.json"
    if not os.path.lexists(file):
        return None
    raw = read_json(folder, file)
    check_fields(raw, GENERATION, "E209", f"{file} with ")
    fields, unknown = known(raw, GENERATION)
    for name in _SCORED:
        tokens = _flat(fields.get(name))
        got = f"{file} with {name}={max(tokens, default=0)} of {vocab_size} tokens"
        check(all(token < vocab_size for token in tokens), "E209", got=got, why="scores have no such column")
    if unknown:
        _log.warning("%s: keys that are not read: %s", file, ", ".join(sorted(unknown)[:20]))
    try:
        return GenerationConfig(**fields)
    except Exception as fault:  # its validation raises several classes
        raise error("E209", got=f"{file}", why=shown(str(fault))) from None


def _flat(tokens: Any) -> list[int]:
    """Return token ids of nested lists, none for None."""
    if isinstance(tokens, list):
        return [token for item in tokens for token in _flat(item)]
    return [] if tokens is None else [tokens]
