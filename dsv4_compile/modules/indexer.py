"""Lightning indexer of CSA layers: scores compressed entries with small quantised keys and selects the top-k."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import layout
from ..cache import CacheFormat, LayerCache
from ..config import DeepseekV4Config
from ..errors import fail
from ..metadata.types import AttentionMetadata
from .compressor import Compressor
from .linear import Fp8Linear, Linear
from .side_stream import select_on_side_stream


class Indexer(nn.Module):
    """Selects, for every token, up to `index_topk` compressed entries of its request.

    score(t, i) = sum_h w[t,h] * relu(q[t,h] . k[i]) * Di^-0.5 * Hi^-0.5 over the entries that token t can see.
    """

    def __init__(
        self,
        config: DeepseekV4Config,
        cache_format: CacheFormat,
        *,
        fp8: bool = False,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.n_heads, self.head_dim = config.index_n_heads, config.index_head_dim
        self.topk = config.index_topk
        self.cache_format = cache_format.indexer
        self.hadamard = cache_format.hadamard
        n, k = self.n_heads * self.head_dim, config.q_lora_rank
        self.wq_b = Fp8Linear(n, k, device=device) if fp8 else Linear(n, k, dtype=dtype, device=device)
        self.weights_proj = Linear(self.n_heads, config.hidden_size, dtype=dtype, device=device)
        self.compressor = Compressor(
            config.hidden_size,
            self.head_dim,
            layout.CSA_RATIO,
            eps=config.rms_norm_eps,
            cache_format=self.cache_format,
            hadamard=self.hadamard,
            dtype=dtype,
            device=device,
        )

    def compress(self, kv_score: Tensor, cos_sin: Tensor, metadata: AttentionMetadata, cache: LayerCache) -> None:
        """Compress this step's keys into `cache.indexer`; `kv_score` as `Compressor.forward` takes it."""
        c4 = metadata.c4
        assert c4 is not None and cache.indexer is not None and cache.indexer_state is not None
        self.compressor(
            kv_score,
            cos_sin,
            metadata.positions,
            metadata.token_to_req,
            cache.indexer_state,
            c4.indexer_state_slot_mapping,
            c4.indexer_state_block_table,
            cache.indexer,
            c4.indexer_slot_mapping,
        )

    def forward(
        self, q: Tensor, weights: Tensor, cos_sin: Tensor, metadata: AttentionMetadata, cache: LayerCache
    ) -> Tensor:
        """Return entries of the request, int32 `[T, index_topk]`, valid ones first, then -1.

        Args:
            q: `[T, n_heads * head_dim]`, wq_b of the normed query latent.
            weights: `[T, n_heads]`, weights_proj of the layer's input.
            cache: its indexer cache holds this step's keys already.
        """
        c4 = metadata.c4
        assert c4 is not None and cache.indexer is not None
        q8, q_scale, weights = torch.ops.dsv4.indexer_q_rope_quant(
            torch.unflatten(q, -1, (self.n_heads, self.head_dim)),
            metadata.positions,
            cos_sin,
            weights,
            self.cache_format,
            self.hadamard,
        )
        return torch.ops.dsv4.indexer_logits_topk(
            q8,
            q_scale,
            weights,
            cache.indexer,
            c4.indexer_block_table,
            metadata.token_to_req,
            c4.context_lens,
            layout.storage_block_size(layout.CSA_RATIO),
            self.cache_format,
            self.topk,
        )

    def select_on_side_stream(
        self,
        qr: Tensor,
        weights: Tensor,
        cos_sin: Tensor,
        metadata: AttentionMetadata,
        cache: LayerCache,
        slots: bool,
    ) -> tuple[Tensor, Tensor]:
        """Run `forward` from the normed query latent `qr` on the side stream, with float32 `weights`.

        With `slots` the result is slots of the extra cache with their lengths; see `side_stream.select_on_side_stream`.
        """
        c4 = metadata.c4
        assert c4 is not None and cache.indexer is not None
        if type(self.wq_b) not in (Linear, Fp8Linear):
            fail(
                "E302",
                got=f"aux_stream=True with an indexer.wq_b of type {type(self.wq_b).__name__}",
                why="on the side stream the indexer runs a GEMM with the weight, and nothing else that the module does",
                fix="set aux_stream=False and call stack() on the layer",
            )
        fp8 = self.wq_b if isinstance(self.wq_b, Fp8Linear) else None
        entries, lens = select_on_side_stream(
            qr,
            self.wq_b.weight,
            None if fp8 is None else fp8.scale,
            fp8 is not None and fp8.quantize_input,
            weights,
            metadata.positions,
            cos_sin,
            cache.indexer,
            c4.indexer_block_table,
            metadata.token_to_req,
            c4.context_lens,
            layout.storage_block_size(layout.CSA_RATIO),
            self.cache_format,
            self.hadamard,
            self.topk,
            c4.block_table if slots else None,
            metadata.is_valid_token,
            layout.storage_block_size(layout.CSA_RATIO),
        )
        return entries, lens
