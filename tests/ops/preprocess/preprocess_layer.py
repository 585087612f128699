"""A layer's caches and its inputs in a step, as the arguments of `preprocess_insert`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.testing import poison_
from tests.ops.preprocess.compressor_engine import EPS, Engine, rope_table

WINDOW_BLOCK, LATENT = 4, 24
CACHES = ("window_cache", "state_cache", "compressed_cache", "indexer_state_cache", "indexer_cache")
PER_TOKEN = ("positions", "token_to_req", "window_slot_mapping")
PER_TOKEN += tuple(f"{who}{name}" for who in ("", "indexer_") for name in ("kv_score", "state_slot_mapping"))
PER_TOKEN += ("qr", "kv", "compressed_slot_mapping", "indexer_slot_mapping")
PADDING = (-1, -1)
"""A token that no request has."""


class Layer:
    """Paged caches of a layer of `ratio` 0, 4 (with an indexer) or more; dirty, scattered, apart from each other."""

    def __init__(
        self,
        ratio: int,
        *,
        fmt: str = "plain",
        dim: int = 16,
        rope_dim: int = 8,
        key_fmt: str = "plain",
        key_dim: int = 16,
        hadamard: bool = False,
        dtype: torch.dtype = torch.float32,
        requests: int = 1,
        max_len: int = 384,
        kv_scale: Tensor | None = None,
        latent: int = LATENT,
        rounded: torch.dtype | None = None,
    ) -> None:
        self.ratio, self.dim, self.fmt, self.kv_scale, self.hadamard = ratio, dim, fmt, kv_scale, hadamard
        self.latent, self.rounded = latent, rounded
        self.table = rope_table(max_len, rope_dim)
        self.q_weight, self.kv_weight = (1 + 0.1 * torch.randn(size).to(dtype) for size in (latent, dim))
        self.window_table, self.window = self._window(requests, max_len, dtype)
        self.main = self.keys = None
        if ratio:
            options: dict[str, Any] = {"requests": requests, "max_len": max_len, "dtype": dtype}
            options |= {"block": layout.storage_block_size(ratio), "rope_dim": rope_dim}
            self.main = Engine(ratio, dim=dim, fmt=fmt, kv_scale=kv_scale, **options)
            if ratio == layout.CSA_RATIO:
                self.keys = Engine(ratio, dim=key_dim, fmt=key_fmt, hadamard=hadamard, **options)

    def _window(self, requests: int, max_len: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        columns = layout.cdiv(max_len, WINDOW_BLOCK)
        pages = requests * columns + 1
        table = torch.randperm(pages)[:-1].int().view(requests, columns)
        shape = layout.cache_shape(self.fmt, pages, WINDOW_BLOCK, self.dim)
        used = math.prod(shape[1:])
        stride = layout.PAGE_LAYOUTS[self.fmt].page_stride(WINDOW_BLOCK) if len(shape) == 2 else used + self.dim
        backing = poison_(torch.empty(pages * stride, dtype=dtype if self.fmt == "plain" else torch.uint8))
        return table, backing.as_strided(shape, (stride, 1) if len(shape) == 2 else (stride, self.dim, 1))

    @property
    def widths(self) -> list[int]:
        """Columns of the projection: latent, key/value, scores of each compressor."""
        return [self.latent, self.dim, *(engine.width for engine in (self.main, self.keys) if engine is not None)]

    def projection(self, tokens: int) -> Tensor:
        """float32 `[T, sum(widths)]`."""
        return torch.randn(tokens, sum(self.widths))

    def arguments(self, tokens: Sequence[tuple[int, int]], projection: Tensor) -> dict[str, Any]:
        """Return the op's arguments for `tokens`, (request, position), with slices of `projection` as inputs."""
        request, position = torch.tensor(tokens, dtype=torch.int64).view(-1, 2).unbind(1)
        real = request >= 0
        request, position = request.clamp_min(0), position.clamp_min(0)
        qr, kv, *scores = projection.split(self.widths, dim=1)
        slots = self.window_table[request, position // WINDOW_BLOCK].long() * WINDOW_BLOCK + position % WINDOW_BLOCK
        arguments: dict[str, Any] = {
            "qr": qr,
            "kv": kv,
            "q_weight": self.q_weight,
            "kv_weight": self.kv_weight,
            "positions": position,
            "cos_sin_cache": self.table,
            "token_to_req": request.int(),
            "eps": EPS,
            "cache_format": self.fmt,
            "window_cache": self.window,
            "window_slot_mapping": torch.where(real, slots, -1),
            "window_block_size": WINDOW_BLOCK,
            "kv_scale": self.kv_scale,
            "dtype": self.rounded,
        }
        names = ("", "compressed_"), ("indexer_", "indexer_")
        for engine, (prefix, entries), score in zip((self.main, self.keys), names, [*scores, None, None], strict=False):
            if engine is not None:
                meta = engine.metadata(request, position)
                arguments |= {
                    f"{prefix}kv_score": score,
                    f"{prefix}ape": engine.ape,
                    f"{prefix}norm_weight": engine.norm_weight,
                    f"{prefix}state_cache": engine.state,
                    f"{prefix}state_slot_mapping": torch.where(real, meta["state_slot_mapping"], -1),
                    f"{prefix}state_block_table": engine.state_table,
                    f"{entries}cache": engine.cache,
                    f"{entries}slot_mapping": torch.where(real, meta["slot_mapping"], -1),
                    "ratio": self.ratio,
                }
        if self.keys is not None:
            arguments |= {"indexer_cache_format": self.keys.fmt, "hadamard": self.hadamard}
        return arguments


def storage(x: Tensor) -> Tensor:
    """All bytes behind a tensor, those between its elements included."""
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())


def with_copied_caches(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with copied caches, with equal strides and equal bytes between their elements."""
    copies = {}
    for name in CACHES:
        x = arguments.get(name)
        if x is not None:
            copy = storage(x).clone().view(x.dtype)
            copies[name] = copy.as_strided(x.shape, x.stride(), x.storage_offset())
    return {**arguments, **copies}
