"""Compressed entries of the tokens that close a group; other tokens cost three calls of torch together."""

from __future__ import annotations

import torch
from torch import Tensor

from ...layout import PAGE_LAYOUTS, overlap_factor
from ...reference.common import paging
from ...reference.common.quant import rounded_hadamard
from ...reference.common.rope import apply_rope
from ...reference.preprocess import compress_norm_rope_insert as reference
from ...reference.preprocess.compress_norm_rope_insert import ENTRIES_AT_A_TIME, CompressArguments
from ...reference.preprocess.fused_q_kv_rmsnorm import rms_norm
from .. import native
from ..common.invariant import before_sums_by_torch
from ..common.rows import write_rows


def compress_norm_rope_insert(call: CompressArguments) -> None:
    """Compute the op of this name as its reference does: bit for bit in calls of torch, up to sums in the kernel."""
    if _in_kernel(call):
        return
    before_sums_by_torch()
    ratio, fmt = call.ratio, call.cache_format
    tokens = call.state_slot_mapping.shape[0]
    rows = (call.positions[:tokens] % ratio == ratio - 1).nonzero().view(-1)
    if rows.shape[0] == 0:
        return
    # The remainder of -1 is that of a token that closes a group.
    keep = call.positions.index_select(0, rows) >= 0
    for slots, cache, block in (
        (call.state_slot_mapping, call.state_cache, call.state_block_size),
        (call.slot_mapping, call.k_cache, call.block_size),
    ):
        keep &= paging.valid_slots(slots.index_select(0, rows), cache.shape[0], block)
    for chunk in rows[keep].split(ENTRIES_AT_A_TIME):
        at = call.positions.index_select(0, chunk).long()
        entry = rms_norm(_pool(call, call.token_to_req.index_select(0, chunk), at), call.eps, call.norm_weight)
        entry = apply_rope(entry, at // ratio * ratio, call.cos_sin_cache)
        if call.hadamard:
            entry = rounded_hadamard(entry, torch.bfloat16 if fmt in PAGE_LAYOUTS else call.k_cache.dtype)
        slots = call.slot_mapping.index_select(0, chunk)
        write_rows(call.k_cache, fmt, call.block_size, slots, entry, call.kv_scale)


def _in_kernel(call: CompressArguments) -> bool:
    """Compute the op in a kernel and return True, or return False if it takes other tensors."""
    floats = call.state_cache, call.norm_weight, call.cos_sin_cache, call.k_cache
    places = call.state_slot_mapping, call.positions, call.slot_mapping
    int32 = call.state_block_table, call.token_to_req
    if call.cache_format != "plain" or call.hadamard or not native.takes(*floats, int64=places, int32=int32):
        return False
    native.call(
        "compress_norm_rope_insert",
        call.state_cache,
        *places,
        *int32,
        call.norm_weight,
        call.cos_sin_cache,
        call.k_cache,
        call.state_slot_mapping.shape[0],
        call.state_cache.shape[0] * call.state_block_size,
        call.k_cache.shape[0] * call.block_size,
        *call.state_block_table.shape,
        call.cos_sin_cache.shape[0],
        call.norm_weight.shape[0],
        call.cos_sin_cache.shape[1],
        call.ratio,
        overlap_factor(call.ratio),
        call.state_block_size,
        float(call.eps),
    )
    return True


def _pool(call: CompressArguments, requests: Tensor, positions: Tensor) -> Tensor:
    """Return `[N, d]`, the reference's `pool` of the windows that end at `positions` `[N]`, read with one gather."""
    states, ratio, block = call.state_cache, call.ratio, call.state_block_size
    if not states.is_contiguous() or states.numel() == 0:
        return reference.pool(states, call.state_block_table, requests, positions, ratio, block)
    groups = overlap_factor(ratio)
    window = torch.arange(groups * ratio)
    logical = positions[:, None] + (window + (1 - groups * ratio))
    slots = paging.lookup_slots(call.state_block_table, requests[:, None], logical, block)
    absent = ~paging.valid_slots(slots, states.shape[0], block)
    # A state is 2 * groups pieces, values before scores; a position gives the piece of its group of each.
    first = slots.masked_fill(absent, 0) * (2 * groups) + window // ratio
    pieces = torch.stack((first, first + groups), dim=1)
    values, scores = (
        states.view(-1, states.shape[-1] // (2 * groups))
        .index_select(0, pieces.view(-1))
        .view(*pieces.shape, -1)
        .unbind(1)
    )
    absent = absent[..., None]
    scores = scores.masked_fill(absent, -torch.inf)
    # Weights are NaN where nothing is present: select, never multiply.
    nothing = (scores == -torch.inf).all(dim=1)
    pooled = (values * scores.softmax(dim=1)).masked_fill_(absent, 0.0).sum(dim=1)
    return pooled.masked_fill_(nothing, 0.0)
