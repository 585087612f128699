"""Taps: hidden states of a target model that its draft layers read, as outputs of the traced graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class Taps(NamedTuple):
    """Layers whose completed streams are returned, in order.

    Attributes:
        layers: indices of decoder layers; a tap is the streams after the layer, its experts included.
        mean: average the streams, in their dtype. Otherwise a tap is all streams, one after the other.
    """

    layers: tuple[int, ...]
    mean: bool = True

    def read(self, streams: Mapping[int, Tensor]) -> Tensor:
        """Return taps `[T, len(layers) * D]`, or `[T, len(layers) * N * D]`, of streams `[B, S, N, D]` by layer."""
        rows = [streams[layer].flatten(0, 1) for layer in self.layers]
        return torch.cat([each.mean(1) if self.mean else each.flatten(1) for each in rows], dim=1)
