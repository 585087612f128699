"""Scales of per-tensor fp8 caches and queries, in the two forms that kernels want: buffers, and Python floats."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ..errors import check
from .facts import LayerShape
from .protocol import SparseAttention

SMALLEST = torch.finfo(torch.float32).tiny
"""Of a scale: smaller ones are flushed to zero, and those above its inverse have none."""


class PerTensorScales(SparseAttention):
    """Attention whose `fp8` cache, and whose queries where a kernel wants them quantised, have a scale each.

    `q_scale`, `q_scale_inv` and `kv_scale` are buffers for the ops that quantise and attend; `bmm1_scale` and
    `bmm2_scale` the factors of the scores and of the result as floats, for kernels that take another path for tensors.
    All are 1, and `bmm1_scale` the layer's own, until `set_scales`. Other caches have no buffers.
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
        """Per-tensor scales of e4m3 queries and of fp8 caches. Caches written under other scales become garbage.

        Set them before a step is compiled or captured: a captured graph reads the buffers at each replay, but has taken
        over the floats of its capture, and half of a new scale is a wrong one. Nothing here knows of such graphs.
        E201 unless scales are positive, finite, and have such an inverse in float32.
        """
        for name, scale in (("q_scale", q_scale), ("kv_scale", kv_scale)):
            check(
                SMALLEST <= scale <= 1 / SMALLEST,
                "E201",
                got=f"{name}={scale!r}",
                rule=f"a scale is positive and finite, from {SMALLEST:.2g} to {1 / SMALLEST:.2g}",
                fix="pass the largest magnitude over that of e4m3; 1.0 leaves values as they are",
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
            rule="its queries stay as they are",
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
