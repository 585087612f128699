"""FLASHINFER_MLA_SPARSE: DeepSeek-V3.2. One row cache of 512 latent and 64 RoPE dims; each token attends top-k tokens.

Queries are absorbed: 512 dims for the latent, 64 for the rotated key. Values are the latent.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ... import ops  # noqa: F401  (registers torch.ops.dsv4)
from ...errors import check
from ...layout import ROPE_DIM, V32_HEAD_DIM, V32_LATENT_DIM, V32_NOPE_HEAD_DIM
from ...metadata.checks import check_capacity
from ...reference.metadata.batch import token_requests
from ..flashinfer import flashinfer_workspace
from ..protocol import AttentionBackend, SparseAttention
from ..types import CommonAttentionMetadata, Demand, LayerShape


@dataclass(frozen=True)
class FlashInferMLASparseMetadata:
    """A batch for V3.2 attention: each token is one row, decode or prefill.

    num_reqs, num_actual_tokens, max_query_len, max_seq_len: as in `CommonAttentionMetadata`.
    query_start_loc: int32 `[R + 1]`, slot_mapping: int64 `[T]`, block_table: int32 `[R, B]`, seq_lens: int32 `[R]`.
    req_id_per_token: int32 `[T]`, 0 for padding; a view of the builder's buffer.
    block_size: tokens of a page. topk_tokens: K.
    """

    num_reqs: int
    max_query_len: int
    max_seq_len: int
    num_actual_tokens: int
    query_start_loc: Tensor
    slot_mapping: Tensor
    block_table: Tensor
    req_id_per_token: Tensor
    seq_lens: Tensor
    block_size: int = 64
    topk_tokens: int = 2048


class FlashInferMLASparseMetadataBuilder:
    """Builds `FlashInferMLASparseMetadata` in a buffer of fixed address."""

    def __init__(
        self,
        max_num_batched_tokens: int,
        *,
        block_size: int = 64,
        topk_tokens: int = 2048,
        device: torch.device | str | None = None,
    ) -> None:
        self.block_size, self.topk_tokens = block_size, topk_tokens
        self.req_id_per_token_buffer = torch.zeros(max_num_batched_tokens, dtype=torch.int32, device=device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlashInferMLASparseMetadata:
        """Build the metadata of a batch. Engines pass `common_prefix_len` and `fast_build`; both are ignored.

        E401 for more tokens than the buffer holds.
        """
        cm, buffer = common_attn_metadata, self.req_id_per_token_buffer
        check_capacity("tokens", cm.num_actual_tokens, buffer.shape[0], "max_num_batched_tokens")
        # Padding and the rest of the buffer get request 0, a legal row for a captured graph.
        tokens = torch.arange(buffer.shape[0], device=buffer.device)
        buffer.copy_(token_requests(cm.query_start_loc, tokens).clamp_min(0))
        return FlashInferMLASparseMetadata(
            num_reqs=cm.num_reqs,
            max_query_len=cm.max_query_len,
            max_seq_len=cm.max_seq_len,
            num_actual_tokens=cm.num_actual_tokens,
            query_start_loc=cm.query_start_loc,
            slot_mapping=cm.slot_mapping,
            block_table=cm.block_table_tensor,
            req_id_per_token=buffer[: cm.num_actual_tokens],
            seq_lens=cm.seq_lens,
            block_size=self.block_size,
            topk_tokens=self.topk_tokens,
        )


class FlashInferMLASparseBackend(AttentionBackend):
    """flashinfer's TRTLLM-gen MLA with a sparse top-k, on Blackwell."""

    name = "FLASHINFER_MLA_SPARSE"
    model_type = "deepseek_v32"
    supported_dtypes = (torch.float16, torch.bfloat16)
    cache_formats: ClassVar = {"auto": "plain", "bfloat16": "plain"}
    kernel_block_sizes = (32, 64)
    head_sizes = (V32_HEAD_DIM,)
    max_heads = 0
    library = "flashinfer"
    library_majors = (10,)
    library_formats = ("plain",)

    @classmethod
    def get_impl_cls(cls) -> type[SparseAttention]:
        return FlashInferMLASparseAttention

    @classmethod
    def get_builder_cls(cls) -> type[Any]:
        return FlashInferMLASparseMetadataBuilder

    @classmethod
    def get_required_kv_cache_layout(cls) -> str:
        """Return "HND". With one KV head it equals "NHD"."""
        return "HND"

    @classmethod
    def _unsupported_model(cls, demand: Demand) -> str:
        if why := super()._unsupported_model(demand):
            return why
        if demand.qk_nope_head_dim not in (None, V32_NOPE_HEAD_DIM):
            return f"qk_nope_head_dim {demand.qk_nope_head_dim}: its kernel supports {V32_NOPE_HEAD_DIM}"
        return "an attention sink: its kernel supports none" if demand.has_sink else ""


