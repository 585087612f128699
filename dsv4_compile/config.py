"""Attention configuration of a DeepSeek-V4 model: dimensions, layer ratios and RoPE parameters."""

from __future__ import annotations

import math
import os
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from . import layout
from .checkpoints.config_fields import ATTENTION, ROPE, check_attention, check_fields, without_nulls
from .checkpoints.json_text import read_json
from .checkpoints.paths import shown
from .errors import check, fail
from .sources import SELECTIONS, WINDOW_ONLY, Source, source_ratios

SWA, CSA, HCA = "swa", "csa", "hca"
_KIND_OF_RATIO = {1: SWA, layout.CSA_RATIO: CSA, layout.HCA_RATIO: HCA}
RATIO_OF_LAYER_TYPE = {
    "sliding_attention": 1,
    "compressed_sparse_attention": layout.CSA_RATIO,
    "heavily_compressed_attention": layout.HCA_RATIO,
}
LAYER_TYPES = {ratio: name for name, ratio in RATIO_OF_LAYER_TYPE.items()}
"""transformers' names of the compress ratios."""

BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}
"""Turns over the original context between which YaRN interpolates, where a configuration has none or 0."""


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN interpolation of RoPE frequencies. DeepSeek-V4 uses no attention factor (mscale) with it."""

    factor: float
    original_max_position: int
    beta_fast: float = BETAS["beta_fast"]
    beta_slow: float = BETAS["beta_slow"]

    def __post_init__(self) -> None:
        names = {"original_max_position_embeddings": self.original_max_position}
        check_fields({name: getattr(self, name, None) for name in ROPE} | names, ROPE, where="yarn with ")


@dataclass(frozen=True, slots=True)
class Rope:
    """Parameters of one RoPE table: base, number of rotated dims, and YaRN or None."""

    theta: float
    dim: int
    yarn: Yarn | None = None


@dataclass(frozen=True, slots=True)
class DeepseekV4Config:
    """Attention configuration. The defaults are those of V4-Flash.

    `compress_ratios` has one entry for each layer, and may have more for MTP layers: 1 for sliding window only (SWA; 0
    is accepted and stored as 1), 4 for compressed sparse (CSA), 128 for heavily compressed (HCA).

    `source_layers` names, for each layer, the layer whose compressed entries it reads; empty where each layer has its
    own. An owner comes before its readers and has their ratio. Readers have no compressor; their indexer scores the
    owner's keys.
    """

    hidden_size: int = 4096
    num_layers: int = 43
    num_heads: int = 64
    head_dim: int = layout.HEAD_DIM
    rope_dim: int = layout.ROPE_DIM
    q_lora_rank: int = 1024
    o_groups: int = 8
    o_lora_rank: int = 1024
    sliding_window: int = layout.SLIDING_WINDOW
    compress_ratios: tuple[int, ...] = (0, 0, *(4, 128) * 20, 4, 0)
    index_n_heads: int = 64
    index_head_dim: int = layout.INDEXER_HEAD_DIM
    index_topk: int = 512
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    yarn: Yarn | None = Yarn(factor=16.0, original_max_position=65536)
    max_position_embeddings: int = 1048576
    source_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_attention({name: getattr(self, name) for name in self.__slots__ if name != "source_layers"})
        check(self.yarn is None or isinstance(self.yarn, Yarn), "E205", got=f"yarn={shown(self.yarn)}")
        object.__setattr__(self, "compress_ratios", tuple(max(1, int(r)) for r in self.compress_ratios))
        bad = sorted(set(self.compress_ratios) - set(_KIND_OF_RATIO))
        check(not bad, "E205", got=f"compress_ratios with {bad}", why="V4.1 and other variants are not supported")
        check(
            len(self.compress_ratios) >= self.num_layers,
            "E205",
            got=f"{len(self.compress_ratios)} compress_ratios for {self.num_layers} layers",
            fix="give one ratio for each layer",
        )
        self._check_source_layers()
        check(
            self.num_heads % self.o_groups == 0,
            "E205",
            got=f"num_heads={self.num_heads}, o_groups={self.o_groups}",
            fix="o_groups must divide num_heads",
        )
        check(
            self.rope_dim % 2 == 0 and 0 < self.rope_dim <= min(self.head_dim, self.index_head_dim),
            "E205",
            got=f"rope_dim={self.rope_dim}, head_dim={self.head_dim}, index_head_dim={self.index_head_dim}",
            fix="rope_dim must be even and fit into both head dims",
        )

    def _check_source_layers(self) -> None:
        owners, ratios = self.source_layers, self.compress_ratios
        fine = isinstance(owners, (tuple, list)) and (not owners or len(owners) >= self.num_layers)
        for layer, owner in enumerate(owners[: self.num_layers] if fine else ()):
            known = type(owner) is int and 0 <= owner <= layer
            fine = fine and known and owners[owner] == owner and ratios[owner] == ratios[layer]
        check(
            fine,
            "E205",
            got=f"source_layers={shown(owners)} with compress_ratios={ratios}",
            rule="each layer names itself, or an earlier layer of its ratio that names itself",
        )
        object.__setattr__(self, "source_layers", tuple(owners))

    @classmethod
    def flash(cls) -> DeepseekV4Config:
        """Return the configuration of DeepSeek-V4-Flash."""
        return cls()

    @classmethod
    def pro(cls) -> DeepseekV4Config:
        """Return the configuration of DeepSeek-V4-Pro."""
        return cls(
            hidden_size=7168,
            num_layers=61,
            num_heads=128,
            q_lora_rank=1536,
            o_groups=16,
            compress_ratios=(128, 128, *(4, 128) * 29, 4, 0),
            index_topk=1024,
        )

    @classmethod
    def from_hf(cls, source: str | pathlib.Path | Mapping[str, Any] | Any) -> DeepseekV4Config:
        """Read a `config.json` (path), its dict, or a transformers `PretrainedConfig`.

        Both sets of names are understood: DeepSeek's (`compress_ratios`, `rope_scaling`, `qk_rope_head_dim`) and
        transformers' (`layer_types`, `rope_parameters`, `partial_rotary_factor`). Raises E205 for other models.
        """
        return _from_hf(cls, _as_dict(source))

    def ratio(self, layer_idx: int) -> int:
        """Return the compress ratio of a layer: 1, 4 or 128."""
        check(
            0 <= layer_idx < len(self.compress_ratios),
            "E205",
            got=f"layer_idx={layer_idx} with {len(self.compress_ratios)} compress_ratios",
        )
        return self.compress_ratios[layer_idx]

    def kind(self, layer_idx: int) -> str:
        """Return the kind of a layer: `swa`, `csa` or `hca`."""
        return _KIND_OF_RATIO[self.ratio(layer_idx)]

    def sources(self, layer_idx: int) -> tuple[Source, ...]:
        """Return the compressed sources of a layer, none for sliding window only."""
        ratio = self.ratio(layer_idx)
        if ratio in WINDOW_ONLY:
            return ()
        owner = self.source_layers[layer_idx] if self.source_layers else layer_idx
        return (Source(ratio, owner, SELECTIONS[ratio]),)

    def rope(self, ratio: int) -> Rope:
        """Return the RoPE parameters of a layer of this ratio: queries, window, compressed entries and indexer."""
        if ratio <= 1:
            return Rope(self.rope_theta, self.rope_dim)
        return Rope(self.compress_rope_theta, self.rope_dim, self.yarn)

    def with_layers(self, *ratios: int) -> DeepseekV4Config:
        """Return this model with exactly these layers, for examples, tests and layer benchmarks."""
        return replace(self, num_layers=len(ratios), compress_ratios=ratios, source_layers=())

    @property
    def compressed_ratios(self) -> tuple[int, ...]:
        """Ratios of the sources of the model's layers, ascending. They determine its block tables and metadata."""
        return tuple(source_ratios(self.compress_ratios[: self.num_layers]))

    @property
    def softmax_scale(self) -> float:
        """head_dim ** -0.5, with no YaRN correction."""
        return float(self.head_dim**-0.5)


