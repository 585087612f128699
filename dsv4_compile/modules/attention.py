"""One DeepSeek-V4 attention layer: SWA, CSA or HCA, decode and prefill, in one traced forward.

hidden -> wq_a, wkv and the other projections of hidden -> norms -> wq_b -> [q norm + RoPE | kv RoPE + insert] ->
compressor, indexer -> sparse attention over window and compressed entries, in an attention backend -> inverse RoPE ->
wo_a by groups -> wo_b. With `DSV4_PAGED`, the first choice of `auto`, every token attends through the paged caches, in
decode and prefill, so all batches run the same graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import layout, ops  # noqa: F401  (ops registers torch.ops.dsv4)
from .._compat import device_architecture
from ..attention_backends import Demand, LayerShape, SparseAttention, select
from ..attention_backends.paged import DeepseekV4PagedBackend, Slots
from ..attention_backends.registry import cache_word
from ..attention_backends.v4 import DeepseekV4Metadata
from ..attention_backends.workspace import Workspace
from ..cache import CacheFormat, LayerCache, one_format
from ..config import DeepseekV4Config
from ..metadata.types import AttentionMetadata
from ..parallel import Ranks, all_reduce, attention_config
from ..sizes import check_optional_size
from .layer_weights import LayerWeights
from .output import choose_path, project_output, quantised_path
from .stacked import project

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class DeepseekV4Attention(LayerWeights):
    """The attention of layer `layer_idx`, with parameters under the official checkpoint names.

    Args:
        config: attention configuration.
        layer_idx: index of the layer; its sources decide SWA, CSA or HCA.
        kv_cache_dtype, indexer_cache_dtype, hadamard: see `CacheFormat.resolve`.
        cache_format: in place of these three.
        fp8: keep wq_a, wq_b, wkv, wo_a, wo_b and the indexer's wq_b as e4m3 with 128x128 block scales.
        dtype: dtype of the other weights and of hidden states.
        max_seq_len: positions of the RoPE table (None = the model's max_position_embeddings). A token at a position
            that is not below gets NaN.
        attention_backend: `auto` or a name in `attention_backends.NAMES`. A named backend is used or raises E302;
            `selection` holds the choice and the reasons.
        engine: `dsv4`, or `library` for the kernel library that the backend was made for.
        max_num_batched_tokens: most tokens of a step, for backends with a prefill workspace (None =
            `max_seq_len`).
        workspace: memory for the keys that such prefills gather; None allocates at each call, which compiled code
            needs. See `dummy_run`.
        output_projection: one of `output.PATHS`; `output_path` holds the choice and the reason.
        aux_stream: project the indexer's queries, score and select on a side stream, in parallel with the projection
            of q. No effect on layers without an indexer, and none on a CPU.
        single_gemm: one GEMM for all projections of hidden, float32 results included; see `stacked.Stack`.
        mesh: ranks, along one dim, that split heads and output groups; `config` describes the whole layer. Inputs,
            caches and the result are the same on all of them. E701 if they do not divide it.

    Parameters are uninitialised: load them with `dsv4_compile.loading`.
    """

    def __init__(
        self,
        config: DeepseekV4Config,
        layer_idx: int,
        *,
        kv_cache_dtype: str | CacheFormat = "auto",
        indexer_cache_dtype: str = "auto",
        hadamard: bool = False,
        cache_format: str | CacheFormat | None = None,
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
        mesh: DeviceMesh | None = None,
    ) -> None:
        ranks = None if mesh is None else Ranks.of(mesh)
        formats = one_format(kv_cache_dtype, cache_format)
        super().__init__(
            config if ranks is None else attention_config(config, ranks, fp8=fp8),
            layer_idx,
            CacheFormat.resolve(
                formats if isinstance(formats, CacheFormat) else cache_word(attention_backend, formats),
                indexer_cache_dtype,
                model_dtype=dtype,
                hadamard=hadamard,
            ),
            fp8=fp8,
            dtype=dtype,
            device=device,
            max_seq_len=max_seq_len,
            aux_stream=aux_stream,
            single_gemm=single_gemm,
        )
        self.ranks = ranks
        self.selection = select(attention_backend, self._demand(dtype, engine))
        self.attention = self._backend(
            check_optional_size("max_num_batched_tokens", max_num_batched_tokens) or self.max_seq_len
        )
        self.attention.workspace = workspace
        self.output_projection = output_projection
        self._choose_output()

    def _choose_output(self) -> None:
        architecture = device_architecture(self.attn_sink.device)
        self.output_path = choose_path(self.output_projection, self.wo_a, architecture)
        self._quantised_path = quantised_path(self.output_projection, architecture)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DeepseekV4Attention:
        """Choose the output projection again: it depends on the device."""
        super()._apply(fn, recurse)
        self._choose_output()
        return self

    def _demand(self, dtype: torch.dtype, engine: str) -> Demand:
        """Return the requirements of this layer on an attention backend."""
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
        """Build the selected backend's module for this layer."""
        shape = LayerShape(
            num_heads=self.config.num_heads,
            head_size=self.config.head_dim,
            scale=self.scale,
            window=self.config.sliding_window,
            ratio=self.ratio,
            selection=self.entry_selection,
            max_model_len=self.max_seq_len,
            max_num_batched_tokens=max_num_batched_tokens,
            kv_cache_dtype=self.cache_format.kv_word,
        )
        module = self.selection.backend.get_impl_cls()(shape, self.selection.engine)
        device = self.attn_sink.device
        # A module on the meta device keeps its per-tensor scales: they are values, not only shapes.
        return module if device.type == "meta" else module.to(device)

    def forward(
        self,
        hidden: Tensor,
        metadata: AttentionMetadata,
        cache: LayerCache,
        step: DeepseekV4Metadata | None = None,
    ) -> Tensor:
        """Run attention for T tokens and update the caches in place.

        Args:
            hidden: `[T, hidden_size]`, normed input of the layer.
            metadata: metadata of this step, see `dsv4_compile.metadata`.
            cache: this layer's caches, in `self.cache_format`.
            step: metadata of this step in the attention backend's own format, for all but `DSV4_PAGED`; see
                `attention_backends.step_metadata.DeepseekV4StepBuilder`.
        Returns:
            `[T, hidden_size]` in hidden's dtype. Padding tokens (slot -1) give zeros.
        """
        qr, kv, *rest = project(hidden, self._hidden_projections(), self.hidden_stacks)
        qr, kv = torch.ops.dsv4.fused_q_kv_rmsnorm(qr, kv, self.q_norm.weight, self.kv_norm.weight, self.eps)
        self._compress(rest, metadata, cache)
        q, selected = self._query_and_selection(qr, rest, metadata, cache)
        q = torch.ops.dsv4.q_norm_rope_kv_insert(
            torch.unflatten(q, -1, (self.config.num_heads, self.config.head_dim)),
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
            cache.sources[0].entries if self.entry_selection else None,
            metadata if step is None else step,
            selected,
            self.attn_sink.float(),  # model.to(bfloat16) casts it
        )
        return self._project_output(out, metadata.positions)

    def _compress(self, rest: Sequence[Tensor], metadata: AttentionMetadata, cache: LayerCache) -> None:
        """Write new compressed entries. `rest` holds the results of `_hidden_projections` without qr and kv."""
        if self.compressor is None:
            return
        md, source = metadata.sources[self.ratio], cache.sources[0]
        # Not `pop`: in torch 2.11 Dynamo makes a tuple of a starred name.
        first = 0 if self.indexer is None else 1
        self.compressor(
            rest[first],
            self.cos_sin,
            metadata.positions,
            metadata.token_to_req,
            source.states,
            md.state_slot_mapping,
            md.state_block_table,
            source.entries,
            md.slot_mapping,
            self.attention.cache_scale(),
        )
        if self.indexer is not None:
            self.indexer.compress(rest[2], self.cos_sin, metadata, source)

    def _query_and_selection(
        self, qr: Tensor, rest: Sequence[Tensor], metadata: AttentionMetadata, cache: LayerCache
    ) -> tuple[Tensor, Tensor | Slots | None]:
        """Return q `[T, H * D]`, and the compressed entries that the indexer selects, if there is one."""
        if self.indexer is None or not self.aux_stream:
            q, *index_q = project(qr, self._latent_projections(), self.latent_stacks)
            if self.indexer is None:
                return q, None
            return q, self.indexer(index_q[0], rest[0], self.cos_sin, metadata, cache.sources[0])
        weights, paged = rest[0], self.selection.backend is DeepseekV4PagedBackend
        source = cache.sources[0]
        entries, lens = self.indexer.select_on_side_stream(qr, weights, self.cos_sin, metadata, source, paged)
        (q,) = project(qr, self._latent_projections(), self.latent_stacks)
        torch.ops.dsv4_stream.join(q, [entries, lens, qr, weights])
        return q, Slots(entries, lens) if paged else entries

    def dummy_run(self, hidden: Tensor) -> Tensor:
        """Run every GEMM and no attention, for an engine's profiling run before caches are allocated.

        Reserves the workspace of the largest prefill, which keeps its address from then on. Returns zeros in the shape
        and dtype of `forward`'s result.
        """
        qr, kv, *_ = project(hidden, self._hidden_projections(), self.hidden_stacks)
        qr, _ = torch.ops.dsv4.fused_q_kv_rmsnorm(qr, kv, self.q_norm.weight, self.kv_norm.weight, self.eps)
        q, *_ = project(qr, self._latent_projections(), self.latent_stacks)
        self.attention.reserve_workspace(hidden.dtype)
        out = torch.unflatten(torch.zeros_like(q), -1, (self.config.num_heads, self.config.head_dim))
        return self._project_output(out, torch.zeros(hidden.shape[0], dtype=torch.int64, device=hidden.device))

    def _project_output(self, out: Tensor, positions: Tensor) -> Tensor:
        """Project `out` `[T, H, D]` to `[T, hidden_size]`, see `output.project_output`."""
        groups = self.config.o_groups
        hidden = project_output(self._quantised_path, out, positions, self.cos_sin, self.wo_a, self.wo_b, groups)
        return all_reduce(hidden, self.ranks)
