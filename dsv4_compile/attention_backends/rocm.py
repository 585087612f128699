"""ROCM_FLASHMLA_SPARSE_DSV4: index rows as lists (CSR), for decodes over the caches and for prefills over a workspace.

The system that engines know by this name computes it in Triton kernels of its own, not in a library. Here
`sparse_mla_decode_ragged` and `sparse_mla_prefill_ragged` do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import ops  # noqa: F401  (registers torch.ops.dsv4)
from ..layout import CSA_RATIO
from .facts import Demand
from .protocol import AttentionBackend, SparseAttention
from .rocm_metadata import DeepseekV4ROCMAiterMLASparseMetadataBuilder, DeepseekV4ROCMAiterSparseSWAMetadataBuilder
from .v4 import Inputs, WorkspacePrefill, decode_tokens

FNUZ_ARCHITECTURES = ("cuda gfx940", "cuda gfx941", "cuda gfx942")
"""GPUs whose 8-bit floats are e4m3fnuz: the same byte is half of what it is in the caches of all other devices."""


class DeepseekV4ROCMAiterMLASparseBackend(AttentionBackend):
    """Ragged sparse attention, as AMD's GPUs run it."""

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
    def _refuse_device(cls, demand: Demand) -> str:
        if demand.architecture in FNUZ_ARCHITECTURES and cls.cache_format(demand.kv_cache_dtype) != "plain":
            return f"{demand.kv_cache_dtype} cache on {demand.architecture}: its fp8 is e4m3fnuz, the cache's is e4m3fn"
        return super()._refuse_device(demand)


class RaggedAttention(WorkspacePrefill):
    """Attention of one layer in `ROCM_FLASHMLA_SPARSE_DSV4`. rocm_metadata.py builds its metadata."""

    backend = DeepseekV4ROCMAiterMLASparseBackend

    def forward_decode(self, q: Tensor, inputs: Inputs) -> Tensor:
        """Each token's window and entries as lists."""
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
            None if entries is None else inputs.main_cache,
            entries,
            indptr,
            0 if entries is None else self.layer.entry_block_size,
            inputs.kv_scale,
            self.layer.window,
            most,
        )
        return out

    def _decode_entries(self, inputs: Inputs) -> tuple[Tensor | None, Tensor | None, int]:
        """The compressed entries of the decode tokens as one list of slots, its row ends, and a row's most entries."""
        swa, main = inputs.metadata.swa, inputs.metadata.main
        if main is None:
            return None, None, 0
        if self.layer.ratio != CSA_RATIO:
            width = main.c128a_global_decode_topk_indices.shape[-1]
            return main.c128a_decode_topk_ragged_indices, main.c128a_decode_topk_ragged_indptr, width
        assert inputs.topk_indices is not None
        decodes = decode_tokens(swa)
        flat, indptr, _ = torch.ops.dsv4.global_topk_ragged(
            inputs.topk_indices[decodes],
            swa.token_to_req_indices[decodes],
            main.block_table,
            swa.is_valid_token[decodes],
            self.layer.entry_block_size,
        )
        return flat, indptr, inputs.topk_indices.shape[1]

    def attend_workspace(
        self, q: Tensor, kv: Tensor, topk: Tensor, batch: tuple[Any, ...], attn_sink: Tensor | None
    ) -> Tensor:
        """The selected entries, then the window, of each token as lists."""
        flat, indptr, _ = torch.ops.dsv4.combine_topk_swa_ragged(topk, *batch)
        out, _, _ = torch.ops.dsv4.sparse_mla_prefill_ragged(
            q, kv, flat, indptr, self.layer.scale, attn_sink, topk.shape[1] + self.layer.window
        )
        return out
