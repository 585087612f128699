"""ROCM_FLASHMLA_SPARSE_DSV4: index rows as ragged lists (CSR), for decodes over caches and prefills over a workspace.

AMD's aiter has no attention kernel of this kind; the backend of this name in other engines uses their Triton kernels.
Here `sparse_mla_decode_ragged` and `sparse_mla_prefill_ragged` compute it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import ops  # noqa: F401  (registers torch.ops.dsv4)
from ..layout import PAD_INDEX
from ..sources import TOPK
from .group_metadata import DeepseekV4FlashMLAMetadata, DeepseekV4FlashMLAMetadataBuilder
from .protocol import AttentionBackend, SparseAttention
from .types import CommonAttentionMetadata, Demand
from .v4 import Inputs, WorkspacePrefill, decode_tokens
from .window_metadata import DeepseekSparseSWAMetadata, DeepseekSparseSWAMetadataBuilder

FNUZ_ARCHITECTURES = ("cuda gfx940", "cuda gfx941", "cuda gfx942")
"""GPUs with e4m3fnuz as 8-bit float: the same byte means half of its e4m3fn value, which caches store."""


@dataclass(frozen=True)
class DeepseekV4ROCMAiterSparseSWAMetadata(DeepseekSparseSWAMetadata):
    """The window's metadata with the rows of decodes as a ragged list.

    decode_swa_ragged_indices: int32 `[max(Td * W, 1)]`, decode_swa_ragged_indptr: int32 `[Td + 1]`; None without
    decodes. Entries after the last row are -1.
    """

    decode_swa_ragged_indices: Tensor | None = None
    decode_swa_ragged_indptr: Tensor | None = None


@dataclass(frozen=True)
class DeepseekV4ROCMAiterMLASparseMetadata(DeepseekV4FlashMLAMetadata):
    """The extra cache's metadata with the decode rows of ratio 128 as a ragged list; at ratio 4 the indexer selects.

    c128a_decode_topk_ragged_indices: int32 `[max(Td * C, 1)]`, c128a_decode_topk_ragged_indptr: int32 `[Td + 1]`.
    """

    c128a_decode_topk_ragged_indices: Tensor | None = None
    c128a_decode_topk_ragged_indptr: Tensor | None = None


def copy_ragged_to_graph_buffers(
    ragged_indices: Tensor,
    ragged_indptr: Tensor,
    ragged_indices_buffer: Tensor,
    ragged_indptr_buffer: Tensor,
    num_rows: int,
    max_entries_per_row: int,
) -> tuple[Tensor, Tensor]:
    """Copy a step's ragged list into graph buffers; address and size of the result depend on `num_rows` alone.

    Args:
        ragged_indices: int `[N]`; ragged_indptr: int `[num_rows + 1]`: row r is `indices[indptr[r] : indptr[r + 1]]`.
        ragged_indices_buffer: int32 `[M]`; ragged_indptr_buffer: int32 `[Q + 1]`, allocated for the largest step.
        num_rows: rows of this step. max_entries_per_row: upper bound of the length of a row.

    Returns:
        `ragged_indices_buffer[: max(num_rows * max_entries_per_row, 1)]`, -1 after the last index, and
        `ragged_indptr_buffer[: num_rows + 1]`. The first view and the whole second buffer are written.
    """
    indices = ragged_indices_buffer[: max(num_rows * max_entries_per_row, 1)]
    torch.ops.dsv4.copy_ragged_to_graph_buffers(ragged_indices, ragged_indptr, indices, ragged_indptr_buffer)
    return indices, ragged_indptr_buffer[: num_rows + 1]


class _RaggedBuffers:
    """Graph buffers of one ragged list, refilled from dense rows."""

    def __init__(self, rows: int, width: int, device: torch.device | str | None) -> None:
        self.width = width
        self.indices = torch.full((max(rows * width, 1),), PAD_INDEX, dtype=torch.int32, device=device)
        self.indptr = torch.zeros(rows + 1, dtype=torch.int32, device=device)

    def refill(self, dense: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows `[Td, 1, width]` as a ragged list and its row ends, in the buffers."""
        flat, indptr = torch.ops.dsv4.ragged_from_dense(dense, lens)
        return copy_ragged_to_graph_buffers(flat, indptr, self.indices, self.indptr, dense.shape[0], self.width)


