"""FLASHMLA_SPARSE_DSV4: decodes over the paged caches with dense index rows, prefills over a gathered workspace.

flash_mla has kernels for 64 and 128 query heads: queries are padded with zeros, sinks with -inf.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import ops  # noqa: F401  (registers torch.ops.dsv4)
from ..layout import FP8_DS_MLA
from ..sources import TOPK
from .group_metadata import DeepseekV4FlashMLAMetadataBuilder
from .library import pad_heads, pad_rows, pad_sink
from .protocol import AttentionBackend, SparseAttention
from .v4 import Inputs, WorkspacePrefill, decode_tokens
from .window_metadata import DeepseekSparseSWAMetadataBuilder


class DeepseekV4FlashMLABackend(AttentionBackend):
    """flash_mla's sparse attention on Hopper and Blackwell."""

    name = "FLASHMLA_SPARSE_DSV4"
    cache_formats: ClassVar = {
        "auto": "fp8_ds_mla",
        "fp8": "fp8_ds_mla",
        "fp8_ds_mla": "fp8_ds_mla",
        "bfloat16": "plain",
    }
    library = "flash_mla"
    library_majors = (9, 10)
    library_formats = ("fp8_ds_mla",)
    library_heads = (64, 128)
    """Head counts with kernels. The width of index rows must be a multiple of the same number."""

    @classmethod
    def get_impl_cls(cls) -> type[SparseAttention]:
        return FlashMLAAttention

    @classmethod
    def get_builder_cls(cls) -> type[Any]:
        return DeepseekV4FlashMLAMetadataBuilder

    @classmethod
    def get_swa_builder_cls(cls) -> Callable[..., Any]:
        return DeepseekSparseSWAMetadataBuilder


class FlashMLAAttention(WorkspacePrefill):
    """Attention of one layer in `FLASHMLA_SPARSE_DSV4`."""

    backend = DeepseekV4FlashMLABackend

    def forward_decode(self, q: Tensor, inputs: Inputs) -> Tensor:
        """Attend both caches with one index row per token."""
        swa = inputs.metadata.swa
        entries, lens = self._decode_entries(inputs)
        window = (inputs.window_cache, swa.decode_swa_indices.squeeze(1), swa.decode_swa_lens, swa.block_size)
        extra = (inputs.extra_cache, entries, lens, self.layer.entry_block_size if entries is not None else 0)
        if self.engine == "library":
            return self._library_decode(q, window, extra, inputs.attn_sink)
        cache, indices, window_lens, block_size = window
        attend = (block_size, self.cache_format, self.layer.scale, inputs.attn_sink)
        out, _ = torch.ops.dsv4.sparse_mla_decode(q, cache, indices, window_lens, *attend, *extra, inputs.kv_scale)
        return out

    def _decode_entries(self, inputs: Inputs) -> tuple[Tensor | None, Tensor | None]:
        """Return slots `[Td, K]` of the compressed entries that each decode token attends, and their number."""
        swa, extra = inputs.metadata.swa, inputs.metadata.extra
        if extra is None:
            return None, None
        if self.layer.selection != TOPK:
            return extra.c128a_global_decode_topk_indices.flatten(1), extra.c128a_decode_topk_lens
        assert inputs.topk_indices is not None
        decodes = decode_tokens(swa)
        indices, lens = torch.ops.dsv4.global_topk(
            inputs.topk_indices[decodes],
            swa.token_to_req_indices[decodes],
            extra.block_table,
            swa.is_valid_token[decodes],
            self.layer.entry_block_size,
        )
        return indices, lens

    def attend_workspace(
        self, q: Tensor, kv: Tensor, topk: Tensor, batch: tuple[Any, ...], attn_sink: Tensor | None
    ) -> Tensor:
        """Attend with dense index rows: the selected entries, then the window."""
        indices, lens = torch.ops.dsv4.combine_topk_swa(topk, *batch)
        if self.engine != "library":
            out, _, _ = torch.ops.dsv4.sparse_mla_prefill(q, kv, indices, lens, self.layer.scale, attn_sink)
            return out
        heads = self.backend.get_padded_num_q_heads(self.layer.num_heads)
        out = torch.ops.dsv4_library.flash_mla_sparse_fwd(
            pad_heads(q, heads), kv, indices, lens, self.layer.scale, pad_sink(attn_sink, heads)
        )
        return out[:, : self.layer.num_heads]

    def _library_decode(
        self, q: Tensor, window: tuple[Any, ...], extra: tuple[Any, ...], attn_sink: Tensor | None
    ) -> Tensor:
        heads = self.backend.get_padded_num_q_heads(self.layer.num_heads)
        cache, indices, lens, block_size = window
        extra_cache, extra_indices, extra_lens, extra_block_size = extra
        out = torch.ops.dsv4_library.flash_mla_decode(
            pad_heads(q, heads),
            token_pages(cache, block_size),
            pad_rows(indices, heads),
            lens,
            self.layer.scale,
            pad_sink(attn_sink, heads),
            None if extra_indices is None else token_pages(extra_cache, extra_block_size),
            None if extra_indices is None else pad_rows(extra_indices, heads),
            extra_lens,
        )
        return out[:, : self.layer.num_heads]


