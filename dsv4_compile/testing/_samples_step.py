"""One small step as tensors, and the registry of samples built from it. See samples.py."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import layout
from . import batch as paged
from .generate import RandomCache, hostile_indices, random_cache

Args = tuple[Any, ...]
Builder = Callable[["Step"], list[Args]]

EPS = 1e-6
MAX_POSITION = 160
ENTRY_BLOCK = 8
"""Small pages, so that the compressed entries of a short request fill several."""
BATCH = paged.Batch(query_lens=(1, 2, 6, 0), seq_lens=(128, 9, 131, 0), padding=1)
REQUESTS, TOKENS, DECODES, DECODE_TOKENS = 4, 10, 2, 3

KV = (("fp8_ds_mla", 512, torch.bfloat16), ("fp8", 64, torch.bfloat16), ("plain", 64, torch.float32))
"""Key/value formats, each with a head dim and the dtype of activations."""
INDEXER = (("indexer_fp8", 128, torch.bfloat16), ("indexer_mxfp4", 128, torch.bfloat16), ("plain", 32, torch.float32))
"""Indexer formats, likewise."""

BUILDERS: dict[str, Builder] = {}


def sample(build: Builder) -> Builder:
    """Register the samples of the op that `build` is named after."""
    BUILDERS[build.__name__] = build
    return build


def rope_dim(head_dim: int) -> int:
    """Rotated dims of a vector, as in the model and smaller in smaller ones."""
    return min(layout.ROPE_DIM, head_dim // 2)


class Step:
    """Tensors of `BATCH`. Random ones are drawn from a generator that belongs to one op, on the CPU."""

    def __init__(self, op: str) -> None:
        self.generator = torch.Generator().manual_seed(zlib.crc32(op.encode()))
        tokens = BATCH.tokens()
        self.query_start_loc = BATCH.query_start_loc()
        self.seq_lens = BATCH.seq_lens_tensor()
        self.positions = torch.tensor([max(position, 0) for _, position in tokens])
        self.token_to_req = torch.tensor([max(request, 0) for request, _ in tokens], dtype=torch.int32)
        self.is_valid = torch.tensor([position >= 0 for _, position in tokens])
        self.window = self.table(layout.WINDOW_BLOCK)
        """Block table of the window cache."""

    def randn(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Standard normal."""
        return torch.randn(shape, generator=self.generator).to(dtype)

    def randint(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Uniform in [low, high)."""
        return torch.randint(low, high, shape, generator=self.generator).to(dtype)

    def hostile(self, bound: int, *shape: int) -> Tensor:
        """int32 indices, about a third of them outside [0, bound)."""
        return hostile_indices(shape, bound, fraction=0.3, generator=self.generator)

    def table(self, block_size: int, ratio: int = 1) -> Tensor:
        """int32 `[R, B]`: distinct pages of `block_size` tokens (or entries of `ratio` tokens), in random order."""
        columns = layout.cdiv(max(BATCH.seq_lens), block_size * ratio)
        return torch.randperm(REQUESTS * columns, generator=self.generator).view(REQUESTS, columns).int()

    def slots(self, table: Tensor, block_size: int) -> Tensor:
        """int64 `[T]`, -1 for the padding token."""
        rows = table.tolist()
        return torch.tensor([paged.slot(rows, *token, block_size) for token in BATCH.tokens()])

    def entry_slots(self, table: Tensor, block_size: int, ratio: int) -> Tensor:
        """int64 `[T]`, -1 for tokens that complete no entry."""
        rows = table.tolist()
        return torch.tensor([paged.compressed_slot(rows, *token, block_size, ratio) for token in BATCH.tokens()])

    def entry_counts(self, ratio: int) -> Tensor:
        """int32 `[T]`: entries that a token sees, 0 for the padding token."""
        return torch.where(self.is_valid, (self.positions + 1) // ratio, 0).int()

    def cache(self, fmt: str, table: Tensor, block_size: int, **options: Any) -> RandomCache:
        """A full cache with the pages of `table`; its page padding is NaN."""
        pages = table.numel()
        return random_cache(fmt, pages, block_size, live=pages * block_size, generator=self.generator, **options)

    def state(self, ratio: int, head_dim: int) -> tuple[Tensor, Tensor, int]:
        """Compressor state float32 `[P, S, width]`, its block table and S."""
        block_size, width = layout.state_block_size(ratio), layout.state_width(ratio, head_dim)
        table = self.table(block_size)
        return self.cache("plain", table, block_size, head_dim=width, dtype=torch.float32).cache, table, block_size

    def rope(self, dim: int = layout.ROPE_DIM) -> Tensor:
        """float32 `[MAX_POSITION, dim]`."""
        frequency = 10000.0 ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angle = torch.arange(MAX_POSITION, dtype=torch.float64)[:, None] * frequency
        return torch.cat((angle.cos(), angle.sin()), dim=1).float()
