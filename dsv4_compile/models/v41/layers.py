"""Layer of DeepSeek-V4.1: attention and experts between lagged hyper-connections, and an engram before them.

Each sub-layer takes the streams by the coefficients of the site before it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .attention import Attention, Selection
from .cache import V41Caches
from .config import V41Config
from .engram import Engram
from .experts import MoE
from .fetch import TableRows
from .linear import Norm, WeightOptions, parameter
from .step import Step, Tail


class Site(nn.Module):
    """Weights of hyper-connections at one sub-layer."""

    def __init__(self, config: V41Config) -> None:
        super().__init__()
        count = config.hc_mult
        outputs = (count + 2) * count
        self.fn = parameter(outputs, count * config.hidden_size, dtype=torch.float32)
        self.base = parameter(outputs, dtype=torch.float32)
        self.scale = parameter(3, dtype=torch.float32)
        self.norm_eps, self.hc_eps, self.iterations = config.rms_norm_eps, config.hc_eps, config.hc_sinkhorn_iters

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return pre, which the next site takes, and post and comb of this one."""
        pre, post, comb = torch.ops.dsv4.mhc_mixes(
            streams, self.fn, self.base, self.scale, self.norm_eps, self.hc_eps, self.iterations
        )
        return pre, post, comb


class Layer(nn.Module):
    """Engram where there is one, attention and experts, each between a collapse and a return of the streams."""

    is_tapped = False
    """Whether draft layers read the mean of this layer's streams, before its mixing."""
    first_of_kind = -1
    """First layer of its kind, -1 for the only one: see `layer_kinds`."""
    weight_names: tuple[str, ...] = ()

    def __init__(self, config: V41Config, layer: int, options: WeightOptions) -> None:
        super().__init__()
        # Facts of the configuration that a graph branches on are attributes of modules: constants in every graph.
        self.layer, self.eps, self.is_last_source = layer, config.rms_norm_eps, layer == config.last_source
        if layer in config.engram_layers:
            self.engram = Engram(config, layer, options)
        self.has_engram = layer in config.engram_layers
        self.attn_norm = Norm(config.hidden_size, self.eps, options.dtype)
        self.ffn_norm = Norm(config.hidden_size, self.eps, options.dtype)
        self.hc_attn, self.hc_ffn = Site(config), Site(config)
        self.attn = Attention(config, layer, options)
        self.ffn = MoE(config, options)

    def collapse(self, streams: Tensor, pre: Tensor, norm: Norm) -> Tensor:
        """Return the normed input `[T, D]` of a sub-layer."""
        out: Tensor = torch.ops.dsv4.mhc_collapse(streams, pre, norm.weight, norm.eps)
        return out

    def insert(
        self, streams: Tensor, pre: Tensor, rows: TableRows | None, step: Step, caches: V41Caches
    ) -> tuple[Tensor, Tensor]:
        """Write this layer's rows of caches; return the streams after the engram, and attention's input `[T, D]`."""
        if self.has_engram and rows is not None:
            streams = self.engram(streams, rows, step.is_image)
        x = self.collapse(streams, pre, self.attn_norm)
        self.attn.insert(x, step, caches)
        return streams, x

    def forward(
        self,
        streams: Tensor,
        pre: Tensor,
        rows: TableRows | None,
        step: Step,
        caches: V41Caches,
        selection: Selection | None,
        tail: Tail | None = None,
        taps: dict[int, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Step, Selection | None]:
        """Run the layer over streams `[T, N, D]`.

        Args:
            pre: float32 `[T, N]`, coefficients of the site before.
            rows: rows of the engram's table, for a layer with one.
            tail: at the last source, the tokens that this and later layers run; all are inserted.
            taps: takes the mean `[T, D]` of the streams after the engram, if draft layers read this layer's.
        Returns:
            Streams, pre, step and selection for the next layer, of the tail where there is one.
        """
        streams, x = self.insert(streams, pre, rows, step, caches)
        if tail is not None:
            streams, x, step = streams[tail.rows], x[tail.rows], step.at(tail.rows)
        if taps is not None and self.is_tapped:
            taps[self.layer] = streams.mean(1)
        attn_pre, post, comb = self.hc_attn(streams)
        z, selection = self.attn.attend(x, step, caches, selection)
        if tail is not None:
            step = step.with_windows_from(tail.first)
        streams = torch.ops.dsv4.mhc_post(streams, z, post, comb)
        ffn_pre, post, comb = self.hc_ffn(streams)
        z = self.ffn(self.collapse(streams, attn_pre, self.ffn_norm), step.is_image)
        return torch.ops.dsv4.mhc_post(streams, z, post, comb), ffn_pre, step, selection
