"""Configuration of DeepSeek-V4.1: sizes, and which layer owns the keys, entries and picks that a layer reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ...checkpoints.config_fields import (
    ROPE,
    Fields,
    Rule,
    check_fields,
    either,
    flag,
    integer,
    list_of,
    real,
    text,
    without_nulls,
)
from ...checkpoints.paths import shown
from ...config import Rope, Yarn
from ...errors import check
from ...layout import MX_TILE

MODEL_TYPE, TEXT_TYPE = "deepseek_v41", "deepseek_v41_text"
RULE = "the configuration describes DeepSeek-V4.1: deepseek_v41 with a text_config, layer ratios 0, 2 and 1"
_MOST_LAYERS = 512
_SIZE = integer(1, 1 << 22)
_LAYER = integer(0, _MOST_LAYERS)
_LAYERS = list_of(_LAYER, _MOST_LAYERS)
_TOKEN = integer(-1, 1 << 31)
TEXT: dict[str, Rule] = {
    "model_type": text,
    **dict.fromkeys(("vocab_size", "hidden_size", "num_attention_heads", "head_dim", "qk_rope_head_dim"), _SIZE),
    **dict.fromkeys(("q_lora_rank", "o_lora_rank", "o_groups", "sliding_window", "moe_intermediate_size"), _SIZE),
    **dict.fromkeys(("candidate_topk_blocks", "candidate_block_size", "index_topk"), _SIZE),
    **dict.fromkeys(("index_n_heads", "index_head_dim", "engram_n_heads", "engram_head_dim"), _SIZE),
    "num_hidden_layers": integer(1, _MOST_LAYERS),
    "num_key_value_heads": integer(1, 1),
    "compress_ratios": list_of(integer(0, 1 << 20), 2 * _MOST_LAYERS),
    **dict.fromkeys(("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"), _LAYERS),
    "candidate_source_layer_id": _LAYER,
    "rms_norm_eps": real(0.0, 1.0),
    **dict.fromkeys(("rope_theta", "compress_rope_theta"), real(1.0, 1e15, above=True)),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), Fields(ROPE)),
    "max_position_embeddings": integer(1, 1 << 40),
    "hc_mult": integer(1, 64),
    "hc_sinkhorn_iters": integer(1, 128),
    "hc_eps": real(0.0, 1.0),
    "n_routed_experts": integer(1, 4096),
    "n_shared_experts": integer(1, 1),
    "num_experts_per_tok": integer(1, 64),
    "gate_temp": real(0.0, 1e6, above=True),
    "scoring_func": text,
    "topk_method": text,
    "norm_topk_prob": flag,
    "routed_scaling_factor": real(0.0, 1e6),
    "swiglu_limit": real(0.0, 1e6, above=True),
    "hidden_act": text,
    "attention_bias": flag,
    "tie_word_embeddings": flag,
    "engram_num_embeddings": list_of(integer(1, 1 << 40), _MOST_LAYERS),
    "engram_max_ngram_size": integer(2, 16),
    "engram_vocab_size": integer(2, 1 << 40),
    "engram_compressed_vocab_size": integer(1, 1 << 31),
    **dict.fromkeys(("engram_pad_token_id", "engram_pad_id"), integer(0, 1 << 31)),
    "num_nextn_predict_layers": integer(0, 16),
    **dict.fromkeys(("bos_token_id", "pad_token_id"), _TOKEN),
    "eos_token_id": either(_TOKEN, list_of(_TOKEN, 1024, least=1)),
}
"""Fields of `text_config` that are read."""
ROOT: dict[str, Rule] = {
    "model_type": text,
    "text_config": Fields(TEXT),
    "image_token_id": _TOKEN,
    "quantization_config": Fields({"quant_method": text, "scale_fmt": text, "expert_dtype": text}),
    **{name: TEXT[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")},
}
"""Fields of `config.json` that are read."""
_SAME: dict[str, Any] = {
    "hidden_act": "silu",
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
"""Values that the model's definition stands for."""
_QUANTISED: dict[str, Any] = {
    "quant_method": "fp8",
    "weight_block_size": [MX_TILE, MX_TILE],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}
_NAMES = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "rope_dim": "qk_rope_head_dim",
    "kv_sources": "kv_source_layer_ids",
    "index_sources": "index_source_layer_ids",
    "candidate_source": "candidate_source_layer_id",
    "candidate_blocks": "candidate_topk_blocks",
    "num_experts": "n_routed_experts",
    "experts_per_token": "num_experts_per_tok",
    "intermediate_size": "moe_intermediate_size",
    "gate_temperature": "gate_temp",
    "max_positions": "max_position_embeddings",
    "engram_layers": "engram_layer_ids",
    "engram_rows": "engram_num_embeddings",
    "engram_order": "engram_max_ngram_size",
    "engram_heads": "engram_n_heads",
    "engram_compressed_vocab": "engram_compressed_vocab_size",
    "engram_pad": "engram_pad_token_id",
}
"""Fields of `V41Config` and their names in `text_config`, where they differ."""


