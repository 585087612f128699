"""`torch.ops.dsv4.compress_norm_rope_insert`; what it computes is in reference/compress_norm_rope_insert.py."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import fail
from ...layout import INDEXER_FORMATS, KV_FORMATS, state_width
from ...reference.preprocess import compress_norm_rope_insert as reference
from ..common.define import define
from ..common.validate import (
    FLOATS,
    INTS,
    expect,
    expect_hadamard_dim,
    expect_indexer_cache,
    expect_kv_cache,
    expect_rope_table,
    expect_rows,
    expect_state_cache,
)


def check_compress(
    state_cache: Tensor,
    state_slot_mapping: Tensor,
    state_block_table: Tensor,
    token_to_req: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    norm_weight: Tensor,
    cos_sin_cache: Tensor,
    k_cache: Tensor,
    eps: float,
    ratio: int,
    state_block_size: int,
    block_size: int,
    cache_format: str,
    hadamard: bool = False,
    kv_scale: Tensor | None = None,
    op: str = "compress_norm_rope_insert",
) -> None:
    """Raise where the arguments of `compress_norm_rope_insert`, on behalf of `op`, are wrong."""
    expect(norm_weight, f"{op}: norm_weight [d]", FLOATS)
    dim = norm_weight.shape[0]
    if ratio < 2:
        fail("E201", got=f"{op}: ratio {ratio}", rule="a compressed layer has a ratio above 1")
    expect_state_cache(state_cache, op, state_block_size, state_width(ratio, dim))
    expect(state_slot_mapping, f"{op}: state_slot_mapping [T]", torch.int64)
    expect(state_block_table, f"{op}: state_block_table [R, B]", torch.int32)
    expect(token_to_req, f"{op}: token_to_req [T]", INTS)
    expect(positions, f"{op}: positions [T]", INTS)
    expect(slot_mapping, f"{op}: slot_mapping [T]", torch.int64)
    for name, value in (("token_to_req", token_to_req), ("positions", positions), ("slot_mapping", slot_mapping)):
        expect_rows(value.shape[0], state_slot_mapping.shape[0], f"{op}: {name}")
    expect_rope_table(cos_sin_cache, op, dim)
    if cache_format in KV_FORMATS:
        expect_kv_cache(k_cache, op, cache_format, block_size, dim, kv_scale)
    else:
        expect_indexer_cache(k_cache, op, cache_format, block_size, dim)
        if kv_scale is not None:
            fail("E201", got=f"{op}: kv_scale with {cache_format}", fix="drop it")
    if hadamard:
        if cache_format not in INDEXER_FORMATS:
            fail("E202", got=f"{op}: hadamard=True with {cache_format}", rule="only indexer keys are transformed")
        expect_hadamard_dim(dim, op)


def _fake(
    state_cache: Tensor,
    state_slot_mapping: Tensor,
    state_block_table: Tensor,
    token_to_req: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    norm_weight: Tensor,
    cos_sin_cache: Tensor,
    k_cache: Tensor,
    eps: float,
    ratio: int,
    state_block_size: int,
    block_size: int,
    cache_format: str,
    hadamard: bool = False,
    kv_scale: Tensor | None = None,
) -> None:
    return None


compress_norm_rope_insert = define(
    "compress_norm_rope_insert(Tensor state_cache, Tensor state_slot_mapping, Tensor state_block_table, "
    "Tensor token_to_req, Tensor positions, Tensor slot_mapping, Tensor norm_weight, Tensor cos_sin_cache, "
    "Tensor(a!) k_cache, float eps, int ratio, int state_block_size, int block_size, str cache_format, "
    "bool hadamard=False, Tensor? kv_scale=None) -> ()",
    reference=reference.compress_norm_rope_insert,
    fake=_fake,
    check=check_compress,
)
