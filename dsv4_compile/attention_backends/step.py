"""Metadata of all cache groups of a step from one launch and one split, for engines with persistent block tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..layout import CSA_RATIO, HCA_RATIO
from ..metadata import BatchSplit, MetadataBuffers
from .common import CommonAttentionMetadata
from .flashmla_metadata import DeepseekV4FlashMLAMetadata, DeepseekV4FlashMLAMetadataBuilder
from .indexer_metadata import (
    DeepseekV4CompressorMetadata,
    DeepseekV4CompressorMetadataBuilder,
    DeepseekV4IndexerMetadata,
    DeepseekV4IndexerMetadataBuilder,
)
from .swa import DeepseekSparseSWAMetadata
from .v4 import DeepseekV4Metadata


@dataclass(frozen=True)
class DeepseekV4Step:
    """What the layers of every kind get in one step; groups that the model has not are absent.

    Attributes:
        swa: the window's metadata, of all layers. main: that of the main caches, by compress ratio.
        indexer: that of the indexer's cache. states: that of the states, by group: c4_state, indexer_state, c128_state.
        split: decodes and prefills, the same for all.
    """

    swa: DeepseekSparseSWAMetadata
    main: dict[int, DeepseekV4FlashMLAMetadata]
    indexer: DeepseekV4IndexerMetadata | None
    states: dict[str, DeepseekV4CompressorMetadata]
    split: BatchSplit

    def of(self, ratio: int) -> DeepseekV4Metadata:
        """What a layer of this compress ratio takes; 0 and 1 are window-only layers."""
        return DeepseekV4Metadata(self.swa, self.main[ratio] if ratio > 1 else None)


class DeepseekV4StepBuilder:
    """Views of one `MetadataBuffers` in the shapes of the builders of single groups.

    Args:
        buffers: with the block tables of all groups in them; `load` or `advance` says what the batch is.
        topk_tokens: entries that the indexer selects.
        decode_threshold: longest query that is a decode, 1 + the number of speculative tokens.
    """

    def __init__(self, buffers: MetadataBuffers, *, topk_tokens: int = 0, decode_threshold: int = 1) -> None:
        self.buffers, self.decode_threshold = buffers, decode_threshold
        ratios = [ratio for ratio in (CSA_RATIO, HCA_RATIO) if f"c{ratio}" in buffers.groups]

        def options(ratio: int) -> dict[str, Any]:
            return {"max_model_len": buffers.max_model_len, "ratio": ratio, "buffers": buffers}

        tokens = buffers.max_num_batched_tokens
        self.main = {
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

    def build(self, query_start_loc: Sequence[int], seq_lens: Sequence[int], num_tokens: int) -> DeepseekV4Step:
        """Refresh the buffers and show them.

        Args:
            query_start_loc: R + 1 host integers, seq_lens: R host integers or upper bounds of the lengths: the batch
                that was loaded. They decide the split and sizes of prefills, and no value of a decode.
            num_tokens: T, tokens with the padding of a captured graph.
        """
        starts = tuple(query_start_loc)
        self.buffers.refresh(num_tokens)
        cms = {group: self._common(group, starts, seq_lens, num_tokens) for group in self.buffers.groups}
        split = cms["window"].split(self.decode_threshold)
        return DeepseekV4Step(
            swa=self._window(cms["window"], split),
            main={ratio: builder.view(cms[f"c{ratio}"], split) for ratio, builder in self.main.items()},
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
            max_query_len=max((end - start for start, end in pairwise(starts)), default=0),
            max_seq_len=max(seq_lens, default=0),
            block_table_tensor=tensors[f"{group}_block_table"][:requests],
            slot_mapping=tensors["window_slots"][:num_tokens],
            positions=tensors["positions"][:num_tokens],
        )

    def _window(self, cm: CommonAttentionMetadata, split: BatchSplit) -> DeepseekSparseSWAMetadata:
        tensors, tokens = self.buffers.tensors, slice(0, cm.num_actual_tokens)
        decodes = slice(0, split.num_decode_tokens)
        indices: Tensor = tensors["window_indices"]
        lens = [end - start for start, end in pairwise(cm.query_start_loc_cpu)]
        return DeepseekSparseSWAMetadata(
            block_table=cm.block_table_tensor,
            slot_mapping=cm.slot_mapping,
            block_size=self.buffers.window_block_size,
            seq_lens=cm.seq_lens,
            query_start_loc=cm.query_start_loc,
            query_start_loc_cpu=cm.query_start_loc_cpu,
            token_to_req_indices=tensors["token_to_req"][tokens],
            is_valid_token=tensors["is_valid_token"][tokens],
            decode_swa_indices=indices[decodes].unsqueeze(1),
            decode_swa_lens=tensors["window_lens"][decodes],
            prefill_seq_lens=cm.seq_lens[split.num_decodes :],
            prefill_gather_lens=torch.ops.dsv4.prefill_gather_lens(
                cm.query_start_loc, cm.seq_lens, split.num_decodes, indices.shape[1]
            ),
            max_decode_query_len=max(lens[: split.num_decodes], default=0),
            max_prefill_query_len=max(lens[split.num_decodes :], default=0),
            **split._asdict(),
        )
