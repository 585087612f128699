"""A compressor with its paged caches, and the entries it must store, pooled one element at a time in double."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.ops.preprocess.compress_norm_rope_insert import compress_norm_rope_insert
from dsv4_compile.ops.preprocess.save_partial_states import save_partial_states
from dsv4_compile.reference.common.kv_format import load_indexer, load_kv
from dsv4_compile.testing import poison_
from tests.support import scalar

EPS = 1e-6


def rope_table(positions: int, dim: int) -> Tensor:
    """Return cosines and sines, with different angles in every row."""
    angles = torch.arange(positions)[:, None] * 0.3 ** torch.arange(dim // 2)
    return torch.cat((angles.cos(), angles.sin()), dim=1)


class Engine:
    """A compressor and its paged caches. Pages are dirty, scattered, and apart from each other."""

    def __init__(
        self,
        ratio: int,
        *,
        requests: int = 1,
        max_len: int = 384,
        dim: int = 16,
        rope_dim: int = 8,
        fmt: str = "plain",
        dtype: torch.dtype = torch.float32,
        hadamard: bool = False,
        kv_scale: Tensor | None = None,
        block: int = 8,
    ) -> None:
        self.ratio, self.dim, self.fmt, self.hadamard, self.kv_scale = ratio, dim, fmt, hadamard, kv_scale
        self.width = layout.state_width(ratio, dim)
        self.ape = torch.randn(ratio, self.width // 2)
        self.norm_weight = 1 + 0.1 * torch.randn(dim)
        self.table = rope_table(max_len, rope_dim)

        self.state_block, self.block = layout.state_block_size(ratio), block
        blocks = layout.cdiv(max_len, self.state_block)
        self.state = poison_(torch.empty(requests * blocks + 2, self.state_block + 1, self.width))[:, :-1]
        self.state_table = torch.randperm(requests * blocks + 2)[: requests * blocks].int().view(requests, blocks)
        blocks = layout.cdiv(max_len // ratio, self.block)
        self.cache = self._dirty_cache(requests * blocks + 1, dtype)
        self.cache_table = torch.randperm(requests * blocks + 1)[: requests * blocks].int().view(requests, blocks)

    def unrounded(self, dtype: torch.dtype = torch.float32) -> Engine:
        """Same weights, tables and block tables, and empty caches with plain rows."""
        other = copy.copy(self)
        other.state, other.fmt, other.hadamard, other.kv_scale = self.state.clone(), "plain", False, None
        other.cache = other._dirty_cache(len(self.cache), dtype)
        return other

    def _dirty_cache(self, pages: int, dtype: torch.dtype) -> Tensor:
        if self.fmt not in layout.PAGE_LAYOUTS:
            kind = dtype if self.fmt == "plain" else torch.uint8
            return poison_(torch.empty(pages, self.block + 1, self.dim, dtype=kind))[:, :-1]
        stride = layout.PAGE_LAYOUTS[self.fmt].page_stride(self.block)
        shape = layout.cache_shape(self.fmt, pages, self.block, self.dim)
        return poison_(torch.empty(pages * stride, dtype=torch.uint8)).as_strided(shape, (stride, 1))

    def slots(self, table: Tensor, block: int, request: Tensor, index: Tensor) -> Tensor:
        return table[request, index // block].long() * block + index % block

    def metadata(self, request: Tensor, position: Tensor) -> dict[str, Tensor]:
        """What the op is given for these tokens, by its argument names."""
        closes = (position + 1) % self.ratio == 0
        return {
            "state_slot_mapping": self.slots(self.state_table, self.state_block, request, position),
            "state_block_table": self.state_table,
            "token_to_req": request.int(),
            "positions": position,
            "slot_mapping": torch.where(
                closes, self.slots(self.cache_table, self.block, request, position // self.ratio), -1
            ),
        }

    def run(self, tokens: Sequence[tuple[int, int]], inputs: Tensor, **changes: Tensor) -> None:
        """One step: `tokens` are (request, position), `inputs` their projections `[T, width]`."""
        request, position = torch.tensor(tokens).unbind(1)
        meta = {**self.metadata(request, position), **changes}
        save_partial_states(
            inputs, self.ape, self.state, meta["state_slot_mapping"], meta["positions"], self.state_block
        )
        compress_norm_rope_insert(*self.arguments(meta))

    def arguments(self, meta: dict[str, Tensor]) -> tuple[Any, ...]:
        return (
            self.state,
            *meta.values(),
            self.norm_weight,
            self.table,
            self.cache,
            EPS,
            self.ratio,
            self.state_block,
            self.block,
            self.fmt,
            self.hadamard,
            self.kv_scale,
        )

    def entries(self, request: int, count: int) -> Tensor:
        """The first `count` entries of a request, dequantised."""
        index = torch.arange(count)
        slots = self.slots(self.cache_table, self.block, torch.full_like(index, request), index)
        if self.fmt in layout.KV_FORMATS:
            return load_kv(self.cache, self.fmt, self.block, slots, self.kv_scale)
        return load_indexer(self.cache, self.fmt, self.block, slots)

    def entry_by_hand(self, history: Tensor, position: int, rope: bool = True) -> list[float]:
        """The entry that closes at `position`, in double, from the projections `[L, width]` of the whole request."""
        ratio, half = self.ratio, self.width // 2
        span = ratio * layout.overlap_factor(ratio)
        pooled = []
        for channel in range(self.dim):
            scores, values = [], []
            for p in range(max(position - span + 1, 0), position + 1):
                shift = self.dim if span > ratio and p > position - ratio else 0
                values.append(history[p, shift + channel].item())
                scores.append(history[p, half + shift + channel].item() + self.ape[p % ratio, shift + channel].item())
            weights = [math.exp(score - max(scores)) for score in scores]
            pooled.append(sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights))
        inverse = (sum(v * v for v in pooled) / self.dim + EPS) ** -0.5
        normed = [v * inverse * w for v, w in zip(pooled, self.norm_weight.tolist(), strict=True)]
        return scalar.rotate(normed, self.table[position // ratio * ratio].tolist()) if rope else normed

    def check(self, history: Tensor, request: int = 0) -> None:
        """Every entry that `history` closes is there."""
        closed = len(history) // self.ratio
        expected = [self.entry_by_hand(history, self.ratio * (i + 1) - 1) for i in range(closed)]
        got = self.entries(request, closed)
        torch.testing.assert_close(got.double(), torch.tensor(expected).double(), rtol=2e-6, atol=2e-6)


def one_request(positions: range) -> list[tuple[int, int]]:
    return [(0, p) for p in positions]