def _as_dict(source: Any) -> Mapping[str, Any]:
    if isinstance(source, (str, pathlib.Path)):
        path = pathlib.Path(source)
        path = path / "config.json" if os.path.isdir(path) else pathlib.Path(os.path.realpath(path))
        check(
            os.path.isfile(path), "E205", got=f"no file {path}", fix="pass the path of a config.json or of its folder"
        )
        return read_json(path.parent, path)
    if isinstance(source, Mapping):
        return source
    if hasattr(source, "to_dict"):
        return dict(source.to_dict())
    fail("E205", got=f"a {type(source).__name__}", fix="pass a path, a dict or a transformers config")


def _from_hf(cls: type[DeepseekV4Config], raw: Mapping[str, Any]) -> DeepseekV4Config:
    model_type = raw.get("model_type", "deepseek_v4")
    v41 = model_type in ("deepseek_v41", "deepseek_v41_text")
    fix = "load V4.1 by dsv4_compile.hf.load or models.v41.load" if v41 else "only deepseek_v4 is supported"
    check(model_type == "deepseek_v4", "E205", got=f"model_type={shown(model_type)}", fix=fix)
    check_fields(raw, ATTENTION)
    raw = without_nulls(raw)
    required = ("hidden_size", "num_hidden_layers", "num_attention_heads")
    missing = [name for name in required if raw.get(name) is None]
    check(not missing, "E205", got=f"a configuration without {', '.join(missing)}", fix="pass the model's config.json")
    check(
        raw.get("num_key_value_heads", 1) == 1,
        "E205",
        got=f"num_key_value_heads={raw.get('num_key_value_heads')}",
    )
    default = cls()
    head_dim = int(raw.get("head_dim", default.head_dim))
    renamed = {"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads"}
    same = (
        "hidden_size",
        "q_lora_rank",
        "o_groups",
        "o_lora_rank",
        "sliding_window",
        "index_n_heads",
        "index_head_dim",
        "index_topk",
        "rms_norm_eps",
        "max_position_embeddings",
    )
    names = {**renamed, **{name: name for name in same}}
    fields: dict[str, Any] = {ours: raw[theirs] for ours, theirs in names.items() if raw.get(theirs) is not None}
    return cls(**fields, **_rope_fields(raw, head_dim, default), head_dim=head_dim, compress_ratios=_ratios(raw))


