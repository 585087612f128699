"""Attention layers in the state of a long decode, for scenario `decode_step`: weights, full caches and a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
from .timing import ColdTimer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

CACHE = CacheFormat.resolve("fp8_ds_mla")
Forward = Callable[..., list[Tensor]]
"""`Layers`, or a compiled form of it."""
_FILLED_AT_A_TIME = 1 << 16
"""Cache rows generated at a time, which bounds the memory of a fill."""


class Layers(nn.Module):
    """Attention layers one after the other on the same hidden states: `layers(hidden, metadata, caches)`.

    The rest of a model is left out. With a `timer` each layer is one part of it: see `timing.ColdTimer`.
    """

    def __init__(self, layers: Iterable[nn.Module], timer: ColdTimer | None = None) -> None:
        super().__init__()
        self.layers, self.timer = nn.ModuleList(layers), timer

    def forward(self, hidden: Tensor, metadata: AttentionMetadata, caches: Any) -> list[Tensor]:
        """Return one tensor `[T, hidden]` for each layer."""
        results = []
        for index, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            if self.timer is not None:
                self.timer.begin(index)
            results.append(layer(hidden, metadata, cache))
            if self.timer is not None:
                self.timer.end(index)
        return results


def in_steps(layers: Forward) -> Forward:
    """Return `layers` for Inductor's CUDA graphs, with results that live until the next step, not the next graph."""

    def step(*args: Any) -> list[Tensor]:
        torch.compiler.cudagraph_mark_step_begin()
        return layers(*args)

    return step


def random_layers(
    config: DeepseekV4Config, fp8: bool, context: int, device: torch.device, mesh: DeviceMesh | None = None
) -> Layers:
    """Return layers of `config`, or a rank's parts of them, with random weights."""
    options: dict[str, Any] = {"cache_format": CACHE, "fp8": fp8, "max_seq_len": context, "device": device}
    options["mesh"] = mesh
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
class DecodeStep:
    """Layers and a batch of requests at the end of their contexts; a step decodes the first requests.

    Each layer is compiled by itself, so that all layers of one kind share their code.
    """

    layers: Layers
    caches: PagedCaches
    buffers: MetadataBuffers
    context: int

    @classmethod
    def build(
        cls,
        config: DeepseekV4Config,
        fp8: bool,
        requests: int,
        context: int,
        device: torch.device,
        mesh: DeviceMesh | None = None,
    ) -> DecodeStep:
        """Return a step with caches full of random rows, equal in all layers of a kind; `mesh` splits the layers."""
        sizes: dict[str, Any] = {"max_batch_size": requests, "max_seq_len": context, "max_step_tokens": 1}
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
        return cls(random_layers(config, fp8, context, device, mesh), caches, buffers, context)

    def with_side_stream(self) -> DecodeStep:
        """Set `aux_stream` in every layer with an indexer and return this step."""
        for layer in self.layers.layers:
            assert isinstance(layer, DeepseekV4Attention)
            layer.aux_stream = layer.indexer is not None
            layer.stack()
        return self

    def load(self, tokens: int, apart: bool = False) -> None:
        """Load a batch of the first `tokens` requests, one token each.

        All are at the end of their contexts, where every group closes, or, `apart`, each one token before the previous,
        so that one in R closes a group of ratio R.
        """
        earlier = [request % layout.HCA_RATIO * apart for request in range(tokens)]
        self.buffers.load(list(range(tokens + 1)), [self.context - earlier_by for earlier_by in earlier])
        self.buffers.refresh(tokens)

    def compiled(self, **options: Any) -> Layers:
        """Return the layers, compiled anew one by one."""
        torch.compiler.reset()
        compiled: list[Any] = [torch.compile(layer, fullgraph=True, **options) for layer in self.layers.layers]
        return Layers(compiled)

    def call(self, layers: Forward, tokens: int, apart: bool = False) -> Callable[[Tensor], list[Tensor]]:
        """Return a step of `layers` with metadata that is built here, once."""
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
        """Return a runner of `layers`, warmed up."""
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
        """Return the replay of a step, metadata included; it copies a new input once, before it is timed."""
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
        """Device of all tensors."""
        return self.buffers.tensors["seq_lens"].device

    @property
    def width(self) -> int:
        """Width of the hidden states."""
        return self.caches.config.hidden_size


def fill(name: str, cache: Tensor) -> None:
    """Fill a tensor of `LayerCache.tensors()` with random rows, the same in every call."""
    generator = torch.Generator(cache.device).manual_seed(len(name))
    if cache.is_floating_point():
        cache.normal_(generator=generator)
    elif name == "keys":
        # Every e4m3 code except NaN, then float32 scales of one.
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
    """Return the rows of a page of compressed entries, which follow from its bytes."""
    by_bytes = {layout.FP8_DS_MLA.page_bytes(layout.storage_block_size(r)): r for r in (4, layout.HCA_RATIO)}
    return layout.storage_block_size(by_bytes[cache.shape[1]])
