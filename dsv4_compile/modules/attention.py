"""One DeepSeek-V4 attention layer: SWA, CSA or HCA, decode and prefill alike, in one traced forward.

hidden -> wq_a, wkv and what else reads it -> norms -> wq_b -> [q norm + RoPE | kv RoPE + store] -> compressor, indexer
-> sparse attention over window and compressed entries, in an attention backend -> inverse RoPE -> wo_a by groups ->
wo_b. With `DSV4_PAGED`, the backend that `auto` asks first, every token attends through the paged caches, decode or
prefill, so batches of any mix run the same graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .. import layout, ops  # noqa: F401  (ops registers torch.ops.dsv4)
from .._compat import device_architecture
from ..attention_backends import Demand, LayerShape, SparseAttention, select
from ..attention_backends.paged import DeepseekV4PagedBackend, Slots
from ..attention_backends.registry import cache_word
from ..attention_backends.v4 import DeepseekV4Metadata
from ..attention_backends.workspace import Workspace
from ..cache import CacheFormat, LayerCache
from ..config import DeepseekV4Config
from ..metadata.types import AttentionMetadata
from .layer_weights import LayerWeights
from .output import choose_path, project_output, quantised_path
from .stacked import project


class DeepseekV4Attention(LayerWeights):
    """The attention of layer `layer_idx`, with parameters under the official checkpoint names.

    Args:
        config: attention configuration.
        layer_idx: which layer; its ratio decides SWA, CSA or HCA.
        kv_cache_dtype, indexer_cache_dtype, hadamard: see `CacheFormat.resolve`; or pass `cache_format` itself.
        fp8: keep wq_a, wq_b, wkv, wo_a, wo_b and the indexer's wq_b as e4m3 with 128x128 block scales.
        dtype: of the other weights and of hidden states.
        max_seq_len: rows of the RoPE table (None = the model's max_position_embeddings). Positions must stay below.
        attention_backend: `auto` or a name in `attention_backends.NAMES`. One that is asked for is used or refused with
            E302; `selection` holds the choice and the reasons.
        engine: `dsv4`, or `library` for the kernel library that the backend was made for.
        max_num_batched_tokens: most tokens of a step, for backends whose prefills go through a workspace (None =
            `max_seq_len`).
        workspace: where such prefills gather their keys; None allocates at each call, as compiled code wants it.
            See `dummy_run`.
        output_projection: one of `output.PATHS`; `output_path` holds the choice and the reason.
        aux_stream: let the indexer project its queries, score and select on a second stream, beside the projection of
            q. Layers without an indexer have nothing to run beside, and a CPU has one stream.
        single_gemm: one GEMM for all projections of hidden, those wanted in float32 included; see `stacked.Stack`.

    Parameters are uninitialised: load them with `dsv4_compile.loading`.
    """

    def __init__(
        self,
        config: DeepseekV4Config,
        layer_idx: int,
        *,
        kv_cache_dtype: str = "auto",
        indexer_cache_dtype: str = "auto",
        hadamard: bool = False,
        cache_format: CacheFormat | None = None,
        fp8: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        max_seq_len: int | None = None,
        attention_backend: str = "auto",
        engine: str = "dsv4",
        max_num_batched_tokens: int | None = None,
        workspace: Workspace | None = None,
        output_projection: str = "auto",
        aux_stream: bool = False,
        single_gemm: bool | None = None,
    ) -> None:
        super().__init__(
            config,
            layer_idx,
            cache_format
            or CacheFormat.resolve(
                cache_word(attention_backend, kv_cache_dtype), indexer_cache_dtype, model_dtype=dtype, hadamard=hadamard
            ),
            fp8=fp8,
            dtype=dtype,
            device=device,
            max_seq_len=max_seq_len,
            aux_stream=aux_stream,
            single_gemm=single_gemm,
        )
        self.selection = select(attention_backend, self._demand(dtype, engine))
        self.attention = self._backend(max_num_batched_tokens or self.max_seq_len)
        self.attention.workspace = workspace
        self.output_projection = output_projection
        self._choose_output()

    def _choose_output(self) -> None:
        architecture = device_architecture(self.attn_sink.device)
        self.output_path = choose_path(self.output_projection, self.wo_a, architecture)
        self._quantised_path = quantised_path(self.output_projection, architecture)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DeepseekV4Attention:
        """Another device may want another output projection."""
        super()._apply(fn, recurse)
        self._choose_output()
        return self

    def _demand(self, dtype: torch.dtype, engine: str) -> Demand:
        """What the layer asks of an attention backend."""
        return Demand(
            head_size=self.config.head_dim,
            num_heads=self.config.num_heads,
            dtype=dtype,
            kv_cache_dtype=self.cache_format.kv_word,
            index_topk=self.config.index_topk,
            architecture=device_architecture(self.attn_sink.device),
            engine=engine,
        )

    def _backend(self, max_num_batched_tokens: int) -> SparseAttention:
        """The selected backend's module for this layer."""
        shape = LayerShape(
            num_heads=self.config.num_heads,
            head_size=self.config.head_dim,
            scale=self.scale,
            window=self.config.sliding_window,
            ratio=self.ratio,
            max_model_len=self.max_seq_len,
            max_num_batched_tokens=max_num_batched_tokens,
            kv_cache_dtype=self.cache_format.kv_word,
        )
        module = self.selection.backend.get_impl_cls()(shape, self.selection.engine)
        device = self.attn_sink.device
        # Scales of per-tensor fp8 are values, which parameters without storage do not stand for.
        return module if device.type == "meta" else module.to(device)

    def forward(
        self,
        hidden: Tensor,
        metadata: AttentionMetadata,
        cache: LayerCache,
        step: DeepseekV4Metadata | None = None,
    ) -> Tensor:
        """Attend T tokens and update the caches in place.

        Args:
            hidden: `[T, hidden_size]`, normed input of the layer.
            metadata: of this step, see `dsv4_compile.metadata`.
            cache: this layer's caches, in `self.cache_format`.
            step: the same step as the attention backend wants it, for backends other than `DSV4_PAGED`; see
                `attention_backends.step_metadata.DeepseekV4StepBuilder`.
        Returns:
            `[T, hidden_size]` in hidden's dtype. Padding tokens (slot -1) give zeros.
        """
        qr, kv, *of_hidden = project(hidden, self._of_hidden(), self.of_hidden)
        qr, kv = torch.ops.dsv4.fused_q_kv_rmsnorm(qr, kv, self.q_norm.weight, self.kv_norm.weight, self.eps)
        self._compress(of_hidden, metadata, cache)
        q, choice = self._query_and_choice(qr, of_hidden, metadata, cache)
        q = torch.ops.dsv4.q_norm_rope_kv_insert(
            q.unflatten(-1, (self.config.num_heads, self.config.head_dim)),
            kv,
            cache.window,
            metadata.window.slot_mapping,
            metadata.positions,
            self.cos_sin,
            self.eps,
            layout.WINDOW_BLOCK,
            self.cache_format.kv,
            q_scale=self.attention.query_scale(),
            kv_scale=self.attention.cache_scale(),
        )
        out = self.attention(
            q,
            cache.window,
            cache.main,
            metadata if step is None else step,
            choice,
            self.attn_sink.float(),  # model.to(bfloat16) casts it; nothing to do otherwise
        )
        return self._project_output(out, metadata.positions)

    def _compress(self, of_hidden: Sequence[Tensor], metadata: AttentionMetadata, cache: LayerCache) -> None:
        """Write new compressed entries; the tensors are what `_of_hidden` describes, without qr and kv."""
        if self.compressor is None:
            return
        md = metadata.c4 if self.indexer is not None else metadata.c128
        assert md is not None and cache.main is not None and cache.state is not None
        # Not `pop`: to Dynamo in torch 2.11 what a starred name takes is a tuple.
        first = 0 if self.indexer is None else 1
        self.compressor(
            of_hidden[first],
            self.cos_sin,
            metadata.positions,
            metadata.token_to_req,
            cache.state,
            md.state_slot_mapping,
            md.state_block_table,
            cache.main,
            md.slot_mapping,
            self.attention.cache_scale(),
        )
        if self.indexer is not None:
            self.indexer.compress(of_hidden[2], self.cos_sin, metadata, cache)

    def _query_and_choice(
        self, qr: Tensor, of_hidden: Sequence[Tensor], metadata: AttentionMetadata, cache: LayerCache
    ) -> tuple[Tensor, Tensor | Slots | None]:
        """q `[T, H * D]`, and what the indexer chooses of the compressed entries, if there is one."""
        if self.indexer is None or not self.aux_stream:
            q, *of_latent = project(qr, self._of_latent(), self.of_latent)
            if self.indexer is None:
                return q, None
            return q, self.indexer(of_latent[0], of_hidden[0], self.cos_sin, metadata, cache)
        weights, paged = of_hidden[0], self.selection.backend is DeepseekV4PagedBackend
        chosen, lens = self.indexer.aside(qr, weights, self.cos_sin, metadata, cache, paged)
        (q,) = project(qr, self._of_latent(), self.of_latent)
        torch.ops.dsv4_stream.join(q, [chosen, lens, qr, weights])
        return q, Slots(chosen, lens) if paged else chosen

    def dummy_run(self, hidden: Tensor) -> Tensor:
        """What an engine runs before there are caches or captures: every product, and no attention.

        Reserves the workspace of the largest prefill, so that it lies still from then on. Returns zeros, of the shape
        and dtype that `forward` returns.
        """
        qr, kv, *_ = project(hidden, self._of_hidden(), self.of_hidden)
        qr, _ = torch.ops.dsv4.fused_q_kv_rmsnorm(qr, kv, self.q_norm.weight, self.kv_norm.weight, self.eps)
        q, *_ = project(qr, self._of_latent(), self.of_latent)
        self.attention.reserve_workspace(hidden.dtype)
        nothing = torch.zeros_like(q).unflatten(-1, (self.config.num_heads, self.config.head_dim))
        return self._project_output(nothing, torch.zeros(hidden.shape[0], dtype=torch.int64, device=hidden.device))

    def _project_output(self, out: Tensor, positions: Tensor) -> Tensor:
        """See `output.project_output`. `out` is `[T, H, D]`."""
        groups = self.config.o_groups
        return project_output(self._quantised_path, out, positions, self.cos_sin, self.wo_a, self.wo_b, groups)