_YARN = Yarn(factor=16.0, original_max_position=65536)


class Sources(NamedTuple):
    """Layers that a layer reads from: compressed entries and index keys, and picks; None in a window-only layer."""

    kv: int | None
    picks: int | None


@dataclass(frozen=True, slots=True)
class V41Config:
    """Text model. The defaults are those of DeepSeek-V4.1-Flash.

    `compress_ratios` has one entry for each layer, and may have more for draft layers: 0 for a layer with a window
    alone, 2 and 1 for layers that also attend compressed entries. A ratio of 1 is compressed too.
    """

    vocab_size: int = 129280
    hidden_size: int = 5120
    num_layers: int = 40
    num_heads: int = 64
    head_dim: int = 512
    rope_dim: int = 64
    q_lora_rank: int = 1280
    o_lora_rank: int = 1024
    o_groups: int = 8
    sliding_window: int = 128
    compress_ratios: tuple[int, ...] = (0, 0, *(2,) * 18, *(1,) * 20, 0, 0, 0)
    kv_sources: tuple[int, ...] = (2, 8, 14, 20)
    index_sources: tuple[int, ...] = (2, 8, 14, 20, 24, 28, 32, 36)
    candidate_source: int = 20
    candidate_blocks: int = 2048
    candidate_block_size: int = 8
    index_n_heads: int = 32
    index_head_dim: int = 128
    index_topk: int = 512
    rms_norm_eps: float = 1e-20
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    yarn: Yarn | None = _YARN
    max_positions: int = 1048576
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    num_experts: int = 384
    experts_per_token: int = 6
    intermediate_size: int = 2304
    gate_temperature: float = 1.0
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    engram_layers: tuple[int, ...] = (1, 14)
    engram_rows: tuple[int, ...] = (384006168, 384016682)
    engram_order: int = 4
    engram_heads: int = 8
    engram_head_dim: int = 256
    engram_vocab_size: int = 16000000
    engram_compressed_vocab: int = 99092
    engram_pad: int = 2
    image_token_id: int = 129264
    bos_token_id: int | None = 0
    eos_token_id: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        ratios, layers = self.compress_ratios[: self.num_layers], range(self.num_layers)

        def need(holds: bool, got: str, why: str = "") -> None:
            check(holds, "E205", got=got, why=why, rule=RULE)

        need(len(ratios) == self.num_layers, f"{len(ratios)} compress_ratios for {self.num_layers} layers")
        odd = sorted(set(ratios) - {0, 1, 2})
        need(
            not odd, f"compress_ratios with {odd}", "4 and 128 are those of DeepSeek-V4" if set(odd) & {4, 128} else ""
        )
        need(self.num_heads % self.o_groups == 0, f"num_heads={self.num_heads} in o_groups={self.o_groups}")
        rope = self.rope_dim
        need(rope % 2 == 0 and rope <= min(self.head_dim, self.index_head_dim), f"rope_dim={rope}")
        need(self.experts_per_token <= self.num_experts, f"{self.experts_per_token} of {self.num_experts} experts")
        for name in ("kv_sources", "index_sources", "engram_layers"):
            ids = getattr(self, name)
            need(list(ids) == sorted(set(ids)) and set(ids) <= set(layers), f"{name}={list(ids)}")
        need(set(self.kv_sources) <= set(self.index_sources), "a layer with index keys and no indexer")
        known = not self.kv_sources or self.candidate_source in self.kv_sources
        need(known, f"candidate_source={self.candidate_source}")
        need(len(self.engram_rows) == len(self.engram_layers), f"{len(self.engram_rows)} engram tables")
        for layer in layers:
            kv, picks = self.sources(layer)
            if ratios[layer]:
                need(kv is not None and ratios[kv] == ratios[layer], f"layer {layer}, with no source of its ratio")
                need(
                    picks is not None and kv is not None and picks >= kv, f"layer {layer}, with picks of another source"
                )
        if self.kv_sources:
            last = self.kv_sources[-1]
            need(all(ratio == ratios[last] for ratio in ratios[last:]), "a window-only layer after the last source")

    def ratio(self, layer: int) -> int:
        """Return the compress ratio of a layer: 0, 2 or 1."""
        return self.compress_ratios[layer]

    def sources(self, layer: int) -> Sources:
        """Return the layers whose entries and keys, and whose picks, a layer reads."""
        if not self.compress_ratios[layer]:
            return Sources(None, None)
        kv, picks = (
            max((source for source in ids if source <= layer), default=None)
            for ids in (self.kv_sources, self.index_sources)
        )
        return Sources(kv, picks)

    def selects_candidates(self, layer: int) -> bool:
        """Return whether an index source selects inside the candidates of `candidate_source`: later ones, not it."""
        return layer > self.candidate_source and self.sources(layer).kv == self.candidate_source

    def rope(self, layer: int) -> Rope:
        """Return the RoPE parameters of a layer: queries, window, entries and indexer. YaRN at ratios 2 and 1."""
        if not self.compress_ratios[layer]:
            return Rope(self.rope_theta, self.rope_dim)
        return Rope(self.compress_rope_theta, self.rope_dim, self.yarn)

    @property
    def n_routed_experts(self) -> int:
        """`num_experts`, by the name that loading knows."""
        return self.num_experts

    @property
    def last_source(self) -> int:
        """Layer that needs the input of every token of a prompt; later ones run on its tail."""
        return self.kv_sources[-1] if self.kv_sources else self.num_layers

    @property
    def exact_tail(self) -> int:
        """Last tokens of a prompt that layers from `last_source` on take for exact logits and windows: 2,414."""
        later = self.num_layers - 1 - self.last_source
        return self.sliding_window + max(later - 1, 0) * (self.sliding_window - 1)

    def with_layers(self, num_layers: int) -> V41Config:
        """Return this model cut off after `num_layers`, for benchmarks."""
        return replace(
            self,
            num_layers=num_layers,
            compress_ratios=self.compress_ratios[:num_layers],
            kv_sources=tuple(i for i in self.kv_sources if i < num_layers),
            index_sources=tuple(i for i in self.index_sources if i < num_layers),
            candidate_source=max(i for i in self.kv_sources if i < num_layers),
            engram_layers=tuple(i for i in self.engram_layers if i < num_layers),
            engram_rows=tuple(r for i, r in zip(self.engram_layers, self.engram_rows, strict=True) if i < num_layers),
        )

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> V41Config:
        """Read the content of an official `config.json`, whose text model is `text_config`. Raises E205 for others."""
        check_model_type(raw)
        check_fields(raw, ROOT)
        root = without_nulls(raw)
        values = {name: root[name] for name in ("bos_token_id", "eos_token_id") if name in root} | root["text_config"]
        for name, wanted in _SAME.items():
            got = values.get(name, wanted)
            check(got == wanted, "E205", got=f"{name}={shown(got)}", why=f"V4.1 has {wanted!r}", rule=RULE)
        for name, wanted in _QUANTISED.items():
            got = root.get("quantization_config", {}).get(name, wanted)
            why = f"V4.1 has {wanted!r}" + ("; V4 has blocks of 128x128" if got == [128, 128] else "")
            check(got == wanted, "E205", got=f"quantization_config with {name}={shown(got)}", why=why, rule=RULE)
        if "engram_pad_id" in values:
            values.setdefault("engram_pad_token_id", values["engram_pad_id"])
        names = {name: _NAMES.get(name, name) for name in cls.__slots__ if name not in ("yarn", "image_token_id")}
        required = sorted(theirs for theirs in names.values() if theirs not in values and theirs not in _OPTIONAL)
        check(not required, "E205", got=f"a text_config without {', '.join(required)}", rule=RULE)
        fields = {ours: _frozen(values[theirs]) for ours, theirs in names.items() if theirs in values}
        if isinstance(fields.get("eos_token_id"), int):
            fields["eos_token_id"] = (fields["eos_token_id"],)
        return cls(**fields, yarn=_yarn(values), image_token_id=root.get("image_token_id", -1))


