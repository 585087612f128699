"""Metadata of one group of caches as serving engines ask for it: main, indexer and compressor caches, one builder each.

An engine calls the builder of each of its cache groups with that group's block table and slots. All of them split the
batch by one threshold, so that their decodes line up, and fill buffers that are declared in `metadata.BUFFERS`: give
them one `MetadataBuffers` and they share its memory. Each build is one launch, two where a batch with prefills has
layers of ratio 128. Where the block tables of all groups are in persistent buffers, `step.DeepseekV4StepBuilder` makes
all of it in one launch for all groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import ops  # noqa: F401  (registers torch.ops.dsv4)
from ..errors import check
from ..layout import HCA_RATIO, KV_BLOCK, PAD_INDEX, WINDOW_BLOCK, cdiv, state_block_size
from ..metadata import BatchSplit, MetadataBuffers, plan_buffers
from ..ops.batch_metadata import GROUPS, TOKENS
from .common import CommonAttentionMetadata
from .protocol import CudaGraphSupport


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


class _GroupBuilder:
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


class DeepseekV4FlashMLAMetadataBuilder(_GroupBuilder):
    """Builds `DeepseekV4FlashMLAMetadata` for the main caches of ratio 1, 4 or 128. See `_GroupBuilder` for arguments.

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


class DeepseekV4IndexerMetadataBuilder(_GroupBuilder):
    """Builds `DeepseekV4IndexerMetadata`. See `_GroupBuilder` for arguments; `ratio` is 4."""

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


class DeepseekV4CompressorMetadataBuilder(_GroupBuilder):
    """Builds `DeepseekV4CompressorMetadata` for the states of the compressor of ratio 4 or 128, or of the indexer's.

    See `_GroupBuilder` for arguments.

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