def _ratios(raw: Mapping[str, Any]) -> tuple[int, ...]:
    rates = raw.get("compress_rates") or {}
    expected = {name: ratio for name, ratio in RATIO_OF_LAYER_TYPE.items() if ratio > 1}
    for name, ratio in rates.items():
        check(expected.get(name, ratio) == ratio, "E205", got=f"compress_rates[{name!r}]={ratio}")
    if raw.get("compress_ratios") is not None:
        return tuple(int(r) for r in raw["compress_ratios"])
    types = raw.get("layer_types")
    if types is None:
        fail("E205", got="a configuration without compress_ratios or layer_types", fix="pass the model's config.json")
    unknown = sorted(set(types) - set(RATIO_OF_LAYER_TYPE))
    check(
        not unknown,
        "E205",
        got=f"layer_types with {shown(unknown)}",
        fix=f"known types are {sorted(RATIO_OF_LAYER_TYPE)}",
    )
    return tuple(RATIO_OF_LAYER_TYPE[t] for t in types)


def _rope_fields(raw: Mapping[str, Any], head_dim: int, default: DeepseekV4Config) -> dict[str, Any]:
    """Return the fields of RoPE; absent ones as transformers completes them."""
    main, compress = _rope_parameters(raw, default)
    kind = main.get("rope_type", main.get("type", "default"))
    check(kind == "default", "E205", got=f"rope type {kind!r} on window layers", fix="only default exists there")
    dim, compress_dim = (int(head_dim * float(rope["partial_rotary_factor"])) for rope in (main, compress))
    check(
        dim == compress_dim,
        "E205",
        got=f"{dim} rotated dims on window layers and {compress_dim} on compressed layers",
        fix="give main and compress the same partial_rotary_factor",
    )
    thetas = {"rope_theta": float(main["rope_theta"]), "compress_rope_theta": float(compress["rope_theta"])}
    for name, theta in thetas.items():
        check(theta > 1, "E205", got=f"{name}={theta}", rule="the base of RoPE frequencies is above 1")
    return {"rope_dim": dim, **thetas, "yarn": _yarn(compress)}


