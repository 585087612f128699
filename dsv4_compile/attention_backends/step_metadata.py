"""Metadata of all cache groups of a step from one launch and one split, for engines with persistent block tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..layout import CSA_RATIO, HCA_RATIO
from ..metadata import BatchSplit, MetadataBuffers
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
        indexer: of the indexer's cache. states: of compressor states, by group: c4_state, indexer_state, c128_state.
        split: decodes and prefills, the same for all groups.
    """

    swa: DeepseekSparseSWAMetadata
    extra: dict[int, DeepseekV4FlashMLAMetadata]
    indexer: DeepseekV4IndexerMetadata | None
    states: dict[str, DeepseekV4CompressorMetadata]
    split: BatchSplit

    def of(self, ratio: int) -> DeepseekV4Metadata:
        """Return the metadata of a layer of this compress ratio; 0 and 1 are window-only layers."""
        return DeepseekV4Metadata(self.swa, self.extra[ratio] if ratio > 1 else None)


class DeepseekV4StepBuilder:
    """Builds `DeepseekV4StepMetadata` as views of one `MetadataBuffers`.

    Args:
        buffers: buffers that hold the block tables of all groups; `load` or `advance` sets the batch.
        topk_tokens: entries that the indexer selects.
        decode_threshold: longest query that is a decode, 1 + the number of speculative tokens.
    """

    def __init__(self, buffers: MetadataBuffers, *, topk_tokens: int = 0, decode_threshold: int = 1) -> None:
        self.buffers, self.decode_threshold = buffers, decode_threshold
        ratios = [ratio for ratio in (CSA_RATIO, HCA_RATIO) if f"c{ratio}" in buffers.groups]

        def options(ratio: int) -> dict[str, Any]:
            return {"max_model_len": buffers.max_model_len, "ratio": ratio, "buffers": buffers}

        tokens = buffers.max_num_batched_tokens
        self.extra = {
            ratio: DeepseekV4FlashMLAMetadataBuilder(tokens, topk_tokens=topk_tokens, **options(ratio))
            for ratio in ratios
        }
        self.indexer = DeepseekV4IndexerMetadataBuilder(tokens, **options(CSA_RATIO)) if CSA_RATIO in ratios else None
        self.states = {
            group: DeepseekV4CompressorMetadataBuilder(
                tokens,
                indexer=group == "indexer_state",
                **options(HCA_RATIO if group == "c128_state" else CSA_RATIO),
            )
            for group in buffers.groups
            if group.endswith("state")
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
            extra={ratio: builder.view(cms[f"c{ratio}"], split) for ratio, builder in self.extra.items()},
            indexer=None if self.indexer is None else self.indexer.view(cms["indexer"], split),
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
