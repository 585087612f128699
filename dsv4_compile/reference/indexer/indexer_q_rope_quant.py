"""Rotate and quantise the indexer's queries, and fold every scale of the score into its head weights."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.kv_format import quantize_indexer
from ..common.quant import rounded_hadamard
from ..common.rope import apply_rope


def indexer_q_rope_quant(
    q: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    weights: Tensor,
    cache_format: str,
    hadamard: bool = False,
    round_weights: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Prepare queries for `indexer_logits`.

    Queries are rotated in float32 and rounded once: to bfloat16 for the quantised formats, to their own dtype for
    `plain`. With `hadamard` the transform follows, and a second rounding.

    Args:
        q: `[T, H, D]`, any strides; positions: int `[>= T]`; weights: `[T, H]`.
        cos_sin_cache: float32 `[max_pos, rope_dim]`.
        cache_format: of the keys the queries will meet.
        hadamard: transform the queries. Keys must have been stored with the same setting.
        round_weights: round w to q's dtype first, as the result of a GEMM in that dtype would have been.
    Returns:
        All contiguous and fresh. The weights are float32 `[T, H]` in every format.
        `indexer_fp8`: e4m3 `[T, H, D]`, float32 `[T, H, 0]`, ((w * s) * D^-0.5) * H^-0.5 with s the query's scale;
        `indexer_mxfp4`: uint8 `[T, H, D/2]`, UE8M0 uint8 `[T, H, D/32]`, (w * D^-0.5) * H^-0.5;
        `plain`: `[T, H, D]` in q's dtype, float32 `[T, H, 0]`, (w * D^-0.5) * H^-0.5.
    """
    heads, dim = q.shape[1:]
    store = q.dtype if cache_format == "plain" else torch.bfloat16
    x = apply_rope(q, positions[: q.shape[0]], cos_sin_cache).to(store).float()
    if hadamard:
        x = rounded_hadamard(x, store)
    weights = (weights.to(q.dtype) if round_weights else weights).float()
    scale = torch.empty(*q.shape[:2], 0, dtype=torch.float32, device=q.device)
    if cache_format == "plain":
        values = x.to(store)
    else:
        values, scale_or_byte = quantize_indexer(x, cache_format)
        if cache_format == "indexer_fp8":
            weights = weights * scale_or_byte[..., 0]
        else:
            scale = scale_or_byte
    return values.contiguous(), scale.contiguous(), (weights * dim**-0.5 * heads**-0.5).contiguous()