def _rope_parameters(raw: Mapping[str, Any], default: DeepseekV4Config) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the RoPE parameters of window layers and of compressed layers.

    They are nested, `{"main": ..., "compress": ...}`, or those of YaRN on compressed layers in one dict. In one dict
    YaRN has no attention factor unless it says so; in a nested one transformers computes what is absent.
    """
    parameters = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    theta = raw.get("rope_theta", default.rope_theta)
    context = raw.get("max_position_embeddings", default.max_position_embeddings)
    factor = raw.get("partial_rotary_factor")
    if factor is None and raw.get("qk_rope_head_dim") is not None:
        factor = raw["qk_rope_head_dim"] / raw.get("head_dim", default.head_dim)
    if factor is None:
        factor = default.rope_dim / default.head_dim
    common = {"partial_rotary_factor": factor, "original_max_position_embeddings": context}
    if isinstance(parameters.get("main"), Mapping) and isinstance(parameters.get("compress"), Mapping):
        main, compress = ({"rope_theta": theta, **common, **parameters[name]} for name in ("main", "compress"))
        return main, compress
    compress_theta = raw.get("compress_rope_theta", default.compress_rope_theta)
    yarn = {name: value for name, value in parameters.items() if name not in ("main", "compress")}
    if raw.get("original_max_position_embeddings") is not None:
        yarn["original_max_position_embeddings"] = raw["original_max_position_embeddings"]
    compress = {**common, "attention_factor": 1.0, **yarn, "rope_theta": compress_theta}
    return {"rope_theta": theta, **common}, {**compress, "partial_rotary_factor": factor}


def _yarn(compress: Mapping[str, Any]) -> Yarn | None:
    kind = compress.get("rope_type", compress.get("type", "default"))
    if kind == "default":
        return None
    check(kind == "yarn", "E205", got=f"rope type {kind!r} on compressed layers", fix="only yarn and default exist")
    factor, original = compress.get("factor"), compress["original_max_position_embeddings"]
    betas = {name: float(compress.get(name) or value) for name, value in BETAS.items()}
    positive = {"factor": factor, "original_max_position_embeddings": original, **betas}
    for name, value in positive.items():
        check(value is not None and value > 0, "E205", got=f"yarn with {name}={value}", rule=f"{name} is above 0")
    assert factor is not None
    attention_factor = compress.get("attention_factor")
    scaling = _attention_factor(compress, float(factor)) if attention_factor is None else float(attention_factor)
    check(
        scaling == 1.0,
        "E205",
        got=f"attention_factor={attention_factor}",
        why="V4 scales neither cos/sin nor scores"
        + (f"; transformers computes {scaling:.4f}" if attention_factor is None else ""),
        fix='"attention_factor": 1.0 in rope_parameters["compress"], if the model was trained without it',
    )
    return Yarn(float(factor), int(original), **betas)


def _attention_factor(yarn: Mapping[str, Any], factor: float) -> float:
    """Return the factor of cos and sin that transformers computes where `attention_factor` is absent."""

    def scaled(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    numerator, denominator = yarn.get("mscale"), yarn.get("mscale_all_dim")
    if numerator and denominator:
        return scaled(numerator) / scaled(denominator)
    return scaled(1.0)
