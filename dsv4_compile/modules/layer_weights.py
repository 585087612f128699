"""Weights of one attention layer under the checkpoint's names, stacked by their input, and its RoPE table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..cache import CacheFormat
from ..config import DeepseekV4Config
from ..rope_tables import cos_sin_cache
from ..sizes import check_optional_size
from ..sources import TOPK
from .compressor import Compressor
from .indexer import Indexer
from .linear import Fp8Linear, Linear, Norm
from .stacked import Projection, stacks

_STACKS = ("hidden_stacks", "latent_stacks")


class LayerWeights(nn.Module):
    """Uninitialised parameters of a layer, stacked into one matrix for each input. See `attention` for Args.

    `hidden_stacks` and `latent_stacks` hold the linears that read hidden and the normed query latent.
    """

    cos_sin: Tensor

    def __init__(
        self,
        config: DeepseekV4Config,
        layer_idx: int,
        cache_format: CacheFormat,
        *,
        fp8: bool,
        dtype: torch.dtype,
        device: torch.device | str | None,
        max_seq_len: int | None,
        aux_stream: bool,
        single_gemm: bool | None,
    ) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.ratio = config.ratio(layer_idx)
        source = next(iter(config.sources(layer_idx)), None)
        # Words and numbers that layers of one kind have in common, not the source itself, which has its owner.
        self.entry_selection = "" if source is None else source.selection
        self.cache_format = cache_format
        self.eps = config.rms_norm_eps
        self.scale = config.softmax_scale

        def linear(n: int, k: int) -> Linear | Fp8Linear:
            return Fp8Linear(n, k, device=device) if fp8 else Linear(n, k, dtype=dtype, device=device)

        heads, dim = config.num_heads, config.head_dim
        self.wq_a = linear(config.q_lora_rank, config.hidden_size)
        self.q_norm = Norm(config.q_lora_rank, dtype=dtype, device=device)
        self.wq_b = linear(heads * dim, config.q_lora_rank)
        self.wkv = linear(dim, config.hidden_size)
        self.kv_norm = Norm(dim, dtype=dtype, device=device)
        self.attn_sink = nn.Parameter(torch.empty(heads, dtype=torch.float32, device=device), requires_grad=False)
        self.wo_a = linear(config.o_groups * config.o_lora_rank, heads * dim // config.o_groups)
        self.wo_b = linear(config.hidden_size, config.o_groups * config.o_lora_rank)
        self.compressor = None
        self.indexer = None
        writes = source is not None and source.owner == layer_idx
        if writes:
            self.compressor = Compressor(
                config.hidden_size,
                dim,
                self.ratio,
                eps=self.eps,
                cache_format=self.cache_format.kv,
                dtype=dtype,
                device=device,
            )
        if self.entry_selection == TOPK:
            self.indexer = Indexer(
                config, self.ratio, self.cache_format, compresses=writes, fp8=fp8, dtype=dtype, device=device
            )
        self.single_gemm = single_gemm
        self.aux_stream = aux_stream and self.indexer is not None
        self.stack()
        self.max_seq_len = check_optional_size("max_seq_len", max_seq_len) or config.max_position_embeddings
        self.register_buffer("cos_sin", self._table(self.attn_sink.device), persistent=False)

    def stack(self) -> None:
        """Stack the linears of one input if possible (see `stacked`). Call it again after one is replaced."""
        stacked: list[Any] = [stack for name in _STACKS for stack in getattr(self, name, ())]
        known = [matrix for stack in stacked for matrix in stack.buffers()]
        self.hidden_stacks = stacks(self._hidden_projections(), self.single_gemm, known)
        self.latent_stacks = stacks(self._latent_projections(), known=known)

    def arrange(self) -> None:
        """Move weights that got other storage back into their stacks: `Stack.arrange` of all stacks."""
        for stack in (*self.hidden_stacks, *self.latent_stacks):
            stack.arrange()

    def release(self) -> None:
        """Move weights out of their stacks: `Stack.release` of all stacks."""
        for stack in (*self.hidden_stacks, *self.latent_stacks):
            stack.release()

    def _hidden_projections(self) -> list[Projection]:
        """Return qr, kv, and, if the layer has them, the indexer's weights and the compressors' kv_score."""
        projections = [Projection((self.wq_a,)), Projection((self.wkv,))]
        if self.indexer is not None:
            projections.append(Projection((self.indexer.weights_proj,), float32=self.aux_stream))
        compressors = (self.compressor, self.indexer.compressor if self.indexer is not None else None)
        return projections + [compressor.kv_score() for compressor in compressors if compressor is not None]

    def _latent_projections(self) -> list[Projection]:
        """Return q, and the indexer's q unless the side stream projects it."""
        indexer = [Projection((self.indexer.wq_b,))] if self.indexer is not None and not self.aux_stream else []
        return [Projection((self.wq_b,)), *indexer]

    def _table(self, device: torch.device) -> Tensor:
        return cos_sin_cache(self.config.rope(self.ratio), self.max_seq_len, device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LayerWeights:
        """Convert all but the RoPE table, which is never cast and which all layers on a device share."""
        self.cos_sin = torch.empty(0)
        super()._apply(fn, recurse)
        self.cos_sin = self._table(self.attn_sink.device)
        return self
