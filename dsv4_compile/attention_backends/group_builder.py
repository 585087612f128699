"""What the metadata builders of single cache groups share: a group's persistent buffers, their refill, and the split.

An engine calls the builder of each of its cache groups with that group's block table and slots. All of them split the
batch by one threshold, so that their decodes line up, and fill buffers that are declared in `metadata.BUFFERS`: give
them one `MetadataBuffers` and they share its memory. Where the block tables of all groups are in persistent buffers,
`step.DeepseekV4StepBuilder` fills those of all groups in one launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

import torch

from .. import ops  # noqa: F401  (registers torch.ops.dsv4)
from ..errors import check
from ..layout import WINDOW_BLOCK
from ..metadata import BatchSplit, MetadataBuffers, plan_buffers
from ..ops.batch_metadata import GROUPS, TOKENS
from .common import CommonAttentionMetadata
from .facts import CudaGraphSupport

Builder = TypeVar("Builder", bound="GroupBuilder")


class GroupBuilder:
    """What the builders share: a group's buffers, their refill, and the split.

    Args:
        max_num_batched_tokens: most tokens of a step, padding included.
        max_model_len: longest sequence. Block tables stay where the engine has them.
        ratio: compress ratio of the layers that this group of caches belongs to.
        decode_threshold: longest query that is a decode, 1 + the number of speculative tokens; the same for all groups.
        buffers: memory to share, allocated for as many tokens and as long sequences; None allocates what is needed.
    """

    cudagraph_support: ClassVar[CudaGraphSupport] = CudaGraphSupport.UNIFORM_BATCH
    outputs: ClassVar[tuple[str, ...]] = ()
    """Buffers beside those that come with the block table."""

    def __init__(
        self,
        max_num_batched_tokens: int,
        *,
        max_model_len: int,
        ratio: int,
        decode_threshold: int = 1,
        buffers: MetadataBuffers | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.max_model_len, self.ratio, self.reorder_batch_threshold = max_model_len, ratio, decode_threshold
        self.groups = self._groups()
        if buffers is not None:
            fits = (max_num_batched_tokens, max_model_len) == (buffers.max_num_batched_tokens, buffers.max_model_len)
            check(
                fits,
                "E204",
                got=f"a builder for {max_num_batched_tokens} tokens and sequences of {max_model_len}, buffers for "
                f"{buffers.max_num_batched_tokens} and {buffers.max_model_len}",
                fix="give both the same capacities",
            )
            self.tensors = buffers.tensors
            return
        plan = plan_buffers(
            max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=1, max_model_len=max_model_len, ratios=(ratio,)
        )
        self.tensors = plan.allocate(self._names(), device)

    @classmethod
    def from_engine(
        cls: type[Builder],
        kv_cache_spec: Any,
        layer_names: Sequence[str],
        engine_config: Any,
        device: torch.device | str | None,
    ) -> Builder:
        """The builder of a group of layers, from what vLLM-like engines construct builders with.

        Args:
            kv_cache_spec: of the group: `compress_ratio`, and `block_size` for main caches.
            layer_names: of the group; not needed.
            engine_config: `scheduler_config.max_num_batched_tokens`, `model_config.max_model_len`,
                `model_config.hf_config.index_topk`, and `speculative_config.num_speculative_tokens` if there is one.
        """
        drafts = getattr(engine_config, "speculative_config", None)
        return cls(
            engine_config.scheduler_config.max_num_batched_tokens,
            max_model_len=engine_config.model_config.max_model_len,
            ratio=kv_cache_spec.compress_ratio,
            decode_threshold=1 + (0 if drafts is None else drafts.num_speculative_tokens),
            device=device,
            **cls._engine_options(kv_cache_spec, engine_config),
        )

    @classmethod
    def _engine_options(cls, kv_cache_spec: Any, engine_config: Any) -> dict[str, Any]:
        """Arguments that one kind of builder has beside those of all."""
        return {}

    def _groups(self) -> tuple[str, ...]:
        """Groups of `ops.batch_metadata` that one call fills for this cache."""
        raise AssertionError("a builder names its groups")

    def _names(self) -> tuple[str, ...]:
        """The buffers of this group."""
        return (*TOKENS, *(name for group in self.groups for name in GROUPS[group]), *self.outputs)

    def _refill(self, cm: CommonAttentionMetadata) -> BatchSplit:
        """Rewrite every row of this group's buffers and return the split."""
        torch.ops.dsv4.batch_metadata(
            cm.query_start_loc,
            cm.seq_lens,
            cm.slot_mapping,
            *(cm.block_table_tensor if group in self.groups else None for group in GROUPS),
            WINDOW_BLOCK,
            **{name: self.tensors[name] for name in self._names()},
        )
        return cm.split(self.reorder_batch_threshold)
