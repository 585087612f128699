"""Adapters in the interface of PEFT: which modules have one, and how they are folded into weights.

A converted model reads the weights of most modules and never calls these, so an adapter there must be folded first.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ...errors import check, fail

_CALLED = ("lm_head", "model.embed_tokens")
"""Modules that a converted model calls."""
_ATTENTION = re.compile(r"model\.layers\.\d+(\.self_attn(\..*)?)?$")
"""Modules that `attention_only` replaces or reads."""
_WEIGHTS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_SCALES = "_scale_inv"
_FIX = "convert(..., merge_adapters=True) folds adapters in; remove hooks and parametrisations"


def is_adapter(module: nn.Module) -> bool:
    """Return whether `module` adds an adapter to, or replaces the weights of, a module that it holds."""
    return "base_layer" in module._modules or hasattr(type(module), "unload_and_optionally_merge_module")


def adapted(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost modules with adapters, by name."""
    inside = ""
    for name, module in model.named_modules():
        if (not inside or not name.startswith(inside)) and is_adapter(module):
            inside = f"{name}."
            yield name, module


def check_called(model: nn.Module, *, attention_only: bool, split: bool) -> None:
    """Raise E208 for an adapter, or parametrised weights, of a module that a converted `model` does not call."""
    outer = ""
    for name, module in model.named_modules():
        if outer and name.startswith(outer):
            continue
        what = "an adapter" if is_adapter(module) else ""
        if "parametrizations" in module._modules:
            what = "parametrised parameters"
        if not what:
            continue
        outer = f"{name}."
        called = name not in ("", "model") and not (_ATTENTION if attention_only else re.compile(r"model\.")).match(
            name
        )
        check(
            (called or name in _CALLED) and not split,
            "E208",
            got=f"{_described(name)}, a {type(module).__name__} with {what}",
            why="ranks keep parts of its weights"
            if split
            else "a converted model reads its weights and never calls it",
            fix=_FIX,
        )


@torch.no_grad()
def merge(model: Any) -> None:
    """Replace modules with adapters by modules whose weights compute the same, adapters as active as they are now.

    Disabled adapters are removed, those merged before stay, and `modules_to_save` take the place of the originals.

    Raises E208, with the name of the module, for adapters that no weights stand for. The model is then half merged.
    """
    held: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        held.setdefault(id(parameter), []).append(name)
    for name, module in list(adapted(model)):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PEFT's, of adapters that were merged before
                base = _folded(module, name, held)
        except (RuntimeError, ValueError, NotImplementedError, AttributeError, TypeError, KeyError) as fault:
            if getattr(fault, "code", None):
                raise
            _refuse(name, module, f"cannot be folded: {str(fault).partition(chr(10))[0]}")
        model.set_submodule(name, base)
    # What transformers and PEFT note of a model with adapters: save_pretrained would write the adapters alone.
    for attribute in ("peft_config", "_hf_peft_config_loaded"):
        vars(model).pop(attribute, None)


def _folded(module: Any, name: str, held: dict[int, list[str]]) -> nn.Module:
    """Return the module that stands for `module` with its adapters."""
    for submodule in module.modules():
        if submodule._forward_hooks or submodule._forward_pre_hooks or "forward" in vars(submodule):
            _refuse(name, module, f"has a {type(submodule).__name__} with forward hooks or a replaced forward")
    if "modules_to_save" in module._modules:
        known, active = module.modules_to_save, list(module.active_adapters)
        chosen = known[active[0]] if active and not module.disable_adapters and active[0] in known else None
        base: Any = module.original_module if chosen is None else chosen
        return _folded(base, name, held) if is_adapter(base) else base
    if "token_adapter" in module._modules:
        return _folded(module.token_adapter, name, held)
    layers = [module]
    while is_adapter(layers[-1].base_layer):
        layers.append(layers[-1].base_layer)
    for layer in reversed(layers):
        _fold(layer, name, held)
    folded: nn.Module = module.get_base_layer()
    return folded


def _fold(layer: Any, name: str, held: dict[int, list[str]]) -> None:
    """Change the weights of the base of one adapter as a call of `layer` would."""
    merged = bool(getattr(layer, "merged", False))
    if getattr(layer, "disable_adapters", False):
        if merged:
            layer.unmerge()
        return
    if merged or not getattr(layer, "active_adapters", True):
        return
    base = layer.get_base_layer()
    for leaf, parameter in base.named_parameters():
        if parameter.dtype not in _WEIGHTS and not leaf.endswith(_SCALES):
            _refuse(name, layer, f"would change {leaf} in {parameter.dtype}, which rounds its values away")
        others = [other for other in held.get(id(parameter), ()) if not other.startswith(f"{name}.")]
        if others:
            _refuse(name, layer, f"would change {others[0]} too, which is tied to it")
    layer.merge()


def _refuse(name: str, module: nn.Module, why: str) -> None:
    fail(
        "E208",
        got=f"{_described(name)}, a {type(module).__name__} with an adapter",
        why=f"the adapter {why}",
        fix="remove or disable it before convert; adapters of embed_tokens and lm_head work without merge_adapters",
    )


def _described(name: str) -> str:
    """Return the name of a module as errors say it."""
    layer = re.match(r"model\.layers\.(\d+)\.(.+)", name)
    return f"{layer[2]} of layer {layer[1]}" if layer else name.removeprefix("model.") or "the model"
