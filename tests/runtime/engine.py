"""A tiny stack of one SWA, one CSA and one HCA layer, and an engine that feeds it random decode steps."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dsv4_compile.cache import CacheFormat, PagedCaches
from dsv4_compile.config import DeepseekV4Config
from dsv4_compile.metadata import AttentionMetadata, MetadataBuffers, build_batch_metadata
from dsv4_compile.modules import DeepseekV4Attention
from dsv4_compile.runtime import DecodeRunner

REQUESTS, MAX_SEQ_LEN, CAPACITY = 6, 512, 24
CONFIG = DeepseekV4Config(
    hidden_size=24,
    num_heads=2,
    head_dim=16,
    rope_dim=8,
    q_lora_rank=16,
    o_groups=1,
    o_lora_rank=16,
    sliding_window=12,
    index_n_heads=4,
    index_head_dim=16,
    index_topk=8,
).with_layers(1, 4, 128)
FORMAT = CacheFormat.resolve(model_dtype=torch.float32)


class Stack(nn.Module):
    """The attention of three layers with residuals: `stack(hidden, metadata, caches)`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            DeepseekV4Attention(CONFIG, i, cache_format=FORMAT, dtype=torch.float32, max_seq_len=MAX_SEQ_LEN)
            for i in range(CONFIG.num_layers)
        )
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)

    def forward(self, hidden: Tensor, metadata: AttentionMetadata, caches: Any) -> Tensor:
        for layer, cache in zip(self.layers, caches, strict=True):
            hidden = hidden + layer(hidden, metadata, cache)
        return hidden


def new_caches() -> PagedCaches:
    """Caches full of old rows, the same at every call."""
    caches = PagedCaches(CONFIG, max_batch_size=REQUESTS, max_seq_len=MAX_SEQ_LEN, cache_format=FORMAT)
    generator = torch.Generator().manual_seed(6)
    for layer in caches.layers:
        for tensor in layer.tensors().values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return caches


@dataclass
class Engine:
    """Requests that join anywhere in a context, decode, and leave; -1 is an empty row. Rows that decode come first."""

    rng: random.Random
    tokens_each: int = 1

    def __post_init__(self) -> None:
        self.lengths: list[int] = []

    def advance(self) -> tuple[list[int], list[int]]:
        """Query lengths and sequence lengths of the next step."""
        starts = (1, 2, 3, 4, 5, 11, 12, 13, 126, 127, 128, 129, 250, 255, 256, 383, 384, 400)
        for row in reversed(range(len(self.lengths))):
            if self.rng.random() < 0.05 or self.lengths[row] + self.tokens_each > MAX_SEQ_LEN:
                del self.lengths[row]
        while len(self.lengths) < REQUESTS and (not self.lengths or self.rng.random() < 0.3):
            self.lengths.insert(self.rng.randrange(len(self.lengths) + 1), self.rng.choice(starts))
        self.lengths = [length + self.tokens_each for length in self.lengths]
        return [self.tokens_each] * len(self.lengths), list(self.lengths)


@dataclass
class World:
    """A stack, its persistent buffers and caches, and the eager answer for the same batch from caches of its own."""

    stack: Stack
    buffers: MetadataBuffers
    hidden: Tensor
    caches: PagedCaches
    eager_caches: PagedCaches

    def load(self, query_lens: list[int], seq_lens: list[int]) -> Tensor:
        """Describe a batch to the buffers; returns random hidden states for it."""
        self.buffers.load(starts_of(query_lens), seq_lens)
        return torch.randn(sum(query_lens), CONFIG.hidden_size)

    @torch.no_grad()
    def eager(self, hidden: Tensor, query_lens: list[int], seq_lens: list[int], padded: int) -> Tensor:
        """Output at the padded shape, through metadata that is built anew and caches that only this method writes."""
        metadata = build_batch_metadata(
            query_start_loc=torch.tensor(starts_of(query_lens), dtype=torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            num_tokens=padded,
            block_tables=self.eager_caches.block_tables,
            window=CONFIG.sliding_window,
            max_model_len=MAX_SEQ_LEN,
        )
        rows = torch.cat((hidden, hidden.new_zeros(padded - hidden.shape[0], hidden.shape[1])))
        return self.stack(rows, metadata, self.eager_caches.layers)[: hidden.shape[0]]

    def named_caches(self, which: PagedCaches) -> dict[str, Tensor]:
        """Every cache tensor by name."""
        return {f"{i}.{name}": t for i, layer in enumerate(which.layers) for name, t in layer.tensors().items()}


def starts_of(query_lens: list[int]) -> list[int]:
    """`query_start_loc`."""
    return [sum(query_lens[:i]) for i in range(len(query_lens) + 1)]


def make_world(buffers_type: type[MetadataBuffers] = MetadataBuffers) -> World:
    """A world at its beginning; `buffers_type` replaces MetadataBuffers."""
    caches = new_caches()
    buffers = buffers_type(
        max_num_batched_tokens=CAPACITY,
        max_num_seqs=REQUESTS,
        max_model_len=MAX_SEQ_LEN,
        window=CONFIG.sliding_window,
        block_tables=caches.block_tables,
    )
    return World(Stack(), buffers, torch.zeros(CAPACITY, CONFIG.hidden_size), caches, new_caches())


def make_runner(world: World, **options: Any) -> DecodeRunner:
    """A runner of the world's stack on the stand-in, not warmed up."""
    inputs = {"hidden": world.hidden}
    return DecodeRunner(
        world.stack, world.buffers, inputs=inputs, caches=world.caches.layers, graphs="standin", **options
    )
