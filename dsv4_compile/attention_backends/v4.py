"""Common parts of the DeepSeek-V4 backends: the split of a batch, and prefill through a gathered workspace."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import ops  # noqa: F401  (registers torch.ops.dsv4)
from ..layout import cdiv
from ..reference.attention.sparse_mla_decode import output_dtype
from ..sources import TOPK
from .protocol import SparseAttention
from .types import LayerShape
from .window_metadata import DeepseekSparseSWAMetadata
from .workspace import Workspace

PREFILL_CHUNK_SIZE = 4
"""Requests that gather keys and values at the same time; it bounds the workspace."""


@dataclass(frozen=True)
class DeepseekV4Metadata:
    """Metadata of one step for one layer. `extra` belongs to its extra cache; None for a window-only layer."""

    swa: DeepseekSparseSWAMetadata
    extra: Any = None


class Inputs(NamedTuple):
    """Arguments of an attention call, without the queries.

    window_cache, extra_cache: caches in the layer's format; None where the layer has no extra cache.
    topk_indices: int32 `[T, K]`, entries within the request that the indexer selected, if there is one.
    attn_sink: float32 `[H]`. kv_scale: float32, one element, of per-tensor fp8 caches.
    """

    window_cache: Tensor
    extra_cache: Tensor | None
    metadata: DeepseekV4Metadata
    topk_indices: Tensor | None
    attn_sink: Tensor | None
    kv_scale: Tensor | None


def decode_tokens(swa: DeepseekSparseSWAMetadata) -> slice:
    """Return the tokens of decodes."""
    return slice(0, swa.num_decode_tokens)


def prefill_tokens(swa: DeepseekSparseSWAMetadata) -> slice:
    """Return the tokens of prefills, and the padding after them."""
    return slice(swa.num_decode_tokens, swa.num_decode_tokens + swa.num_prefill_tokens)


def prefill_topk(layer: LayerShape, inputs: Inputs) -> Tensor:
    """Return int32 `[Tp, K]`: entries within the request that each prefill token attends; K is 0 at ratio 1."""
    swa, extra = inputs.metadata.swa, inputs.metadata.extra
    if extra is None:
        return swa.token_to_req_indices[prefill_tokens(swa), None][:, :0]
    if layer.selection == TOPK:
        assert inputs.topk_indices is not None
        return inputs.topk_indices[prefill_tokens(swa)]
    topk: Tensor = extra.c128a_prefill_topk_indices
    return topk


class DeepseekV4SparseAttention(SparseAttention):
    """Attention of one DeepSeek-V4 layer with separate kernels for decodes and prefills.

    The split consists of host numbers, so there is one compiled graph for decodes only, one for prefills only and one
    for both; within each, a new batch does not recompile. torch.compile merges sizes that are equal in the first batch:
    warm up with a batch with different numbers of tokens, decodes and requests.

    Prefills gather keys and values into `workspace`; None allocates at each call, which suits compiled code.
    """

    def __init__(self, layer: LayerShape, engine: str = "dsv4", workspace: Workspace | None = None) -> None:
        super().__init__(layer, engine)
        self.workspace = workspace

    def forward(
        self,
        q: Tensor,
        window_cache: Tensor,
        extra_cache: Tensor | None,
        metadata: DeepseekV4Metadata,
        topk_indices: Tensor | None = None,
        attn_sink: Tensor | None = None,
        kv_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend T tokens; their keys and values are in the caches already.

        Args:
            q: `[T, H, D]`, normed and rotated; rows after the metadata's tokens are padding of a captured graph.
            window_cache, extra_cache, metadata, topk_indices, attn_sink, kv_scale: see `Inputs`.
        Returns:
            `[T, H, D]`, 0 for padding; q's dtype, bfloat16 for e4m3.
        """
        inputs = Inputs(window_cache, extra_cache, metadata, topk_indices, attn_sink, kv_scale)
        swa = metadata.swa
        parts = []
        if swa.num_decode_tokens > 0:
            parts.append(self.forward_decode(q[decode_tokens(swa)], inputs))
        if swa.num_prefill_tokens > 0:
            parts.append(self.forward_prefill(q[prefill_tokens(swa)], inputs))
        padding = q.shape[0] - swa.num_decode_tokens - swa.num_prefill_tokens
        if padding > 0 or not parts:
            parts.append(q.new_zeros((padding, *q.shape[1:]), dtype=output_dtype(q)))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @abstractmethod
    def forward_decode(self, q: Tensor, inputs: Inputs) -> Tensor:
        """Attend the first Td tokens through the paged caches: `[Td, H, D]`."""

    @abstractmethod
    def forward_prefill(self, q: Tensor, inputs: Inputs) -> Tensor:
        """Attend the other Tp tokens: `[Tp, H, D]`."""


