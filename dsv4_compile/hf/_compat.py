"""Private names: conversions of checkpoints, recorded outputs, what `generate` prepares; and default devices."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import transformers
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.integrations.finegrained_fp8 import FP8Experts
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from .._compat import default_device, function_modes

_SAMPLING = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper)
"""Warpers of logits that ops of this package stand for, in the order of `generate`."""

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


def sampling_of(processors: Any) -> tuple[float, float, float, float] | None:
    """Return temperature, top-k, top-p and 0 that a list of warpers of logits stands for, None if it does more."""
    kinds = [type(processor) for processor in processors]
    if any(kind not in _SAMPLING for kind in kinds) or kinds != [kind for kind in _SAMPLING if kind in kinds]:
        return None
    if any(getattr(processor, "filter_value", -math.inf) != -math.inf for processor in processors):
        return None
    by_kind = dict(zip(kinds, processors, strict=True))
    if getattr(by_kind.get(TopPLogitsWarper), "min_tokens_to_keep", 1) != 1:
        return None
    temperature = getattr(by_kind.get(TemperatureLogitsWarper), "temperature", 1.0)
    top_k = getattr(by_kind.get(TopKLogitsWarper), "top_k", 0)
    return float(temperature), float(top_k), float(getattr(by_kind.get(TopPLogitsWarper), "top_p", 1.0)), 0.0


def mask_columns(config: Any, mask: Any, input_ids: Any) -> int:
    """Return the columns of the attention mask of a prompt, which has those of earlier calls too.

    `generate` drops a mask of ones, and notes its width.
    """
    width: int = getattr(config, "_mask_length", input_ids.shape[1]) if mask is None else mask.shape[1]
    return width


def padding_of(config: Any, criteria: Any) -> int | None:
    """Return the token that rows get after their end, None where they go on until all rows have ended."""
    ends = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
    return int(config._pad_token_tensor) if ends else None


has_function_modes: Callable[[], int] = function_modes._len_torch_function_stack
"""Function that returns how many modes of torch functions this thread is in, default devices among them."""


@contextmanager
def without_default_device() -> Iterator[None]:
    """Leave `with torch.device(...)` and `torch.set_default_device` inside the block: Dynamo guards both."""
    stack = list(function_modes._get_current_function_mode_stack())
    current = default_device.CURRENT_DEVICE
    _set_modes([mode for mode in stack if not isinstance(mode, default_device.DeviceContext)])
    default_device.CURRENT_DEVICE = None
    try:
        yield
    finally:
        _set_modes(stack)
        default_device.CURRENT_DEVICE = current


def _set_modes(modes: list[Any]) -> None:
    for _ in function_modes._get_current_function_mode_stack():
        function_modes._pop_mode()
    for mode in modes:
        function_modes._push_mode(mode)
