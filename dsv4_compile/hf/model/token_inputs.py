"""Token ids, masks and modes of a call, as graphs take them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..._compat import maybe_mark_dynamic
from ...errors import fail

_IDS = (torch.int64, torch.int32)
WHY_NO_AUTOCAST = "ops round where DeepSeek-V4 does, in the dtypes of the weights, and not under torch.autocast"
_FIX_AUTOCAST = (
    "leave the autocast block, hook or wrapper (mixed_precision of accelerate, bf16 or fp16 of Trainer), or load the "
    "model in the dtype you want"
)


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


def tokens_after(ids: Tensor, mask: Tensor | None, column: int) -> Tensor:
    """Return the first token of each row of `[B, S]` from a column on that the mask `[B, >= S]` keeps, int64 `[B]`."""
    if mask is None:
        return ids[:, column].long()
    first = kept(mask, ids.shape[1])[:, column:].int().argmax(dim=1)
    return ids[:, column:].gather(1, first[:, None])[:, 0].long()


def places_of(keep: Tensor, padding: Tensor, *, first: bool) -> Tensor:
    """Return the column int64 `[B, S]` that each column moves to, so that the tokens of a row are neighbours.

    Args:
        keep: bool `[B, S]`, which columns hold a token.
        padding: int64 `[B, 1]`, number of those that hold none.
        first: tokens move to the first columns, as in batches of engines; else to the last.
    """
    tokens, others = keep.cumsum(dim=1), (~keep).cumsum(dim=1)
    if first:
        return torch.where(keep, tokens, keep.shape[1] - padding + others) - 1
    return torch.where(keep, padding + tokens, others) - 1


def restored(value: Any, row: Tensor, places: Tensor) -> Any:
    """Return outputs with the column from `places` `[B, S]` in each column; what has none is returned as it is."""
    if isinstance(value, tuple):
        return tuple(restored(each, row, places) for each in value)
    if not isinstance(value, Tensor):
        return value
    if value.dim() > 2:
        return value[row, places]
    return torch.unflatten(value, 0, places.shape)[row, places].flatten(0, 1)


def check_ids(ids: Any) -> None:
    """Raise E208 unless `ids` are a tensor of token ids `[batch, columns]`."""
    if not isinstance(ids, Tensor):
        fail(
            "E208",
            got=f"input_ids of type {type(ids).__name__}",
            fix="pass a tensor, torch.tensor([[1, 2]]) for a list; of a tokenizer's result, model(**tokens)",
        )
    # Without `check`, which would format its message in every call.
    if not (ids.dim() == 2 and ids.numel() > 0 and ids.dtype in _IDS):
        fail(
            "E208",
            got=f"input_ids of shape {tuple(ids.shape)} and dtype {ids.dtype}",
            fix="pass int64 or int32 [batch, columns] with at least one row and one column",
        )


def check_autocast(tensor: Tensor) -> None:
    """Raise E208 under torch.autocast for the tensor's device, which wrappers and hooks enter inside a call."""
    if torch.is_autocast_enabled(tensor.device.type):
        refuse_autocast(tensor.device.type)


def _refuse_autocast(device_type: str) -> NoReturn:
    """Raise E208 for torch.autocast."""
    fail(
        "E208",
        got=f"torch.autocast({device_type!r})",
        why=WHY_NO_AUTOCAST,
        fix=_FIX_AUTOCAST,
    )


refuse_autocast: Callable[[str], NoReturn] = torch.compiler.disable(
    _refuse_autocast, reason=f"E208: {WHY_NO_AUTOCAST}: {_FIX_AUTOCAST}"
)
"""`_refuse_autocast`, or in a trace with fullgraph=True torch's error with this reason."""
