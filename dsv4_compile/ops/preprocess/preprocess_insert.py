"""Schema, check and fake of `preprocess_insert` and `preprocess_insert_quant`."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from ...errors import fail
from ...reference.common.block_scale import new_rows
from ...reference.preprocess import preprocess_insert as reference
from ...reference.preprocess.preprocess_insert import PreprocessArguments, compress_arguments
from ...selection import costs
from ...selection.costs import FLOAT32, FP8, CallSizes, Cost, CostModel, act_tiles, angles, inserted
from ..common.define import define
from ..common.invariance import AS_IT_IS, Invariance
from ..common.validate import FLOATS, INTS, expect, expect_dim, expect_indexer_format
from .compress_norm_rope_insert import check_compress, pooled_sizes
from .fused_q_kv_rmsnorm import check_norms
from .kv_rope_insert import check_kv_insert, insert_sizes
from .save_partial_states import check_save


def _check(call: PreprocessArguments, *, op: str = "preprocess_insert") -> None:
    main, indexer = call.compressors()
    check_norms(call.qr, call.kv, call.q_weight, call.kv_weight, call.eps, op)
    expect(call.token_to_req, f"{op}: token_to_req [T]", INTS)
    if call.dtype is not None and call.dtype not in FLOATS:
        fail("E201", got=f"{op}: dtype {call.dtype}", rule="dtype is bfloat16, float16 or float32, or None")
    window = call.window_cache, call.window_slot_mapping, call.positions, call.cos_sin_cache, call.window_block_size
    check_kv_insert(call.kv, *window, call.cache_format, call.kv_scale, op)
    if (main is None) != (call.ratio == 0):
        fail("E201", got=f"{op}: ratio {call.ratio}", rule="ratio is 0 without a compressor, and only then")
    if indexer is None and (call.indexer_cache_format or call.hadamard):
        what = f"indexer_cache_format={call.indexer_cache_format!r}, hadamard={call.hadamard}"
        fail("E201", got=f"{op}: {what} without an indexer's compressor", fix="drop them")
    if indexer is not None:
        expect_indexer_format(op, call.indexer_cache_format)
    for c, who in ((main, op), (indexer, f"{op} (indexer)")):
        if c is not None:
            compress = compress_arguments(call, c, of_indexer=c is indexer)
            states = c.state_cache, c.state_slot_mapping, call.positions, compress.state_block_size
            check_save(c.kv_score, c.ape, *states, who)
            expect_dim(c.ape.shape[0], call.ratio, f"{who}: ape has a row for every place in a group")
            check_compress(compress, op=who)


def _fake(call: PreprocessArguments) -> Tensor:
    return call.qr.new_empty(call.qr.shape, dtype=call.result_dtype())


def fake_quantized(qr: Tensor) -> tuple[Tensor, Tensor]:
    """Return the results of `preprocess_insert_quant` for latents `qr`, without values."""
    return new_rows(qr, *qr.shape)


def _compressor_costs(call: CallSizes) -> list[Cost]:
    """Return the costs of the compressors that a call runs."""
    added = []
    for prefix, cache_format in (("", "cache_format"), ("indexer_", "indexer_cache_format")):
        if call.arguments.get(f"{prefix}kv_score") is not None:
            tokens, width = call.dims(f"{prefix}kv_score")
            added.append(costs.of("save_partial_states", T=tokens, width=width))
            sizes = pooled_sizes(call, tokens, width, f"{prefix}norm_weight", cache_format)
            added.append(costs.of("compress_norm_rope_insert", **sizes))
    return added


preprocess_insert = define(
    "preprocess_insert",
    mutates=("window_cache", "state_cache", "compressed_cache", "indexer_state_cache", "indexer_cache"),
    reference=reference.preprocess_insert,
    fake=_fake,
    check=_check,
    arguments=PreprocessArguments,
    kernel="dsv4_compile.kernels.preprocess.preprocess_insert",
    cost=CostModel(
        lambda T, D, Q, rope, row, e=2: (T * (e * (2 * Q + D) + angles(rope) + inserted(row)) + e * (Q + D), 0),
        sizes=insert_sizes,
        added=_compressor_costs,
    ),
    invariant=Invariance(
        rows=(
            "qr",
            "kv",
            "positions",
            "token_to_req",
            "window_slot_mapping",
            "kv_score",
            "state_slot_mapping",
            "compressed_slot_mapping",
            "indexer_kv_score",
            "indexer_state_slot_mapping",
            "indexer_slot_mapping",
        ),
        kernel=AS_IT_IS,
    ),
)
preprocess_insert_quant = define(
    "preprocess_insert_quant",
    mutates=("window_cache", "state_cache", "compressed_cache", "indexer_state_cache", "indexer_cache"),
    reference=reference.preprocess_insert_quant,
    fake=lambda call: fake_quantized(call.qr),
    check=partial(_check, op="preprocess_insert_quant"),
    arguments=PreprocessArguments,
    kernel="dsv4_compile.kernels.preprocess.preprocess_insert",
    cost=CostModel(
        lambda T, D, Q, rope, row, e=2: (
            T * (e * (Q + D) + Q * FP8 + FLOAT32 * act_tiles(Q) + angles(rope) + inserted(row)) + e * (Q + D),
            0,
        ),
        sizes=insert_sizes,
        added=_compressor_costs,
    ),
    invariant=Invariance(
        rows=(
            "qr",
            "kv",
            "positions",
            "token_to_req",
            "window_slot_mapping",
            "kv_score",
            "state_slot_mapping",
            "compressed_slot_mapping",
            "indexer_kv_score",
            "indexer_state_slot_mapping",
            "indexer_slot_mapping",
        ),
        kernel=AS_IT_IS,
    ),
)
