"""The router: scores, choice and weights of a few tokens after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from ...reference.moe import moe_route as reference
from .. import native
from ..common.invariant import before_sums_by_torch


def moe_route(
    x: Tensor,
    gate: Tensor,
    bias: Tensor | None = None,
    token_ids: Tensor | None = None,
    tid2eid: Tensor | None = None,
    top_k: int = 6,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Compute the op of this name as its reference does, with scores up to the order of sums.

    In the kernel, a token has the same bits in any batch.
    """
    tokens = x.shape[0]
    both = (token_ids is None) == (tid2eid is None)
    if both and native.takes(x, gate, bias, int64=(token_ids, tid2eid)):
        ids, weights = torch.empty((tokens, top_k), dtype=torch.int32), torch.empty((tokens, top_k))
        sizes = tokens, *gate.shape, top_k, 0 if tid2eid is None else tid2eid.shape[0]
        arguments = x, gate, bias, token_ids, tid2eid, ids, weights
        native.call("moe_route", *arguments, *sizes, float(scale), torch.get_num_threads())
        return ids, weights
    before_sums_by_torch()
    return reference.moe_route(x, gate, bias, token_ids, tid2eid, top_k, scale)