class WorkspacePrefill(DeepseekV4SparseAttention):
    """Prefill of FlashMLA and ROCm: a few requests at a time, over rows gathered from the caches."""

    @property
    def workspace_rows(self) -> tuple[int, int]:
        """Rows of one request in the workspace, M, and how many of the first ones are compressed entries, N."""
        layer = self.layer
        entries = cdiv(layer.max_model_len, layer.ratio) if layer.ratio > 1 else 0
        return entries + layer.window + layer.max_num_batched_tokens, entries

    def reserve_workspace(self, dtype: torch.dtype = torch.bfloat16) -> None:
        """Reserve the workspace of the largest prefill. Call it before `Workspace.lock`, for example in a dummy run."""
        if self.workspace is not None:
            rows, _ = self.workspace_rows
            self.workspace.reserve(((PREFILL_CHUNK_SIZE, rows, self.layer.head_size), dtype))

    def forward_prefill(self, q: Tensor, inputs: Inputs) -> Tensor:
        """Attend the Tp prefill tokens, `PREFILL_CHUNK_SIZE` requests at a time: `[Tp, H, D]`."""
        swa = inputs.metadata.swa
        topk = prefill_topk(self.layer, inputs)
        if swa.num_prefills <= PREFILL_CHUNK_SIZE:
            return self._chunk(q, topk, inputs, slice(0, swa.num_prefills))
        starts = swa.query_start_loc_cpu[swa.num_decodes :]
        out = []
        for first in range(0, swa.num_prefills, PREFILL_CHUNK_SIZE):
            last = min(first + PREFILL_CHUNK_SIZE, swa.num_prefills)
            # The last chunk includes the padding after its requests.
            end = q.shape[0] if last == swa.num_prefills else starts[last] - starts[0]
            tokens = slice(starts[first] - starts[0], end)
            out.append(self._chunk(q[tokens], topk[tokens], inputs, slice(first, last)))
        return torch.cat(out)

    def _chunk(self, q: Tensor, topk: Tensor, inputs: Inputs, requests: slice) -> Tensor:
        """Gather the entries and windows of some requests into the workspace and attend them."""
        swa, extra = inputs.metadata.swa, inputs.metadata.extra
        rows, entries = self.workspace_rows
        seq_lens, gather_lens = swa.prefill_seq_lens[requests], swa.prefill_gather_lens[requests]
        tables = slice(swa.num_decodes + requests.start, swa.num_decodes + requests.stop)
        kv = self._gathered(seq_lens.shape[0], rows, inputs.window_cache)
        if extra is not None:
            torch.ops.dsv4.dequantize_and_gather_k_cache(
                kv,
                inputs.extra_cache,
                seq_lens // self.layer.ratio,
                None,
                extra.block_table[tables],
                self.layer.entry_block_size,
                0,
                self.cache_format,
                inputs.kv_scale,
            )
        torch.ops.dsv4.dequantize_and_gather_k_cache(
            kv,
            inputs.window_cache,
            seq_lens,
            gather_lens,
            swa.block_table[tables],
            swa.block_size,
            entries,
            self.cache_format,
            inputs.kv_scale,
        )
        batch = (
            swa.query_start_loc[tables.start : tables.stop + 1],
            seq_lens,
            gather_lens,
            self.layer.window,
            self.layer.ratio,
            topk.shape[1],
            rows,
            entries,
        )
        return self.attend_workspace(q, kv.flatten(0, 1), topk, batch, inputs.attn_sink)

    def _gathered(self, requests: int, rows: int, cache: Tensor) -> Tensor:
        """Return the workspace `[B, M, D]`: bfloat16, or the dtype of plain rows."""
        shape = (requests, rows, self.layer.head_size)
        dtype = cache.dtype if self.cache_format == "plain" else torch.bfloat16
        if self.workspace is None:
            return cache.new_empty(shape, dtype=dtype)
        return self.workspace.get_simultaneous((shape, dtype))[0]

    @abstractmethod
    def attend_workspace(
        self, q: Tensor, kv: Tensor, topk: Tensor, batch: tuple[Any, ...], attn_sink: Tensor | None
    ) -> Tensor:
        """Attend rows of `kv` `[S, D]`; `batch` holds the arguments of `combine_topk_swa` after `topk`."""
