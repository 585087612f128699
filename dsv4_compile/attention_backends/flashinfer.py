"""FLASHINFER_MLA_SPARSE_DSV4: one index matrix over two row caches, bfloat16 or per-tensor fp8.

The first W columns of an index row are slots of the window cache, the others slots of the compressed cache. flashinfer
is called twice, for decodes and for prefills, each with query offsets from zero, and with 64 or 128 heads.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import ops  # noqa: F401  (registers torch.ops.dsv4)
from ..errors import check
from ..sources import TOPK
from .group_metadata import DeepseekV4FlashMLAMetadataBuilder
from .library import pad_heads, pad_sink
from .protocol import AttentionBackend, SparseAttention
from .scales import PerTensorScales
from .v4 import DeepseekV4Metadata, Inputs, decode_tokens, prefill_tokens, prefill_topk
from .window_metadata import DeepseekSparseSWAMetadataBuilder
from .workspace import Workspace

WORKSPACE_BYTES = 128 * 2**20
STORAGE_OFFSETS = "sparse_indices_are_storage_offsets"
"""Argument of flashinfer from version 0.7 on: whether indices count storage elements or rows."""


class DeepseekV4FlashInferMLASparseBackend(AttentionBackend):
    """flashinfer's TRTLLM-gen sparse attention on Blackwell."""

    name = "FLASHINFER_MLA_SPARSE_DSV4"
    cache_formats: ClassVar = {"auto": "plain", "bfloat16": "plain", "fp8": "fp8", "fp8_e4m3": "fp8"}
    library = "flashinfer"
    library_majors = (10,)
    library_formats = ("plain", "fp8")
    library_heads = (64, 128)

    @classmethod
    def get_impl_cls(cls) -> type[SparseAttention]:
        return FlashInferAttention

    @classmethod
    def get_builder_cls(cls) -> type[Any]:
        """Return FlashMLA's builder, which builds the same extra cache metadata."""
        return DeepseekV4FlashMLAMetadataBuilder

    @classmethod
    def get_swa_builder_cls(cls) -> Callable[..., Any]:
        return DeepseekSparseSWAMetadataBuilder


