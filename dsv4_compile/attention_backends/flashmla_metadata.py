"""Metadata of the main caches for FLASHMLA_SPARSE_DSV4, and its builder.

A build is one launch, two where a batch with prefills has layers of ratio 128.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import check
from ..layout import HCA_RATIO, KV_BLOCK, PAD_INDEX
from ..metadata import BatchSplit, MetadataBuffers
from .common import CommonAttentionMetadata
from .group_builder import GroupBuilder


@dataclass(frozen=True)
class DeepseekV4FlashMLAMetadata:
    """A batch as the main cache of one compress ratio sees it; tensors are views of the builder's buffers.

    Attributes:
        num_reqs, max_query_len, max_seq_len, num_actual_tokens: of the batch.
        query_start_loc: int32 `[R + 1]`. block_table: int32 `[R, B]`, entries of `block_size` tokens each.
        slot_mapping: int64 `[T]`, slot of the compressed entry that a token completes, else -1; of a window-only
            layer the raw slots.
        req_id_per_token: int32 `[T]`, 0 for padding. topk_tokens: entries that the indexer selects, K.
        c128a_global_decode_topk_indices: int32 `[Td, 1, C]`, slots of all visible entries of the decodes' tokens;
            c128a_decode_topk_lens: int32 `[Td]`; c128a_prefill_topk_indices: int32 `[Tp, C]`, indices within the
            request. Ratio 128 only; None for a part that has no tokens.
        num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens: the split that all groups share.
    """

    num_reqs: int
    max_query_len: int
    max_seq_len: int
    num_actual_tokens: int
    query_start_loc: Tensor
    slot_mapping: Tensor
    block_table: Tensor
    req_id_per_token: Tensor
    block_size: int = KV_BLOCK
    topk_tokens: int = 0
    c128a_global_decode_topk_indices: Tensor | None = None
    c128a_decode_topk_lens: Tensor | None = None
    c128a_prefill_topk_indices: Tensor | None = None
    num_decodes: int = 0
    num_prefills: int = 0
    num_decode_tokens: int = 0
    num_prefill_tokens: int = 0


class DeepseekV4FlashMLAMetadataBuilder(GroupBuilder):
    """Builds `DeepseekV4FlashMLAMetadata` for the main caches of ratio 1, 4 or 128. See `GroupBuilder` for arguments.

    Args:
        topk_tokens: entries that the indexer selects. block_size: tokens that a block table entry covers.
    """

    def __init__(
        self,
        max_num_batched_tokens: int,
        *,
        max_model_len: int,
        ratio: int = 1,
        topk_tokens: int = 0,
        block_size: int = KV_BLOCK,
        decode_threshold: int = 1,
        buffers: MetadataBuffers | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        check(
            ratio <= 1 or block_size == KV_BLOCK,
            "E205",
            got=f"block_size={block_size} of a compressed cache",
            fix=f"pages of compressed caches cover {KV_BLOCK} tokens",
        )
        super().__init__(
            max_num_batched_tokens,
            max_model_len=max_model_len,
            ratio=ratio,
            decode_threshold=decode_threshold,
            buffers=buffers,
            device=device,
        )
        self.topk_tokens, self.block_size = topk_tokens, block_size
        self.prefill_rows: Tensor | None = None
        if ratio == HCA_RATIO:
            self.prefill_rows = torch.full_like(self.tensors["c128_indices"], PAD_INDEX)

    @classmethod
    def _engine_options(cls, kv_cache_spec: Any, engine_config: Any) -> dict[str, Any]:
        topk_tokens = engine_config.model_config.hf_config.index_topk
        return {"topk_tokens": topk_tokens, "block_size": kv_cache_spec.block_size}

    def _groups(self) -> tuple[str, ...]:
        return (f"c{self.ratio}",) if self.ratio > 1 else ()

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> DeepseekV4FlashMLAMetadata:
        """Metadata of a batch. The first and the last argument change nothing; engines pass them to every builder."""
        cm = common_attn_metadata
        return self.view(cm, self._refill(cm))

    def view(self, cm: CommonAttentionMetadata, split: BatchSplit) -> DeepseekV4FlashMLAMetadata:
        """The metadata as views of buffers that have been filled for this batch."""
        tokens = cm.num_actual_tokens
        decode, lens, prefill = None, None, None
        if self.prefill_rows is not None:
            prefill = self._prefill_rows(cm, split) if split.num_prefill_tokens else None
            if split.num_decode_tokens:
                decode = self.tensors["c128_indices"][: split.num_decode_tokens].unsqueeze(1)
                lens = self.tensors["c128_lens"][: split.num_decode_tokens]
        return DeepseekV4FlashMLAMetadata(
            num_reqs=cm.num_reqs,
            max_query_len=cm.max_query_len,
            max_seq_len=cm.max_seq_len,
            num_actual_tokens=tokens,
            query_start_loc=cm.query_start_loc,
            slot_mapping=self.tensors[f"c{self.ratio}_slots"][:tokens] if self.ratio > 1 else cm.slot_mapping,
            block_table=cm.block_table_tensor,
            req_id_per_token=self.tensors["token_to_req"][:tokens],
            block_size=self.block_size,
            topk_tokens=self.topk_tokens,
            c128a_global_decode_topk_indices=decode,
            c128a_decode_topk_lens=lens,
            c128a_prefill_topk_indices=prefill,
            **split._asdict(),
        )

    def _prefill_rows(self, cm: CommonAttentionMetadata, split: BatchSplit) -> Tensor:
        """Rows of indices within the request, for the tokens behind the decodes."""
        assert self.prefill_rows is not None
        tokens = slice(split.num_decode_tokens, cm.num_actual_tokens)
        rows = self.prefill_rows[: split.num_prefill_tokens]
        none = self.tensors["c128_indices"][:0]
        torch.ops.dsv4.c128a_topk_metadata(
            self.tensors["positions"][tokens],
            self.tensors["token_to_req"][tokens],
            cm.block_table_tensor,
            cm.slot_mapping[tokens],
            self.block_size // self.ratio,
            self.ratio,
            0,
            none,
            self.tensors["c128_lens"][:0],
            rows,
        )
        return rows
