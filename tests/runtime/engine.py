"""A small stack of one SWA, one CSA and one HCA layer, and an engine that feeds it random decode steps."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dsv4_compile._compat import maybe_mark_dynamic
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

ROWS = CacheFormat.resolve(model_dtype=torch.float32)


@dataclass(frozen=True)
class Setup:
    """Configuration, formats and device of a stack."""

    config: DeepseekV4Config = CONFIG
    cache_format: CacheFormat = ROWS
    dtype: torch.dtype = torch.float32
    fp8: bool = False
    device: str = "cpu"


SMALL = Setup()


class Stack(nn.Module):
    """Attention layers with residuals: `stack(hidden, metadata, caches)`."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        options = {"cache_format": setup.cache_format, "dtype": setup.dtype, "fp8": setup.fp8}
        self.layers = nn.ModuleList(
            DeepseekV4Attention(setup.config, i, max_seq_len=MAX_SEQ_LEN, device=setup.device, **options)
            for i in range(setup.config.num_layers)
        )
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dtype is torch.float8_e8m0fnu:
                    parameter.fill_(2.0**-4)
                    continue
                gain = 1.0 if parameter.dtype is torch.float8_e4m3fn else parameter.shape[-1] ** -0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * gain)

    def forward(self, hidden: Tensor, metadata: AttentionMetadata, caches: Any) -> Tensor:
        for layer, cache in zip(self.layers, caches, strict=True):
            if hidden.shape[0] > 1 and not torch.compiler.is_compiling():
                maybe_mark_dynamic(hidden, 0)  # for layers that are compiled one by one
            hidden = hidden + layer(hidden, metadata, cache)
        return hidden


def new_caches(setup: Setup = SMALL) -> PagedCaches:
    """Return caches full of old rows, equal at every call; quantised caches are zero."""
    caches = PagedCaches(
        setup.config,
        max_batch_size=REQUESTS,
        max_seq_len=MAX_SEQ_LEN,
        cache_format=setup.cache_format,
        device=setup.device,
    )
    generator = torch.Generator().manual_seed(6)
    for layer in caches.layers:
        for tensor in layer.tensors().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return caches


@dataclass
class Engine:
    """Requests that join with some context, decode, and leave at random."""

    rng: random.Random
    tokens_each: int = 1

    def __post_init__(self) -> None:
        self.lengths: list[int] = []

    def advance(self) -> tuple[list[int], list[int]]:
        """Return query lengths and sequence lengths of the next step."""
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
    """A stack with its persistent buffers and caches, and a second set of caches for the eager reference."""

    setup: Setup
    stack: Stack
    buffers: MetadataBuffers
    hidden: Tensor
    caches: PagedCaches
    eager_caches: PagedCaches

    def load(self, query_lens: list[int], seq_lens: list[int]) -> Tensor:
        """Load a batch into the buffers and return random hidden states for it."""
        self.buffers.load(starts_of(query_lens), seq_lens)
        hidden = torch.randn(sum(query_lens), self.setup.config.hidden_size)
        return hidden.to(self.setup.device, self.setup.dtype)

    @torch.no_grad()
    def eager(self, hidden: Tensor, query_lens: list[int], seq_lens: list[int], padded: int) -> Tensor:
        """Return the eager output at the padded shape, with newly built metadata and the reference's own caches."""
        metadata = build_batch_metadata(
            query_start_loc=torch.tensor(starts_of(query_lens), dtype=torch.int32, device=self.setup.device),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=self.setup.device),
            num_tokens=padded,
            block_tables=self.eager_caches.block_tables,
            window=self.setup.config.sliding_window,
            max_model_len=MAX_SEQ_LEN,
        )
        rows = torch.cat((hidden, hidden.new_zeros(padded - hidden.shape[0], hidden.shape[1])))
        return self.stack(rows, metadata, self.eager_caches.layers)[: hidden.shape[0]]

    def named_caches(self, which: PagedCaches) -> dict[str, Tensor]:
        """Return every cache tensor by name."""
        return {f"{i}.{name}": t for i, layer in enumerate(which.layers) for name, t in layer.tensors().items()}


def starts_of(query_lens: list[int]) -> list[int]:
    """Return `query_start_loc` of these query lengths."""
    return [sum(query_lens[:i]) for i in range(len(query_lens) + 1)]


def make_world(buffers_type: type[MetadataBuffers] = MetadataBuffers, setup: Setup = SMALL) -> World:
    """Make a stack, its buffers and both sets of caches; `buffers_type` replaces MetadataBuffers."""
    caches = new_caches(setup)
    buffers = buffers_type(
        max_num_batched_tokens=CAPACITY,
        max_num_seqs=REQUESTS,
        max_model_len=MAX_SEQ_LEN,
        window=setup.config.sliding_window,
        block_tables=caches.block_tables,
        device=setup.device,
    )
    hidden = torch.zeros(CAPACITY, setup.config.hidden_size, dtype=setup.dtype, device=setup.device)
    return World(setup, Stack(setup), buffers, hidden, caches, new_caches(setup))


def make_runner(world: World, **options: Any) -> DecodeRunner:
    """Make a runner of the world's stack, on the stand-in if there is no GPU; not warmed up."""
    graphs = "standin" if world.setup.device == "cpu" else "cuda"
    options = {"step": world.stack, "inputs": {"hidden": world.hidden}, "graphs": graphs, **options}
    return DecodeRunner(buffers=world.buffers, caches=world.caches.layers, **options)
