"""Attention of a DeepSeek-V4.1 layer: window, compressor, indexer, and one softmax over window and picked entries.

`insert` writes what later tokens and layers read; `attend` reads. At the last source a prompt inserts all tokens and
attends with its tail alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...layout import V41_ENTRY_BLOCK, V41_WINDOW_BLOCK
from ...modules.linear import linear_fp32
from ...parallel import Ranks, all_reduce
from ...reference.common.paging import lookup_slots
from ...reference.common.rope import apply_rope
from .cache import SourceCache, V41Caches
from .config import V41Config
from .linear import Linear, Norm, WeightOptions, linear_of, parameter
from .step import Step


class Selection(NamedTuple):
    """Picks of the last index source, which layers share until the next one: int `[T, K]`, -1 for none.

    Attributes:
        slots: of picked entries in the caches of their source.
        candidates: blocks in which later index sources select, None before `candidate_source`.
    """

    slots: Tensor
    candidates: Tensor | None


class Compressor(nn.Module):
    """Compressed entries of a source: pairs of tokens pooled by their gates at ratio 2, each token at ratio 1."""

    def __init__(self, config: V41Config, ratio: int, options: WeightOptions) -> None:
        super().__init__()
        self.ratio = ratio
        self.wkv = Linear(config.head_dim, config.hidden_size, options.dtype)
        if ratio > 1:
            self.wgate = Linear(config.head_dim, config.hidden_size, options.dtype)
        self.norm = Norm(config.head_dim, config.rms_norm_eps, options.dtype)

    def forward(self, x: Tensor, step: Step, state: Tensor | None) -> Tensor:
        """Return latents `[T, D]`, neither rotated nor rounded to a grid, at tokens that end an entry."""
        values = linear_fp32(x, self.wkv.weight)
        if state is None:
            return self.norm(values.to(x.dtype))
        gates = linear_fp32(x, self.wgate.weight)
        latents: Tensor = torch.ops.dsv4.compress_pairs(
            values, gates, state, step.positions, step.requests, self.norm.weight, self.norm.eps
        )
        return latents


class Indexer(nn.Module):
    """Queries and head weights of an index source, and at sources of entries the keys."""

    def __init__(self, config: V41Config, layer: int, options: WeightOptions) -> None:
        super().__init__()
        self.heads, self.dim = config.index_n_heads, config.index_head_dim
        self.wq_b = linear_of(self.heads * self.dim, config.q_lora_rank, options)
        self.weights_proj = Linear(self.heads, config.hidden_size, options.dtype)
        if layer in config.kv_sources:
            self.wk = Linear(self.dim, config.head_dim, options.dtype)
            self.k_norm = Norm(self.dim, config.rms_norm_eps, options.dtype)


class Attention(nn.Module):
    """Attention of one layer. `insert` comes before `attend`; layers share entries, keys and picks of their sources.

    A rank of a split model has some of the `heads` and of the output `groups`; caches and picks are those of all.
    """

    ranks: Ranks | None = None

    def __init__(self, config: V41Config, layer: int, options: WeightOptions) -> None:
        super().__init__()
        # Facts of the configuration that a graph branches on are attributes of modules: constants in every graph.
        self.layer, self.ratio, self.source = layer, config.ratio(layer), config.sources(layer).kv
        self.is_source, self.is_index_source = layer in config.kv_sources, layer in config.index_sources
        self.publishes_candidates = layer == config.candidate_source
        self.selects_candidates = config.selects_candidates(layer)
        self.blocks, self.block_size = config.candidate_blocks, config.candidate_block_size
        self.topk, self.heads, self.dim, self.groups = (
            *(config.index_topk, config.num_heads),
            *(config.head_dim, config.o_groups),
        )
        heads, dim, hidden, eps = config.num_heads, config.head_dim, config.hidden_size, config.rms_norm_eps
        self.wq_a = linear_of(config.q_lora_rank, hidden, options)
        self.q_norm = Norm(config.q_lora_rank, eps, options.dtype)
        self.wq_b = linear_of(heads * dim, config.q_lora_rank, options)
        self.wkv = linear_of(dim, hidden, options)
        self.kv_norm = Norm(dim, eps, options.dtype)
        self.attn_sink = parameter(heads, dtype=torch.float32)
        # DeepSeek's own code dequantises it, too: its input is not rounded.
        self.wo_a = Linear(config.o_groups * config.o_lora_rank, heads * dim // config.o_groups, options.dtype)
        self.wo_b = linear_of(hidden, config.o_groups * config.o_lora_rank, options)
        if self.is_source:
            self.compressor = Compressor(config, self.ratio, options)
        if self.is_index_source:
            self.indexer = Indexer(config, layer, options)

    def insert(self, x: Tensor, step: Step, caches: V41Caches) -> None:
        """Write the window rows of the tokens `x` `[T, D]`, and at a source index keys and entries."""
        insert, formats, rope = torch.ops.dsv4.rope_quantize_insert, caches.cache_format, caches.rope_tables[self.layer]
        kv, window = self.kv_norm(self.wkv(x)), (V41_WINDOW_BLOCK, formats.window, formats.grid("window"))
        insert(kv, caches.windows[self.layer], step.window_slot, step.positions, rope, *window)
        if not self.is_source:
            return
        source: SourceCache = caches.sources[self.layer]
        latents = self.compressor(x, step, source.state)
        slots = step.entry_slot(self.ratio, caches.entry_tables[self.ratio])
        positions = step.entry_positions(self.ratio)
        # Keys come from the latents before RoPE and rounding.
        keys = self.indexer.k_norm(self.indexer.wk(latents))
        insert(keys, source.keys, slots, positions, rope, V41_ENTRY_BLOCK, formats.keys, formats.grid("keys"))
        entries = formats.entries, formats.grid("entries")
        insert(latents, source.entries, slots, positions, rope, V41_ENTRY_BLOCK, *entries)

    def attend(
        self, x: Tensor, step: Step, caches: V41Caches, selection: Selection | None
    ) -> tuple[Tensor, Selection | None]:
        """Return the output `[T, D]` for the tokens `x`, and the selection for the layers after this one."""
        formats, rope = caches.cache_format, caches.rope_tables[self.layer]
        latent = self.q_norm(self.wq_a(x))
        q = self.wq_b(latent).unflatten(-1, (self.heads, self.dim))
        q = apply_rope(q, step.positions, rope).to(x.dtype)
        if self.is_index_source:
            selection = self._select(x, latent, step, caches, selection)
        entries = slots = None
        if self.source is not None and selection is not None:
            entries, slots = caches.sources[self.source].entries, selection.slots
        out = torch.ops.dsv4.sparse_mla_mixed(
            *(q, caches.windows[self.layer], step.window_slots, entries, slots),
            *(formats.window, V41_WINDOW_BLOCK, formats.entries, V41_ENTRY_BLOCK),
            *(self.dim**-0.5, self.attn_sink),
        )
        out = apply_rope(out, step.positions, rope, inverse=True).to(x.dtype)
        grouped = torch.ops.dsv4.grouped_linear(out.flatten(1), self.wo_a.weight, self.groups)
        return all_reduce(self.wo_b(grouped), self.ranks), selection

    def _select(
        self, x: Tensor, latent: Tensor, step: Step, caches: V41Caches, selection: Selection | None
    ) -> Selection:
        """Return the picks of this index source, from the keys of the source that it reads."""
        formats, indexer = caches.cache_format, self.indexer
        assert self.source is not None
        table = caches.entry_tables[self.ratio]
        q = indexer.wq_b(latent).unflatten(-1, (indexer.heads, indexer.dim))
        arguments = (
            *(q, indexer.weights_proj(x), step.positions, caches.rope_tables[self.layer]),
            *(caches.sources[self.source].keys, table, step.requests, step.visible(self.ratio), V41_ENTRY_BLOCK),
            *(formats.keys, self.topk, formats.query_grid),
        )
        candidates = None
        if self.publishes_candidates:
            picks, candidates = torch.ops.dsv4.index_topk_blocks(*arguments, None, self.block_size, self.blocks)
        elif self.selects_candidates and selection is not None:
            candidates = selection.candidates
            picks = torch.ops.dsv4.index_topk(*arguments, candidates, self.block_size)
        else:
            picks = torch.ops.dsv4.index_topk(*arguments)
        return Selection(lookup_slots(table, step.requests[:, None], picks, V41_ENTRY_BLOCK), candidates)
