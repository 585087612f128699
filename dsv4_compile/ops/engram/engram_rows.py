"""`torch.ops.dsv4.engram_rows`."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import check
from ...reference.engram import engram_rows as reference
from ...selection.costs import INT32, INT64, CallSizes, CostModel
from ..common.define import define
from ..common.validate import INTS, expect, expect_dim

_OP = "engram_rows"


def _check(
    ids: Tensor,
    positions: Tensor,
    requests: Tensor,
    history: Tensor,
    multipliers: Tensor,
    primes: Tensor,
    pad: int,
) -> None:
    for name, tensor in (("ids", ids), ("positions", positions), ("requests", requests)):
        expect(tensor, f"{_OP}: {name} [T]", INTS)
        expect_dim(tensor.shape[0], ids.shape[0], f"{_OP}: {name} and ids have the same tokens")
    expect(history, f"{_OP}: history [R, S]", torch.int32)
    expect(multipliers, f"{_OP}: multipliers [N]", torch.int64)
    expect(primes, f"{_OP}: primes [K]", torch.int64)
    orders, rows = multipliers.shape[0], primes.shape[0]
    check(orders >= 2, "E201", got=f"{_OP}: {orders} multipliers", rule="n-grams have at least 2 tokens")
    check(
        rows % (orders - 1) == 0, "E201", got=f"{_OP}: {rows} primes", rule=f"as many for each of {orders - 1} lengths"
    )
    columns = history.shape[1]
    check(columns >= orders - 1, "E201", got=f"{_OP}: history of {columns}", rule=f"at least {orders - 1} columns")
    check(pad >= 0, "E201", got=f"{_OP}: pad={pad}", rule="an id of the compressed vocabulary")


def _fake(
    ids: Tensor,
    positions: Tensor,
    requests: Tensor,
    history: Tensor,
    multipliers: Tensor,
    primes: Tensor,
    pad: int,
) -> Tensor:
    return ids.new_empty((ids.shape[0], primes.shape[0]), dtype=torch.int64)


def _sizes(call: CallSizes) -> dict[str, int]:
    return {"T": call.dims("ids")[0], "K": call.dims("primes")[0], "N": call.dims("multipliers")[0]}


engram_rows = define(
    _OP,
    mutates=("history",),
    reference=reference.engram_rows,
    fake=_fake,
    check=_check,
    kernel="dsv4_compile.kernels.engram.engram_rows",
    cost=CostModel(lambda T, K, N: (T * (4 * INT64 + N * INT32 + INT64 * K) + INT64 * (K + N), 0), sizes=_sizes),
)
