"""The attention layer of DeepSeek-V3.2 in absorbed form, an example of `FLASHINFER_MLA_SPARSE`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ... import ops  # noqa: F401  (registers torch.ops.dsv4)
from ..._compat import device_architecture
from ...layout import ROPE_DIM, V32_LATENT_DIM, V32_NOPE_HEAD_DIM
from ...reference.common.rope import apply_rope
from ..registry import select
from ..types import Demand, LayerShape
from .attention import FlashInferMLASparseAttention, FlashInferMLASparseMetadata
from .indexer import DeepseekV32Indexer, DeepseekV32IndexerMetadata


class DeepseekV32SparseAttention(nn.Module):
    """DeepSeek-V3.2 attention in absorbed form.

    hidden -> q and latent, normed -> cache row -> sparse attention in the latent space -> values -> hidden.

    The up-projection `kv_b_proj` is never applied to cached tokens: its key half is multiplied into the query, its
    value half into the result. Parameters have the names and shapes of DeepSeek-V3.2's checkpoints.

    Args:
        indexer: selects the attended tokens; same hidden size and query latent. None: the caller passes them.
        scale: of the scores; None = (qk_nope_head_dim + qk_rope_head_dim) ** -0.5, without YaRN's correction.
        engine: one of `types.ENGINES`. E302 for `library` if `FLASHINFER_MLA_SPARSE` does not support the layer.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        q_lora_rank: int = 1536,
        kv_lora_rank: int = V32_LATENT_DIM,
        qk_nope_head_dim: int = V32_NOPE_HEAD_DIM,
        qk_rope_head_dim: int = ROPE_DIM,
        v_head_dim: int = 128,
        scale: float | None = None,
        indexer: DeepseekV32Indexer | None = None,
        eps: float = 1e-6,
        engine: str = "dsv4",
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.eps = num_heads, eps
        self.nope, self.rope, self.latent = qk_nope_head_dim, qk_rope_head_dim, kv_lora_rank
        query = qk_nope_head_dim + qk_rope_head_dim

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, dtype=dtype, device=device).requires_grad_(False)

        def norm(dims: int) -> nn.RMSNorm:
            return nn.RMSNorm(dims, eps, dtype=dtype, device=device).requires_grad_(False)

        self.q_a_proj, self.q_a_layernorm = linear(hidden_size, q_lora_rank), norm(q_lora_rank)
        self.q_b_proj = linear(q_lora_rank, num_heads * query)
        self.kv_a_proj_with_mqa = linear(hidden_size, kv_lora_rank + qk_rope_head_dim)
        self.kv_a_layernorm = norm(kv_lora_rank)
        self.kv_b_proj = linear(kv_lora_rank, num_heads * (qk_nope_head_dim + v_head_dim))
        self.o_proj = linear(num_heads * v_head_dim, hidden_size)
        shape = LayerShape(
            num_heads,
            kv_lora_rank + qk_rope_head_dim,
            query**-0.5 if scale is None else scale,
            window=0,
            value_dim=kv_lora_rank,
        )
        self.indexer = indexer
        if engine == "library":
            _check_library(shape, qk_nope_head_dim, dtype, self.o_proj.weight.device, indexer)
        self.attention = FlashInferMLASparseAttention(shape, engine, qk_nope_head_dim)

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        cos_sin_cache: Tensor,
        kv_cache: Tensor,
        metadata: FlashInferMLASparseMetadata,
        topk_indices: Tensor | None = None,
        index_cache: Tensor | None = None,
        index_metadata: DeepseekV32IndexerMetadata | None = None,
    ) -> Tensor:
        """Attend T tokens and write their rows into the cache, and into the indexer's cache if there is one.

        Args:
            hidden: `[T, hidden]`. positions: int `[T]`.
            cos_sin_cache: float32 `[max_pos, rope]`, see `reference.common.rope`.
            kv_cache: `[P, S, latent + rope]`, updated in place.
            topk_indices: see `FlashInferMLASparseAttention.forward`; for a layer without an indexer.
            index_cache, index_metadata: see `DeepseekV32Indexer.forward`; for a layer with an indexer.
        Returns:
            `[T, hidden]`.
        """
        latent, key = self.kv_a_proj_with_mqa(hidden).split((self.latent, self.rope), dim=-1)
        qr, latent = torch.ops.dsv4.fused_q_kv_rmsnorm(
            self.q_a_proj(hidden), latent, self.q_a_layernorm.weight, self.kv_a_layernorm.weight, self.eps
        )
        torch.ops.dsv4.kv_rope_insert(
            torch.cat((latent, key), dim=-1),
            kv_cache,
            metadata.slot_mapping,
            positions,
            cos_sin_cache,
            metadata.block_size,
            "plain",
        )
        q = torch.unflatten(self.q_b_proj(qr), -1, (self.num_heads, self.nope + self.rope))
        nope, rotated = q.split((self.nope, self.rope), dim=-1)
        rotated = apply_rope(rotated, positions, cos_sin_cache).to(q.dtype)
        if self.indexer is not None:
            assert index_cache is not None and index_metadata is not None
            topk_indices = self.indexer(hidden, qr, positions, cos_sin_cache, index_cache, index_metadata)
        up = torch.unflatten(self.kv_b_proj.weight, 0, (self.num_heads, -1))
        absorbed = torch.einsum("thn,hnc->thc", nope, up[:, : self.nope])
        out = self.attention((absorbed, rotated), kv_cache, metadata, topk_indices)
        values = torch.einsum("thc,hvc->thv", out, up[:, self.nope :])
        return self.o_proj(values.flatten(1))


def _check_library(
    shape: LayerShape, nope: int, dtype: torch.dtype, device: torch.device, indexer: DeepseekV32Indexer | None
) -> None:
    """Raise E302 with the reason if flashinfer does not support the layer."""
    demand = Demand(
        model_type="deepseek_v32",
        head_size=shape.head_size,
        num_heads=shape.num_heads,
        dtype=dtype,
        block_size=64,
        index_topk=2048 if indexer is None else indexer.topk,
        has_sink=False,
        qk_nope_head_dim=nope,
        architecture=device_architecture(device),
        engine="library",
    )
    select("FLASHINFER_MLA_SPARSE", demand)
