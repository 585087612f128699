"""Ops run on inputs so small that the right answer is known without computing it. For `dsv4 doctor`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .layout import FP8_DS_MLA, HEAD_DIM, WINDOW_BLOCK, allocate_cache


def _expect(got: Tensor, wanted: Tensor) -> None:
    if not torch.equal(got, wanted.to(got)):
        raise ArithmeticError(f"wrong result: {got.flatten()[:4].tolist()} instead of {wanted.flatten()[:4].tolist()}")


def _ints(device: torch.device, *values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def norm(device: torch.device) -> None:
    """Rows of equal values are their own root mean square, so they normalise to ones."""
    ones = torch.ones(2, HEAD_DIM, device=device)
    q, kv = torch.ops.dsv4.fused_q_kv_rmsnorm(4 * ones, 2 * ones, ones[0], 3 * ones[0], 0.0)
    _expect(q, ones)
    _expect(kv, 3 * ones)


def cache_round_trip(device: torch.device) -> None:
    """Powers of two survive the 584-byte row exactly, and a slot of -1 is not written."""
    k = torch.full((2, HEAD_DIM), 0.5, dtype=torch.bfloat16, device=device)
    cache = allocate_cache("fp8_ds_mla", 1, WINDOW_BLOCK, device=device)
    torch.ops.dsv4.quantize_and_insert_k_cache(k, cache, _ints(device, 3, -1).long(), WINDOW_BLOCK)
    out = torch.zeros(1, 4, HEAD_DIM, dtype=torch.bfloat16, device=device)
    table, lens = _ints(device, 0)[None], _ints(device, 4)
    torch.ops.dsv4.dequantize_and_gather_k_cache(out, cache, lens, None, table, WINDOW_BLOCK, 0)
    _expect(out[0, 3], k[0])
    untouched = cache[0, : 3 * FP8_DS_MLA.data]
    _expect(untouched, torch.zeros_like(untouched))


def attention(device: torch.device) -> None:
    """One key with score 0 against a sink of 0 halves the value; a row of -1 gives 0 and a log-sum-exp of +inf."""
    cache = torch.zeros(1, WINDOW_BLOCK, HEAD_DIM, device=device)
    cache[0, 5, 1] = 8.0
    q = torch.zeros(2, 1, HEAD_DIM, device=device)
    indices, lens = _ints(device, 5, -1)[:, None], _ints(device, 1, 0)
    sink = torch.zeros(1, device=device)
    out, lse = torch.ops.dsv4.sparse_mla_decode(q, cache, indices, lens, WINDOW_BLOCK, "plain", 1.0, sink)
    _expect(out[0, 0], cache[0, 5] / 2)
    _expect(out[1], torch.zeros_like(out[1]))
    _expect(lse[:, 0], torch.tensor([0.0, torch.inf]))


OP_TESTS: dict[str, Callable[[torch.device], None]] = {
    "fused_q_kv_rmsnorm": norm,
    "quantize_and_insert_k_cache": cache_round_trip,
    "sparse_mla_decode": attention,
}