class DeepseekV4ROCMAiterSparseSWAMetadataBuilder(DeepseekSparseSWAMetadataBuilder):
    """Builds `DeepseekV4ROCMAiterSparseSWAMetadata`. Arguments of `DeepseekSparseSWAMetadataBuilder`."""

    def __init__(self, max_num_batched_tokens: int, **options: Any) -> None:
        super().__init__(max_num_batched_tokens, **options)
        self.ragged = _RaggedBuffers(max_num_batched_tokens, self.window, self.decode_swa_lens.device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> DeepseekV4ROCMAiterSparseSWAMetadata:
        base = super().build(common_prefix_len, common_attn_metadata, fast_build)
        indices = indptr = None
        if base.num_decode_tokens:
            indices, indptr = self.ragged.refill(base.decode_swa_indices, base.decode_swa_lens)
        return DeepseekV4ROCMAiterSparseSWAMetadata(
            **vars(base), decode_swa_ragged_indices=indices, decode_swa_ragged_indptr=indptr
        )


class DeepseekV4ROCMAiterMLASparseMetadataBuilder(DeepseekV4FlashMLAMetadataBuilder):
    """Builds `DeepseekV4ROCMAiterMLASparseMetadata`. Arguments of `DeepseekV4FlashMLAMetadataBuilder`."""

    def __init__(self, max_num_batched_tokens: int, **options: Any) -> None:
        super().__init__(max_num_batched_tokens, **options)
        self.ragged: _RaggedBuffers | None = None
        if self.entry_rows is not None:
            rows = self.entry_rows.indices
            self.ragged = _RaggedBuffers(max_num_batched_tokens, rows.shape[-1], rows.device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> DeepseekV4ROCMAiterMLASparseMetadata:
        base = super().build(common_prefix_len, common_attn_metadata, fast_build)
        indices = indptr = None
        if self.ragged is not None and base.c128a_global_decode_topk_indices is not None:
            assert base.c128a_decode_topk_lens is not None
            indices, indptr = self.ragged.refill(base.c128a_global_decode_topk_indices, base.c128a_decode_topk_lens)
        return DeepseekV4ROCMAiterMLASparseMetadata(
            **vars(base), c128a_decode_topk_ragged_indices=indices, c128a_decode_topk_ragged_indptr=indptr
        )


class DeepseekV4ROCMAiterMLASparseBackend(AttentionBackend):
    """Sparse attention with ragged index lists, in the form that AMD GPUs use."""

    name = "ROCM_FLASHMLA_SPARSE_DSV4"
    cache_formats: ClassVar = {
        "auto": "fp8_ds_mla",
        "fp8": "fp8_ds_mla",
        "fp8_ds_mla": "fp8_ds_mla",
        "bfloat16": "plain",
    }

    @classmethod
    def get_impl_cls(cls) -> type[SparseAttention]:
        return RaggedAttention

    @classmethod
    def get_builder_cls(cls) -> type[Any]:
        return DeepseekV4ROCMAiterMLASparseMetadataBuilder

    @classmethod
    def get_swa_builder_cls(cls) -> Callable[..., Any]:
        return DeepseekV4ROCMAiterSparseSWAMetadataBuilder

    @classmethod
    def _unsupported_device(cls, demand: Demand) -> str:
        if demand.architecture in FNUZ_ARCHITECTURES and cls.cache_format(demand.kv_cache_dtype) != "plain":
            return f"{demand.kv_cache_dtype} cache on {demand.architecture}: its fp8 is e4m3fnuz, the cache's is e4m3fn"
        return super()._unsupported_device(demand)


class RaggedAttention(WorkspacePrefill):
    """Attention of one layer in `ROCM_FLASHMLA_SPARSE_DSV4`."""

    backend = DeepseekV4ROCMAiterMLASparseBackend

    def forward_decode(self, q: Tensor, inputs: Inputs) -> Tensor:
        """Attend each token's window and entries as ragged lists."""
        swa: Any = inputs.metadata.swa
        entries, indptr, most = self._decode_entries(inputs)
        out, _ = torch.ops.dsv4.sparse_mla_decode_ragged(
            q,
            inputs.window_cache,
            swa.decode_swa_ragged_indices,
            swa.decode_swa_ragged_indptr,
            swa.block_size,
            self.cache_format,
            self.layer.scale,
            inputs.attn_sink,
            None if entries is None else inputs.extra_cache,
            entries,
            indptr,
            0 if entries is None else self.layer.entry_block_size,
            inputs.kv_scale,
            self.layer.window,
            most,
        )
        return out

    def _decode_entries(self, inputs: Inputs) -> tuple[Tensor | None, Tensor | None, int]:
        """Return the decodes' compressed entries as a ragged list of slots, its row ends, and the longest row."""
        swa, extra = inputs.metadata.swa, inputs.metadata.extra
        if extra is None:
            return None, None, 0
        if self.layer.selection != TOPK:
            width = extra.c128a_global_decode_topk_indices.shape[-1]
            return extra.c128a_decode_topk_ragged_indices, extra.c128a_decode_topk_ragged_indptr, width
        assert inputs.topk_indices is not None
        decodes = decode_tokens(swa)
        flat, indptr, _ = torch.ops.dsv4.global_topk_ragged(
            inputs.topk_indices[decodes],
            swa.token_to_req_indices[decodes],
            extra.block_table,
            swa.is_valid_token[decodes],
            self.layer.entry_block_size,
        )
        return flat, indptr, inputs.topk_indices.shape[1]

    def attend_workspace(
        self, q: Tensor, kv: Tensor, topk: Tensor, batch: tuple[Any, ...], attn_sink: Tensor | None
    ) -> Tensor:
        """Attend the selected entries, then the window, of each token as ragged lists."""
        flat, indptr, _ = torch.ops.dsv4.combine_topk_swa_ragged(topk, *batch)
        out, _, _ = torch.ops.dsv4.sparse_mla_prefill_ragged(
            q, kv, flat, indptr, self.layer.scale, attn_sink, topk.shape[1] + self.layer.window
        )
        return out
