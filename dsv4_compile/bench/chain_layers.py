"""A layer up to its attention, for scenario `chain`: arguments, the work in plain PyTorch and in ops, and its cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import layout
from ..config import DeepseekV4Config
from ..modules.linear import linear, linear_fp32
from ..selection import costs
from . import plain
from .problem import Args

CACHE, WINDOW, STATE, ENTRIES = "fp8_ds_mla", 7, 9, 14
"""Format of the caches, and the positions in `ChainInputs` of the written tensors."""


class ChainInputs(NamedTuple):
    """Arguments of one step; those of the compressor are None in a layer without one."""

    hidden: Tensor
    w_in: Tensor  # wq_a, wkv, and the compressor's wkv and wgate, as rows of one matrix
    q_weight: Tensor
    kv_weight: Tensor
    wq_b: Tensor
    positions: Tensor
    cos_sin: Tensor
    window: Tensor
    window_slots: Tensor
    state: Tensor | None = None
    state_slots: Tensor | None = None
    state_table: Tensor | None = None
    owners: Tensor | None = None
    entry_slots: Tensor | None = None
    entries: Tensor | None = None
    ape: Tensor | None = None
    norm_weight: Tensor | None = None


TOKENS_FIRST = tuple(
    ChainInputs._fields.index(n)
    for n in ("hidden", "positions", "window_slots", "state_slots", "owners", "entry_slots")
)


@dataclass(frozen=True, slots=True)
class ChainLayer:
    """A layer of a model, with caches for steps of up to `most` tokens or `requests` requests."""

    config: DeepseekV4Config
    ratio: int
    context: int
    requests: int
    most: int
    device: torch.device

    @property
    def width(self) -> int:
        """Width of a token's values for the compressor: half of a state row."""
        return layout.state_width(self.ratio, self.config.head_dim) // 2 if self.ratio > 1 else 0

    @property
    def widths(self) -> tuple[int, ...]:
        """Rows of `w_in` for qr, for kv, and for the values and scores of the compressor."""
        narrow = self.config.q_lora_rank, self.config.head_dim
        return (*narrow, self.width, self.width) if self.ratio > 1 else narrow

    def live_blocks(self, new_tokens: int) -> int:
        """Return how many state blocks the new tokens of a request read and write."""
        size = layout.state_block_size(self.ratio)
        needed = layout.cdiv(layout.overlap_factor(self.ratio) * self.ratio + new_tokens, size) + 1
        return min(needed, layout.cdiv(self.context, size))

    def inputs(self, tokens: int, seed: int) -> Args:
        """Return the `ChainInputs` of a step; caches have the same size in every step."""
        c, device = self.config, self.device
        generator = torch.Generator(device).manual_seed(seed)
        randn = partial(torch.randn, device=device, generator=generator, dtype=torch.bfloat16)
        shuffled = partial(torch.randperm, device=device, generator=generator)
        query_len = tokens if tokens > self.requests else 1
        positions = self.context - query_len + torch.arange(tokens, device=device) % query_len
        angle = torch.rand(self.context, c.rope_dim // 2, device=device, generator=generator) * 6.28
        pages = layout.cdiv(self.most, layout.WINDOW_BLOCK)
        first = ChainInputs(
            hidden=randn(tokens, c.hidden_size),
            w_in=randn(sum(self.widths), c.hidden_size) * c.hidden_size**-0.5,
            q_weight=1 + 0.1 * randn(c.q_lora_rank),
            kv_weight=1 + 0.1 * randn(c.head_dim),
            wq_b=randn(c.num_heads * c.head_dim, c.q_lora_rank) * c.q_lora_rank**-0.5,
            positions=positions,
            cos_sin=torch.cat((angle.cos(), angle.sin()), dim=1),
            window=layout.allocate_cache(CACHE, pages, layout.WINDOW_BLOCK, device=device),
            window_slots=shuffled(pages * layout.WINDOW_BLOCK)[:tokens],
        )
        if self.ratio == 1:
            return tuple(first)
        size, block = layout.state_block_size(self.ratio), layout.storage_block_size(self.ratio)
        owners = torch.arange(tokens, device=device) // query_len
        requests, live = tokens // query_len, self.live_blocks(query_len)
        blocks = max(self.requests * self.live_blocks(1), self.live_blocks(self.most))
        table = torch.full((self.requests, layout.cdiv(self.context, size)), layout.PAD_INDEX, device=device)
        table[:requests, -live:] = shuffled(blocks)[: requests * live].view(requests, live)
        closes = (positions + 1) % self.ratio == 0
        # Slots for an entry of every token; the cache has one page more.
        entries = layout.cdiv(self.most, block) * block
        compressor = {
            "state": randn(blocks, size, 2 * self.width, dtype=torch.float32),
            "state_slots": table[owners, positions // size] * size + positions % size,
            "state_table": table.int(),
            "owners": owners.int(),
            "entry_slots": torch.where(closes, shuffled(entries)[:tokens], layout.PAD_SLOT),
            "entries": layout.allocate_cache(CACHE, entries // block + 1, block, device=device),
            "ape": randn(self.ratio, self.width, dtype=torch.float32),
            "norm_weight": 1 + 0.1 * randn(c.head_dim),
        }
        return tuple(first._replace(**compressor))

    def in_plain_pytorch(self, *args: Any) -> Tensor:
        """Run the chain without an op of this package."""
        i, eps = ChainInputs(*args), self.config.rms_norm_eps
        wq_a, wkv, *compressor = i.w_in.split(self.widths)
        if compressor:
            assert i.state is not None and i.entries is not None
            owned = i.owners, i.state, i.state_slots, i.state_table, i.entries, i.entry_slots
            rest: tuple[Any, ...] = (i.ape, i.norm_weight, i.positions, i.cos_sin, *owned, self.ratio, eps)
            plain.compress(i.hidden, *compressor, *rest)
        norms = i.q_weight, i.kv_weight, i.wq_b
        return plain.queries_and_window(
            i.hidden, wq_a, wkv, *norms, i.positions, i.cos_sin, i.window, i.window_slots, eps
        )

    def in_ops(self, *args: Any) -> Tensor:
        """Run the chain in `torch.ops.dsv4`, with one GEMM for all projections of the hidden states."""
        i, eps, ops = ChainInputs(*args), self.config.rms_norm_eps, torch.ops.dsv4
        qr, kv, *scores = project(i.hidden, i.w_in, self.widths)
        qr, kv = ops.fused_q_kv_rmsnorm(qr, kv, i.q_weight, i.kv_weight, eps)
        q = linear(qr, i.wq_b).unflatten(-1, (self.config.num_heads, self.config.head_dim))
        window = i.window, i.window_slots, i.positions, i.cos_sin, eps, layout.WINDOW_BLOCK, CACHE
        q = ops.q_norm_rope_kv_insert(q, kv, *window)
        if scores:
            size, block = layout.state_block_size(self.ratio), layout.storage_block_size(self.ratio)
            ops.save_partial_states(scores[0], i.ape, i.state, i.state_slots, i.positions, size)
            where = i.state, i.state_slots, i.state_table, i.owners, i.positions, i.entry_slots
            cached = i.entries, eps, self.ratio, size, block, CACHE
            ops.compress_norm_rope_insert(*where, i.norm_weight, i.cos_sin, *cached)
        return q

    def cost(self, tokens: int) -> costs.Cost:
        """Return the cost: weights, hidden states and window states in; queries, cache rows, states and entries out."""
        c, e, row = self.config, 2, costs.row_bytes(CACHE)
        rows, heads = sum(self.widths), c.num_heads * c.head_dim
        weights = e * (rows * c.hidden_size + heads * c.q_lora_rank)
        token_bytes = e * (c.hidden_size + heads) + 4 * c.rope_dim + 2 * 8 + row
        moved = weights + tokens * token_bytes
        if self.ratio > 1:
            closed = tokens if tokens <= self.requests else tokens // self.ratio
            window = layout.overlap_factor(self.ratio) * self.ratio
            sizes = {"T": tokens, "C": closed, "W": window, "D": c.head_dim, "row": row}
            moved += costs.of("save_partial_states", T=tokens, width=2 * self.width).bytes
            moved += costs.of("compress_norm_rope_insert", **sizes).bytes
        return costs.Cost(moved, 2 * tokens * (rows * c.hidden_size + heads * c.q_lora_rank))


def project(hidden: Tensor, w_in: Tensor, widths: Sequence[int]) -> list[Tensor]:
    """Return qr and kv in hidden's dtype, then, for a compressor, its values and scores as one float32 tensor."""
    if len(widths) <= 2:
        return list(linear(hidden, w_in).split(list(widths), dim=-1))
    qr, kv, scores = linear_fp32(hidden, w_in).split([*widths[:2], sum(widths[2:])], dim=-1)
    return [qr.to(hidden.dtype), kv.to(hidden.dtype), scores]
