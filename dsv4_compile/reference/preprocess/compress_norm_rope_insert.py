"""Pool a finished group of tokens into one compressed entry, normalize and rotate it, and store it in its cache.

The token that closes a group, (pos + 1) % C == 0, pools the window of the last `overlap_factor(C)` groups. For C = 4
a state row is two halves wide: a token gives its second half to the entry of the same group and its first half
to the entry of the next one. So the window of the entry that closes at 7 is

    positions 0 1 2 3 | 4 5 6 7
    columns   [0, d)  | [d, 2d)        of the value half and of the score half

and each channel takes its own softmax of the scores over the window. For C = 128 the window is the group itself.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...layout import KV_FORMATS, PAD_SLOT, PAGE_LAYOUTS, overlap_factor
from ..common import paging
from ..common.kv_format import store_indexer, store_kv
from ..common.quant import rounded_hadamard
from ..common.rope import apply_rope
from .fused_q_kv_rmsnorm import rms_norm

ENTRIES_AT_A_TIME = 256
"""Bounds the gathered windows: 128 MiB for C = 128 and d = 512."""


class CompressArguments(NamedTuple):
    """Arguments of `compress_norm_rope_insert`, in schema order.

    Attributes:
        state_cache: float32 `[P, S, 2 * overlap_factor(ratio) * d]`, as `save_partial_states` writes it.
        state_slot_mapping: int64 `[T]`; state_block_table: int32 `[R, B]`, both of raw tokens.
        token_to_req, positions: int `[>= T]`; slot_mapping: int64 `[>= T]`, slots of compressed entries.
        norm_weight: `[d]`; cos_sin_cache: float32 `[max_pos, rope_dim]`, read at the first position of the group.
        k_cache: a key/value or indexer cache of d dims, written in place.
        ratio: C; state_block_size: S of the state cache, in tokens; block_size: S of `k_cache`, in entries.
        hadamard: transform the entry, rounded before and after; for indexer keys only.
        kv_scale: float32 `[1]`, for `fp8` rows.
    """

    state_cache: Tensor
    state_slot_mapping: Tensor
    state_block_table: Tensor
    token_to_req: Tensor
    positions: Tensor
    slot_mapping: Tensor
    norm_weight: Tensor
    cos_sin_cache: Tensor
    k_cache: Tensor
    eps: float
    ratio: int
    state_block_size: int
    block_size: int
    cache_format: str
    hadamard: bool = False
    kv_scale: Tensor | None = None


def compress_norm_rope_insert(call: CompressArguments) -> None:
    """Store the compressed entry of every token that closes a group of `ratio`.

    Token t does so if its state slot lies in the state cache, (positions[t] + 1) % ratio == 0 and slot_mapping[t] lies
    in `k_cache`; every other token is padding and writes nothing. The positions of a request's tokens are consecutive,
    so at most T // ratio + R tokens do, and no more are stored. The states of the whole window must have been saved.
    Window positions before the request's start, or in a state block that is not in the table or the cache, are absent;
    a channel with nothing present, or with scores of -inf alone, is zero. All arithmetic is float32 up to the rounding
    of the cache.
    """
    ratio, fmt, block = call.ratio, call.cache_format, call.block_size
    tokens = call.state_slot_mapping.shape[0]
    position, slots = call.positions[:tokens].long(), call.slot_mapping[:tokens]
    closes = (position >= 0) & ((position + 1) % ratio == 0)
    closes &= paging.valid_slots(call.state_slot_mapping, call.state_cache.shape[0], call.state_block_size)
    closes &= paging.valid_slots(slots, call.k_cache.shape[0], block)
    slots = torch.where(closes, slots, PAD_SLOT)
    # Which tokens close a group is data, how many at most is not: they are sorted first, in their order.
    most = min(tokens, tokens // ratio + call.state_block_table.shape[0])
    closing = closes.int().argsort(descending=True, stable=True)[:most]
    for start in range(0, most, ENTRIES_AT_A_TIME):
        rows = closing[start : start + ENTRIES_AT_A_TIME]
        at = position[rows]
        entry = pool(
            call.state_cache, call.state_block_table, call.token_to_req[rows], at, ratio, call.state_block_size
        )
        entry = apply_rope(rms_norm(entry, call.eps, call.norm_weight), at // ratio * ratio, call.cos_sin_cache)
        if call.hadamard:
            entry = rounded_hadamard(entry, torch.bfloat16 if fmt in PAGE_LAYOUTS else call.k_cache.dtype)
        if fmt in KV_FORMATS:
            store_kv(call.k_cache, fmt, block, slots[rows], entry, call.kv_scale)
        else:
            store_indexer(call.k_cache, fmt, block, slots[rows], entry)


def pool(
    state_cache: Tensor, state_block_table: Tensor, requests: Tensor, positions: Tensor, ratio: int, block_size: int
) -> Tensor:
    """Return, per channel, the softmax-weighted sum of the window that ends at each of `positions` `[N]`: `[N, d]`."""
    groups = overlap_factor(ratio)
    back = torch.arange(1 - groups * ratio, 1, device=positions.device)
    slots = paging.lookup_slots(state_block_table, requests[:, None], positions[:, None] + back, block_size)
    absent = ~paging.valid_slots(slots, state_cache.shape[0], block_size)[..., None]
    columns = state_cache.unflatten(-1, (2, groups, -1))

    def window(part: int) -> Tensor:
        """Return values (0) or scores (1), `[N, groups * C, d]`: each group of positions has separate columns."""
        pieces = [
            paging.read_rows(columns[:, :, part, group], block_size, piece)
            for group, piece in enumerate(slots.split(ratio, dim=1))
        ]
        return torch.cat(pieces, dim=1)

    scores = window(1).masked_fill_(absent, -torch.inf)
    # Weights are NaN where nothing is present, as in the window of a padding token: select, never multiply.
    nothing = (scores == -torch.inf).all(dim=1)
    pooled = (window(0) * scores.softmax(dim=1)).masked_fill_(absent, 0.0).sum(dim=1)
    return pooled.masked_fill_(nothing, 0.0)