def token_pages(cache: Tensor, block_size: int) -> Tensor:
    """View a `fp8_ds_mla` cache as `uint8 [P, S, 1, bytes of a token]`."""
    width = FP8_DS_MLA.data + FP8_DS_MLA.scale
    return cache.view(cache.shape[0], block_size, 1, width)


@torch.library.custom_op("dsv4_library::flash_mla_decode", mutates_args=())
def _decode(
    q: Tensor,
    cache: Tensor,
    indices: Tensor,
    lens: Tensor,
    scale: float,
    attn_sink: Tensor | None,
    extra_cache: Tensor | None,
    extra_indices: Tensor | None,
    extra_lens: Tensor | None,
) -> Tensor:
    """Call `flash_mla_with_kvcache` with one batch row per token. The library schedules its tiles at every call."""
    flash_mla = importlib.import_module("flash_mla")
    plan, _ = flash_mla.get_mla_metadata()
    out, _ = flash_mla.flash_mla_with_kvcache(
        q=q[:, None],
        k_cache=cache,
        block_table=None,
        cache_seqlens=None,
        head_dim_v=q.shape[2],
        tile_scheduler_metadata=plan,
        softmax_scale=scale,
        is_fp8_kvcache=True,
        indices=indices[:, None],
        attn_sink=attn_sink,
        extra_k_cache=extra_cache,
        extra_indices_in_kvcache=None if extra_indices is None else extra_indices[:, None],
        topk_length=lens,
        extra_topk_length=extra_lens,
    )
    attended: Tensor = out.squeeze(1).contiguous()
    return attended


@_decode.register_fake
def _(q: Tensor, *_: object) -> Tensor:
    return q.new_empty(q.shape)


@torch.library.custom_op("dsv4_library::flash_mla_sparse_fwd", mutates_args=())
def _prefill(q: Tensor, kv: Tensor, indices: Tensor, lens: Tensor, scale: float, attn_sink: Tensor | None) -> Tensor:
    """Call `flash_mla_sparse_fwd` over a workspace `[S, D]`."""
    flash_mla = importlib.import_module("flash_mla")
    out, _, _ = flash_mla.flash_mla_sparse_fwd(
        q=q,
        kv=kv[:, None],
        indices=indices[:, None],
        sm_scale=scale,
        d_v=q.shape[2],
        attn_sink=attn_sink,
        topk_length=lens,
    )
    attended: Tensor = out.contiguous()
    return attended


@_prefill.register_fake
def _(q: Tensor, *_: object) -> Tensor:
    return q.new_empty(q.shape)
