"""Token ids and masks of a call, as graphs take them."""

from __future__ import annotations

import torch
from torch import Tensor

from .._compat import maybe_mark_dynamic


def mark_dynamic_tokens(tensor: Tensor) -> Tensor:
    """Mark both dims of `[B, S]` as dynamic, so that Dynamo's first graph serves all sizes.

    Sizes of 1 are not marked: torch specialises 0 and 1, so decode and prefill have separate graphs.
    """
    for dim, size in enumerate(tensor.shape):
        if size > 1:
            maybe_mark_dynamic(tensor, dim)
    return tensor


def in_rows(tensor: Tensor, columns: int | None = None) -> Tensor:
    """Return `[B, S]`, or its last columns, with the strides of a new tensor, which graphs guard: a copy if need be."""
    past = 0 if columns is None else tensor.shape[1] - columns
    last = tensor[:, past:] if past else tensor
    if last.stride() == (last.shape[1], 1):
        return last
    rows = last.clone(memory_format=torch.contiguous_format)
    vars(rows).update(vars(tensor))  # marks of dynamic dims
    return rows


def kept(mask: Tensor, columns: int) -> Tensor:
    """Return which of the last `columns` columns of an attention mask hold a token, bool `[B, columns]`."""
    return mask[:, mask.shape[1] - columns :] != 0
