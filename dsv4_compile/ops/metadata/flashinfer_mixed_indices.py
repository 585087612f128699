"""Schema, check and fake of `torch.ops.dsv4.flashinfer_mixed_indices`."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import check, fail
from ...layout import FLASHINFER_INDEX_ALIGN, align_up
from ...reference.metadata import flashinfer_mixed_indices as reference
from ...reference.metadata.flashinfer_mixed_indices import MixedIndicesArguments
from ...selection.costs import INT32, CostModel
from ..common.define import define
from ..common.invariance import EXACT
from ..common.validate import INTS, expect, expect_dim, expect_rows
from ..common.validate_batch import expect_batch, expect_positive, expect_range

_OP = "flashinfer_mixed_indices"


def _check(call: MixedIndicesArguments) -> None:
    expect(call.decode_swa_indices, f"{_OP}: decode_swa_indices [Td, W]", torch.int32)
    expect_dim(
        call.decode_swa_indices.shape[1], call.window, f"{_OP}: decode_swa_indices has a column for each window token"
    )
    expect(call.prefill_topk_indices, f"{_OP}: prefill_topk_indices [Tp, K]", torch.int32)
    expect_range(_OP, "topk", call.topk, call.prefill_topk_indices.shape[1])
    num_decode = call.decode_swa_indices.shape[0]
    num_tokens = num_decode + call.prefill_topk_indices.shape[0]
    if call.decode_compressed_indices is not None:
        expect(call.decode_compressed_indices, f"{_OP}: decode_compressed_indices [Td, K]", torch.int32)
        expect_dim(call.decode_compressed_indices.shape[0], num_decode, f"{_OP}: decode_compressed_indices has Td rows")
    if call.decode_compressed_lens is not None:
        expect(call.decode_compressed_lens, f"{_OP}: decode_compressed_lens [Td]", INTS)
        expect_rows(call.decode_compressed_lens.shape[0], num_decode, f"{_OP}: decode_compressed_lens")
    if call.decode_is_valid_token is not None:
        expect(call.decode_is_valid_token, f"{_OP}: decode_is_valid_token [Td]", torch.bool)
        expect_rows(call.decode_is_valid_token.shape[0], num_decode, f"{_OP}: decode_is_valid_token")
    check(
        not call.decode_compressed_indices_are_local or call.decode_is_valid_token is not None,
        "E201",
        got="decode_is_valid_token=None",
        rule=f"{_OP}: decode_compressed_indices_are_local comes with decode_is_valid_token",
    )
    expect_batch(_OP, call.query_start_loc, call.seq_lens)
    expect(call.token_to_req, f"{_OP}: token_to_req [T]", INTS)
    expect_rows(call.token_to_req.shape[0], num_tokens, f"{_OP}: token_to_req")
    expect(call.swa_block_table, f"{_OP}: swa_block_table [R, B]", INTS)
    if call.compressed_block_table is not None:
        expect(call.compressed_block_table, f"{_OP}: compressed_block_table [R, B]", INTS)
    expect_positive(
        _OP,
        swa_block_size=call.swa_block_size,
        compressed_block_size=call.compressed_block_size,
        window=call.window,
        ratio=call.ratio,
    )
    _check_span("swa_block_span", call.swa_block_span, call.swa_block_size)
    _check_span("compressed_block_span", call.compressed_block_span, call.compressed_block_size)
    if call.num_rows != 0 and call.num_rows < num_tokens:
        fail(
            "E204",
            got=f"{_OP}: num_rows={call.num_rows} for {num_tokens} tokens",
            fix="pass 0, or a row for every token",
        )


def _check_span(name: str, span: int, block_size: int) -> None:
    if span != 0 and span < block_size:
        fail("E201", got=f"{name}={span}", rule=f"{_OP}: {name} is 0 or at least the block size, {block_size}")


def _fake(call: MixedIndicesArguments) -> tuple[Tensor, Tensor]:
    rows = call.num_rows or call.decode_swa_indices.shape[0] + call.prefill_topk_indices.shape[0]
    decode_width = 0 if call.decode_compressed_indices is None else call.decode_compressed_indices.shape[1]
    width = call.window + align_up(max(call.topk, decode_width), FLASHINFER_INDEX_ALIGN)
    return (
        call.decode_swa_indices.new_empty(rows, width, dtype=torch.int32),
        call.decode_swa_indices.new_empty(rows, dtype=torch.int32),
    )


flashinfer_mixed_indices = define(
    "flashinfer_mixed_indices",
    reference=reference.flashinfer_mixed_indices,
    fake=_fake,
    check=_check,
    arguments=MixedIndicesArguments,
    cost=CostModel(
        lambda T, K, W: (T * (INT32 * 2 * (K + W) + INT32), 0),
    ),
    invariant=EXACT,
)
