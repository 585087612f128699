"""The router of a mixture of experts: the experts of a token, and their weights."""

from __future__ import annotations

import torch
from torch import Tensor

NO_EXPERT = -1
"""Id of a place that no expert takes: a token id outside the table, or an id in it that is no expert."""
SMALLEST_SUM = 1e-20
"""Added to the sum of a token's scores, so that scores that are all 0 give weights of 0."""


def moe_route(
    x: Tensor,
    gate: Tensor,
    bias: Tensor | None = None,
    token_ids: Tensor | None = None,
    tid2eid: Tensor | None = None,
    top_k: int = 6,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Choose `top_k` experts for each token and weigh them by their scores, `sqrt(softplus(x @ gate.T))` in float32.

    Chosen are the largest of scores + bias, of equal ones the smaller id first, NaN counting as the largest; or, in
    layers that route by hash, the row of a table for the token id. A weight is the score without bias, divided by the
    sum of the token's chosen scores, times `scale`.

    Args:
        x: `[T, D]` bfloat16, float16 or float32, any strides.
        gate: `[E, D]` bfloat16, float16 or float32.
        bias: float32 `[E]`, added for the choice alone.
        token_ids: int `[T]`; tid2eid: int `[V, top_k]`. Both or none; then there is no bias.
        top_k: K, at most E.
    Returns:
        ids: int32 `[T, K]`, largest first. Where the token id is outside of the table, or the table's entry is no
            expert, the id is -1 and the weight 0.
        weights: float32 `[T, K]`.
    """
    scores = torch.nn.functional.softplus(x.float() @ gate.float().t()).sqrt()
    if token_ids is None or tid2eid is None:
        ids = _largest(scores if bias is None else scores + bias, top_k)
    else:
        known = (token_ids >= 0) & (token_ids < tid2eid.shape[0])
        ids = tid2eid.index_select(0, torch.where(known, token_ids, 0))
        ids = torch.where(known[:, None] & (ids >= 0) & (ids < gate.shape[0]), ids, NO_EXPERT).long()
    chosen = torch.where(ids >= 0, scores.gather(1, ids.clamp_min(0)), 0.0)
    return ids.to(torch.int32), _weights(chosen, scale)


def moe_route_images(
    x: Tensor,
    gate: Tensor,
    bias: Tensor,
    image_bias: Tensor,
    is_image: Tensor,
    top_k: int = 6,
    scale: float = 1.0,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Choose and weigh experts as `moe_route` does, with a bias of image tokens and a temperature, as in V4.1.

    Scores are `sqrt(softplus(x @ gate.T / temperature))` in float32.

    Args:
        x: `[T, D]` bfloat16, float16 or float32, any strides.
        gate: `[E, D]` bfloat16, float16 or float32.
        bias, image_bias: float32 `[E]`, added for the choice alone, image_bias where `is_image`, bool `[T]`.
        top_k: K, at most E.
    Returns:
        ids: int32 `[T, K]`, largest first, of equal ones the smaller id first; weights: float32 `[T, K]`.
    """
    scores = torch.nn.functional.softplus(x.float() @ gate.float().t() / temperature).sqrt()
    ids = _largest(scores + torch.where(is_image[:, None], image_bias, bias), top_k)
    return ids.to(torch.int32), _weights(scores.gather(1, ids), scale)


def _largest(order: Tensor, top_k: int) -> Tensor:
    """Return int64 `[T, K]`, the columns of the largest values, of equal ones the first."""
    return order.sort(dim=1, descending=True, stable=True).indices[:, :top_k]


def _weights(chosen: Tensor, scale: float) -> Tensor:
    """Return the scores of chosen experts, divided by their sum."""
    return chosen / (chosen.sum(1, keepdim=True) + SMALLEST_SUM) * scale
