"""Scales of per-tensor fp8 caches and queries, as buffers and as Python floats."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ..errors import check
from .protocol import SparseAttention
from .types import LayerShape

SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""Smallest normal float32. A smaller scale is flushed to zero; a scale above its inverse has no float32 inverse."""


class PerTensorScales(SparseAttention):
    """Attention with one scale for an `fp8` cache, and one for queries if the backend quantises them.

    `q_scale`, `q_scale_inv` and `kv_scale` are buffers for ops that quantise and attend. `bmm1_scale` and `bmm2_scale`
    are the factors of the scores and of the result as floats, for kernels that take no tensors there. Until
    `set_scales`, the buffers are 1 and `bmm1_scale` is the layer's scale. Other caches have no buffers.
    """

    quantises_queries: ClassVar[bool] = False

    q_scale: Tensor | None
    q_scale_inv: Tensor | None
    kv_scale: Tensor | None

    def __init__(self, layer: LayerShape, engine: str = "dsv4", device: torch.device | str | None = None) -> None:
        super().__init__(layer, engine)
        for name in ("q_scale", "q_scale_inv", "kv_scale"):
            one = torch.ones(1, dtype=torch.float32, device=device) if self.cache_format == "fp8" else None
            self.register_buffer(name, one, persistent=False)
        self.set_scales(1.0, 1.0)

    def set_scales(self, q_scale: float, kv_scale: float) -> None:
        """Set the scales of e4m3 queries and of fp8 caches. Data that is already in a cache keeps its old scale.

        Call it before a step is compiled or captured: a captured graph reads the buffers at each replay, but the floats
        are constants in it, so a later change applies to one and not to the other. This is not detected.
        E201 unless each scale and its inverse are positive, finite and normal in float32.
        """
        for name, scale in (("q_scale", q_scale), ("kv_scale", kv_scale)):
            check(
                SMALLEST_SCALE <= scale <= 1 / SMALLEST_SCALE,
                "E201",
                got=f"{name}={scale!r}",
                rule=f"a scale is positive and finite, from {SMALLEST_SCALE:.2g} to {1 / SMALLEST_SCALE:.2g}",
                fix="pass the largest magnitude divided by that of e4m3; 1.0 leaves values unscaled",
            )
        check(
            self.cache_format == "fp8" or q_scale == kv_scale == 1.0,
            "E201",
            got=f"{q_scale=}, {kv_scale=} with {self.cache_format} rows",
            rule="scales belong to a per-tensor fp8 cache",
        )
        check(
            self.quantises_queries or q_scale == 1.0,
            "E201",
            got=f"{q_scale=} for {self.backend.name}",
            rule="it does not quantise queries",
            fix="pass q_scale=1.0",
        )
        if self.q_scale is not None and self.q_scale_inv is not None and self.kv_scale is not None:
            self.q_scale.fill_(q_scale)
            self.q_scale_inv.fill_(1.0 / q_scale)
            self.kv_scale.fill_(kv_scale)
        self.q_factor = q_scale
        self.bmm1_scale = self.layer.scale * q_scale * kv_scale
        self.bmm2_scale = kv_scale

    def cache_scale(self) -> Tensor | None:
        return self.kv_scale
