"""Everything of a decoder layer but its attention: hyper-connections, an op each, norms, router and experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...parallel import Ranks
from .experts import Experts, parameter

_ops: Any = torch.ops.dsv4

Pending = tuple[Tensor, Tensor, Tensor]
"""Output of a sub-layer that is not in the streams yet, with `post` and `comb` of `mhc_pre`."""


class Connection(nn.Module):
    """Hyper-connection before a sub-layer, with the sub-layer's norm.

    Args:
        hf: configuration of the model. dtype: of the norm's weight.
    """

    def __init__(self, hf: Any, dtype: torch.dtype) -> None:
        super().__init__()
        streams, hidden = hf.hc_mult, hf.hidden_size
        rows = (2 + streams) * streams
        self.fn = parameter(rows, streams * hidden, dtype=torch.float32)
        self.base = parameter(rows, dtype=torch.float32)
        self.scale = parameter(3, dtype=torch.float32)
        self.norm = parameter(hidden, dtype=dtype)
        self.constants = float(hf.rms_norm_eps), float(hf.hc_eps), int(hf.hc_sinkhorn_iters)

    def forward(self, streams: Tensor, pending: Pending | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the streams `[T, N, D]` plus the pending output, the normed input `[T, D]`, its post and comb."""
        mix = self.fn, self.base, self.scale, self.norm, *self.constants
        if pending is None:
            return streams, *_ops.mhc_pre(streams, *mix)
        out: tuple[Tensor, Tensor, Tensor, Tensor] = _ops.mhc_boundary(streams, *pending, *mix)
        return out

    def slots(self, part: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters by their names in the checkpoint, for `part` "attn" or "ffn"."""
        for name in ("fn", "base", "scale"):
            yield f"hc_{part}_{name}", getattr(self, name)
        yield f"{part}_norm.weight", self.norm


class LayerParts(nn.Module):
    """Hyper-connections and experts of a decoder layer.

    Args:
        hf: configuration of the model. index: of the layer. dtype: of floating weights. ranks, whole: see `Experts`.
    """

    def __init__(
        self, hf: Any, index: int, dtype: torch.dtype, ranks: Ranks | None = None, whole: bool = False
    ) -> None:
        super().__init__()
        self.hc_attn, self.hc_ffn = Connection(hf, dtype), Connection(hf, dtype)
        self.ffn = Experts(hf, index, dtype, ranks=ranks, whole=whole)

    def slots(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what the tensors of a checkpoint fill, by their names there, `ffn.gate.weight`. Call `settle` after."""
        yield from self.hc_attn.slots("attn")
        yield from self.hc_ffn.slots("ffn")
        yield from ((f"ffn.{name}", slot) for name, slot in self.ffn.slots())

    def part(self, name: str, tensor: Tensor) -> Tensor | None:
        """Return what this rank has of a tensor of a checkpoint, None if that is nothing."""
        return self.ffn.part(name.removeprefix("ffn."), tensor) if name.startswith("ffn.") else tensor

    def settle(self) -> None:
        """Finish weights that were filled, see `Experts.settle`."""
        self.ffn.settle()
