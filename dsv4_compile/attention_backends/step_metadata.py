"""Metadata of all cache groups of a step from one launch and one split, for engines with persistent block tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..metadata import BatchSplit, MetadataBuffers
from ..sources import WINDOW_ONLY, Group
from .group_metadata import (
    DeepseekV4CompressorMetadata,
    DeepseekV4CompressorMetadataBuilder,
    DeepseekV4FlashMLAMetadata,
    DeepseekV4FlashMLAMetadataBuilder,
    DeepseekV4IndexerMetadata,
    DeepseekV4IndexerMetadataBuilder,
)
from .types import CommonAttentionMetadata, query_lens
from .v4 import DeepseekV4Metadata
from .window_metadata import DeepseekSparseSWAMetadata, window_metadata


@dataclass(frozen=True)
class DeepseekV4StepMetadata:
    """Metadata of one step for every kind of layer; groups that the model does not have are absent.

    Attributes:
        swa: of the window cache, for all layers. extra: of the extra caches, by compress ratio.
        indexers: of the indexers' caches, by compress ratio. states: of compressor states, by name of the group.
        split: decodes and prefills, the same for all groups.
    """

    swa: DeepseekSparseSWAMetadata
    extra: dict[int, DeepseekV4FlashMLAMetadata]
    indexers: dict[int, DeepseekV4IndexerMetadata]
    states: dict[str, DeepseekV4CompressorMetadata]
    split: BatchSplit

    def of(self, ratio: int) -> DeepseekV4Metadata:
        """Return the metadata of a layer of this compress ratio; 0 and 1 are window-only layers."""
        return DeepseekV4Metadata(self.swa, None if ratio in WINDOW_ONLY else self.extra[ratio])


class DeepseekV4StepBuilder:
    """Builds `DeepseekV4StepMetadata` as views of one `MetadataBuffers`.

    Args:
        buffers: buffers that hold the block tables of all groups; `load` or `advance` sets the batch.
        topk_tokens: entries that the indexer selects.
        decode_threshold: longest query that is a decode, 1 + the number of speculative tokens.
    """

    def __init__(self, buffers: MetadataBuffers, *, topk_tokens: int = 0, decode_threshold: int = 1) -> None:
        self.buffers, self.decode_threshold = buffers, decode_threshold
        tokens, groups = buffers.max_num_batched_tokens, buffers.plan.groups

        def options(group: Group) -> dict[str, Any]:
            return {"max_model_len": buffers.max_model_len, "ratio": group.ratio, "buffers": buffers}

        self.extra = {
            group.ratio: DeepseekV4FlashMLAMetadataBuilder(tokens, topk_tokens=topk_tokens, **options(group))
            for group in groups
            if group.role == "entries"
        }
        self.indexers = {
            group.ratio: DeepseekV4IndexerMetadataBuilder(tokens, **options(group))
            for group in groups
            if group.role == "keys"
        }
        self.states = {
            group.name: DeepseekV4CompressorMetadataBuilder(
                tokens, indexer=group.role == "key_states", **options(group)
            )
            for group in groups
            if group.role in ("states", "key_states")
        }

    def build(self, query_start_loc: Sequence[int], seq_lens: Sequence[int], num_tokens: int) -> DeepseekV4StepMetadata:
        """Refresh the buffers and return views of them.

        Args:
            query_start_loc, seq_lens: R + 1 and R host integers of the loaded batch; lengths may be upper bounds. They
                decide the split and the sizes of prefills, and no value of a decode.
            num_tokens: T, tokens with the padding of a captured graph.
        """
        starts, tensors = tuple(query_start_loc), self.buffers.tensors
        self.buffers.refresh(num_tokens)
        cms = {group: self._common(group, starts, seq_lens, num_tokens) for group in self.buffers.groups}
        split = cms["window"].split(self.decode_threshold)
        return DeepseekV4StepMetadata(
            swa=window_metadata(
                cms["window"],
                split,
                block_size=self.buffers.window_block_size,
                token_to_req=tensors["token_to_req"],
                is_valid_token=tensors["is_valid_token"],
                indices=tensors["window_indices"].unsqueeze(1),
                lens=tensors["window_lens"],
            ),
            extra={ratio: builder.view(cms[f"entries_{ratio}"], split) for ratio, builder in self.extra.items()},
            indexers={ratio: builder.view(cms[f"keys_{ratio}"], split) for ratio, builder in self.indexers.items()},
            states={group: builder.view(cms[group], split) for group, builder in self.states.items()},
            split=split,
        )

    def _common(
        self, group: str, starts: tuple[int, ...], seq_lens: Sequence[int], num_tokens: int
    ) -> CommonAttentionMetadata:
        requests, tensors = len(starts) - 1, self.buffers.tensors
        return CommonAttentionMetadata(
            query_start_loc=tensors["query_start_loc"][: requests + 1],
            query_start_loc_cpu=starts,
            seq_lens=tensors["seq_lens"][:requests],
            num_reqs=requests,
            num_actual_tokens=num_tokens,
            max_query_len=max(query_lens(starts), default=0),
            max_seq_len=max(seq_lens, default=0),
            block_table_tensor=tensors[f"{group}_block_table"][:requests],
            slot_mapping=tensors["window_slots"][:num_tokens],
            positions=tensors["positions"][:num_tokens],
        )
