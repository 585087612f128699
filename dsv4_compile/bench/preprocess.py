"""Scenario `preprocess`: norms, RoPE, inserts and quantisation around a layer's projections, op by op.

Random bfloat16 data at the sizes of V4-Flash and V4-Pro; queries, keys and values are slices of one projection, as in a
layer; an fp8_ds_mla cache with pages of 64 tokens; every token has a slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import layout
from ..config import DeepseekV4Config
from ..ops.common.define import REFERENCES
from ..selection import costs
from .problem import Args, Only, Problem, implementations, keep

TOKENS = {"cuda": (1, 8, 32, 128, 512, 4096, 16384), "cpu": (1, 32)}
TYPICAL_TOKENS = 128
MAX_POSITION = 4096
COLUMNS = ("op", "heads", "tokens", "impl")
CACHE = "fp8_ds_mla"


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Inputs of a step of `tokens` tokens, with random data from `seed`; `slots` tokens fit the cache."""

    config: DeepseekV4Config
    tokens: int
    slots: int
    device: torch.device
    seed: int

    def randn(self, *shape: int, part: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return normal values; different parts of a step are independent."""
        generator = torch.Generator(self.device).manual_seed(16 * self.seed + part)
        return torch.randn(*shape, device=self.device, generator=generator, dtype=dtype)

    def positions(self) -> Tensor:
        """Return positions, int64 `[T]`."""
        return torch.arange(self.tokens, device=self.device) % MAX_POSITION

    def table(self) -> Tensor:
        """Return cosines and sines, float32 `[max_pos, rope_dim]`."""
        angle = self.randn(MAX_POSITION, self.config.rope_dim // 2, part=1, dtype=torch.float32)
        return torch.cat((angle.cos(), angle.sin()), dim=1)

    def projection(self, *sizes: int) -> tuple[Tensor, ...]:
        """Return `[T, size]` for each size, slices of one tensor."""
        return self.randn(self.tokens, sum(sizes), part=2).split(sizes, dim=1)

    def heads(self, flat: Tensor) -> Tensor:
        """Return `[T, H * D]` as `[T, H, D]`."""
        return flat.unflatten(1, (self.config.num_heads, self.config.head_dim))

    def cache(self) -> tuple[Tensor, Tensor]:
        """Return an empty cache, and a distinct slot for every token in random order."""
        pages = layout.cdiv(self.slots, layout.WINDOW_BLOCK)
        slots = self.randn(pages * layout.WINDOW_BLOCK, part=3).argsort()[: self.tokens]
        return layout.allocate_cache(CACHE, pages, layout.WINDOW_BLOCK, device=self.device), slots


@dataclass(frozen=True, slots=True)
class Op:
    """An op: builder of its arguments, positions of those with tokens first, and of those it writes."""

    build: Callable[[LayerInputs], Args]
    tokens: tuple[int, ...]
    written: tuple[int, ...] = ()


def _norms(s: LayerInputs) -> Args:
    c = s.config
    qr, kv = s.projection(c.q_lora_rank, c.head_dim)
    weights = s.randn(c.q_lora_rank, part=4), s.randn(c.head_dim, part=5)
    return qr, kv, *weights, c.rms_norm_eps


def _queries(s: LayerInputs) -> Args:
    q, _ = s.projection(s.config.num_heads * s.config.head_dim, s.config.head_dim)
    return s.heads(q), s.positions(), s.table(), s.config.rms_norm_eps


def _insert(s: LayerInputs) -> Args:
    _, kv = s.projection(s.config.num_heads * s.config.head_dim, s.config.head_dim)
    return kv, *s.cache(), s.positions(), s.table(), layout.WINDOW_BLOCK, CACHE


def _both(s: LayerInputs) -> Args:
    q, kv = s.projection(s.config.num_heads * s.config.head_dim, s.config.head_dim)
    where = s.positions(), s.table(), s.config.rms_norm_eps
    return s.heads(q), kv, *s.cache(), *where, layout.WINDOW_BLOCK, CACHE


def _output(s: LayerInputs) -> Args:
    return s.randn(s.tokens, s.config.num_heads, s.config.head_dim, part=2), s.positions(), s.table()


def _quantised_output(s: LayerInputs) -> Args:
    return *_output(s), s.config.o_groups, s.config.num_heads // s.config.o_groups


OPS: Mapping[str, Op] = {
    "fused_q_kv_rmsnorm": Op(_norms, (0, 1)),
    "q_norm_rope": Op(_queries, (0, 1)),
    "kv_rope_insert": Op(_insert, (0, 2, 3), (1,)),
    "q_norm_rope_kv_insert": Op(_both, (0, 1, 3, 4), (2,)),
    "inv_rope": Op(_output, (0, 1)),
    "inv_rope_fp8_quant": Op(_quantised_output, (0, 1)),
}


def cost(op: str, tokens: int, c: DeepseekV4Config) -> costs.Cost:
    """Return the cost of any implementation."""
    of = {"T": tokens, "H": c.num_heads, "D": c.head_dim, "Q": c.q_lora_rank, "rope": c.rope_dim}
    of["row"] = costs.row_bytes(CACHE)
    return costs.of(op, **{name: size for name, size in of.items() if name in costs.sizes(op)})


def problems(
    device: torch.device,
    only: Only,
    configs: tuple[DeepseekV4Config, ...] | None = None,
    tokens: tuple[int, ...] | None = None,
) -> Iterator[Problem]:
    """Yield every op for V4-Flash and V4-Pro, or for other configurations, at every size."""
    configs = configs or (DeepseekV4Config.flash(), DeepseekV4Config.pro())
    sizes = [t for t in tokens or TOKENS[device.type] if keep(only, tokens=t)]
    for config in configs:
        for name, op in OPS.items():
            if sizes and keep(only, op=name, heads=config.num_heads):
                yield from _sizes_of(name, op, config, sizes, device)


def _sizes_of(name: str, op: Op, config: DeepseekV4Config, sizes: list[int], device: torch.device) -> Iterator[Problem]:
    slots = max(TYPICAL_TOKENS, *sizes)

    def make(tokens: int) -> Callable[[int], Args]:
        return lambda seed: op.build(LayerInputs(config, tokens, slots, device, seed))

    ways = implementations(name, lambda: make(TYPICAL_TOKENS)(0), op.tokens)
    for tokens in sizes:
        yield Problem(
            op=name,
            params={"heads": config.num_heads, "tokens": tokens},
            make=make(tokens),
            written=op.written,
            cost=cost(name, tokens, config),
            reference=REFERENCES[name],
            implementations=ways,
            published={},
        )