_OPTIONAL = ("gate_temp", "bos_token_id", "eos_token_id")


def check_model_type(raw: Mapping[str, Any]) -> None:
    """Raise E205 unless a `config.json` is that of DeepSeek-V4.1."""
    model_type = raw.get("model_type")
    nested = raw.get("text_config")
    why = ""
    if model_type == "deepseek_v4":
        why = "DeepSeek-V4 is loaded by dsv4_compile.hf.load"
    elif model_type == TEXT_TYPE:
        why = "its text_config alone"
    check(model_type == MODEL_TYPE, "E205", got=f"model_type={shown(model_type)}", why=why, rule=RULE)
    check(isinstance(nested, Mapping), "E205", got="a config.json without text_config", rule=RULE)
    inner = (nested or {}).get("model_type", TEXT_TYPE)
    check(inner == TEXT_TYPE, "E205", got=f"text_config with model_type={shown(inner)}", rule=RULE)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _yarn(values: Mapping[str, Any]) -> Yarn | None:
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    check(kind == "yarn", "E205", got=f"rope type {shown(kind)}", rule=RULE)
    missing = [name for name in ("factor", "original_max_position_embeddings") if name not in rope]
    check(not missing, "E205", got=f"yarn without {', '.join(missing)}", rule=RULE)
    betas = {name: float(rope[name]) for name in ("beta_fast", "beta_slow") if rope.get(name)}
    return Yarn(float(rope["factor"]), int(rope["original_max_position_embeddings"]), **betas)
