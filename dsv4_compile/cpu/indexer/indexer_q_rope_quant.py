"""RoPE of the indexer's queries in one pass over them, for keys that are not quantised."""

from __future__ import annotations

import torch
from torch import Tensor

from ...reference.indexer import indexer_q_rope_quant as reference
from .. import native


def indexer_q_rope_quant(
    q: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    weights: Tensor,
    cache_format: str,
    hadamard: bool = False,
    round_weights: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the op of this name as its reference does, bit for bit."""
    tokens, heads, dim = q.shape
    plain = cache_format == "plain" and not hadamard and weights.dtype is torch.float32 and q.stride(1) == dim
    if plain and native.takes(cos_sin_cache, rows=q, int64=(positions,)):
        out, (rows, rope) = torch.empty(q.shape), cos_sin_cache.shape
        where = q, q.stride(0), out, positions, cos_sin_cache
        native.call("rope", *where, *q.shape, rope, rows, 0, torch.get_num_threads())
        return out, torch.empty((tokens, heads, 0)), (weights * dim**-0.5).mul_(heads**-0.5)
    arguments = q, positions, cos_sin_cache, weights, cache_format, hadamard, round_weights
    return reference.indexer_q_rope_quant(*arguments)
