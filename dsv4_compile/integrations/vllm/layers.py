"""A decoder layer of ops of this package alone: hyper-connections, norms, attention, router and experts."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import _compat
from .attention import Attention
from .layer_parts import LayerParts, Pending
from .step import Step
from .tensor_parallel import add_up, ranks_here


class DecoderLayer(LayerParts):
    """One layer in the place of vLLM's, with the arguments that vLLM's model builds its layers from.

    Args:
        vllm_config: configuration of the engine.
        prefix: the layer's name, which contains its index.
    """

    def __init__(self, vllm_config: Any, prefix: str, **_: Any) -> None:
        model, ranks = vllm_config.model_config, ranks_here()
        whole_experts = vllm_config.parallel_config.enable_expert_parallel
        super().__init__(model.hf_config, _compat.extract_layer_index(prefix), model.dtype, ranks, whole_experts)
        self.attn = Attention(vllm_config, prefix=f"{prefix}.attn")

    def forward(
        self, streams: Tensor, pending: Pending | None, step: Step | Tensor, token_ids: Tensor
    ) -> tuple[Tensor, Pending]:
        """Run the layer.

        Args:
            streams: `[T, N, D]`, without what is `pending` of the layer before, None for the first layer.
            step: what `Attention.forward` takes. token_ids: `[T]`.
        Returns:
            The streams, and the pending output of the experts.
        """
        streams, y, post, comb = self.hc_attn(streams, pending)
        streams, y, post, comb = self.hc_ffn(streams, (self.attn(step, y), post, comb))
        return streams, (add_up(self.ffn(y, token_ids), self.ffn.ranks), post, comb)
