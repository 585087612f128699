"""One attention layer of this package in the place of vLLM's: the same caches and block tables, no code of vLLM."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ...cache import LayerCache, SourceCache
from ...config import DeepseekV4Config
from ...modules import DeepseekV4Attention
from ...parallel import attention_config
from . import _compat
from .caches import CacheOwner
from .geometry import cache_kinds
from .step import Step, StepBuffers
from .tensor_parallel import add_up, ranks_here


class Attention(nn.Module):
    """`DeepseekV4Attention` on caches that vLLM owns.

    Args:
        vllm_config: configuration of the engine.
        prefix: the layer's name, which contains its index.

    vLLM's decoder layer builds it and calls it. `owners` are its caches; `metadata_set` is the layer's number in
    `Step.metadata`, None until every cache is bound. `layer` has the heads of this rank among `ranks`, or all of them.
    """

    def __init__(self, vllm_config: Any, prefix: str, topk_indices_buffer: Tensor | None = None, **_: Any) -> None:
        super().__init__()
        hf, index = vllm_config.model_config.hf_config, _compat.extract_layer_index(prefix)
        config, fp8 = DeepseekV4Config.from_hf(hf), getattr(hf, "quantization_config", None) is not None
        self.ranks = ranks_here()
        self.layer = DeepseekV4Attention(
            config if self.ranks is None else attention_config(config, self.ranks, fp8=fp8),
            index,
            kv_cache_dtype="fp8_ds_mla",
            fp8=fp8,
            dtype=vllm_config.model_config.dtype,
            max_seq_len=vllm_config.model_config.max_model_len,
        )
        buffers = step_buffers(vllm_config, config)
        self.owners = [
            CacheOwner(kind, f"{prefix}.{kind.name}_cache", buffers, vllm_config) for kind in cache_kinds(config, index)
        ]
        self.caches = nn.ModuleList(self.owners)
        self.metadata_set: int | None = None

    @property
    def ready(self) -> bool:
        """Whether vLLM has bound and grouped every cache of the layer."""
        return all(owner.ready for owner in self.owners)

    def tables(self) -> dict[str, int]:
        """Return the number of the block table of each group of the layer."""
        return {owner.kind.group: owner.table for owner in self.owners if owner.table is not None}

    def forward(self, step: Step | Tensor, hidden: Tensor, _: Any = None) -> Tensor:
        """Attend `hidden` `[T, hidden_size]`, with the `Step` that travels as positions.

        vLLM's profiling run comes before the caches, and passes positions: it runs every GEMM and no attention.
        """
        if self.metadata_set is None:
            return self.layer.dummy_run(hidden)
        assert isinstance(step, Step)
        pages: dict[str, Any] = {owner.kind.name: owner.pages for owner in self.owners}
        cache = LayerCache(pages.pop("window"), (SourceCache(**pages),) if pages else ())
        return add_up(self.layer(hidden, step.metadata[self.metadata_set], cache), self.ranks)


def step_buffers(vllm_config: Any, config: DeepseekV4Config) -> StepBuffers:
    """Return the buffers of the model that is being built: those of its first owner, or new ones."""
    owners = vllm_config.compilation_config.static_forward_context.values()
    owner_with_buffers = next((owner for owner in owners if isinstance(owner, CacheOwner)), None)
    if owner_with_buffers is not None:
        return owner_with_buffers.step_buffers
    scheduler = vllm_config.scheduler_config
    return StepBuffers(
        config.sliding_window,
        scheduler.max_num_seqs,
        scheduler.max_num_batched_tokens,
        vllm_config.model_config.max_model_len,
    )
