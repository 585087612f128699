"""Random inputs of a step, and arguments and costs of its compressors, for the scenarios around the indexer.

Up to `MOST_REQUESTS` tokens are a decode step of one token a request; each token closes a group, the worst case.
More tokens are the last chunk of one prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import layout
from ..config import DeepseekV4Config
from ..selection import costs
from .problem import Args

MOST_REQUESTS = 512


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Inputs of a step of `tokens` tokens at `context` tokens of context, with random data from `seed`."""

    config: DeepseekV4Config
    tokens: int
    context: int
    device: torch.device
    seed: int

    @property
    def requests(self) -> int:
        """Number of requests: one a token in a decode step, one for a chunk of a prompt."""
        return self.tokens if self.tokens <= MOST_REQUESTS else 1

    def generator(self, part: int) -> torch.Generator:
        """Return a generator; different parts of a step are independent."""
        return torch.Generator(self.device).manual_seed(16 * self.seed + part)

    def randn(self, *shape: int, part: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return normal values."""
        return torch.randn(*shape, device=self.device, generator=self.generator(part), dtype=dtype)

    def randint(self, low: int, high: int, *shape: int, part: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Return uniform values in [low, high)."""
        return torch.randint(low, high, shape, device=self.device, generator=self.generator(part), dtype=dtype)

    def positions(self) -> Tensor:
        """Return int64 `[T]`: the last positions of the context, of one request or of each."""
        query_len = self.tokens // self.requests
        return self.context - query_len + torch.arange(self.tokens, device=self.device) % query_len

    def owners(self) -> Tensor:
        """Return the request of each token, int32 `[T]`."""
        return (torch.arange(self.tokens, device=self.device) // (self.tokens // self.requests)).int()

    def rope(self) -> Tensor:
        """Return cosines and sines, float32 `[context, rope_dim]`."""
        angle = self.randn(self.context, self.config.rope_dim // 2, part=1, dtype=torch.float32)
        return torch.cat((angle.cos(), angle.sin()), dim=1)

    def table(self, columns: int) -> Tensor:
        """Return a block table, int32 `[R, columns]`: distinct pages in random order."""
        order = self.randn(self.requests * columns, part=2, dtype=torch.float32).argsort()
        return order.int().view(self.requests, columns)

    def slots(self, table: Tensor, index: Tensor, block: int) -> Tensor:
        """Return the slots, int64 `[T]`, of indices within the request."""
        return table[self.owners().long(), index // block].long() * block + index % block


@dataclass(frozen=True, slots=True)
class Compressor:
    """A compressor: its ratio, dims of an entry, and format of the cache that receives entries."""

    ratio: int
    dim: int
    fmt: str

    @property
    def width(self) -> int:
        """Width of a float32 state row."""
        return layout.state_width(self.ratio, self.dim)

    def states(self, s: StepInputs) -> tuple[Tensor, Tensor, Tensor, int]:
        """Return state cache, slots, block table and block size, for the positions that the step reads and writes."""
        block = layout.state_block_size(self.ratio)
        # Blocks before the window are freed: their columns name a page that is not read.
        live = layout.cdiv(layout.overlap_factor(self.ratio) * self.ratio + s.tokens // s.requests, block) + 1
        columns = layout.cdiv(s.context, block)
        recent = s.table(live)
        table = torch.nn.functional.pad(recent, (columns - live, 0), value=layout.PAD_INDEX)
        state = s.randn(recent.numel(), block, self.width, part=3, dtype=torch.float32)
        return state, s.slots(table, s.positions(), block), table, block

    def save(self, s: StepInputs) -> Args:
        """Return the arguments of `save_partial_states`."""
        state, slots, _, block = self.states(s)
        kv_score = s.randn(s.tokens, self.width, part=4, dtype=torch.float32)
        ape = s.randn(self.ratio, self.width // 2, part=5, dtype=torch.float32)
        return kv_score, ape, state, slots, s.positions(), block

    def compress(self, s: StepInputs) -> Args:
        """Return the arguments of `compress_norm_rope_insert`."""
        state, slots, table, state_block = self.states(s)
        positions, block = s.positions(), layout.storage_block_size(self.ratio)
        entries = s.table(layout.cdiv(s.context // self.ratio, block))
        entry_slots = s.slots(entries, positions // self.ratio, block)
        closes = (positions + 1) % self.ratio == 0
        cache = layout.allocate_cache(self.fmt, entries.numel(), block, device=s.device)
        weight = 1 + 0.1 * s.randn(self.dim, part=6)
        where = slots, table, s.owners(), positions, torch.where(closes, entry_slots, layout.PAD_SLOT)
        return state, *where, weight, s.rope(), cache, s.config.rms_norm_eps, self.ratio, state_block, block, self.fmt

    def save_cost(self, s: StepInputs) -> costs.Cost:
        """Return the cost of `save_partial_states`."""
        return costs.of("save_partial_states", T=s.tokens, width=self.width)

    def compress_cost(self, s: StepInputs) -> costs.Cost:
        """Return the cost of `compress_norm_rope_insert`: an entry reads half of each state row of its window."""
        entries = s.tokens if s.requests > 1 or s.tokens == 1 else s.tokens // self.ratio
        window = layout.overlap_factor(self.ratio) * self.ratio
        row = costs.row_bytes(self.fmt)
        return costs.of("compress_norm_rope_insert", T=s.tokens, C=entries, W=window, D=self.dim, row=row)
