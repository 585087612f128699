"""Compressor: pools `ratio` tokens into one cache entry, with overlap (ratio 4) or without (ratio 128)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import layout
from .linear import Linear, Norm
from .stacked import Projection


class Compressor(nn.Module):
    """Saves every token's kv and score, and writes a compressed entry at the last token of each group.

    Args:
        hidden_size: width of the layer's input.
        head_dim: width d of an entry: 512, or 128 for the indexer's keys.
        ratio: tokens per entry, 4 (overlapping groups) or 128.
        eps: epsilon of the RMSNorm over a pooled entry.
        cache_format: format of the cache that receives the entries.
        hadamard: rotate entries before quantisation (indexer keys only).
    """

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        ratio: int,
        *,
        eps: float,
        cache_format: str,
        hadamard: bool = False,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        width = layout.overlap_factor(ratio) * head_dim
        self.ratio = ratio
        self.eps = eps
        self.cache_format = cache_format
        self.hadamard = hadamard
        self.wkv = Linear(width, hidden_size, dtype=dtype, device=device)
        self.wgate = Linear(width, hidden_size, dtype=dtype, device=device)
        self.ape = nn.Parameter(torch.empty(ratio, width, dtype=torch.float32, device=device), requires_grad=False)
        self.norm = Norm(head_dim, dtype=dtype, device=device)

    def kv_score(self) -> Projection:
        """Return the projection of the layer's input that computes `kv_score` for `forward`."""
        return Projection((self.wkv, self.wgate), float32=True)

    def forward(
        self,
        kv_score: Tensor,
        cos_sin: Tensor,
        positions: Tensor,
        token_to_req: Tensor,
        state_cache: Tensor | None,
        state_slots: Tensor | None,
        state_block_table: Tensor | None,
        cache: Tensor | None,
        slots: Tensor | None,
        cache_scale: Tensor | None = None,
    ) -> None:
        """Update `state_cache` and `cache` in place for T tokens.

        Args:
            kv_score: float32 `[T, 2 * width]`, any row stride: wkv, then wgate of the layer's input.
            cos_sin: float32 `[max_pos, rope_dim]`, the layer's table.
            positions: int64 `[T]`; token_to_req: int32 `[T]`.
            state_cache: float32 `[P, S, width]`, state_slots int64 `[T]`, state_block_table int32 `[R, B]`.
            cache: destination in `cache_format`; slots: int64 `[T]`, -1 except at a group's last token.
            cache_scale: scale of a per-tensor fp8 destination, float32, one element.
        """
        state_block_size = layout.state_block_size(self.ratio)
        torch.ops.dsv4.save_partial_states(kv_score, self.ape, state_cache, state_slots, positions, state_block_size)
        torch.ops.dsv4.compress_norm_rope_insert(
            state_cache,
            state_slots,
            state_block_table,
            token_to_req,
            positions,
            slots,
            self.norm.weight,
            cos_sin,
            cache,
            self.eps,
            self.ratio,
            state_block_size,
            layout.storage_block_size(self.ratio),
            self.cache_format,
            self.hadamard,
            cache_scale,
        )
