"""Engram of a DeepSeek-V4.1 layer: a memory of n-grams of token ids that is read before the layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...layout import MX_TILE
from ...parallel import Ranks, all_gather, all_reduce
from .config import V41Config
from .fetch import TableRows, fetch, take
from .linear import WeightOptions, linear_of, parameter
from .ngrams import multipliers, primes


class Engram(nn.Module):
    """Table of n-grams, and the projection and gate that add its rows to the streams.

    A quantised table is e4m3 with a scale for each row and 32 channels. Rows depend on token ids alone. A rank of a
    split model has the rows of the table from `first_row` on, and rows of the projection.
    """

    ranks: Ranks | None = None
    first_row = 0
    ahead = False
    """Whether rows are fetched at the beginning of a step: of a table in host memory."""

    def __init__(self, config: V41Config, layer: int, options: WeightOptions) -> None:
        super().__init__()
        self.pad, self.eps = config.engram_pad, config.rms_norm_eps
        rows, dim = config.engram_rows[config.engram_layers.index(layer)], config.engram_head_dim
        self.embed = parameter(rows, dim, dtype=torch.float8_e4m3fn if options.quantised else options.dtype)
        scale = parameter(rows, dim // MX_TILE, dtype=torch.float8_e8m0fnu) if options.quantised else None
        self.register_parameter("embed_scale", scale)
        hashes = (config.engram_order - 1) * config.engram_heads
        self.wkv = linear_of((config.hc_mult + 1) * config.hidden_size, hashes * dim, options)
        self.q_weight = parameter(config.hc_mult, config.hidden_size, dtype=options.dtype)
        self.k_weight = parameter(config.hc_mult, config.hidden_size, dtype=options.dtype)
        numbers = [torch.tensor(f(config, layer), dtype=torch.int64, device="cpu") for f in (multipliers, primes)]
        self.multipliers: Tensor
        self.primes: Tensor
        self.register_buffer("multipliers", numbers[0], persistent=False)
        self.register_buffer("primes", numbers[1], persistent=False)

    def rows(self, ids: Tensor, positions: Tensor, requests: Tensor, history: Tensor) -> TableRows:
        """Return the rows `[T, K]` of the table for compressed ids, and note the ids in `history`."""
        constants = self.multipliers, self.primes, self.pad
        numbers = torch.ops.dsv4.engram_rows(ids, positions, requests, history, *constants) - self.first_row
        return TableRows(numbers, fetch(numbers, self.embed, self.embed_scale) if self.ahead else None)

    def forward(self, streams: Tensor, rows: TableRows, is_image: Tensor) -> Tensor:
        numbers, values = rows
        # A row that this rank does not have is zero here, so the sum over ranks is exact.
        if values is None:
            embedded = torch.ops.dsv4.engram_embed(numbers, self.embed, self.embed_scale).to(streams.dtype)
        else:
            embedded = take(values, numbers, streams.dtype)
        keys_value = all_gather(self.wkv(all_reduce(embedded, self.ranks)), self.ranks)
        out: Tensor = torch.ops.dsv4.engram_gate(streams, keys_value, self.q_weight, self.k_weight, is_image, self.eps)
        return out