class FlashInferAttention(PerTensorScales):
    """Attention of one layer in `FLASHINFER_MLA_SPARSE_DSV4`."""

    backend = DeepseekV4FlashInferMLASparseBackend
    quantises_queries = True

    def query_scale(self) -> Tensor | None:
        return self.q_scale if self.engine == "library" else None

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
        """Attend T tokens. Arguments as for `v4.DeepseekV4SparseAttention.forward`.

        e4m3 queries hold q / q_scale. The scale of the caches is set by `set_scales`, so `kv_scale` is None.
        """
        check(kv_scale is None, "E201", got=f"a kv_scale for {self.backend.name}", fix="pass it to set_scales")
        inputs = Inputs(window_cache, extra_cache, metadata, topk_indices, attn_sink, kv_scale)
        indices, lens = self.mixed_indices(inputs)
        tokens = indices.shape[0]
        attend = self._library if self.engine == "library" else self._own
        out = attend(q[:tokens], indices, lens, inputs)
        return torch.nn.functional.pad(out, (0, 0, 0, 0, 0, q.shape[0] - tokens))

    def mixed_indices(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Return `sparse_indices` int32 `[Td + Tp, W + P]` and `sparse_topk_lens` int32 `[Td + Tp]`."""
        swa, extra, layer = inputs.metadata.swa, inputs.metadata.extra, self.layer
        local = extra is not None and layer.selection == TOPK
        prefill = prefill_topk(layer, inputs) if swa.num_prefill_tokens > 0 else None
        decode = decode_lens = None
        if extra is not None and swa.num_decode_tokens > 0:
            if local:
                assert inputs.topk_indices is not None
                decode = inputs.topk_indices[decode_tokens(swa)]
            else:
                decode, decode_lens = extra.c128a_global_decode_topk_indices.flatten(1), extra.c128a_decode_topk_lens
        indices, lens = torch.ops.dsv4.flashinfer_mixed_indices(
            swa.decode_swa_indices.squeeze(1),
            decode,
            decode_lens,
            swa.token_to_req_indices[:0, None] if prefill is None else prefill,
            swa.query_start_loc,
            swa.seq_lens,
            swa.token_to_req_indices,
            swa.block_table,
            swa.block_size,
            None if extra is None else extra.block_table,
            swa.block_size if extra is None else layer.entry_block_size,
            layer.window,
            layer.ratio,
            0 if prefill is None else prefill.shape[1],
            local,
            swa.is_valid_token if local else None,
        )
        return indices, lens

    def _own(self, q: Tensor, indices: Tensor, lens: Tensor, inputs: Inputs) -> Tensor:
        """Attend with `sparse_mla_decode`: every token is a row, so one call serves decodes and prefills."""
        window, cache = self.layer.window, inputs.extra_cache
        quantised = q.dtype is torch.float8_e4m3fn
        extra: tuple[Any, ...] = (None, None, None, 0)
        if cache is not None:
            extra = (cache, indices[:, window:], lens - window, self.layer.entry_block_size)
        out, _ = torch.ops.dsv4.sparse_mla_decode(
            q,
            inputs.window_cache,
            indices[:, :window],
            lens.clamp_max(window),
            inputs.metadata.swa.block_size,
            self.cache_format,
            self.layer.scale * (self.q_factor if quantised else 1.0),
            inputs.attn_sink,
            *extra,
            self.cache_scale(),
        )
        return out

    def _library(self, q: Tensor, indices: Tensor, lens: Tensor, inputs: Inputs) -> Tensor:
        """Attend decodes, then prefills. The kernel leaves the rows of padding unwritten, so they are zeroed."""
        swa = inputs.metadata.swa
        quantised = q.dtype is torch.float8_e4m3fn
        check(
            quantised == (self.cache_format == "fp8"),
            "E201",
            got=f"{str(q.dtype).removeprefix('torch.')} queries with {self.cache_format} caches",
            rule="queries have the dtype of the caches",
            fix="quantise queries with query_scale()",
        )
        heads = self.backend.get_padded_num_q_heads(self.layer.num_heads)
        q, sink = pad_heads(q, heads), pad_sink(inputs.attn_sink, heads)
        caches = (inputs.window_cache, inputs.window_cache if inputs.extra_cache is None else inputs.extra_cache)
        parts, offset = [], swa.num_decodes
        for rows, requests, longest in (
            (decode_tokens(swa), slice(0, offset), swa.max_decode_query_len),
            (prefill_tokens(swa), slice(offset, offset + swa.num_prefills), swa.max_prefill_query_len),
        ):
            if rows.stop - rows.start > 0:
                starts = swa.query_start_loc[requests.start : requests.stop + 1]
                parts.append(
                    torch.ops.dsv4_library.flashinfer_sparse_mla_dsv4(
                        q[rows],
                        *caches,
                        indices[rows],
                        lens[rows],
                        swa.seq_lens[requests],
                        starts - starts[0],
                        longest,
                        self.bmm1_scale if self.cache_format == "fp8" else self.layer.scale,
                        self.bmm2_scale,
                        sink,
                    )
                )
        if not parts:
            return q.new_zeros(q.shape, dtype=torch.bfloat16)[:, : self.layer.num_heads]
        out = torch.cat(parts)[:, : self.layer.num_heads]
        return torch.where(swa.is_valid_token[: out.shape[0], None, None], out, 0.0)


@functools.cache
def flashinfer_workspace(device: torch.device) -> Tensor:
    """Return the workspace that all layers of a device share: zeroed, as flashinfer requires, at a fixed address."""
    owner = Workspace(device, zeroed=True)
    (buffer,) = owner.get_simultaneous(((WORKSPACE_BYTES,), torch.uint8))
    owner.lock()
    return buffer


@torch.library.custom_op("dsv4_library::flashinfer_sparse_mla_dsv4", mutates_args=())
def _attend(
    q: Tensor,
    window_cache: Tensor,
    compressed_cache: Tensor,
    sparse_indices: Tensor,
    sparse_topk_lens: Tensor,
    seq_lens: Tensor,
    cum_seq_lens_q: Tensor,
    max_q_len: int,
    bmm1_scale: float,
    bmm2_scale: float,
    sinks: Tensor | None,
) -> Tensor:
    """Call `trtllm_batch_decode_sparse_mla_dsv4`: caches `[P, 1, S, D]` in q's dtype, all but pages contiguous."""

    def pages(cache: Tensor) -> Tensor:
        return (cache.view(torch.float8_e4m3fn) if cache.dtype is torch.uint8 else cache)[:, None]

    attend = importlib.import_module("flashinfer.mla").trtllm_batch_decode_sparse_mla_dsv4
    out = q.new_empty(q.shape, dtype=torch.bfloat16)
    attend(
        query=q.contiguous(),
        swa_kv_cache=pages(window_cache),
        workspace_buffer=flashinfer_workspace(q.device),
        sparse_indices=sparse_indices.contiguous(),
        compressed_kv_cache=pages(compressed_cache),
        sparse_topk_lens=sparse_topk_lens.contiguous(),
        seq_lens=seq_lens.contiguous(),
        out=out,
        bmm1_scale=bmm1_scale,
        bmm2_scale=bmm2_scale,
        sinks=sinks,
        cum_seq_lens_q=cum_seq_lens_q,
        max_q_len=max_q_len,
        **_page_options(attend, window_cache, compressed_cache),
    )
    return out


def _page_options(attend: Callable[..., Any], *caches: Tensor) -> dict[str, bool]:
    """Return the options of `attend` for caches with gaps between pages: indices count rows, not storage elements."""
    if all(cache.is_contiguous() for cache in caches):
        return {}
    check(
        STORAGE_OFFSETS in inspect.signature(attend).parameters,
        "E203",
        got=f"pages {', '.join(str(cache.stride(0)) for cache in caches)} elements apart, with gaps, for flashinfer",
        why=f"without {STORAGE_OFFSETS} the library does not define which rows indices address in such caches",
        fix="allocate contiguous caches, or install flashinfer 0.7",
    )
    return {STORAGE_OFFSETS: False}


@_attend.register_fake
def _(q: Tensor, *_: object) -> Tensor:
    return q.new_empty(q.shape, dtype=torch.bfloat16)
