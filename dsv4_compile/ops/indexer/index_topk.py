"""`torch.ops.dsv4.index_topk` and `index_topk_blocks`."""

from __future__ import annotations

import torch
from torch import Tensor

from ...cpu.indexer import index_topk as cpu
from ...errors import check
from ...reference.indexer import index_topk as reference
from ...reference.indexer.index_topk import BlocksArguments, IndexArguments
from ...selection.costs import INT32, CallSizes, CostModel, angles
from ..common.define import define
from ..common.validate import FLOATS, INTS, expect, expect_dim, expect_grid, expect_rope_table, expect_row_cache
from ..common.validate_batch import expect_positive


def _check(a: IndexArguments | BlocksArguments, op: str = "index_topk") -> None:
    expect(a.q, f"{op}: q [T, H, D]", FLOATS)
    expect(a.weights, f"{op}: weights [T, H]", FLOATS)
    tokens, heads, dim = a.q.shape
    per_token = [("positions", a.positions), ("requests", a.requests), ("visible", a.visible)]
    for name, tensor in per_token:
        expect(tensor, f"{op}: {name} [T]", INTS)
    expect(a.block_table, f"{op}: block_table [R, B]", INTS)
    for name, tensor in [("weights", a.weights), *per_token]:
        expect_dim(tensor.shape[0], tokens, f"{op}: {name} and q have the same tokens")
    expect_dim(a.weights.shape[1], heads, f"{op}: weights and q have the same heads")
    expect_rope_table(a.cos_sin_cache, op, dim)
    expect_row_cache(a.keys, op, "keys", a.cache_format, a.block_size, dim)
    expect_grid(op, a.grid, "plain", dim)
    expect_positive(op, block_size=a.block_size, topk=a.topk, candidate_block=a.candidate_block)
    if a.candidates is not None:
        expect(a.candidates, f"{op}: candidates [T, C]", torch.int32)
        expect_dim(a.candidates.shape[0], tokens, f"{op}: candidates and q have the same tokens")


def _check_blocks(a: BlocksArguments) -> None:
    op = "index_topk_blocks"
    _check(a, op)
    expect_positive(op, blocks=a.blocks)
    check(a.candidates is None, "E201", got=f"{op} with candidates", rule="a source of candidates scores all entries")


def _fake(a: IndexArguments) -> Tensor:
    return a.q.new_empty((a.q.shape[0], a.topk), dtype=torch.int32)


def _fake_blocks(a: BlocksArguments) -> tuple[Tensor, Tensor]:
    picks = a.q.new_empty((a.q.shape[0], a.topk), dtype=torch.int32)
    return picks, a.q.new_empty((a.q.shape[0], a.blocks), dtype=torch.int32)


def _sizes(call: CallSizes) -> dict[str, int]:
    heads, candidates = call.of_heads("q"), call.arguments.get("candidates")
    if candidates is None:
        entries = call.dims("block_table")[1] * call.arguments["block_size"]
    else:
        entries = call.dims("candidates")[1] * call.arguments.get("candidate_block", 8)
    sizes = heads | {"C": entries, "K": call.arguments["topk"]} | call.rope
    return sizes | call.row(heads["D"], "q")


def _moved(T: int, H: int, D: int, C: int, K: int, rope: int, row: int, e: int = 2) -> tuple[int, int]:
    """Return bytes and flops of a selection whose tokens read `C` keys each."""
    return T * (angles(rope) + e * H * (D + 1) + C * row + INT32 * (2 + K)), 2 * T * C * H * D


index_topk = define(
    "index_topk",
    reference=reference.index_topk,
    on_cpu=cpu.index_topk,
    fake=_fake,
    check=_check,
    arguments=IndexArguments,
    kernel="dsv4_compile.kernels.indexer.index_topk",
    cost=CostModel(_moved, sizes=_sizes),
)


def _moved_blocks(T: int, H: int, D: int, C: int, K: int, rope: int, row: int, S: int, e: int = 2) -> tuple[int, int]:
    moved, flops = _moved(T, H, D, C, K, rope, row, e)
    return moved + INT32 * T * S, flops


index_topk_blocks = define(
    "index_topk_blocks",
    reference=reference.index_topk_blocks,
    on_cpu=cpu.index_topk_blocks,
    fake=_fake_blocks,
    check=_check_blocks,
    arguments=BlocksArguments,
    kernel="dsv4_compile.kernels.indexer.index_topk",
    cost=CostModel(_moved_blocks, sizes=lambda call: _sizes(call) | {"S": call.arguments.get("blocks", 2048)}),
)
