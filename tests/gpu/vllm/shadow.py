"""vLLM's own attention with the plug-in's next to it: on the same hidden states, on separate caches in vLLM.

The rows of vLLM's go on to the next layer, so every layer compares what both make of the same input, and errors do not
add up over layers. Eager alone: errors are kept in Python.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from recording import ModelWith
from torch import Tensor

from dsv4_compile.integrations.vllm import _compat
from dsv4_compile.integrations.vllm import model as plugin
from dsv4_compile.integrations.vllm.attention import Attention

_CHOSEN = getattr(plugin.base, _compat.model_file().attention)
"""vLLM's attention, or the function that returns it, before the plug-in replaces the global."""


class ShadowAttention(Attention):
    """The plug-in's attention next to vLLM's; returns the rows of vLLM's. `errors` fills once `recording` is set."""

    recording = False

    def __init__(self, vllm_config: Any, prefix: str, **kwargs: Any) -> None:
        super().__init__(vllm_config, f"{prefix}.shadow")
        hf = vllm_config.model_config.hf_config
        ropes = {name: copy.deepcopy(getattr(hf, name)) for name in ("rope_parameters", "rope_scaling")}
        cls = _CHOSEN(vllm_config) if _compat.model_file().selects else _CHOSEN
        self.attn = cls(vllm_config, prefix=prefix, **kwargs)
        for name, value in ropes.items():  # vLLM's attention changes them in place
            setattr(hf, name, value)
        self.errors: list[tuple[Tensor, Tensor]] = []

    def forward(self, step: Any, hidden: Tensor, _: Any = None) -> Tensor:
        if self.metadata_set is None:
            super().forward(step, hidden)
            return self.attn(step, hidden)
        metadata = step.metadata[self.metadata_set]
        theirs = self.attn(metadata.positions, hidden)
        ours = super().forward(step, hidden).float()
        if type(self).recording:
            error = (ours - theirs.float()).norm(dim=-1) / theirs.float().norm(dim=-1).clamp_min(1e-6)
            valid = metadata.is_valid_token
            self.errors.append((metadata.positions[valid].cpu(), error[valid].nan_to_num(torch.inf).cpu()))
        return theirs


class ShadowModel(ModelWith):
    """The plug-in's model with both attentions; each gets its weights."""

    attention_class = ShadowAttention

    def load_weights(self, weights: Any) -> set[str]:
        def both() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                if ".attn." in name:
                    yield name.replace(".attn.", ".attn.attn.", 1), tensor
                yield from self.weights.others([(name, tensor)])

        return set(super(plugin.DeepseekV4Model, self).load_weights(both()))


class ShadowForCausalLM(plugin.DeepseekV4ForCausalLM):
    """The class that is registered in the place of the plug-in's."""

    model_cls = ShadowModel
