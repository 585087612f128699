"""vLLM's DeepSeek-V4 with this package's decoder layers: embedding, logits and the engine around them stay vLLM's."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ..._compat import device_architecture
from ...selection import proven
from . import _compat, model
from .layer_parts import Pending
from .layers import DecoderLayer
from .weights import LayerWeights, NamedTensors

OPS = ("mhc_pre", "mhc_boundary", "mhc_head", "moe_route", "moe_experts")
"""Ops of a layer around its attention."""


class WholeModel(model.DeepseekV4Model):
    """vLLM's model with `DecoderLayer` as layers and `mhc_head` at the end of its streams."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.layer_weights = LayerWeights(dict(enumerate(self.layers)))
        architecture = device_architecture(self.hc_head_fn.device)
        why = next(filter(None, (proven.why_unproven("triton", op, architecture) for op in OPS)), "")
        if why:
            _compat.log("experts, router and hyper-connections run in PyTorch: %s", why)

    @classmethod
    def replacing(cls) -> AbstractContextManager[None]:
        """Let vLLM build `DecoderLayer` inside the block."""
        return _compat.replaced(model.base, _compat.LAYER, DecoderLayer)

    def forward(
        self, input_ids: Tensor, positions: Tensor, intermediate_tensors: Any, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        """Return the normed hidden states `[T, hidden_size]` of the tokens `input_ids` `[T]`."""
        step = self.step(positions)
        hidden = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        streams = hidden.unsqueeze(1).expand(-1, self.hc_mult, -1).contiguous()
        pending: Pending | None = None
        for layer in self.layers:
            streams, pending = layer(streams, pending, step, input_ids)
        mix = self.hc_head_fn, self.hc_head_base, self.hc_head_scale, self.norm.weight, self.rms_norm_eps, self.hc_eps
        out: Tensor = torch.ops.dsv4.mhc_head(streams, *mix, *(pending or ()))
        return out

    def load_weights(self, weights: NamedTensors) -> set[str]:
        """Load a run of names; return those that vLLM's own loader has taken."""
        return super().load_weights(self.layer_weights.others(weights))

    def finish_weights(self) -> set[str]:
        """Return the names of the layers' parameters. E207 if a tensor did not come."""
        return super().finish_weights() | self.layer_weights.finish()

    def get_expert_mapping(self) -> list[Any]:
        """Return no names: vLLM's loader sees none of experts."""
        return []

    def finalize_mega_moe_weights(self) -> None:
        """Do nothing: vLLM's model for GPUs calls it for vLLM's experts."""


class DeepseekV4ForCausalLM(model.DeepseekV4ForCausalLM):
    """The class that vLLM's registry holds with `DSV4_VLLM=all`."""

    model_cls = WholeModel
