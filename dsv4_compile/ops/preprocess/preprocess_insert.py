"""`torch.ops.dsv4.preprocess_insert`; what it computes is in reference/preprocess_insert.py.

`torch.ops.dsv4.preprocess_insert_quant`; what it computes is in reference/preprocess_insert_quant.py.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from ... import layout
from ...errors import fail
from ...reference.common.block_scale import new_rows
from ...reference.preprocess import preprocess_insert as reference
from ..common.define import define
from ..common.validate import INTS, expect, expect_dim, expect_indexer_format
from .compress_norm_rope_insert import check_compress
from .fused_q_kv_rmsnorm import check_norms
from .kv_rope_insert import check_kv_insert
from .save_partial_states import check_save

OP = "preprocess_insert"


def check_insert(
    qr: Tensor,
    kv: Tensor,
    q_weight: Tensor,
    kv_weight: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    token_to_req: Tensor,
    eps: float,
    cache_format: str,
    window_cache: Tensor,
    window_slot_mapping: Tensor,
    window_block_size: int,
    kv_score: Tensor | None = None,
    ape: Tensor | None = None,
    norm_weight: Tensor | None = None,
    state_cache: Tensor | None = None,
    state_slot_mapping: Tensor | None = None,
    state_block_table: Tensor | None = None,
    compressed_cache: Tensor | None = None,
    compressed_slot_mapping: Tensor | None = None,
    ratio: int = 0,
    indexer_kv_score: Tensor | None = None,
    indexer_ape: Tensor | None = None,
    indexer_norm_weight: Tensor | None = None,
    indexer_state_cache: Tensor | None = None,
    indexer_state_slot_mapping: Tensor | None = None,
    indexer_state_block_table: Tensor | None = None,
    indexer_cache: Tensor | None = None,
    indexer_slot_mapping: Tensor | None = None,
    indexer_cache_format: str = "",
    hadamard: bool = False,
    kv_scale: Tensor | None = None,
    *,
    op: str = OP,
) -> None:
    """Of this op, and of `preprocess_insert_quant`, which takes the same arguments."""
    main, indexer = reference.compressors(
        (
            kv_score,
            ape,
            norm_weight,
            state_cache,
            state_slot_mapping,
            state_block_table,
            compressed_cache,
            compressed_slot_mapping,
        ),
        (
            indexer_kv_score,
            indexer_ape,
            indexer_norm_weight,
            indexer_state_cache,
            indexer_state_slot_mapping,
            indexer_state_block_table,
            indexer_cache,
            indexer_slot_mapping,
        ),
    )
    check_norms(qr, kv, q_weight, kv_weight, eps, op)
    expect(token_to_req, f"{op}: token_to_req [T]", INTS)
    check_kv_insert(
        kv,
        window_cache,
        window_slot_mapping,
        positions,
        cos_sin_cache,
        window_block_size,
        cache_format,
        kv_scale,
        op,
    )
    if (main is None) != (ratio == 0):
        fail("E201", got=f"{op}: ratio {ratio}", rule="ratio is 0 without a compressor, and only then")
    if indexer is None and (indexer_cache_format or hadamard):
        what = f"indexer_cache_format={indexer_cache_format!r}, hadamard={hadamard}"
        fail("E201", got=f"{op}: {what} without an indexer's compressor", fix="drop them")
    if indexer is not None:
        expect_indexer_format(op, indexer_cache_format)
    for c, fmt, transform, scale, who in (
        (main, cache_format, False, kv_scale, op),
        (indexer, indexer_cache_format, hadamard, None, f"{op} (indexer)"),
    ):
        if c is not None:
            check_save(
                c.kv_score,
                c.ape,
                c.state_cache,
                c.state_slot_mapping,
                positions,
                layout.state_block_size(ratio),
                who,
            )
            expect_dim(c.ape.shape[0], ratio, f"{who}: ape has a row for every place in a group")
            check_compress(
                c.state_cache,
                c.state_slot_mapping,
                c.state_block_table,
                token_to_req,
                positions,
                c.slot_mapping,
                c.norm_weight,
                cos_sin_cache,
                c.cache,
                eps,
                ratio,
                layout.state_block_size(ratio),
                layout.storage_block_size(ratio),
                fmt,
                transform,
                scale,
                who,
            )


def _fake(qr: Tensor, kv: Tensor, q_weight: Tensor, *_: object, **__: object) -> Tensor:
    return qr.new_empty(qr.shape, dtype=reference.result_dtype(qr, q_weight))


ARGUMENTS = (
    "(Tensor qr, Tensor kv, Tensor q_weight, Tensor kv_weight, Tensor positions, "
    "Tensor cos_sin_cache, Tensor token_to_req, float eps, str cache_format, Tensor(a!) window_cache, "
    "Tensor window_slot_mapping, int window_block_size, Tensor? kv_score=None, Tensor? ape=None, "
    "Tensor? norm_weight=None, Tensor(b!)? state_cache=None, Tensor? state_slot_mapping=None, "
    "Tensor? state_block_table=None, Tensor(c!)? compressed_cache=None, Tensor? compressed_slot_mapping=None, "
    "int ratio=0, Tensor? indexer_kv_score=None, Tensor? indexer_ape=None, Tensor? indexer_norm_weight=None, "
    "Tensor(d!)? indexer_state_cache=None, Tensor? indexer_state_slot_mapping=None, "
    "Tensor? indexer_state_block_table=None, Tensor(e!)? indexer_cache=None, Tensor? indexer_slot_mapping=None, "
    'str indexer_cache_format="", bool hadamard=False, Tensor? kv_scale=None)'
)
"""Of this op and of `preprocess_insert_quant`."""

preprocess_insert = define(
    f"preprocess_insert{ARGUMENTS} -> Tensor",
    reference=reference.preprocess_insert,
    fake=_fake,
    check=check_insert,
)


def fake(qr: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
    """Results for latents `qr`, as the op gives them."""
    return new_rows(qr, *qr.shape)


preprocess_insert_quant = define(
    f"preprocess_insert_quant{ARGUMENTS} -> (Tensor, Tensor)",
    reference=reference.preprocess_insert_quant,
    fake=fake,
    check=partial(check_insert, op="preprocess_insert_quant"),
)
