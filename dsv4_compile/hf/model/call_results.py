"""Results of a call: they have the caller's cache, and their backward raises."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import fail
from .cache import CACHE_NAME

RECORDED = ("output_hidden_states", "output_router_logits")
"""Arguments that ask for results of modules inside the model."""


def with_cache(result: Any, held: Any, returned: Any) -> Any:
    """Return `result`, a model output or a tuple, with `returned` in place of the cache."""
    if isinstance(result, tuple):
        return tuple(returned if item is held else item for item in result if item is not held or returned is not None)
    result[CACHE_NAME] = returned
    return result


class _InferenceOnly(torch.autograd.Function):
    """The identity, whose backward raises E206."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, anchor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        fail("E206", got="backward() through a converted model", fix="revert the model to train it")


def inference_only(result: Any) -> Any:
    """Let a backward through the floating tensors of `result` raise E206, if gradients are enabled."""
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return result
    anchor = torch.empty(0, requires_grad=True)

    def mark(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(mark(item) for item in value)
        wants = isinstance(value, Tensor) and value.is_floating_point() and not value.is_inference()
        return _InferenceOnly.apply(value, anchor) if wants else value

    if isinstance(result, tuple):
        return mark(result)
    for name, value in result.items():
        result[name] = mark(value)
    return result
