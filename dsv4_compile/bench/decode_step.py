"""Scenario `decode_step`: the attention of a decode step of V4-Flash, as a user runs it, host time included.

A batch of requests with 16k tokens each, at the position that closes a group of every compressor. Layers are SWA, CSA
and HCA alone, or `stack`: all 43 of V4-Flash. Times are those of many steps in a row: what the GPU takes, or the host
where that is slower. `eager` runs the ops one by one; `stock` is torch.compile as it comes, `reduce-overhead` its mode
of that name; `dsv4` is this package's backend; `graph` and `eager graph` are a DecodeRunner over `dsv4` and over the
ops as they are, whose graphs refresh the metadata too. The others find it built. The stack is not compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import costs, layout
from ..cache import CacheFormat, PagedCaches
from ..config import DeepseekV4Config
from ..errors import check
from ..metadata import AttentionMetadata, MetadataBuffers
from ..modules import DeepseekV4Attention
from ..runtime import DecodeRunner, mark_static_inputs
from ..runtime.static_inputs import named_tensors
from ..testing import Tolerance, assert_close
from .problem import Args, Only, Prepare, Problem, keep

OP = "decode_step"
COLUMNS = ("layer", "weights", "tokens", "impl")
TOKENS = {"cuda": (1, 8, 32, 128), "cpu": (2,)}
CONTEXT = {"cuda": 16384, "cpu": 256}
WEIGHTS = ("bfloat16", "fp8")
LAYERS: Mapping[str, tuple[int, ...]] = {
    "SWA": (1,),
    "HCA": (layout.HCA_RATIO,),
    "CSA": (layout.CSA_RATIO,),
    "stack": DeepseekV4Config.flash().compress_ratios[: DeepseekV4Config.flash().num_layers],
}
STACK = "stack"
CACHE = CacheFormat.resolve("fp8_ds_mla")
TOLERANCE = Tolerance(abs=0.05, rel=0.1, cosine=1e-3)
"""Of sums over a layer, or over all of them, in another order."""
_FILLED_AT_A_TIME = 1 << 16


class Layers(nn.Module):
    """Attention layers with residuals between them: `layers(hidden, metadata, caches)`, random weights."""

    def __init__(self, config: DeepseekV4Config, fp8: bool, context: int, device: torch.device) -> None:
        super().__init__()
        options: dict[str, Any] = {"cache_format": CACHE, "fp8": fp8, "max_seq_len": context, "device": device}
        self.layers = nn.ModuleList(DeepseekV4Attention(config, i, **options) for i in range(config.num_layers))
        generator = torch.Generator(device).manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dtype is torch.float8_e8m0fnu:
                    parameter.fill_(2.0**-6)
                    continue
                gain = 1.0 if parameter.dtype is torch.float8_e4m3fn else parameter.shape[-1] ** -0.5
                parameter.copy_(torch.randn(parameter.shape, device=device, generator=generator) * gain)

    def forward(self, hidden: Tensor, metadata: AttentionMetadata, caches: Any) -> Tensor:
        """`[T, hidden]` to the same."""
        for layer, cache in zip(self.layers, caches, strict=True):
            hidden = hidden + layer(hidden, metadata, cache)
        return hidden


@dataclass(frozen=True, slots=True)
class Step:
    """A batch of `tokens` requests at the end of their contexts, and the layers that decode it."""

    layers: Layers
    caches: PagedCaches
    buffers: MetadataBuffers
    tokens: int

    @classmethod
    def build(cls, config: DeepseekV4Config, weights: str, tokens: int, context: int, device: torch.device) -> Step:
        """Caches are full of random rows."""
        sizes = {"max_batch_size": tokens, "max_seq_len": context, "max_step_tokens": 1}
        caches = PagedCaches(config, cache_format=CACHE, device=device, **sizes)
        for layer in caches.layers:
            for name, tensor in layer.tensors().items():
                _fill(name, tensor)
        buffers = MetadataBuffers(
            max_num_batched_tokens=tokens,
            max_num_seqs=tokens,
            max_model_len=context,
            window=config.sliding_window,
            ratios=config.compressed_ratios,
            block_tables=caches.block_tables,
            device=device,
        )
        buffers.load(list(range(tokens + 1)), [context] * tokens)
        buffers.refresh(tokens)
        mark_static_inputs(named_tensors(caches.layers, "caches"))
        return cls(Layers(config, weights == "fp8", context, device), caches, buffers, tokens)

    def call(self, layers: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
        """A step of `layers` over the metadata of this batch."""
        self.buffers.refresh(self.tokens)
        metadata = self.buffers.metadata(self.tokens)
        return torch.no_grad()(lambda hidden: layers(hidden, metadata, self.caches.layers))

    def compiled(self, **options: Any) -> Callable[..., Tensor]:
        """The layers compiled anew."""
        torch.compiler.reset()
        compiled: Callable[..., Tensor] = torch.compile(self.layers, fullgraph=True, dynamic=False, **options)
        return compiled

    def captured(self, layers: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
        """Replays of a runner over `layers`, which hold their input: it is copied once, in front of the timing."""
        device = self.buffers.tensors["seq_lens"].device
        inputs = {"hidden": torch.zeros(self.tokens, self.width, dtype=torch.bfloat16, device=device)}
        runner = DecodeRunner(
            layers,
            self.buffers,
            inputs=inputs,
            caches=self.caches.layers,
            buckets=(self.tokens,),
            graphs="cuda" if device.type == "cuda" else "standin",
        )
        runner.warm_up()
        held: list[Tensor] = []

        def step(hidden: Tensor) -> Tensor:
            if not held or held[0] is not hidden:
                held[:] = [hidden]
                inputs["hidden"].copy_(hidden)
            out: Tensor = runner.step(self.tokens)
            return out

        return step

    @property
    def width(self) -> int:
        """Of hidden states."""
        return self.caches.config.hidden_size

    def implementations(self, compile_too: bool) -> dict[str, Prepare]:
        """How to get each; see the module."""
        ways: dict[str, Prepare] = {
            "eager": lambda: self.call(self.layers),
            "eager graph": lambda: self.captured(self.layers),
        }
        if compile_too:
            ways |= {
                "stock": lambda: self.call(self.compiled()),
                "reduce-overhead": lambda: self.call(self.compiled(mode="reduce-overhead")),
                "dsv4": lambda: self.call(self.compiled(backend="dsv4")),
                "graph": lambda: self.captured(self.compiled(backend="dsv4")),
            }
        return ways

    def cost(self, config: DeepseekV4Config, context: int) -> costs.Cost:
        """Weights once; for each token its window, the entries it attends, and the keys that its indexer scores."""
        row = layout.FP8_DS_MLA.data + layout.FP8_DS_MLA.scale
        key = layout.INDEXER_FP8.data + layout.INDEXER_FP8.scale
        read, pairs = 0, 0
        for i in range(config.num_layers):
            entries = 0 if config.ratio(i) == 1 else context // config.ratio(i)
            if config.ratio(i) == layout.CSA_RATIO:
                read += entries * key
                pairs += entries * config.index_n_heads * config.index_head_dim
                entries = min(entries, config.index_topk)
            read += (min(config.sliding_window, context) + entries) * row
            pairs += 2 * (min(config.sliding_window, context) + entries) * config.num_heads * config.head_dim
        weights = list(self.layers.parameters())
        size = sum(p.numel() for p in weights if p.dim() > 1)
        return costs.Cost(
            bytes=sum(p.nbytes for p in weights) + self.tokens * (read + 4 * self.width),
            flops=2 * self.tokens * (size + pairs),
            operands="e4m3" if any(p.dtype is torch.float8_e4m3fn for p in weights) else "bfloat16",
        )


def _fill(name: str, cache: Tensor) -> None:
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


def problems(
    device: torch.device, only: Only, config: DeepseekV4Config | None = None, context: int | None = None
) -> Iterator[Problem]:
    """Every kind of layer with both kinds of weights at every size, of V4-Flash or of another configuration."""
    base, length = config or DeepseekV4Config.flash(), context or CONTEXT[device.type]
    for layer, ratios in LAYERS.items():
        for weights in WEIGHTS:
            for tokens in TOKENS[device.type]:
                if keep(only, layer=layer, weights=weights, tokens=tokens):
                    yield _problem(base.with_layers(*ratios), layer, weights, tokens, length, device)


def _problem(
    config: DeepseekV4Config, layer: str, weights: str, tokens: int, context: int, device: torch.device
) -> Problem:
    step = Step.build(config, weights, tokens, context, device)

    def make(seed: int) -> Args:
        generator = torch.Generator(device).manual_seed(seed)
        return (torch.randn(tokens, step.width, device=device, generator=generator).bfloat16(),)

    return Problem(
        op=OP,
        params={"layer": layer, "weights": weights, "context": context, "tokens": tokens},
        make=make,
        written=(),
        cost=step.cost(config, context),
        reference=step.call(step.layers),
        implementations=step.implementations(compile_too=layer != STACK),
        published={},
        differs=differs,
        cold=False,
        clock="stream",
    )


def differs(got: list[Tensor], want: list[Tensor]) -> str:
    """As `gate.disagreement`, within `TOLERANCE`."""
    try:
        for actual, expected in zip(got, want, strict=True):
            check(bool(expected.isfinite().all()), "E201", got="a reference that is not finite")
            assert_close(actual, expected, TOLERANCE)
    except AssertionError as fault:
        return str(fault).splitlines()[0]
    return ""
