"""Places of a checkpoint's stored tensors in a transformers model, decided from headers alone.

The model is on the meta device, so nothing is allocated. Modules follow the dtypes of the stored tensors: e4m3 and
MXFP4 weights keep their format in transformers' FP8 modules, or become floating if they are dequantised.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.integrations.finegrained_fp8 import (
    ALL_FP8_EXPERTS_FUNCTIONS,
    FP8Experts,
    FP8GroupedLinear,
    FP8Linear,
)
from transformers.integrations.moe import use_experts_implementation
from transformers.models.deepseek_v4 import modeling_deepseek_v4

from ..._compat import kept_in_float32
from ...checkpoints.header import DTYPES, Stored
from ...checkpoints.reader import Index
from ...errors import DSV4Error, error
from ...layout import MX_TILE, WEIGHT_TILE, cdiv
from .checkpoint import Checkpoint, Problems, official_name
from .folder_config import check_counts, describe_quantization, model_config

hf: Any = modeling_deepseek_v4
"""Module of transformers, untyped because its submodules have the type `Tensor | Module`."""

QUANTISED = (
    *(f"self_attn.{name}_proj" for name in ("q_a", "q_b", "kv", "o_a", "o_b")),
    "self_attn.compressor.indexer.q_b_proj",
    *(f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")),
)
"""Linears whose weights may be e4m3, by the ends of their paths."""
_BLOCK = (WEIGHT_TILE, WEIGHT_TILE)
_FLOATS = ("BF16", "F16", "F32", "F64")
_PACKED = ("I8", "U8")
_SCALES = {"mxfp4": ("F8_E8M0", "U8"), "e4m3": ("F8_E8M0", "U8", "F32")}


class Piece(NamedTuple):
    """A stored tensor, or a part of one, and its place.

    Attributes:
        target: name of a parameter or buffer of the model; `into` selects the place in it.
        part: selects what is read of the stored tensor; empty = all.
        scale, scale_part: scales to dequantise with, None for tensors that are stored as they will be used.
        kept: selects what is kept of a dequantised value; empty = all.
    """

    stored: Stored
    target: str
    into: Index = ()
    part: Index = ()
    scale: Stored | None = None
    scale_part: Index = ()
    kept: Index = ()


@dataclass(slots=True)
class Placement:
    """A model on the meta device, and the stored pieces that fill it.

    Attributes:
        dtypes: dtype of every parameter and persistent buffer by name.
        pieces: each stored tensor's place.
        tied: a stored output head that must equal the embedding, or None.
        problems: all that does not fit, as errors that have not been raised.
    """

    model: Any
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)
    tied: Stored | None = None
    problems: Problems = field(default_factory=Problems)

    def nbytes(self, wanted: Callable[[str], bool] = lambda name: True) -> int:
        """Return the bytes of the parameters and persistent buffers whose names are `wanted`."""
        sizes = {name: tensor.numel() * self.dtypes[name].itemsize for name, tensor in targets(self.model)}
        return sum(size for name, size in sizes.items() if wanted(name))


def place(checkpoint: Checkpoint, *, dtype: torch.dtype | None = None, dequantize: bool = False) -> Placement:
    """Decide where every tensor of `checkpoint` goes.

    Args:
        dtype: dtype of floating weights; None = that of the configuration, bfloat16 if it names none.
        dequantize: make e4m3 and MXFP4 weights floating.

    Raises E205 for a configuration that is not DeepSeek-V4's, E207 for one of more layers or experts than are stored.
    Other tensors that do not fit are `problems`.
    """
    config = model_config(checkpoint.config)
    check_counts(config, checkpoint.tensors)
    if dtype is None:
        dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16
    config.dtype = dtype
    with torch.device("meta"):
        placement = Placement(_model(config))
        planner = Planner(checkpoint.tensors, placement, dequantize)
        planner.quantise_modules()
    planner.fill_all(dtype)
    return placement


def _model(config: Any) -> Any:
    try:
        return hf.DeepseekV4ForCausalLM(config)
    except DSV4Error:
        raise
    except Exception as fault:  # sizes that are in range, and do not fit together
        raise error("E205", got="a config.json that transformers builds no model of", why=str(fault)) from None


def targets(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and persistent buffers with their names, each once."""
    yield from model.named_parameters()
    buffers = dict(model.named_buffers())
    yield from ((name, buffers[name]) for name in model.state_dict(keep_vars=True) if name in buffers)


