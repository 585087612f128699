"""The lightning indexer of DeepSeek-V3.2: selects the tokens of its request that each token attends.

    score(t, s) = sum_h w[t, h] * relu(q[t, h] . k[s]) * D^-0.5 * H^-0.5,  s <= t

Each token has one small key (a linear of the layer's input, LayerNorm, RoPE) in a cache with pages of the same size as
the attention cache. Queries are a linear of the query latent. The ops for scores and selection are those of V4's
indexer, where an entry covers several tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ... import ops  # noqa: F401  (registers torch.ops.dsv4)
from ...errors import check
from ...layout import INDEXER_FP8, INDEXER_HEAD_DIM, ROPE_DIM
from ...metadata.checks import check_capacity
from ...reference.common.kv_format import store_indexer
from ...reference.common.quant import rounded_hadamard
from ...reference.common.rope import apply_rope
from ...reference.metadata.batch import token_positions, token_requests
from ..types import CommonAttentionMetadata

FORMATS = {"fp8": "indexer_fp8", "bfloat16": "plain"}
"""Supported words for the key cache -> its format in `layout`."""


@dataclass(frozen=True)
class DeepseekV32IndexerMetadata:
    """A batch for the indexer.

    slot_mapping: int64 `[T]`. block_table: int32 `[R, B]`. req_id_per_token: int32 `[T]`, 0 for padding.
    context_lens: int32 `[T]`, tokens that each may attend, itself included; 0 for padding. block_size: tokens of a
    page. req_id_per_token and context_lens are views of the builder's buffers.
    """

    slot_mapping: Tensor
    block_table: Tensor
    req_id_per_token: Tensor
    context_lens: Tensor
    block_size: int


class DeepseekV32IndexerMetadataBuilder:
    """Builds `DeepseekV32IndexerMetadata` in buffers of fixed addresses."""

    def __init__(
        self, max_num_batched_tokens: int, *, block_size: int = 64, device: torch.device | str | None = None
    ) -> None:
        self.block_size = block_size
        self.req_id_per_token = torch.zeros(max_num_batched_tokens, dtype=torch.int32, device=device)
        self.context_lens = torch.zeros(max_num_batched_tokens, dtype=torch.int32, device=device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> DeepseekV32IndexerMetadata:
        """Build the metadata of a batch. Engines pass `common_prefix_len` and `fast_build`; both are ignored.

        E401 for more tokens than the buffers hold.
        """
        cm, capacity = common_attn_metadata, self.context_lens.shape[0]
        check_capacity("tokens", cm.num_actual_tokens, capacity, "max_num_batched_tokens")
        tokens = torch.arange(capacity, device=self.context_lens.device)
        requests = token_requests(cm.query_start_loc, tokens)
        self.req_id_per_token.copy_(requests.clamp_min(0))
        self.context_lens.copy_(token_positions(cm.query_start_loc, cm.seq_lens, requests, tokens) + 1)
        return DeepseekV32IndexerMetadata(
            slot_mapping=cm.slot_mapping,
            block_table=cm.block_table_tensor,
            req_id_per_token=self.req_id_per_token[: cm.num_actual_tokens],
            context_lens=self.context_lens[: cm.num_actual_tokens],
            block_size=self.block_size,
        )


class DeepseekV32Indexer(nn.Module):
    """The indexer of one layer. Parameters have the names and shapes of DeepSeek-V3.2's checkpoints.

    Args:
        topk: tokens selected, K.
        cache_dtype: a word of `FORMATS`; fp8 keys have 128 dims and one power-of-two scale each.
        rope_dim: leading dims that are rotated. interleaved: whether RoPE pairs are neighbours; otherwise they are
            `rope_dim // 2` apart, as in the published weights.
        hadamard: apply a Hadamard transform to queries and keys before they are quantised, as DeepSeek's code does.
    """

    def __init__(
        self,
        hidden_size: int,
        q_lora_rank: int = 1536,
        *,
        num_heads: int = 64,
        head_dim: int = INDEXER_HEAD_DIM,
        topk: int = 2048,
        cache_dtype: str = "fp8",
        rope_dim: int = ROPE_DIM,
        interleaved: bool = False,
        hadamard: bool = False,
        eps: float = 1e-6,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check(cache_dtype in FORMATS, "E202", got=f"cache_dtype={cache_dtype!r}", rule=f"one of {', '.join(FORMATS)}")
        check(
            cache_dtype != "fp8" or head_dim == INDEXER_HEAD_DIM,
            "E205",
            got=f"head_dim={head_dim} with an fp8 cache",
            fix=f'use cache_dtype="bfloat16"; fp8 keys have {INDEXER_HEAD_DIM} dims',
        )
        self.num_heads, self.head_dim, self.topk, self.eps = num_heads, head_dim, topk, eps
        self.rope_dim, self.interleaved, self.hadamard = rope_dim, interleaved, hadamard
        self.cache_format = FORMATS[cache_dtype]

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, dtype=dtype, device=device).requires_grad_(False)

        self.wq_b, self.wk = linear(q_lora_rank, num_heads * head_dim), linear(hidden_size, head_dim)
        self.weights_proj = linear(hidden_size, num_heads)
        self.k_norm = nn.LayerNorm(head_dim, eps, dtype=torch.float32, device=device).requires_grad_(False)

    def get_cache_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """Return the shape of the key cache: uint8 for fp8, else rows in the layer's dtype."""
        if self.cache_format == "plain":
            return (num_blocks, block_size, self.head_dim)
        return (num_blocks, INDEXER_FP8.page_bytes(block_size))

    def forward(
        self,
        hidden: Tensor,
        qr: Tensor,
        positions: Tensor,
        cos_sin_cache: Tensor,
        cache: Tensor,
        metadata: DeepseekV32IndexerMetadata,
    ) -> Tensor:
        """Store this step's keys, select, and return int32 `[T, K]`: tokens of the request, ascending, then -1.

        Args:
            hidden: `[T, hidden]`, the layer's input. qr: `[T, q_lora_rank]`, the normed query latent.
            positions: int `[T]`. cos_sin_cache: float32 `[max_pos, rope_dim]`, see `reference.common.rope`.
            cache: see `get_cache_shape`; updated in place.
        """
        key = self.wk(hidden).float()
        key = nn.functional.layer_norm(key, (self.head_dim,), self.k_norm.weight, self.k_norm.bias, self.eps)
        # Round after the norm and after RoPE, like the reference implementation.
        store = hidden.dtype
        key = apply_rope(self._rope_last(key.to(store)), positions, cos_sin_cache).to(store).float()
        if self.hadamard:
            key = rounded_hadamard(key, store)
        store_indexer(cache, self.cache_format, metadata.block_size, metadata.slot_mapping, key)
        q = self._rope_last(torch.unflatten(self.wq_b(qr), -1, (self.num_heads, self.head_dim)))
        weights = torch.ops.dsv4.grouped_linear(hidden, self.weights_proj.weight, 1, True)
        values, scale, weights = torch.ops.dsv4.indexer_q_rope_quant(
            q, positions, cos_sin_cache, weights, self.cache_format, self.hadamard
        )
        selected: Tensor = torch.ops.dsv4.indexer_logits_topk(
            values,
            scale,
            weights,
            cache,
            metadata.block_table,
            metadata.req_id_per_token,
            metadata.context_lens,
            metadata.block_size,
            self.cache_format,
            self.topk,
        )
        return selected

    def _rope_last(self, x: Tensor) -> Tensor:
        """Move the RoPE dims of `x` `[..., D]` to the end and make RoPE pairs neighbours, as the ops expect.

        Queries and keys get the same permutation, so their dot products and quantisation scales do not change.
        """
        rotated, rest = x.split((self.rope_dim, self.head_dim - self.rope_dim), dim=-1)
        if not self.interleaved:
            rotated = torch.unflatten(rotated, -1, (2, -1)).transpose(-1, -2).flatten(-2)
        return torch.cat((rest, rotated), dim=-1)
