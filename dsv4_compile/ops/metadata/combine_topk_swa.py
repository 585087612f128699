"""`torch.ops.dsv4.combine_topk_swa` and `.combine_topk_swa_ragged`; see reference/combine_topk_swa.py."""

from __future__ import annotations

import torch
from torch import Tensor

from ...layout import INDEX_ALIGN, align_up
from ...reference.metadata import combine_topk_swa as reference
from ..common.define import define
from ..common.validate import INTS, expect
from ..common.validate_batch import expect_batch, expect_positive, expect_range


def _check(
    topk_indices: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    gather_lens: Tensor,
    window: int,
    ratio: int,
    topk: int,
    m: int,
    n: int,
) -> None:
    op = "combine_topk_swa"
    expect(topk_indices, f"{op}: topk_indices [T, K]", INTS)
    expect_batch(op, query_start_loc, seq_lens, ("gather_lens", gather_lens))
    expect_positive(op, window=window, ratio=ratio)
    expect_range(op, "topk", topk, topk_indices.shape[1])
    expect_range(op, "n", n, m)


def _fake(
    topk_indices: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    gather_lens: Tensor,
    window: int,
    ratio: int,
    topk: int,
    m: int,
    n: int,
) -> tuple[Tensor, Tensor]:
    tokens, width = topk_indices.shape[0], align_up(topk + window, INDEX_ALIGN)
    return (
        topk_indices.new_empty(tokens, width, dtype=torch.int32),
        topk_indices.new_empty(tokens, dtype=torch.int32),
    )


def _fake_ragged(
    topk_indices: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    gather_lens: Tensor,
    window: int,
    ratio: int,
    topk: int,
    m: int,
    n: int,
) -> tuple[Tensor, Tensor, Tensor]:
    tokens = topk_indices.shape[0]
    return (
        topk_indices.new_empty(tokens * (topk + window), dtype=torch.int32),
        topk_indices.new_empty(tokens + 1, dtype=torch.int32),
        topk_indices.new_empty(tokens, dtype=torch.int32),
    )


_ARGUMENTS = (
    "(Tensor topk_indices, Tensor query_start_loc, Tensor seq_lens, Tensor gather_lens, "
    "int window, int ratio, int topk, int m, int n)"
)

combine_topk_swa = define(
    f"combine_topk_swa{_ARGUMENTS} -> (Tensor, Tensor)",
    reference=reference.combine_topk_swa,
    fake=_fake,
    check=_check,
)

combine_topk_swa_ragged = define(
    f"combine_topk_swa_ragged{_ARGUMENTS} -> (Tensor, Tensor, Tensor)",
    reference=reference.combine_topk_swa_ragged,
    fake=_fake_ragged,
    check=_check,
)