class Planner:
    """Pairs stored tensors with the parameters of a model."""

    quantised: tuple[str, ...] = QUANTISED
    """Linears whose weights may be e4m3, by the ends of their paths."""

    def __init__(self, tensors: Mapping[str, Stored], placement: Placement, dequantize: bool) -> None:
        self.stored = tensors
        self.placement = placement
        self.model: Any = placement.model
        self.dequantize = dequantize
        self.used: set[str] = set()

    def problem(self, got: str, why: str = "", fix: str = "") -> None:
        """Record a problem of the folder, which ends a load and which `dsv4 doctor` lists."""
        self.placement.problems.add("E207", got=got, why=why, fix=fix)

    def official(self, name: str) -> str:
        """Return the name under which checkpoints store a parameter of the model."""
        return official_name(name)

    def first(self, path: str) -> tuple[str, Stored | None]:
        """Return the format of the weight at `path`, a linear or experts, and its first scale: what is stored says."""
        names = [self.official(f"{path}.weight")]
        if path.endswith(".experts"):
            official = self.official(f"{path}.gate_up_proj")
            names = [official, official.replace("gate_up_proj", "0.w1.weight")]
        weight = next((self.stored[name] for name in names if name in self.stored), None)
        scales = [f"{name.removesuffix('.weight')}.scale" for name in names]
        scale = next((self.stored[name] for name in scales if name in self.stored), None)
        return _format(weight, path.endswith(".experts")), scale

    def quantise_modules(self) -> None:
        """Replace modules whose weights are quantised by transformers' FP8 modules."""
        config = self.model.config
        for path, module in list(self.model.named_modules()):
            experts = path.endswith(".mlp.experts")
            if self.dequantize or not (experts or path.endswith(self.quantised)):
                continue
            kind, scale = self.first(path)
            if kind == "float":
                continue
            floating = scale is not None and scale.dtype == "F32" and kind == "e4m3"
            options: dict[str, Any] = {"block_size": _BLOCK, "scale_fmt": "float" if floating else "ue8m0"}
            if experts:
                self.check_divides(path, kind, config.moe_intermediate_size, config.hidden_size)
                quantised = _fp8_experts(config, "fp4" if kind == "mxfp4" else "fp8", options)
            elif hasattr(module, "n_groups"):
                if kind == "e4m3" and module.in_features % WEIGHT_TILE:
                    got = f"{path} in e4m3 with {module.in_features} inputs a group"
                    self.problem(
                        got, f"a group's heads fill whole tiles of {WEIGHT_TILE}", "load(..., dequantize=True)"
                    )
                quantised = FP8GroupedLinear(module.in_features, module.out_features, module.n_groups, **options)
            else:
                quantised = FP8Linear(module.in_features, module.out_features, **options)
                if "shared_experts" in path:
                    self.check_divides(path, kind, config.moe_intermediate_size, WEIGHT_TILE)
            self.model.set_submodule(path, quantised)
        self.describe()

    def describe(self) -> None:
        """Let the configuration say what is quantised, whatever `config.json` says: `save_pretrained` writes it."""
        ends = (*self.quantised, ".mlp.experts")
        modules = {path: module for path, module in self.model.named_modules() if path.endswith(ends)}
        quantised = [module for module in modules.values() if isinstance(module, (FP8Linear, FP8Experts))]
        if quantised:
            parameters = [parameter.dtype for module in quantised for parameter in module.parameters()]
            describe_quantization(
                self.model.config,
                [path for path, module in modules.items() if module not in quantised],
                expert_dtype="fp4" if torch.int8 in parameters else "fp8",
                scale_format="float" if torch.float32 in parameters else "ue8m0",
            )
            return
        for name in ("quantization_config", "expert_dtype"):
            if hasattr(self.model.config, name):
                delattr(self.model.config, name)

    def check_divides(self, path: str, kind: str, inner: int, hidden: int) -> None:
        """Report sizes whose blocks of scales would cross from gate to up."""
        tile = WEIGHT_TILE if kind == "e4m3" else MX_TILE
        if inner % tile or (kind == "mxfp4" and hidden % tile):
            got = f"{path} in {kind} with moe_intermediate_size={inner}, hidden_size={hidden}"
            self.problem(got, f"scales are of blocks of {tile}", "load(..., dequantize=True)")

    def fill_all(self, dtype: torch.dtype) -> None:
        """Find what is stored for all of the model, whose floating weights become `dtype`, and what is left over."""
        for name, tensor in targets(self.model):
            wanted = torch.float32 if kept_in_float32(self.model, name) else dtype
            self.placement.dtypes[name] = wanted if _is_floating(name, tensor) else tensor.dtype
            self.fill(name, tensor)
        self.finish()

    def fill(self, name: str, tensor: Tensor) -> None:
        """Find what is stored for a parameter or buffer of the model."""
        shape, official = tuple(tensor.shape), self.official(name)
        path = name.rpartition(".")[0]
        quantisable = path.endswith(self.quantised) or ".mlp.experts" in name
        kind = self.first(path)[0] if quantisable and self.dequantize else "float"
        allowed = _allowed(name, tensor, kind)
        missing: list[str] = []
        for source, index, piece_shape in self.sources(official, shape, kind):
            if source not in self.stored:
                missing.append(source)
                continue
            stored, stored_part = self.stored[source], index if source == official else ()
            self.used.add(source)
            piece = Piece(stored, name, index, stored_part)
            expected = shape if stored_part else piece_shape
            expected = _packed(expected) if kind == "mxfp4" else expected
            if self.expect(stored, expected, allowed, name) and kind != "float":
                piece = self.with_scale(piece, source, kind, piece_shape, missing)
            self.placement.pieces.append(piece)
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            what = f"{str(tensor.dtype).removeprefix('torch.')} {list(shape)}"
            self.problem(f"no tensor {missing[0]}{more}", f"{name}, {what}, needs {'them' if more else 'it'}")

    def sources(self, official: str, shape: tuple[int, ...], kind: str) -> Iterator[tuple[str, Index, tuple[int, ...]]]:
        """Yield name, place and shape of the tensors that make a parameter up: one, or one for each expert's matrix.

        Experts in one tensor are dequantised one by one.
        """
        fused = re.fullmatch(r"(.*\.experts)\.(gate_up_proj|down_proj)(\.scale|)", official)
        if fused is None or (official in self.stored and kind == "float"):
            yield official, (), shape
            return
        if official in self.stored:
            yield from ((official, (i,), shape[1:]) for i in range(shape[0]))
            return
        prefix, matrix, suffix = fused.groups()
        suffix = suffix or ".weight"
        half = (shape[1] // 2, *shape[2:])
        for i in range(shape[0]):
            if matrix == "down_proj":
                yield f"{prefix}.{i}.w2{suffix}", (i,), shape[1:]
            else:
                yield f"{prefix}.{i}.w1{suffix}", (i, slice(0, half[0])), half
                yield f"{prefix}.{i}.w3{suffix}", (i, slice(half[0], shape[1])), half

    def with_scale(self, piece: Piece, source: str, kind: str, shape: tuple[int, ...], missing: list[str]) -> Piece:
        """Return `piece`, a matrix of `shape`, with the scales that dequantise it: its own, or those of all experts."""
        of_matrix = f"{source.removesuffix('.weight')}.scale"
        rows, columns = shape
        tile = (1, MX_TILE) if kind == "mxfp4" else _BLOCK
        wanted: tuple[int, ...] = (cdiv(rows, tile[0]), cdiv(columns, tile[1]))
        fused = f"{self.official(piece.target)}.scale"
        name = of_matrix if of_matrix in self.stored else fused
        if name not in self.stored:
            missing.append(of_matrix)
            return piece
        self.used.add(name)
        scale, scale_part = self.stored[name], piece.scale_part
        if name == fused and piece.into:
            first = piece.into[1].start if len(piece.into) > 1 and isinstance(piece.into[1], slice) else 0
            if first % tile[0]:
                self.problem(f"{self.stored[name]}, whose blocks reach from gate to up", fix="store experts one by one")
            scale_part = (piece.into[0], slice(first // tile[0], first // tile[0] + wanted[0]))
            experts = self.model.get_parameter(piece.target).shape
            wanted = (experts[0], cdiv(experts[1], tile[0]), wanted[1])
        self.expect(scale, wanted, _SCALES[kind], piece.target)
        return piece._replace(scale=scale, scale_part=scale_part)

    def expect(self, stored: Stored, shape: Iterable[int], allowed: tuple[str, ...], target: str) -> bool:
        """Report a stored tensor whose shape or dtype is wrong, and return whether both are right."""
        wanted = tuple(shape)
        if stored.dtype not in allowed or stored.dtype not in DTYPES:
            self.problem(f"{stored} of dtype {stored.dtype}", f"{target} is stored in {' or '.join(allowed)}")
        elif stored.shape != wanted:
            self.problem(f"{stored} of shape {list(stored.shape)}", f"{target} needs {list(wanted)}")
        else:
            return True
        return False

    def finish(self) -> None:
        """Report tensors that no parameter takes, and find a head that repeats the embedding."""
        if self.model.config.tie_word_embeddings and "head.weight" in self.stored:
            self.placement.tied = self.stored["head.weight"]
            self.used.add("head.weight")
        layers = self.model.config.num_hidden_layers
        for name, stored in self.stored.items():
            if name in self.used:
                continue
            layer = re.match(r"layers\.([0-9]{1,9})\.", name)
            beyond = layer is not None and int(layer[1]) >= layers
            why = f"config.json has {layers} layers" if beyond else "no parameter of DeepSeek-V4 has this name"
            self.problem(f"a tensor too many: {stored}", why, "remove it, or use the config.json of this checkpoint")


def _fp8_experts(config: Any, expert_dtype: str, options: dict[str, Any]) -> Any:
    """Return transformers' module of quantised experts, as its own quantizer builds it.

    In 5.17 the module asks the configuration for the dtype, in 5.23 it takes it as an argument.
    """
    config.expert_dtype = expert_dtype
    if "expert_dtype" in inspect.signature(FP8Experts).parameters:
        options["expert_dtype"] = expert_dtype
    return _dispatched_experts()(config, **options)


@functools.cache
def _dispatched_experts() -> Any:
    """Return FP8Experts, wrapped once: each call wraps its `__init__` again, until a load recurses too deeply."""
    return use_experts_implementation(
        experts_class=FP8Experts, experts_interface=ALL_FP8_EXPERTS_FUNCTIONS, has_bias=False, has_gate=True
    )


def _format(weight: Stored | None, experts: bool) -> str:
    if weight is not None and weight.dtype == "F8_E4M3":
        return "e4m3"
    return "mxfp4" if experts and weight is not None and weight.dtype in _PACKED else "float"


def _packed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-1], shape[-1] // 2)


def _is_floating(name: str, tensor: Tensor) -> bool:
    """Return whether a tensor of the model is a weight that may have any floating dtype."""
    return tensor.is_floating_point() and tensor.itemsize > 1 and not name.endswith("_scale_inv")


def _allowed(name: str, tensor: Tensor, kind: str) -> tuple[str, ...]:
    """Return the dtypes that a parameter's stored tensors may have."""
    if kind != "float":
        return _PACKED if kind == "mxfp4" else ("F8_E4M3",)
    if name.endswith("_scale_inv"):
        return ("F32",) if tensor.dtype is torch.float32 else _SCALES["mxfp4"]
    if tensor.dtype is torch.int8:
        return _PACKED
    if tensor.dtype is torch.int64:
        return ("I64", "I32")
    return _FLOATS if _is_floating(name, tensor) else ("F8_E4M3",)
