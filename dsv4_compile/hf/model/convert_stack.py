"""Conversion of a decoder stack in place, that of a model or of its draft layers, and back.

A stack is a `DeepseekV4Model` of transformers in the attribute `model` of its root.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from ...cache import CacheFormat
from ...config import DeepseekV4Config
from ...errors import check
from ...loading import hf_name
from ...modules import DeepseekV4Attention
from ...modules.linear import Fp8Linear, Linear
from ...parallel import Ranks
from ...rope_tables import cos_sin_cache
from . import layers, split
from .causal_lm import CompilableAttention, CompilableForCausalLM, CompilableModel, CompilableNorm, hf
from .expected_modules import READ, READ_HEAD, check_layers, check_model, check_untied
from .layer_kinds import Repeated
from .redundant_guards import REPEATS, STATE, TENSORS
from .shared_weights import ReadSettings, SharedWeights, why_unreadable
from .weight_types import check_weights, embedding_weight

_COMPILABLE: dict[type, Any] = {
    hf.DeepseekV4Attention: CompilableAttention,
    hf.DeepseekV4Model: CompilableModel,
    hf.DeepseekV4RMSNorm: CompilableNorm,
    hf.DeepseekV4ForCausalLM: CompilableForCausalLM,
}
_ORIGINAL = {compilable: original for original, compilable in (_COMPILABLE | layers.SWAPS).items()}
_NOT_ADOPTED: Mapping[str, Any] = {
    "dsv4_snapshot": None,
    "dsv4_repeated": Repeated(),
    "dsv4_hooked": False,
    STATE: "",
    TENSORS: {},
    REPEATS: (),
}
"""Attributes of a decoder stack, as they are before its first call."""
_OF_LAYER = ("dsv4", "dsv4_weights", *layers.OWN_MATRICES)
"""Attributes that converted modules of layers have."""


def check_stack(stack: Any, config: DeepseekV4Config, *, attention_only: bool) -> None:
    """Raise E208 for a decoder stack whose modules or weights ops would misread."""
    check_layers(stack.layers, config)
    for i, layer in enumerate(stack.layers):
        _check_readable(f"layer {i}", layer.self_attn)
        if not attention_only:
            _check_readable(f"layer {i}", layer, READ)
    _check_readable("the model", stack, ("rotary_emb",) if attention_only else ("rotary_emb", *READ_HEAD))
    check_model(stack, config, attention_only=attention_only)
    check_untied(stack.layers, attention_only=attention_only)
    check_weights(stack, attention_only=attention_only)


def convert_stack(
    root: Any,
    config: DeepseekV4Config,
    cache_format: CacheFormat,
    max_seq_len: int,
    *,
    attention_only: bool = False,
    ranks: Ranks | None = None,
    expert_layout: str = "experts",
) -> None:
    """Give the modules of `root`, whose stack has passed `check_stack`, the classes and attributes that ops need.

    Args:
        root: a module with the stack in `model`, and with `config`.
        config: of the attention of this rank.
        max_seq_len: positions of RoPE tables.
        ranks: what this rank's part of the weights is summed over.
    """
    stack = root.model
    dtype = embedding_weight(stack).dtype
    shared = [_shared_weights(layer.self_attn, config, cache_format, dtype, max_seq_len) for layer in stack.layers]
    for layer, weights in zip(stack.layers, shared, strict=True):
        # In __dict__, so that nn.Module does not register the parameters a second time.
        layer.self_attn.__dict__.update(dsv4=weights.ours, dsv4_weights=weights)
    for weights in shared:
        weights.ours.ranks = ranks
    swaps = _COMPILABLE if attention_only else _COMPILABLE | layers.SWAPS
    _swap_classes(root, swaps if ranks is None else swaps | {hf.DeepseekV4ForCausalLM: split.SplitForCausalLM})
    for weights in shared:
        weights.watch()
    if ranks is not None:
        split.place_experts(root, ranks, expert_layout)
    read = None if attention_only else layers.ReadParts(stack)
    settings = ReadSettings(stack, config, attention_only=attention_only)
    stack.__dict__.update(dsv4_read=read, dsv4_settings=settings, **_NOT_ADOPTED)
    if read is not None:
        read.adopt()


def revert_stack(root: Any) -> None:
    """Undo `convert_stack`. Weights that were rows of one matrix are copied to separate memory."""
    for part in (root, *root.model.dsv4_settings.layers):  # also layers that were removed
        for module in part.modules():
            if isinstance(module, (CompilableAttention, layers.CompilableMoe)):
                module.release()
        _swap_classes(part, _ORIGINAL)
        for module in part.modules():
            for name in _OF_LAYER:
                vars(module).pop(name, None)
    for name in ("dsv4_read", "dsv4_settings", *_NOT_ADOPTED):
        del root.model.__dict__[name]


def _check_readable(name: str, source: nn.Module, paths: Collection[str] | None = None) -> None:
    """Raise E208 for a submodule that returns more than its weights say."""
    unreadable = why_unreadable(source, paths)
    check(
        not unreadable,
        "E208",
        got=f"{name} with {unreadable}",
        why="a converted model reads its weights and never calls it",
        fix="convert(..., merge_adapters=True) folds adapters in; remove hooks and parametrisations",
    )


def _swap_classes(model: nn.Module, swaps: dict[type, Any]) -> None:
    for module in model.modules():
        if type(module) in swaps:
            module.__class__ = swaps[type(module)]


def _shared_weights(
    source: Any, config: DeepseekV4Config, cache_format: CacheFormat, dtype: torch.dtype, max_seq_len: int
) -> SharedWeights:
    """Build a `DeepseekV4Attention` that shares the parameters of `source`, floating or e4m3 with scales."""
    ours = DeepseekV4Attention(
        config,
        source.layer_idx,
        cache_format=cache_format,
        fp8=True,
        dtype=dtype,
        device="meta",
        max_seq_len=max_seq_len,
    )
    for path, module in list(ours.named_modules()):
        if not isinstance(module, Fp8Linear):
            continue
        weight = source.get_parameter(hf_name(f"{path}.weight"))
        if weight.dtype is not torch.float8_e4m3fn:
            ours.set_submodule(path, Linear(*module.weight.shape, dtype=dtype, device="meta"))
    shared = SharedWeights(source, ours)
    ours.stack()
    ours.cos_sin = cos_sin_cache(config.rope(ours.ratio), max_seq_len, source.sinks.device)
    ours.eval()
    shared.settle()
    return shared
