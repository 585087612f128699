"""`torch.ops.dsv4.sparse_mla_mixed`."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import check
from ...reference.attention import sparse_mla_mixed as reference
from ...reference.attention.sparse_mla_mixed import MixedArguments
from ...selection.costs import FLOAT32, INT64, CallSizes, CostModel
from ..common.define import define
from ..common.validate import FLOATS, INTS, expect, expect_dim, expect_row_cache

_OP = "sparse_mla_mixed"


def _check(a: MixedArguments) -> None:
    expect(a.q, f"{_OP}: q [T, H, D]", FLOATS)
    expect(a.window_slots, f"{_OP}: window_slots [T, N]", INTS)
    expect(a.sink, f"{_OP}: sink [H]", torch.float32)
    tokens, heads, dim = a.q.shape
    expect_dim(a.window_slots.shape[0], tokens, f"{_OP}: window_slots and q have the same tokens")
    expect_dim(a.sink.shape[0], heads, f"{_OP}: sink has an element for each head")
    expect_row_cache(a.window, _OP, "window", a.window_format, a.window_block_size, dim)
    alone = (a.entries is None) != (a.entry_slots is None)
    check(not alone, "E201", got=f"{_OP} with entries or entry_slots alone", rule="they come together")
    if a.entries is None or a.entry_slots is None:
        return
    expect(a.entry_slots, f"{_OP}: entry_slots [T, N]", INTS)
    expect_dim(a.entry_slots.shape[0], tokens, f"{_OP}: entry_slots and q have the same tokens")
    expect_row_cache(a.entries, _OP, "entries", a.entry_format, a.entry_block_size, dim)


def _fake(a: MixedArguments) -> Tensor:
    return a.q.new_empty(a.q.shape)


def _sizes(call: CallSizes) -> dict[str, int]:
    heads = call.of_heads("q")
    sizes = heads | {"W": call.dims("window_slots")[1], "K": 0, "row": 0}
    sizes |= {"width": call.row(heads["D"], "q", "window_format")["row"]}
    if call.arguments.get("entries") is not None:
        sizes |= {"K": call.dims("entry_slots")[1]} | call.row(heads["D"], "q", "entry_format")
    return sizes


sparse_mla_mixed = define(
    _OP,
    reference=reference.sparse_mla_mixed,
    fake=_fake,
    check=_check,
    kernel="dsv4_compile.kernels.attention.sparse_mla_mixed",
    arguments=MixedArguments,
    cost=CostModel(
        lambda T, H, D, W, width, K, row, e=2: (
            T * (2 * e * H * D + W * (INT64 + width) + K * (INT64 + row)) + FLOAT32 * H,
            4 * T * H * D * (W + K),
        ),
        sizes=_sizes,
    ),
)
