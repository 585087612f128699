"""Lightning indexer: scores the entries of a source with small quantised keys and selects the top-k."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import layout
from ..cache import CacheFormat, SourceCache
from ..config import DeepseekV4Config
from ..errors import fail
from ..metadata.types import AttentionMetadata
from .compressor import Compressor
from .linear import Fp8Linear, Linear
from .side_stream import select_on_side_stream


class Indexer(nn.Module):
    """Selects, for every token, up to `index_topk` compressed entries of its request.

    score(t, i) = sum_h w[t,h] * relu(q[t,h] . k[i]) * Di^-0.5 * Hi^-0.5 over the entries that token t can see.

    Args:
        ratio: compress ratio of the source.
        compresses: whether the layer writes the keys; readers of another layer's source have no compressor.
    """

    def __init__(
        self,
        config: DeepseekV4Config,
        ratio: int,
        cache_format: CacheFormat,
        *,
        compresses: bool = True,
        fp8: bool = False,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.n_heads, self.head_dim = config.index_n_heads, config.index_head_dim
        self.topk, self.ratio = config.index_topk, ratio
        self.cache_format = cache_format.indexer
        self.hadamard = cache_format.hadamard
        n, k = self.n_heads * self.head_dim, config.q_lora_rank
        self.wq_b = Fp8Linear(n, k, device=device) if fp8 else Linear(n, k, dtype=dtype, device=device)
        self.weights_proj = Linear(self.n_heads, config.hidden_size, dtype=dtype, device=device)
        self.compressor = None
        if compresses:
            self.compressor = Compressor(
                config.hidden_size,
                self.head_dim,
                ratio,
                eps=config.rms_norm_eps,
                cache_format=self.cache_format,
                hadamard=self.hadamard,
                dtype=dtype,
                device=device,
            )

    def compress(self, kv_score: Tensor, cos_sin: Tensor, metadata: AttentionMetadata, source: SourceCache) -> None:
        """Compress this step's keys into `source.keys`; `kv_score` as `Compressor.forward` takes it."""
        assert self.compressor is not None
        md = metadata.sources[self.ratio]
        self.compressor(
            kv_score,
            cos_sin,
            metadata.positions,
            metadata.token_to_req,
            source.key_states,
            md.indexer_state_slot_mapping,
            md.indexer_state_block_table,
            source.keys,
            md.indexer_slot_mapping,
        )

    def forward(
        self, q: Tensor, weights: Tensor, cos_sin: Tensor, metadata: AttentionMetadata, source: SourceCache
    ) -> Tensor:
        """Return entries of the request, int32 `[T, index_topk]`, valid ones first, then -1.

        Args:
            q: `[T, n_heads * head_dim]`, wq_b of the normed query latent.
            weights: `[T, n_heads]`, weights_proj of the layer's input.
            source: its keys include those of this step already.
        """
        md = metadata.sources[self.ratio]
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
            source.keys,
            md.indexer_block_table,
            metadata.token_to_req,
            md.context_lens,
            layout.storage_block_size(self.ratio),
            self.cache_format,
            self.topk,
        )

    def select_on_side_stream(
        self,
        qr: Tensor,
        weights: Tensor,
        cos_sin: Tensor,
        metadata: AttentionMetadata,
        source: SourceCache,
        slots: bool,
    ) -> tuple[Tensor, Tensor]:
        """Run `forward` from the normed query latent `qr` on the side stream, with float32 `weights`.

        With `slots` the result is slots of the extra cache with their lengths; see `side_stream.select_on_side_stream`.
        """
        md = metadata.sources[self.ratio]
        assert source.keys is not None and md.indexer_block_table is not None
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
            source.keys,
            md.indexer_block_table,
            metadata.token_to_req,
            md.context_lens,
            layout.storage_block_size(self.ratio),
            self.cache_format,
            self.hadamard,
            self.topk,
            md.block_table if slots else None,
            metadata.is_valid_token,
            layout.storage_block_size(self.ratio),
        )
        return entries, lens
