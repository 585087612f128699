"""Layers of V4-Flash in the state of a long decode, for scenario `decode_step`: weights, full caches, a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .. import layout
from .._compat import maybe_mark_dynamic
from ..cache import CacheFormat, LayerCache, PagedCaches
from ..config import DeepseekV4Config
from ..metadata import AttentionMetadata, MetadataBuffers
from ..modules import DeepseekV4Attention
from ..runtime import DecodeRunner, mark_static_inputs
from ..runtime.addresses import named_tensors
from ..runtime.step import token_tensors

CACHE = CacheFormat.resolve("fp8_ds_mla")
Forward = Callable[..., list[Tensor]]
"""Of `Layers`, however they are compiled."""
_FILLED_AT_A_TIME = 1 << 16
_OTHERS = {"cuda": 256 << 20, "cpu": 1 << 20}
"""Bytes that are read between layers: four times what the L2 of an H200 holds."""


class Layers(nn.Module):
    """Attention layers one after the other, all of the same hidden states: `layers(hidden, metadata, caches)`.

    What lies between the attention of two layers is not of this package, so it is left out and not timed; `between` is
    called in its place, behind each layer.
    """

    def __init__(self, layers: Iterable[nn.Module], between: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self.layers, self.between = nn.ModuleList(layers), between

    def forward(self, hidden: Tensor, metadata: AttentionMetadata, caches: Any) -> list[Tensor]:
        """`[T, hidden]` to one of the same shape for each layer."""
        results = []
        for layer, cache in zip(self.layers, caches, strict=True):
            results.append(layer(hidden, metadata, cache))
            if self.between is not None:
                self.between()
        return results


def reads_of_others(device: torch.device) -> Callable[[], Any]:
    """Reads so much other memory that no cache keeps what was there before, as a model does between two layers."""
    others = torch.zeros(_OTHERS[device.type] // 4, device=device)
    return partial(torch.sum, others, dim=0, out=torch.zeros((), device=device))


def in_steps(layers: Forward) -> Forward:
    """`layers` that Inductor captures one by one: their results stay until the next step, not until the next graph."""

    def step(*args: Any) -> list[Tensor]:
        torch.compiler.cudagraph_mark_step_begin()
        return layers(*args)

    return step


def random_layers(config: DeepseekV4Config, fp8: bool, context: int, device: torch.device) -> Layers:
    """Layers of `config` with random weights."""
    options: dict[str, Any] = {"cache_format": CACHE, "fp8": fp8, "max_seq_len": context, "device": device}
    layers = Layers(DeepseekV4Attention(config, i, **options) for i in range(config.num_layers))
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in layers.parameters():
            if parameter.dtype is torch.float8_e8m0fnu:
                parameter.fill_(2.0**-6)
                continue
            gain = 1.0 if parameter.dtype is torch.float8_e4m3fn else parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn(parameter.shape, device=device, generator=generator) * gain)
    return layers


@dataclass(frozen=True, slots=True)
class Step:
    """Layers, and requests at the end of their contexts, the first of which they decode.

    Each layer is compiled by itself, so layers of one kind share their code, however many there are.
    """

    layers: Layers
    caches: PagedCaches
    buffers: MetadataBuffers
    context: int

    @classmethod
    def build(cls, config: DeepseekV4Config, fp8: bool, requests: int, context: int, device: torch.device) -> Step:
        """Caches are full of random rows, the same in all layers of a kind."""
        sizes = {"max_batch_size": requests, "max_seq_len": context, "max_step_tokens": 1}
        caches = PagedCaches(config, cache_format=CACHE, device=device, **sizes)
        filled: dict[int, LayerCache] = {}
        for i, layer in enumerate(caches.layers):
            like = filled.setdefault(config.ratio(i), layer)
            for name, tensor in layer.tensors().items():
                if like is layer:
                    fill(name, tensor)
                else:
                    tensor.copy_(like.tensors()[name])
        buffers = MetadataBuffers(
            max_num_batched_tokens=requests,
            max_num_seqs=requests,
            max_model_len=context,
            window=config.sliding_window,
            ratios=config.compressed_ratios,
            block_tables=caches.block_tables,
            device=device,
        )
        mark_static_inputs(named_tensors(caches.layers, "caches"))
        return cls(random_layers(config, fp8, context, device), caches, buffers, context)

    def aside(self) -> Step:
        """The same with `aux_stream` in every layer that it is for."""
        for layer in self.layers.layers:
            assert isinstance(layer, DeepseekV4Attention)
            layer.aux_stream = layer.indexer is not None
            layer.stack()
        return self

    def load(self, tokens: int, apart: bool = False) -> None:
        """Describe the first `tokens` requests, one token each: all at the end of their contexts, where every group
        closes, or `apart`, each one token before the last, so that one in R closes a group of ratio R."""
        behind = [request % layout.HCA_RATIO * apart for request in range(tokens)]
        self.buffers.load(list(range(tokens + 1)), [self.context - tail for tail in behind])
        self.buffers.refresh(tokens)

    def compiled(self, **options: Any) -> Layers:
        """The layers compiled anew."""
        torch.compiler.reset()
        compiled: list[Any] = [torch.compile(layer, fullgraph=True, **options) for layer in self.layers.layers]
        return Layers(compiled)

    def call(self, layers: Forward, tokens: int, apart: bool = False) -> Callable[[Tensor], list[Tensor]]:
        """A step of `layers` over metadata that is built here, once."""
        self.load(tokens, apart)
        metadata = self.buffers.metadata(tokens)
        marked: list[Tensor] = []

        def step(hidden: Tensor) -> list[Tensor]:
            if tokens > 1 and not (marked and marked[0] is hidden):
                marked[:] = [hidden, *token_tensors(metadata)]
                for tensor in marked:
                    maybe_mark_dynamic(tensor, 0)
            return layers(hidden, metadata, self.caches.layers)

        return torch.no_grad()(step)

    def runner(self, layers: Forward, sizes: Iterable[int]) -> DecodeRunner:
        """A runner over `layers`, warmed up."""
        hidden = torch.zeros(self.buffers.max_num_batched_tokens, self.width, dtype=torch.bfloat16, device=self.device)
        runner = DecodeRunner(
            layers,
            self.buffers,
            inputs={"hidden": hidden},
            caches=self.caches.layers,
            buckets=tuple(sizes),
            graphs="cuda" if self.device.type == "cuda" else "standin",
        )
        runner.warm_up()
        return runner

    def replay(self, runner: DecodeRunner, tokens: int, apart: bool = False) -> Callable[[Tensor], list[Tensor]]:
        """Replays of a step, metadata included. They hold their input: it is copied once, in front of the timing."""
        self.load(tokens, apart)
        held: list[Tensor] = []

        def step(hidden: Tensor) -> list[Tensor]:
            if not held or held[0] is not hidden:
                held[:] = [hidden]
                runner.inputs["hidden"][:tokens].copy_(hidden)
            out: list[Tensor] = runner.step(tokens)
            return out

        return step

    @property
    def device(self) -> torch.device:
        """Of everything."""
        return self.buffers.tensors["seq_lens"].device

    @property
    def width(self) -> int:
        """Of hidden states."""
        return self.caches.config.hidden_size


def fill(name: str, cache: Tensor) -> None:
    """Random rows, the same at every call, in a tensor of `LayerCache.tensors()`."""
    generator = torch.Generator(cache.device).manual_seed(len(name))
    if cache.is_floating_point():
        cache.normal_(generator=generator)
    elif name == "indexer":
        # Every e4m3 code but NaN, then float32 scales of one.
        block = layout.storage_block_size(layout.CSA_RATIO)
        pages = layout.byte_pages(cache, "indexer_fp8", block)
        end = block * layout.INDEXER_FP8.data
        codes = torch.randint(0, 0x7F, pages[:, :end].shape, device=cache.device, generator=generator)
        pages[:, :end].copy_(codes)
        scales = pages[:, end : end + block * layout.INDEXER_FP8.scale]
        one = torch.ones(1, device=cache.device).view(torch.uint8)
        scales.copy_(one.repeat(block).expand(scales.shape))
    else:
        block = layout.WINDOW_BLOCK if name == "window" else _entries_of_a_page(cache)
        rows = cache.shape[0] * block
        for first in range(0, rows, _FILLED_AT_A_TIME):
            slots = torch.arange(first, min(first + _FILLED_AT_A_TIME, rows), device=cache.device)
            keys = torch.randn(slots.shape[0], layout.HEAD_DIM, device=cache.device, generator=generator)
            torch.ops.dsv4.quantize_and_insert_k_cache(keys.bfloat16(), cache, slots, block)


def _entries_of_a_page(cache: Tensor) -> int:
    """Rows of a page of compressed entries, by its bytes."""
    by_bytes = {layout.FP8_DS_MLA.page_bytes(layout.storage_block_size(r)): r for r in (4, layout.HCA_RATIO)}
    return layout.storage_block_size(by_bytes[cache.shape[1]])
