"""Attention configuration of a DeepSeek-V4 model: dimensions, layer ratios and RoPE parameters."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from . import layout
from .errors import check, fail

SWA, CSA, HCA = "swa", "csa", "hca"
_KIND_OF_RATIO = {1: SWA, layout.CSA_RATIO: CSA, layout.HCA_RATIO: HCA}
_RATIO_OF_LAYER_TYPE = {
    "sliding_attention": 1,
    "compressed_sparse_attention": layout.CSA_RATIO,
    "heavily_compressed_attention": layout.HCA_RATIO,
}


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN interpolation of RoPE frequencies. DeepSeek-V4 uses no attention factor (mscale) with it."""

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0


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

    def __post_init__(self) -> None:
        object.__setattr__(self, "compress_ratios", tuple(max(1, int(r)) for r in self.compress_ratios))
        bad = sorted(set(self.compress_ratios) - set(_KIND_OF_RATIO))
        check(not bad, "E205", got=f"compress_ratios with {bad}", why="V4.1 and other variants are not supported")
        check(
            len(self.compress_ratios) >= self.num_layers,
            "E205",
            got=f"{len(self.compress_ratios)} compress_ratios for {self.num_layers} layers",
            fix="give one ratio for each layer",
        )
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

    def rope(self, ratio: int) -> Rope:
        """Return the RoPE parameters of a layer of this ratio: queries, window, compressed entries and indexer."""
        if ratio <= 1:
            return Rope(self.rope_theta, self.rope_dim)
        return Rope(self.compress_rope_theta, self.rope_dim, self.yarn)

    def with_layers(self, *ratios: int) -> DeepseekV4Config:
        """Return this model with exactly these layers, for examples, tests and layer benchmarks."""
        return replace(self, num_layers=len(ratios), compress_ratios=ratios)

    @property
    def compressed_ratios(self) -> tuple[int, ...]:
        """Ratios above 1 of the model's layers, ascending. They determine its block tables and metadata."""
        return tuple(sorted(set(self.compress_ratios[: self.num_layers]) - {1}))

    @property
    def softmax_scale(self) -> float:
        """head_dim ** -0.5, with no YaRN correction."""
        return float(self.head_dim**-0.5)


def _as_dict(source: Any) -> Mapping[str, Any]:
    if isinstance(source, (str, pathlib.Path)):
        path = pathlib.Path(source)
        path = path / "config.json" if path.is_dir() else path
        check(path.is_file(), "E205", got=f"no file {path}", fix="pass the path of a config.json or of its folder")
        return dict(json.loads(path.read_text()))
    if isinstance(source, Mapping):
        return source
    if hasattr(source, "to_dict"):
        return dict(source.to_dict())
    fail("E205", got=f"a {type(source).__name__}", fix="pass a path, a dict or a transformers config")


def _from_hf(cls: type[DeepseekV4Config], raw: Mapping[str, Any]) -> DeepseekV4Config:
    model_type = raw.get("model_type", "deepseek_v4")
    check(model_type == "deepseek_v4", "E205", got=f"model_type={model_type!r}", fix="only deepseek_v4 is supported")
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
    main, compress = _rope_parameters(raw)
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
    return cls(
        **fields,
        head_dim=head_dim,
        rope_dim=_rope_dim(raw, main, head_dim, default),
        compress_ratios=_ratios(raw),
        rope_theta=float(main.get("rope_theta", raw.get("rope_theta", default.rope_theta))),
        compress_rope_theta=float(
            compress.get("rope_theta", raw.get("compress_rope_theta", default.compress_rope_theta))
        ),
        yarn=_yarn(compress),
    )


def _ratios(raw: Mapping[str, Any]) -> tuple[int, ...]:
    rates = raw.get("compress_rates") or {}
    expected = {name: ratio for name, ratio in _RATIO_OF_LAYER_TYPE.items() if ratio > 1}
    for name, ratio in rates.items():
        check(expected.get(name, ratio) == ratio, "E205", got=f"compress_rates[{name!r}]={ratio}")
    if raw.get("compress_ratios") is not None:
        return tuple(int(r) for r in raw["compress_ratios"])
    types = raw.get("layer_types")
    if types is None:
        fail("E205", got="a configuration without compress_ratios or layer_types", fix="pass the model's config.json")
    unknown = sorted(set(types) - set(_RATIO_OF_LAYER_TYPE))
    check(not unknown, "E205", got=f"layer_types with {unknown}", fix=f"known types are {sorted(_RATIO_OF_LAYER_TYPE)}")
    return tuple(_RATIO_OF_LAYER_TYPE[t] for t in types)


def _rope_parameters(raw: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the RoPE parameters of window layers and of compressed layers, each possibly empty."""
    nested = raw.get("rope_parameters") or {}
    if isinstance(nested.get("main"), Mapping):
        kind = nested["main"].get("rope_type", "default")
        check(kind == "default", "E205", got=f"rope type {kind!r} on window layers", fix="only default exists there")
        return nested["main"], nested["compress"]
    flat = dict(raw.get("rope_scaling") or nested)
    flat.pop("rope_theta", None)
    return {}, flat


def _rope_dim(raw: Mapping[str, Any], main: Mapping[str, Any], head_dim: int, default: DeepseekV4Config) -> int:
    if raw.get("qk_rope_head_dim") is not None:
        return int(raw["qk_rope_head_dim"])
    factor = main.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    return int(head_dim * factor) if factor is not None else default.rope_dim


def _yarn(compress: Mapping[str, Any]) -> Yarn | None:
    kind = compress.get("rope_type", compress.get("type", "default"))
    if kind == "default":
        return None
    check(kind == "yarn", "E205", got=f"rope type {kind!r} on compressed layers", fix="only yarn and default exist")
    scaling = compress.get("attention_factor", 1.0)
    check(scaling == 1.0, "E205", got=f"attention_factor={scaling}", why="V4 scales neither cos/sin nor scores")
    factor, original = compress.get("factor"), compress.get("original_max_position_embeddings")
    if factor is None or original is None:
        fail("E205", got=f"yarn with {factor=}, original_max_position_embeddings={original}")
    betas = {name: float(compress[name]) for name in ("beta_fast", "beta_slow") if compress.get(name) is not None}
    return Yarn(float(factor), int(original), **betas)
