"""Modules of transformers that a converted model stands for: their classes, and the numbers its ops compute with.

`convert` compares a model with this description, reads the modules that it names, and holds the numbers, which later
calls compare again: a replaced module or a changed number raises E208, because ops would not notice it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.integrations.finegrained_fp8 import FP8Experts, FP8GroupedLinear, FP8Linear
from transformers.models.deepseek_v4 import modeling_deepseek_v4

from ...config import LAYER_TYPES, DeepseekV4Config
from ...errors import check, fail
from ...layout import WEIGHT_TILE
from ...rope_tables import inv_freq
from .experts_interface import FLAGS

hf: Any = modeling_deepseek_v4
"""Module of transformers, untyped because its submodules have the type `Tensor | Module`."""


class Activation(NamedTuple):
    """Activations of which a module must have one: classes, functions, and their name."""

    name: str
    classes: tuple[type, ...]
    functions: tuple[Any, ...] = ()


class Part(NamedTuple):
    """A module: its allowed classes, and attributes with the values that ops compute with."""

    classes: tuple[type, ...]
    values: Mapping[str, Any] = MappingProxyType({})


CONFIG = ("sliding_window", "hc_mult", "o_groups")
"""Settings that transformers reads in the configuration at each call, and a converted model has read once."""


class BuiltIn:
    """Equals every name of an implementation that computes what the model defines, and no function of a caller.

    `generate` of transformers switches between such implementations of experts while it decodes on a GPU.
    """

    def __init__(self, *beginnings: str) -> None:
        self.beginnings = beginnings

    def __eq__(self, used: object) -> bool:
        return not isinstance(used, str) or (used.startswith(self.beginnings) and "/" not in used)

    def __repr__(self) -> str:
        return " or ".join(self.beginnings)

    __hash__ = None  # type: ignore[assignment]


BUILT_IN: Mapping[str, BuiltIn] = {
    "_attn_implementation": BuiltIn("eager", "sdpa", "flash", "flex_attention", "paged|"),
    "_experts_implementation": BuiltIn("eager", "batched_mm", "grouped_mm", "deepgemm", "sonicmoe", "dsv4"),
}
"""Implementations that a converted model stands for, by the setting that names them."""
AROUND_FIX = "convert(model, attention_only=True) leaves everything but attention to transformers"
_ATTENTION_FIX = "build the model from a configuration that says so, or convert without it"
_LINEARS = (nn.Linear, FP8Linear)
_SILU = Activation("silu", (type(ACT2FN["silu"]), nn.SiLU), (nn.functional.silu,))
_SCORES = Activation("sqrtsoftplus", (type(ACT2FN["sqrtsoftplus"]),))
_LINEAR = Part(_LINEARS, {"bias": None, "activation_scale": None})
_FORWARD_REPLACED = (hf.DeepseekV4Attention, hf.DeepseekV4Model)
"""Classes whose forward takes other arguments in a converted model."""
_ONCE = ("layer_type", *FLAGS)
"""Values that describe a module as it was built, and that no call of it reads alone."""
READ = (
    "attn_hc",
    "attn_hc.input_norm",
    "ffn_hc",
    "ffn_hc.input_norm",
    "input_layernorm",
    "post_attention_layernorm",
    "mlp.gate.score_fn",
    "mlp.experts",
    "mlp.experts.act_fn",
    "mlp.shared_experts",
    "mlp.shared_experts.act_fn",
    "mlp.shared_experts.gate_proj",
    "mlp.shared_experts.up_proj",
    "mlp.shared_experts.down_proj",
)
"""Modules of a decoder layer whose parameters are read, and which are not called."""
READ_HEAD = ("norm", "hc_head", "hc_head.input_norm")
"""Modules of the decoder stack that are read, or called otherwise than by transformers."""
CALLED = ("mlp", "mlp.gate")
"""Modules of a decoder layer that are called in a swapped class."""


def attention_parts(config: DeepseekV4Config, layer_idx: int) -> dict[str, Part]:
    """Return the modules of an attention layer, by their paths in it."""
    ratio = config.ratio(layer_idx)
    norm = Part((hf.DeepseekV4RMSNorm,), {"variance_epsilon": config.rms_norm_eps})
    values = {
        "layer_type": LAYER_TYPES[ratio],
        "rope_layer_type": "main" if ratio == 1 else "compress",
        "num_heads": config.num_heads,
        "num_key_value_groups": config.num_heads,
        "head_dim": config.head_dim,
        "sliding_window": config.sliding_window,
        "scaling": config.softmax_scale,
    }
    groups = {**_LINEAR.values, "n_groups": config.o_groups}
    parts = {
        "": Part((hf.DeepseekV4Attention,), values if ratio > 1 else {**values, "compressor": None}),
        **dict.fromkeys(("q_a_proj", "q_b_proj", "kv_proj", "o_b_proj"), _LINEAR),
        "o_a_proj": Part((hf.DeepseekV4GroupedLinear, FP8GroupedLinear), groups),
        **dict.fromkeys(("q_a_norm", "kv_norm"), norm),
        "q_b_norm": Part((hf.DeepseekV4UnweightedRMSNorm,), {"eps": config.rms_norm_eps}),
    }
    if ratio == 1:
        return parts
    compressor = Part(
        (hf.DeepseekV4HCACompressor if ratio > 4 else hf.DeepseekV4CSACompressor,),
        {"compress_rate": ratio, "head_dim": config.head_dim, "rope_layer_type": "compress"},
    )
    rotary = Part((hf.DeepseekV4RotaryEmbedding,), {"compress_attention_scaling": 1.0})
    pooling = {"kv_proj": _LINEAR, "gate_proj": _LINEAR, "kv_norm": norm, "rotary_emb": rotary}
    parts |= {"compressor": compressor, **{f"compressor.{path}": part for path, part in pooling.items()}}
    if ratio > 4:
        return parts
    indexer = {
        "compress_rate": ratio,
        "rope_layer_type": "compress",
        "num_heads": config.index_n_heads,
        "head_dim": config.index_head_dim,
        "index_topk": config.index_topk,
    }
    scorer = {"softmax_scale": config.index_head_dim**-0.5, "weights_scaling": config.index_n_heads**-0.5}
    return parts | {
        "compressor.indexer": Part((hf.DeepseekV4Indexer,), indexer),
        **{f"compressor.indexer.{path}": part for path, part in pooling.items()},
        "compressor.indexer.q_b_proj": _LINEAR,
        "compressor.indexer.scorer": Part((hf.DeepseekV4IndexerScorer,), scorer),
        "compressor.indexer.scorer.weights_proj": _LINEAR,
    }


def around_parts(layer: Any, streams: int) -> dict[str, Part]:
    """Return the modules of a decoder layer around attention, by their paths in it, for `streams` residual streams.

    Ops read the numbers of these modules at each call, but one number for two modules, whose values are the first's.
    """
    hash_routed = getattr(submodule(layer, "mlp"), "is_hash", False)
    limit = getattr(submodule(layer, "mlp.experts"), "limit", None)
    mixture = Part((hf.DeepseekV4SparseMoeBlock,), {"is_hash": hash_routed})
    parts = {"": Part((hf.DeepseekV4DecoderLayer,)), "mlp": mixture}
    for hc, norm in (("attn_hc", "input_layernorm"), ("ffn_hc", "post_attention_layernorm")):
        eps = getattr(submodule(layer, norm), "variance_epsilon", None)
        parts[hc] = Part((hf.DeepseekV4HyperConnection,), {"hc_mult": streams})
        parts[norm] = Part((hf.DeepseekV4RMSNorm,), {"variance_epsilon": eps})
        parts[f"{hc}.input_norm"] = Part((hf.DeepseekV4UnweightedRMSNorm,), {"eps": eps})
    gate = hf.DeepseekV4HashRouter if hash_routed else hf.DeepseekV4TopKRouter
    parts["mlp.gate"] = Part((gate,), {"score_fn": _SCORES})
    plain = dict.fromkeys(("swiglu_alpha", "gate_softcap", "up_softcap"))
    flags = {name: value for name, (value, _) in FLAGS.items()} | plain | {"activation_scheme": "dynamic"}
    swiglu = {"act_fn": _SILU, "limit": limit}
    parts["mlp.experts"] = Part((hf.DeepseekV4Experts, FP8Experts), {**flags, **swiglu})
    parts["mlp.shared_experts"] = Part((hf.DeepseekV4MLP,), swiglu)
    return parts | {f"mlp.shared_experts.{name}_proj": _LINEAR for name in ("gate", "up", "down")}


def stack_parts(model: Any, *, attention_only: bool) -> dict[str, Part]:
    """Return the modules of a decoder stack that are no layers, by their paths in it."""
    scaling = {"main_attention_scaling": 1.0, "compress_attention_scaling": 1.0}
    parts = {"": Part((hf.DeepseekV4Model,)), "rotary_emb": Part((hf.DeepseekV4RotaryEmbedding,), scaling)}
    if attention_only:
        return parts
    eps = getattr(submodule(model, "norm"), "variance_epsilon", None)
    return parts | {
        "norm": Part((hf.DeepseekV4RMSNorm,), {"variance_epsilon": eps}),
        "hc_head": Part((hf.DeepseekV4HyperHead,), {"hc_mult": model.config.hc_mult}),
        "hc_head.input_norm": Part((hf.DeepseekV4UnweightedRMSNorm,), {"eps": eps}),
    }


def submodule(module: Any, path: str) -> Any:
    """Return what stands at a path of a module, None if nothing does."""
    for name in filter(None, path.split(".")):
        module = getattr(module, name, None)
    return module


class Place(NamedTuple):
    """A module that the description names, and the name of its place in messages."""

    where: str
    path: str
    module: Any
    part: Part


def places(model: Any, config: DeepseekV4Config, *, attention_only: bool) -> Iterator[Place]:
    """Yield every module of a decoder stack that the description names, or None where it is missing."""
    groups: list[tuple[str, str, Any, Mapping[str, Part]]] = [
        ("the model", "", model, stack_parts(model, attention_only=attention_only))
    ]
    for i, layer in enumerate(model.layers):
        where = f"layer {i}"
        if not attention_only:
            groups.append((where, "", layer, around_parts(layer, model.config.hc_mult)))
        attention = layer.self_attn
        groups.append((where, "self_attn", attention, attention_parts(config, attention.layer_idx)))
    for where, prefix, root, parts in groups:
        for path, part in parts.items():
            yield Place(where, ".".join(filter(None, (prefix, path))), submodule(root, path), part)


def held_values(model: Any, config: DeepseekV4Config, *, attention_only: bool) -> Iterator[tuple[str, Any, str, Any]]:
    """Yield name, owner, attribute and value of settings that transformers reads in each call, and `convert` once."""
    yield from (("the model's config", model.config, name, getattr(model.config, name, None)) for name in CONFIG)
    yield from (("the model's config", model.config, name, BUILT_IN[name]) for name in _implementations(attention_only))
    for described in places(model, config, attention_only=attention_only):
        names = [*described.part.values, "layer_idx"] if described.path == "self_attn" else described.part.values
        for name in names:
            if name not in _ONCE and hasattr(described.module, name):
                yield _named(described), described.module, name, getattr(described.module, name)


def _implementations(attention_only: bool) -> tuple[str, ...]:
    """Return the settings that name a function which a converted model does not call."""
    return ("_attn_implementation",) if attention_only else tuple(BUILT_IN)


def _named(place: Place) -> str:
    return f"{place.path} of {place.where}" if place.path else place.where


def check_layers(layers: Any, config: DeepseekV4Config) -> None:
    """Raise E208 unless every layer has a separate attention module, and a separate cache through its `layer_idx`."""
    is_module = isinstance(layers, nn.Module)  # layers of a list would not be seen as modules
    check(is_module, "E208", got=f"layers in a {type(layers).__name__}", fix="put them in an nn.ModuleList")
    if not len(layers):
        fail("E208", got="a model without layers")
    seen: dict[int, int] = {}
    numbers: dict[Any, int] = {}
    for i, layer in enumerate(layers):
        attention = getattr(layer, "self_attn", None)
        if type(attention) is not hf.DeepseekV4Attention:
            _refuse_class(f"layer {i}, a {type(layer).__name__}, with self_attn", attention, hf.DeepseekV4Attention)
        index = getattr(attention, "layer_idx", None)
        first = seen.setdefault(id(attention), i)
        if first != i:
            _refuse_number(f"layer {i} with the attention of layer {first}", "both would write the same cache")
        if type(index) is not int or not 0 <= index < config.num_layers:
            _refuse_number(f"layer_idx={index!r} of layer {i}", f"the configuration has {config.num_layers} layers")
        if numbers.setdefault(index, i) != i:
            _refuse_number(f"layer_idx={index} of layers {numbers[index]} and {i}", "both would write the same cache")


def _refuse_number(got: str, why: str) -> NoReturn:
    fail("E208", got=got, why=why, fix="give layers distinct numbers in self_attn.layer_idx, from 0 up")


def check_untied(layers: Any, *, attention_only: bool) -> None:
    """Raise E208 for a parameter in two places that are both stacked with others: it can be rows of one matrix."""
    owners: dict[int, tuple[int, str]] = {}
    for i, layer in enumerate(layers):
        names = dict(layer.self_attn.named_parameters(prefix="self_attn", remove_duplicate=False))
        places = [(i, name, name, parameter) for name, parameter in names.items()]
        if not attention_only:
            moe = layer.mlp.named_parameters(prefix="mlp", remove_duplicate=False)
            shared = [(name, parameter) for name, parameter in moe if "shared_experts" in name]
            places += [(id(layer.mlp), name, name, parameter) for name, parameter in shared]
        for owner, key, name, parameter in places:
            if owners.setdefault(id(parameter), (owner, key)) != (owner, key):
                fail(
                    "E208",
                    got=f"{name} of layer {i}, which another module has too",
                    why="weights become rows of one matrix for each module",
                    fix="give each module a copy: module.weight = nn.Parameter(module.weight.clone())",
                )


def check_model(model: Any, config: DeepseekV4Config, *, attention_only: bool) -> None:
    """Raise E208 unless a decoder stack of transformers, whose layers have passed, is as its ops compute it."""
    for name in _implementations(attention_only):
        if BUILT_IN[name] != getattr(model.config, name, None):
            fail(
                "E208",
                got=f"{name}={getattr(model.config, name)!r}",
                why="a converted model would not call this function",
                fix="model.set_attn_implementation('eager'), model.set_experts_implementation('eager')",
            )
    for described in places(model, config, attention_only=attention_only):
        _check_place(described)
    if not attention_only:
        for i, layer in enumerate(model.layers):
            _check_shared_expert(f"layer {i}", layer.mlp)
    _check_frequencies(model, config)


def _check_place(place: Place) -> None:
    name = _named(place)
    around = not place.path.startswith(("self_attn", "rotary_emb"))
    if type(place.module) not in place.part.classes:
        _refuse_class(name, place.module, *place.part.classes, around=around)
    forward = type(place.module).forward.__module__
    if not forward.startswith(("torch.", "transformers.")):
        _refuse_value(f"{name} with a forward from {forward}", "the class was patched", around)
    if type(place.module) in _FORWARD_REPLACED and "forward" in vars(place.module):
        _refuse_value(f"{name} with a replaced forward", "it would call the one that convert replaces", False)
    for attribute, wanted in place.part.values.items():
        value = getattr(place.module, attribute, wanted)
        if isinstance(wanted, Activation):
            if type(value) not in wanted.classes and value not in wanted.functions:
                shown = getattr(value, "__name__", type(value).__name__)
                _refuse_value(f"{attribute}={shown} of {name}", f"ops compute the activation {wanted.name}", around)
        elif isinstance(value, nn.Parameter) and wanted is None:
            if around:  # other attributes of attention are named where its weights are read
                _refuse_value(f"a {attribute} of {name}", "no op reads it", around)
        elif not _equal(value, wanted):
            shown = type(value).__name__ if isinstance(value, nn.Module) else value
            _refuse_value(f"{attribute}={shown} of {name}", f"ops compute with {wanted}", around)


def _equal(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, float) and isinstance(value, (int, float)):
        return math.isclose(value, wanted, rel_tol=1e-9)
    return value is wanted or (isinstance(value, (int, float, str)) and bool(value == wanted))


def _check_shared_expert(where: str, moe: Any) -> None:
    limit, gate = moe.experts.limit, moe.shared_experts.gate_proj.weight
    if not isinstance(limit, (int, float)):
        _refuse_value(f"limit={limit} of mlp.experts of {where}", "ops clamp gate and up", True)
    if gate.dtype is torch.float8_e4m3fn and gate.shape[0] % WEIGHT_TILE:
        rows = f"a shared expert of {gate.shape[0]} rows in e4m3"
        _refuse_value(f"{where} with {rows}", f"scales are of blocks of {WEIGHT_TILE}", True)


def _refuse_class(name: str, module: Any, *classes: type, around: bool = False) -> NoReturn:
    got = f"{name}, a {type(module).__name__}" if module is not None else f"{name}, which is missing"
    expected = " or ".join(kind.__name__ for kind in classes)
    _refuse_value(got, f"ops stand for the forward of {expected}, and would not run a different one", around)


def _refuse_value(got: str, why: str, around: bool) -> NoReturn:
    fail("E208", got=got, why=why, fix=AROUND_FIX if around else _ATTENTION_FIX)


def _check_frequencies(model: Any, config: DeepseekV4Config) -> None:
    """Raise E208 unless the modules' RoPE frequencies are those of our tables. Synchronises with the device."""
    tables = {label: inv_freq(config.rope(ratio)) for label, ratio in (("main", 1), ("compress", 4))}
    labels = {"main" if config.ratio(layer.self_attn.layer_idx) == 1 else "compress" for layer in model.layers}
    owners = [("rotary_emb of the model", model.rotary_emb, labels)]
    for i, layer in enumerate(model.layers):
        modules = layer.self_attn.named_modules(prefix="self_attn")
        owners += [(f"{path} of layer {i}", m, {"compress"}) for path, m in modules if path.endswith("rotary_emb")]
    for name, rotary, read in owners:
        for label in read:
            kind = "default" if label == "main" or config.yarn is None else "yarn"
            if rotary.rope_type.get(label) != kind:
                _refuse_value(f"rope_type {rotary.rope_type} of {name}", f"tables are of {kind!r} for {label}", False)
            buffer = getattr(rotary, f"{label}_inv_freq", None)
            if not isinstance(buffer, Tensor) or not (buffer.is_meta or _is_rounded_from(buffer, tables[label])):
                why = "they are not those of its rope_parameters, from which tables are computed"
                _refuse_value(f"{label}_inv_freq of {name}", why, False)


def _is_rounded_from(buffer: Tensor, exact: Tensor) -> bool:
    """Return whether a buffer holds `exact` frequencies, or what a change of the model's dtype has left of them.

    Transformers computes with rounded frequencies then; the tables of converted layers stay exact.
    """
    if buffer.shape != exact.shape:
        return False
    held, wanted = buffer.double().cpu(), exact.double().cpu()
    for dtype in dict.fromkeys((buffer.dtype, torch.float16, torch.bfloat16)):
        limits = torch.finfo(dtype)
        # Powers differ by a few units in the last place between devices; float16 also has subnormal frequencies.
        close = torch.isclose(held, wanted, rtol=max(limits.eps, 4e-6), atol=limits.smallest_normal * limits.eps)
        if bool(close.all()) and torch.equal(buffer.to(dtype).to(buffer), buffer):
            return True
    return False
