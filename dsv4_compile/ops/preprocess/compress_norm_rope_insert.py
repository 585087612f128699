"""Schema, check and fake of `compress_norm_rope_insert`."""

from __future__ import annotations

import torch

from ...cpu.preprocess import compress_norm_rope_insert as cpu
from ...errors import fail
from ...layout import CSA_RATIO, INDEXER_FORMATS, KV_FORMATS, cdiv, state_width
from ...reference.preprocess import compress_norm_rope_insert as reference
from ...reference.preprocess.compress_norm_rope_insert import CompressArguments
from ...selection.costs import FLOAT32, INT32, INT64, CallSizes, CostModel
from ..common.define import define
from ..common.invariance import AS_IT_IS, Invariance
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


def check_compress(call: CompressArguments, *, op: str = "compress_norm_rope_insert") -> None:
    """Raise if the arguments of `compress_norm_rope_insert`, on behalf of `op`, are wrong."""
    fmt = call.cache_format
    expect(call.norm_weight, f"{op}: norm_weight [d]", FLOATS)
    dim = call.norm_weight.shape[0]
    if call.ratio < 2:
        fail("E201", got=f"{op}: ratio {call.ratio}", rule="a compressed layer has a ratio above 1")
    expect_state_cache(call.state_cache, op, call.state_block_size, state_width(call.ratio, dim))
    expect(call.state_slot_mapping, f"{op}: state_slot_mapping [T]", torch.int64)
    expect(call.state_block_table, f"{op}: state_block_table [R, B]", torch.int32)
    for name, dtypes in (("token_to_req", INTS), ("positions", INTS), ("slot_mapping", torch.int64)):
        value = getattr(call, name)
        expect(value, f"{op}: {name} [T]", dtypes)
        expect_rows(value.shape[0], call.state_slot_mapping.shape[0], f"{op}: {name}")
    expect_rope_table(call.cos_sin_cache, op, dim)
    if fmt in KV_FORMATS:
        expect_kv_cache(call.k_cache, op, fmt, call.block_size, dim, call.kv_scale)
    else:
        expect_indexer_cache(call.k_cache, op, fmt, call.block_size, dim)
        if call.kv_scale is not None:
            fail("E201", got=f"{op}: kv_scale with {fmt}", fix="drop it")
    if call.hadamard:
        if fmt not in INDEXER_FORMATS:
            fail("E202", got=f"{op}: hadamard=True with {fmt}", rule="only indexer keys are transformed")
        expect_hadamard_dim(dim, op)


def pooled_sizes(call: CallSizes, tokens: int, width: int, weight: str, cache_format: str) -> dict[str, int]:
    """Return the sizes of compressed entries; a state row holds values and scores of one or two groups."""
    (dim,), ratio = call.dims(weight), call.arguments["ratio"] or CSA_RATIO
    closing = {"T": tokens, "C": cdiv(tokens, ratio), "W": ratio * width // (2 * dim), "D": dim}
    return closing | call.row(dim, weight, cache_format)


compress_norm_rope_insert = define(
    "compress_norm_rope_insert",
    mutates=("k_cache",),
    reference=reference.compress_norm_rope_insert,
    on_cpu=cpu.compress_norm_rope_insert,
    fake=lambda call: None,
    check=check_compress,
    arguments=CompressArguments,
    kernel="dsv4_compile.kernels.preprocess.compress_norm_rope_insert",
    lowering="dsv4_compile.lowering.preprocess.compress_norm_rope_insert",
    cost=CostModel(
        lambda T, D, C, W, row: (C * (2 * FLOAT32 * W * D + row) + T * (3 * INT64 + INT32), 0),
        sizes=lambda call: pooled_sizes(
            call, call.dims("positions")[0], call.dims("state_cache")[-1], "norm_weight", "cache_format"
        ),
    ),
    invariant=Invariance(
        rows=("state_slot_mapping", "token_to_req", "positions", "slot_mapping"), on_cpu=AS_IT_IS, kernel=AS_IT_IS
    ),
)