class FlashInferMLASparseAttention(SparseAttention):
    """Attention of one layer in `FLASHINFER_MLA_SPARSE`."""

    backend = FlashInferMLASparseBackend

    def __init__(self, layer: LayerShape, engine: str = "dsv4", qk_nope_head_dim: int = V32_NOPE_HEAD_DIM) -> None:
        super().__init__(layer, engine)
        self.qk_nope_head_dim = qk_nope_head_dim

    def forward(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_cache: Tensor,
        metadata: FlashInferMLASparseMetadata,
        topk_indices: Tensor,
    ) -> Tensor:
        """Attend T tokens; their keys are in the cache already.

        Args:
            q: `[T, H, latent + rope]`, or its two parts. Rows after the metadata's tokens are padding.
            kv_cache: `[P, S, latent + rope]`.
            topk_indices: int32 `[>= T, K]`, tokens within the request, -1 for unused columns.
        Returns:
            `[T, H, latent]` in q's dtype; 0 where nothing is attended.
        """
        if isinstance(q, tuple):
            q = torch.cat(q, dim=-1)
        tokens = metadata.req_id_per_token.shape[0]
        indices, counts = torch.ops.dsv4.convert_req_index(
            metadata.req_id_per_token, metadata.block_table, topk_indices[:tokens], metadata.block_size, True
        )
        if self.engine == "library":
            out = torch.ops.dsv4_library.flashinfer_mla_sparse(
                q[:tokens],
                kv_cache,
                indices,
                counts,
                self.layer.scale,
                self.qk_nope_head_dim,
                self.layer.value_dim,
            )
        else:
            out, _ = torch.ops.dsv4.sparse_mla_decode_latent(
                q[:tokens],
                kv_cache,
                indices,
                counts,
                metadata.block_size,
                self.layer.scale,
                self.layer.value_dim,
            )
        return torch.nn.functional.pad(out, (0, 0, 0, 0, 0, q.shape[0] - tokens))


@torch.library.custom_op("dsv4_library::flashinfer_mla_sparse", mutates_args=())
def _attend(
    q: Tensor,
    kv_cache: Tensor,
    indices: Tensor,
    counts: Tensor,
    scale: float,
    qk_nope_head_dim: int,
    value_dim: int,
) -> Tensor:
    """Call `trtllm_batch_decode_with_kv_cache_mla` with a sparse top-k and one query row per batch row."""
    check(
        kv_cache.is_contiguous(),
        "E203",
        got=f"pages {kv_cache.stride(0)} elements apart, with gaps, for flashinfer",
        why="the library does not define which rows a sparse top-k addresses in such pages",
        fix="allocate a contiguous cache",
    )
    flashinfer_decode = importlib.import_module("flashinfer.decode")
    width = indices.shape[1]
    out = flashinfer_decode.trtllm_batch_decode_with_kv_cache_mla(
        query=q.contiguous()[:, None],
        kv_cache=kv_cache[:, None],
        workspace_buffer=flashinfer_workspace(q.device),
        qk_nope_head_dim=qk_nope_head_dim,
        kv_lora_rank=value_dim,
        qk_rope_head_dim=q.shape[2] - value_dim,
        block_tables=indices[:, None],
        seq_lens=counts,
        max_seq_len=width,
        bmm1_scale=scale,
        bmm2_scale=1.0,
        sparse_mla_top_k=width,
    )
    attended: Tensor = out.view(-1, q.shape[1], value_dim).contiguous()
    return attended


@_attend.register_fake
def _(
    q: Tensor, kv_cache: Tensor, indices: Tensor, counts: Tensor, scale: float, qk_nope_head_dim: int, value_dim: int
) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[1], value_dim))


def v32_shape(num_heads: int, scale: float, **options: Any) -> LayerShape:
    """Return the shape of a DeepSeek-V3.2 layer."""
    shape = {"head_size": V32_LATENT_DIM + ROPE_DIM, "value_dim": V32_LATENT_DIM, "window": 0, **options}
    return LayerShape(num_heads, scale=scale, **shape)
