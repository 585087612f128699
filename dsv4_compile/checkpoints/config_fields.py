"""Fields of `config.json` and `generation_config.json` that are read, with the type and range of each value.

A key that is not in these tables reaches nobody: not transformers, which lets a configuration name code and kernels
to download. Ranges hold every size that DeepSeek-V4 could have, and bound the work of one that it has not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import check
from .paths import shown

Rule = Callable[[Any], str]
"""Returns "" for a good value, else which values are good."""


def integer(low: int, high: int) -> Rule:
    """Accept integers of a range, bools excluded."""
    return lambda value: "" if type(value) is int and low <= value <= high else f"an integer from {low} to {high}"


def real(low: float, high: float, *, above: bool = False) -> Rule:
    """Accept finite numbers of a range; `above` leaves the lower end out."""

    def why(value: Any) -> str:
        good = type(value) in (int, float) and (low < value if above else low <= value) and value <= high
        return "" if good else f"a number {'above' if above else 'from'} {low:g} {'up ' if above else ''}to {high:g}"

    return why


def flag(value: Any) -> str:
    """Accept true and false."""
    return "" if type(value) is bool else "true or false"


def text(value: Any) -> str:
    """Accept short printable text."""
    good = isinstance(value, str) and len(value) <= 128 and value.isprintable()
    return "" if good else "printable text of at most 128 characters"


def one_of(*values: str) -> Rule:
    """Accept these texts."""
    return lambda value: "" if isinstance(value, str) and value in values else f"one of {', '.join(values)}"


def list_of(rule: Rule, most: int, least: int = 0) -> Rule:
    """Accept lists of `least` to `most` values."""

    def why(value: Any) -> str:
        if not isinstance(value, (list, tuple)) or not least <= len(value) <= most:
            return f"a list of {least} to {most} values"
        bad = next((reason for element in value if (reason := rule(element))), "")
        return f"a list whose values are {bad}" if bad else ""

    return why


def either(*rules: Rule) -> Rule:
    """Accept what one of the rules accepts."""
    return lambda value: "" if not all(rule(value) for rule in rules) else ", or ".join(rule(value) for rule in rules)


class Fields:
    """Rule that accepts objects with these fields; `known` leaves others out."""

    def __init__(self, rules: Mapping[str, Rule]) -> None:
        self.rules = rules

    def __call__(self, value: Any) -> str:
        return "" if isinstance(value, Mapping) else "an object"


_THETA = real(1.0, 1e15, above=True)
_EPS = real(0.0, 1.0)
_TOKEN = integer(-1, 1 << 31)
_TOKENS = either(_TOKEN, list_of(_TOKEN, 1024, least=1))
_LAYERS = 512
LAYER_TYPES = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")
ROPE: dict[str, Rule] = {
    "type": text,
    "rope_type": text,
    "rope_theta": _THETA,
    "partial_rotary_factor": real(0.0, 1.0, above=True),
    "factor": real(1.0, 1e6),
    "original_max_position_embeddings": integer(1, 1 << 40),
    "beta_fast": real(0.0, 1e6),
    "beta_slow": real(0.0, 1e6),
    "attention_factor": real(0.0, 1e6),
    "mscale": real(0.0, 1e6),
    "mscale_all_dim": real(0.0, 1e6),
    "truncate": flag,
}
"""Parameters of RoPE and YaRN."""
ATTENTION: dict[str, Rule] = {
    "model_type": text,
    "hidden_size": integer(1, 1 << 17),
    "num_hidden_layers": integer(1, _LAYERS),
    "num_attention_heads": integer(1, 4096),
    "num_key_value_heads": integer(1, 1),
    "head_dim": integer(1, 4096),
    "qk_rope_head_dim": integer(1, 4096),
    "partial_rotary_factor": real(0.0, 1.0, above=True),
    "q_lora_rank": integer(1, 1 << 17),
    "o_groups": integer(1, 4096),
    "o_lora_rank": integer(1, 1 << 17),
    "sliding_window": integer(1, 1 << 20),
    "compress_ratios": list_of(integer(0, 1 << 20), 2 * _LAYERS),
    "compress_rates": Fields(dict.fromkeys(LAYER_TYPES, integer(1, 1 << 20))),
    "layer_types": list_of(text, 2 * _LAYERS),
    "index_n_heads": integer(1, 4096),
    "index_head_dim": integer(1, 4096),
    "index_topk": integer(1, 1 << 20),
    "rms_norm_eps": _EPS,
    "rope_theta": _THETA,
    "compress_rope_theta": _THETA,
    "rope_scaling": Fields(ROPE | {"main": Fields(ROPE), "compress": Fields(ROPE)}),
    "rope_parameters": Fields(ROPE | {"main": Fields(ROPE), "compress": Fields(ROPE)}),
    "max_position_embeddings": integer(1, 1 << 40),
    "original_max_position_embeddings": integer(1, 1 << 40),
}
"""Fields that `DeepseekV4Config` reads."""
QUANTIZATION: dict[str, Rule] = {
    "quant_method": text,
    "fmt": text,
    "scale_fmt": text,
    "weight_block_size": list_of(integer(1, 1 << 20), 4),
    "activation_scheme": text,
    "expert_dtype": text,
    "modules_to_not_convert": list_of(text, 4096),
}
_DTYPE = one_of("bfloat16", "float16", "float32", "float64")
MODEL: dict[str, Rule] = ATTENTION | {
    "architectures": list_of(text, 8),
    "transformers_version": text,
    "torch_dtype": _DTYPE,
    "dtype": _DTYPE,
    "expert_dtype": text,
    "vocab_size": integer(1, 1 << 22),
    "moe_intermediate_size": integer(1, 1 << 17),
    "n_routed_experts": integer(1, 4096),
    "n_shared_experts": integer(0, 64),
    "num_experts_per_tok": integer(1, 64),
    "scoring_func": text,
    "norm_topk_prob": flag,
    "routed_scaling_factor": real(0.0, 1e6),
    "swiglu_limit": real(0.0, 1e6, above=True),
    "hc_mult": integer(1, 64),
    "hc_sinkhorn_iters": integer(1, 128),
    "hc_eps": _EPS,
    "num_hash_layers": integer(0, _LAYERS),
    "mlp_layer_types": list_of(one_of("hash_moe", "moe"), 2 * _LAYERS),
    "compress_rate_csa": integer(1, 1 << 20),
    "compress_rate_hca": integer(1, 1 << 20),
    "num_nextn_predict_layers": integer(0, _LAYERS),
    "hidden_act": text,
    "initializer_range": real(0.0, 1e6),
    "attention_bias": flag,
    "mlp_bias": flag,
    "attention_dropout": real(0.0, 1.0),
    "output_router_logits": flag,
    "router_aux_loss_coef": real(0.0, 1e6),
    "router_jitter_noise": real(0.0, 1.0),
    "output_hidden_states": flag,
    "return_dict": flag,
    "use_cache": flag,
    "tie_word_embeddings": flag,
    "pad_token_id": _TOKEN,
    "bos_token_id": _TOKEN,
    "eos_token_id": _TOKENS,
    "quantization_config": Fields(QUANTIZATION),
}
"""Fields of `config.json` that a model is built from."""
DRAFTS: dict[str, Rule] = {
    "num_hidden_layers": integer(1, _LAYERS),
    "vocab_size": integer(1, 1 << 22),
    "compress_ratios": list_of(integer(0, 1 << 20), 2 * _LAYERS),
    "n_mtp_layers": integer(0, 16),
    "dspark_block_size": integer(0, 16),
    "dspark_noise_token_id": integer(0, 1 << 31),
    "dspark_target_layer_ids": list_of(integer(0, _LAYERS), 64),
    "dspark_markov_rank": integer(1, 1 << 16),
}
"""Fields of `config.json` that draft layers are built from."""
_COUNT = integer(0, 1 << 31)
GENERATION: dict[str, Rule] = {
    "bos_token_id": _TOKEN,
    "eos_token_id": _TOKENS,
    "pad_token_id": _TOKEN,
    "decoder_start_token_id": _TOKEN,
    "forced_bos_token_id": _TOKEN,
    "forced_eos_token_id": _TOKENS,
    "suppress_tokens": list_of(_TOKEN, 1 << 18),
    "begin_suppress_tokens": list_of(_TOKEN, 1 << 18),
    "bad_words_ids": list_of(list_of(_TOKEN, 1024), 1 << 16),
    "do_sample": flag,
    "temperature": real(0.0, 1e6),
    "top_k": _COUNT,
    "top_p": real(0.0, 1.0),
    "min_p": real(0.0, 1.0),
    "typical_p": real(0.0, 1.0),
    "epsilon_cutoff": real(0.0, 1.0),
    "eta_cutoff": real(0.0, 1.0),
    "repetition_penalty": real(0.0, 1e6, above=True),
    "length_penalty": real(-1e6, 1e6),
    "no_repeat_ngram_size": _COUNT,
    "max_length": _COUNT,
    "max_new_tokens": _COUNT,
    "min_length": _COUNT,
    "min_new_tokens": _COUNT,
    "max_time": real(0.0, 1e9),
    "num_beams": integer(1, 4096),
    "num_return_sequences": integer(1, 4096),
    "early_stopping": either(flag, one_of("never")),
    "guidance_scale": real(0.0, 1e6),
    "renormalize_logits": flag,
    "remove_invalid_values": flag,
    "use_cache": flag,
    "output_attentions": flag,
    "output_hidden_states": flag,
    "output_scores": flag,
    "output_logits": flag,
    "return_dict_in_generate": flag,
    "transformers_version": text,
    "_from_model_config": flag,
}
"""Fields of `generation_config.json` that are read."""
_OF_OURS = {"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads", "rope_dim": "qk_rope_head_dim"}


def check_fields(values: Mapping[str, Any], rules: Mapping[str, Rule], code: str = "E205", where: str = "") -> None:
    """Raise `code` for the first field that breaks its rule; None counts as absent."""
    for name, rule in rules.items():
        value = values.get(name)
        if value is not None and (why := rule(value)):
            check(False, code, got=f"{where}{name}={shown(value)}", why=f"{name} is {why}", fix="correct the value")
        if value is not None and isinstance(rule, Fields):
            check_fields(value, rule.rules, code, f"{where}{name} with ")


def check_attention(values: Mapping[str, Any]) -> None:
    """Raise E205 for a field of `DeepseekV4Config`, by its own names, that is outside its range."""
    check_fields(values, {name: ATTENTION[_OF_OURS.get(name, name)] for name in values if name != "yarn"})


def without_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of an object without fields that are null, nested ones included."""
    return {
        name: without_nulls(value) if isinstance(value, Mapping) else value
        for name, value in values.items()
        if value is not None
    }


def known(values: Mapping[str, Any], rules: Mapping[str, Rule]) -> tuple[dict[str, Any], list[str]]:
    """Return a copy of the fields in `rules`, and the names of the others."""
    fields = {name: _copied(value, rules[name]) for name, value in values.items() if name in rules}
    return fields, [shown(name)[1:-1] for name, value in values.items() if name not in rules and value is not None]


def _copied(value: Any, rule: Rule) -> Any:
    """Return a copy of a field without unknown fields inside it."""
    if isinstance(rule, Fields) and isinstance(value, Mapping):
        return {name: _copied(inner, rule.rules[name]) for name, inner in value.items() if name in rule.rules}
    return list(value) if isinstance(value, (list, tuple)) else value
