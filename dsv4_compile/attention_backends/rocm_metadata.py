"""Metadata of ROCM_FLASHMLA_SPARSE_DSV4: what FlashMLA's has, and the rows of decodes as lists at fixed addresses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import ops  # noqa: F401  (registers torch.ops.dsv4)
from ..layout import HCA_RATIO, PAD_INDEX
from .common import CommonAttentionMetadata
from .flashmla_metadata import DeepseekV4FlashMLAMetadata, DeepseekV4FlashMLAMetadataBuilder
from .ragged import copy_ragged_to_graph_buffers
from .swa import DeepseekSparseSWAMetadata, DeepseekSparseSWAMetadataBuilder


@dataclass(frozen=True)
class DeepseekV4ROCMAiterSparseSWAMetadata(DeepseekSparseSWAMetadata):
    """The window's metadata with its decode rows as a list.

    decode_swa_ragged_indices: int32 `[max(Td * W, 1)]`, decode_swa_ragged_indptr: int32 `[Td + 1]`; None without
    decodes. Entries behind the last end are -1.
    """

    decode_swa_ragged_indices: Tensor | None = None
    decode_swa_ragged_indptr: Tensor | None = None


@dataclass(frozen=True)
class DeepseekV4ROCMAiterMLASparseMetadata(DeepseekV4FlashMLAMetadata):
    """The main cache's metadata with the decode rows of ratio 128 as a list; at ratio 4 the indexer chooses later.

    c128a_decode_topk_ragged_indices: int32 `[max(Td * C, 1)]`, c128a_decode_topk_ragged_indptr: int32 `[Td + 1]`.
    """

    c128a_decode_topk_ragged_indices: Tensor | None = None
    c128a_decode_topk_ragged_indptr: Tensor | None = None


class _Lists:
    """Buffers of one list of rows, and their refill from dense rows."""

    def __init__(self, rows: int, width: int, device: torch.device | str | None) -> None:
        self.width = width
        self.indices = torch.full((max(rows * width, 1),), PAD_INDEX, dtype=torch.int32, device=device)
        self.indptr = torch.zeros(rows + 1, dtype=torch.int32, device=device)

    def refill(self, dense: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
        """The list of rows `[Td, 1, width]` and its ends, in the buffers."""
        flat, indptr = torch.ops.dsv4.ragged_from_dense(dense, lens)
        return copy_ragged_to_graph_buffers(flat, indptr, self.indices, self.indptr, dense.shape[0], self.width)


class DeepseekV4ROCMAiterSparseSWAMetadataBuilder(DeepseekSparseSWAMetadataBuilder):
    """Builds `DeepseekV4ROCMAiterSparseSWAMetadata`. Arguments as its parent's."""

    def __init__(self, max_num_batched_tokens: int, **options: Any) -> None:
        super().__init__(max_num_batched_tokens, **options)
        self.lists = _Lists(max_num_batched_tokens, self.window, self.decode_swa_lens.device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> DeepseekV4ROCMAiterSparseSWAMetadata:
        base = super().build(common_prefix_len, common_attn_metadata, fast_build)
        indices = indptr = None
        if base.num_decode_tokens:
            indices, indptr = self.lists.refill(base.decode_swa_indices, base.decode_swa_lens)
        return DeepseekV4ROCMAiterSparseSWAMetadata(
            **vars(base), decode_swa_ragged_indices=indices, decode_swa_ragged_indptr=indptr
        )


class DeepseekV4ROCMAiterMLASparseMetadataBuilder(DeepseekV4FlashMLAMetadataBuilder):
    """Builds `DeepseekV4ROCMAiterMLASparseMetadata`. Arguments as its parent's."""

    def __init__(self, max_num_batched_tokens: int, **options: Any) -> None:
        super().__init__(max_num_batched_tokens, **options)
        self.lists: _Lists | None = None
        if self.ratio == HCA_RATIO:
            rows = self.tensors["c128_indices"]
            self.lists = _Lists(max_num_batched_tokens, rows.shape[-1], rows.device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> DeepseekV4ROCMAiterMLASparseMetadata:
        base = super().build(common_prefix_len, common_attn_metadata, fast_build)
        indices = indptr = None
        if self.lists is not None and base.c128a_global_decode_topk_indices is not None:
            assert base.c128a_decode_topk_lens is not None
            indices, indptr = self.lists.refill(base.c128a_global_decode_topk_indices, base.c128a_decode_topk_lens)
        return DeepseekV4ROCMAiterMLASparseMetadata(
            **vars(base), c128a_decode_topk_ragged_indices=indices, c128a_decode_topk_ragged_indptr=indptr
        )
