"""Metadata of the indexer's cache and of compressor states, and their builders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..layout import cdiv, state_block_size
from ..metadata import BatchSplit
from .common import CommonAttentionMetadata
from .group_builder import GroupBuilder


@dataclass(frozen=True)
class DeepseekV4IndexerMetadata:
    """A batch as the indexer's cache sees it.

    Attributes:
        block_table: int32 `[R, B]`; slot_mapping: int64 `[T]`, slot of the key that a token completes, else -1.
        req_id_per_token: int32 `[T]`; is_valid_token: bool `[T]`.
        context_lens: int32 `[T]`, keys that each token may score: `(position + 1) // 4`, 0 for padding.
        max_context: bound of `context_lens` that follows from max_model_len, so that no shape depends on a batch.
        num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens: the split that all groups share.
    """

    block_table: Tensor
    slot_mapping: Tensor
    req_id_per_token: Tensor
    is_valid_token: Tensor
    context_lens: Tensor
    max_context: int
    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int


@dataclass(frozen=True)
class DeepseekV4CompressorMetadata:
    """A batch as the cache of compressor states sees it.

    Attributes:
        block_table: int32 `[R, B]`, entries of `block_size` tokens. slot_mapping: int64 `[T]`, where the state of each
            token goes, -1 for padding. req_id_per_token: int32 `[T]`.
    """

    block_table: Tensor
    slot_mapping: Tensor
    req_id_per_token: Tensor
    block_size: int


class DeepseekV4IndexerMetadataBuilder(GroupBuilder):
    """Builds `DeepseekV4IndexerMetadata`. See `GroupBuilder` for arguments; `ratio` is 4."""

    outputs = ("c4_context_lens",)

    def _groups(self) -> tuple[str, ...]:
        return ("indexer",)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> DeepseekV4IndexerMetadata:
        """Metadata of a batch; see `DeepseekV4FlashMLAMetadataBuilder.build`."""
        return self.view(common_attn_metadata, self._refill(common_attn_metadata))

    def view(self, cm: CommonAttentionMetadata, split: BatchSplit) -> DeepseekV4IndexerMetadata:
        """The metadata as views of buffers that have been filled for this batch."""
        tokens = slice(0, cm.num_actual_tokens)
        return DeepseekV4IndexerMetadata(
            block_table=cm.block_table_tensor,
            slot_mapping=self.tensors["indexer_slots"][tokens],
            req_id_per_token=self.tensors["token_to_req"][tokens],
            is_valid_token=self.tensors["is_valid_token"][tokens],
            context_lens=self.tensors["c4_context_lens"][tokens],
            max_context=cdiv(self.max_model_len, self.ratio),
            **split._asdict(),
        )


class DeepseekV4CompressorMetadataBuilder(GroupBuilder):
    """Builds `DeepseekV4CompressorMetadata` for the states of the compressor of ratio 4 or 128, or of the indexer's.

    See `GroupBuilder` for arguments.

    Args:
        indexer: whether the states are those of the indexer's compressor.
    """

    def __init__(self, max_num_batched_tokens: int, *, indexer: bool = False, **options: Any) -> None:
        self.indexer = indexer
        super().__init__(max_num_batched_tokens, **options)

    def _groups(self) -> tuple[str, ...]:
        return ("indexer_state" if self.indexer else f"c{self.ratio}_state",)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> DeepseekV4CompressorMetadata:
        """Metadata of a batch; see `DeepseekV4FlashMLAMetadataBuilder.build`."""
        return self.view(common_attn_metadata, self._refill(common_attn_metadata))

    def view(self, cm: CommonAttentionMetadata, split: BatchSplit) -> DeepseekV4CompressorMetadata:
        """The metadata as views of buffers that have been filled for this batch."""
        tokens = slice(0, cm.num_actual_tokens)
        return DeepseekV4CompressorMetadata(
            block_table=cm.block_table_tensor,
            slot_mapping=self.tensors[f"{self.groups[0]}_slots"][tokens],
            req_id_per_token=self.tensors["token_to_req"][tokens],
            block_size=state_block_size(self.ratio),
        )
