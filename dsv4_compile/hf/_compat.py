"""Private names of transformers: conversions of checkpoints that it writes and reads, and outputs that it records."""

from __future__ import annotations

import inspect
from typing import Any

import transformers
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming
from transformers.integrations.finegrained_fp8 import FP8Experts
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

_CONVERSIONS = "_weight_conversions"
"""Attribute of a model by which `save_pretrained` reverts what `from_pretrained` did."""
_SCALE = "_scale_inv"


def has_quantised_experts(model: Any) -> bool:
    """Return whether experts of a layer are e4m3 or MXFP4 with scales."""
    return any(isinstance(layer.mlp.experts, FP8Experts) for layer in model.model.layers)


def why_not_saved(model: Any, original_format: bool) -> str:
    """Return why transformers would not read what its `save_pretrained` writes of `model`, or ""."""
    if not has_quantised_experts(model):
        return ""
    if not _splits_scales():
        return f"transformers {transformers.__version__} loses scales of experts when it saves them one by one"
    return "" if original_format else "transformers dequantises scales of single experts, and drops those of all"


def _splits_scales() -> bool:
    """Return whether conversions of weights do not apply to scales: since then quantizers see the model."""
    return "model" in inspect.signature(FineGrainedFP8HfQuantizer.update_weight_conversions).parameters


def save_as_quantised(model: Any) -> None:
    """Let `save_pretrained` write scales of experts one by one, and name all scales as DeepSeek does.

    transformers learns both from the quantizer that loaded a model. Without one it would write weights of single
    experts and scales of all, and then not read these.
    """
    quantised = any(name.endswith(_SCALE) for name, _ in model.named_parameters())
    if not quantised or not _splits_scales() or getattr(model, _CONVERSIONS, None) is not None:
        return
    conversions: list[Any] = [WeightRenaming(source_patterns=r"^(.+)\.scale", target_patterns=rf"\1.weight{_SCALE}")]
    for conversion in get_model_conversion_mapping(model, add_legacy=False):
        conversions.append(conversion)
        if isinstance(conversion, WeightConverter):
            scales = WeightConverter(
                source_patterns=[f"{source}{_SCALE}" for source in conversion._original_source_patterns],
                target_patterns=[f"{target}{_SCALE}" for target in conversion._original_target_patterns],
                operations=list(conversion.operations),
            )
            conversions.append(scales)
    setattr(model, _CONVERSIONS, conversions)


def register_recorded_outputs(model: Any) -> None:
    """Let transformers record hidden states and router logits of `model`, a class that it did not construct."""
    from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

    # Older versions have a plain dict there, which does not name the class of its keys itself.
    registry: Any = _CAN_RECORD_REGISTRY
    registry[str(type(model)) if type(registry) is dict else model] = model._can_record_outputs


def record_outputs(model: Any) -> None:
    """Install the hooks that record hidden states and router logits, which a compiled forward cannot do itself."""
    from transformers.utils.output_capturing import maybe_install_capturing_hooks

    maybe_install_capturing_hooks(model)
