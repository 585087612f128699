"""DSV4_PAGED, the default backend: every token, decode or prefill, attends through the paged caches.

It needs no split into decodes and prefills, no workspace and no host numbers, so one graph serves every batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .. import ops  # noqa: F401  (registers torch.ops.dsv4)
from ..metadata import AttentionMetadata, build_batch_metadata
from ..sources import TOPK
from .protocol import AttentionBackend, SparseAttention
from .scales import PerTensorScales
from .types import CudaGraphSupport


class DeepseekV4PagedBackend(AttentionBackend):
    """This package's own backend: any device, any head size, every cache format."""

    name = "DSV4_PAGED"
    cudagraph_support = CudaGraphSupport.ALWAYS
    supported_dtypes = (torch.bfloat16, torch.float16, torch.float32)
    cache_formats: ClassVar = {
        "auto": "plain",
        "bfloat16": "plain",
        "float16": "plain",
        "float32": "plain",
        "fp8_ds_mla": "fp8_ds_mla",
        "fp8": "fp8",
    }
    kernel_block_sizes = ()
    head_sizes = ()
    max_heads = 0
    needs_index_topk = False

    @classmethod
    def get_impl_cls(cls) -> type[SparseAttention]:
        return PagedAttention

    @classmethod
    def get_builder_cls(cls) -> Callable[..., Any]:
        return build_batch_metadata


class Slots(NamedTuple):
    """Selected compressed entries as slots int32 `[T, K]`, and their number int32 `[T]`."""

    indices: Tensor
    lens: Tensor


class PagedAttention(PerTensorScales):
    """Attention of one layer in `DSV4_PAGED`."""

    backend = DeepseekV4PagedBackend

    def forward(
        self,
        q: Tensor,
        window_cache: Tensor,
        extra_cache: Tensor | None,
        metadata: AttentionMetadata,
        topk_indices: Tensor | Slots | None = None,
        attn_sink: Tensor | None = None,
        kv_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend T tokens: `[T, H, D]`, 0 for padding. Arguments as for `v4.Inputs`, but `metadata`.

        `kv_scale` of per-tensor fp8 caches defaults to that of `set_scales`.
        """
        indices = lens = None
        if extra_cache is not None:
            indices, lens = self._entries(metadata, topk_indices)
        out, _ = torch.ops.dsv4.sparse_mla_decode(
            q,
            window_cache,
            metadata.window.indices,
            metadata.window.lens,
            self.layer.window_block_size,
            self.cache_format,
            self.layer.scale,
            attn_sink,
            extra_cache,
            indices,
            lens,
            self.layer.entry_block_size if extra_cache is not None else 0,
            self.cache_scale() if kv_scale is None else kv_scale,
        )
        return out

    def _entries(
        self, metadata: AttentionMetadata, topk_indices: Tensor | Slots | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return slots of the compressed entries that each token attends, and their number."""
        if isinstance(topk_indices, Slots):
            return topk_indices
        source = metadata.sources[self.layer.ratio]
        if self.layer.selection != TOPK:
            return source.indices, source.lens
        indices, lens = torch.ops.dsv4.global_topk(
            topk_indices,
            metadata.token_to_req,
            source.block_table,
            metadata.is_valid_token,
            self.layer.entry_block_size,
        )
        return indices, lens
