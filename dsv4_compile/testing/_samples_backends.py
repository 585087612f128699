"""Samples of the ops that belong to one of the attention backends. See samples.py."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import layout
from ._samples_step import KV, TOKENS, Args, Step, sample


def _rows(s: Step, width: int) -> Tensor:
    """int32 `[T + 1]`: ends of rows of at most `width` entries, some of them empty."""
    return torch.nn.functional.pad(s.randint(-2, width + 1, TOKENS).clamp_min(0).cumsum(0), (1, 0)).int()


@sample
def sparse_mla_decode_ragged(s: Step) -> list[Args]:
    samples: list[Args] = []
    for fmt, dim, dtype in KV:
        c = s.cache(fmt, s.window, layout.WINDOW_BLOCK, head_dim=dim, dtype=dtype)
        e = s.cache(fmt, s.table(2, layout.HCA_RATIO), 2, head_dim=dim, dtype=dtype)
        q, sink = s.randn(TOKENS, 3, dim, dtype=dtype), s.randn(3, dtype=torch.float32)
        slots, extra = s.hostile(len(c.slots), TOKENS * 20), s.hostile(len(e.slots), TOKENS * 6)
        one = (q, c.cache, slots, _rows(s, 20), c.block_size, c.fmt, dim**-0.5)
        samples.append((*one, sink, e.cache, extra, _rows(s, 6), e.block_size, c.kv_scale, 20, 5))
        samples.append((*one, None, None, None, None, 0, c.kv_scale))
    return samples


@sample
def sparse_mla_decode_latent(s: Step) -> list[Args]:
    samples: list[Args] = []
    for dim, value_dim, dtype in (
        (48, 32, torch.float32),
        (layout.V32_HEAD_DIM, layout.V32_LATENT_DIM, torch.bfloat16),
    ):
        c = s.cache("plain", s.window, layout.WINDOW_BLOCK, head_dim=dim, dtype=dtype)
        slots, lens = s.hostile(len(c.slots), TOKENS, 20), s.randint(-1, 22, TOKENS)
        samples.append((s.randn(TOKENS, 3, dim, dtype=dtype), c.cache, slots, lens, c.block_size, 0.125, value_dim))
    return samples
