"""V4.1's selection on a GPU against the reference there: scores of integers are exact in any order of sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.ops.common.kernels import launcher, refusal
from dsv4_compile.reference.common.row_format import load_rows, store_rows
from dsv4_compile.reference.indexer.index_topk import BlocksArguments, IndexArguments, queries
from dsv4_compile.testing import poison_

TOPK, BLOCKS, SIZE, PAGE, REQUESTS = 512, 2048, 8, 64, 4
PICK, PUBLISH = launcher("index_topk"), launcher("index_topk_blocks")


def call(
    tokens: int,
    columns: int,
    *,
    fmt: str = "mxfp4",
    heads: int = 32,
    dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    **changes: Any,
) -> IndexArguments:
    """Integers, many with equal scores; pages that nobody owns are NaN, and one of each request is missing."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def randint(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, device="cuda", generator=generator)

    pages = REQUESTS * columns + 2
    order = torch.randperm(pages, device="cuda", generator=generator)
    table = order[: REQUESTS * columns].int().view(REQUESTS, columns)
    keys = poison_(layout.allocate_cache(fmt, pages, PAGE, dim, dtype=dtype, device="cuda"))
    for row in table.long():
        slots = (row[:, None] * PAGE + torch.arange(PAGE, device="cuda")).flatten()
        store_rows(keys, fmt, PAGE, slots, randint(-2, 3, len(slots), dim).float())
    if columns > 1:
        table[:, columns // 2] = -1
    visible = randint(0, columns * PAGE + 1, tokens).int()
    visible[0] = columns * PAGE
    values: dict[str, Any] = {
        "q": randint(-2, 3, tokens, heads, dim).to(dtype),
        "weights": randint(-4, 5, tokens, heads).to(dtype),
        "positions": torch.zeros(tokens, dtype=torch.int64, device="cuda"),
        "cos_sin_cache": torch.cat((torch.ones(9, dim // 4), torch.zeros(9, dim // 4)), 1).cuda(),
        "keys": keys,
        "block_table": table,
        "requests": randint(-1, REQUESTS, tokens).int(),
        "visible": visible,
        "block_size": PAGE,
        "cache_format": fmt,
        "topk": TOPK,
        "grid": "mxfp4" if fmt == "mxfp4" else "",
    }
    values["requests"][0] = 0
    return IndexArguments(**(values | changes))


def blocks_of(a: IndexArguments, blocks: int = BLOCKS) -> BlocksArguments:
    return BlocksArguments(*a[:12], None, SIZE, blocks)


def compare(a: IndexArguments, blocks: int = BLOCKS, **tiles: Any) -> Tensor:
    """Compare picks among all entries, candidates, and picks inside these; return the candidates."""
    picks, candidates = PUBLISH(*blocks_of(a, blocks), **tiles)
    want, want_candidates = REFERENCES["index_topk_blocks"](*blocks_of(a, blocks))
    assert torch.equal(picks, want) and torch.equal(candidates, want_candidates)
    assert torch.equal(PICK(*a, **tiles), want)
    inside = a._replace(q=-a.q, candidates=candidates, candidate_block=SIZE)
    assert torch.equal(PICK(*inside, **tiles), REFERENCES["index_topk"](*inside))
    return candidates


@pytest.mark.parametrize(("tokens", "columns", "blocks"), [(1, 1, 2048), (6, 9, 30), (32, 300, 2048), (130, 40, 100)])
@pytest.mark.parametrize("fmt", ["mxfp4", "plain"])
def test_selections_are_those_of_the_reference(fmt: str, tokens: int, columns: int, blocks: int) -> None:
    compare(call(tokens, columns, fmt=fmt), blocks)


@pytest.mark.parametrize(
    ("fmt", "heads", "dim", "dtype"),
    [
        ("mxfp4", 8, 32, torch.float32),
        ("plain", 16, 64, torch.float16),
        ("plain", 32, 128, torch.float32),
        ("plain", 1, 16, torch.bfloat16),
    ],
)
def test_other_sizes_and_dtypes(fmt: str, heads: int, dim: int, dtype: torch.dtype) -> None:
    compare(call(7, 20, fmt=fmt, heads=heads, dim=dim, dtype=dtype), 40)


def test_a_million_entries() -> None:
    candidates = compare(call(2, 16384))
    assert (candidates[0] >= 0).all()


def test_tiles_change_nothing() -> None:
    a = call(20, 200)
    for tiles in ({"programs": 1}, {"programs": 4096}, {"select_tile": (1024, 4)}, {"select_tile": (8192, 16)}):
        compare(a, 300, **tiles)


def test_rotated_queries_pick_the_largest_scores() -> None:
    """Random queries: entries that the reference picks and the kernel does not score as those that it picks."""
    angles = torch.randn(4096, 32)
    table = torch.cat((angles.cos(), angles.sin()), 1).cuda()
    a = call(16, 60, cos_sin_cache=table, positions=torch.arange(16, device="cuda") * 250)
    a = a._replace(q=torch.randn_like(a.q), weights=torch.randn_like(a.weights))
    q, weights = (x.double() for x in queries(a, slice(None)))
    for token, (mine, theirs) in enumerate(zip(PICK(*a).tolist(), REFERENCES["index_topk"](*a).tolist(), strict=True)):
        assert mine.count(-1) == theirs.count(-1)
        entries = torch.tensor(sorted(set(mine) ^ set(theirs)), device="cuda", dtype=torch.long)
        slots = a.block_table[max(0, int(a.requests[token]))].long()[entries // PAGE] * PAGE + entries % PAGE
        keys = load_rows(a.keys, a.cache_format, PAGE, slots, 128).double()
        scores = ((keys @ q[token].t()).relu() * weights[token]).sum(1)
        assert len(scores) == 0 or scores.max() - scores.min() <= 1e-4


def test_a_captured_launch_follows_its_inputs() -> None:
    a = call(12, 50)
    mine = [x for x in a if isinstance(x, Tensor)]

    def run() -> tuple[Tensor, Tensor, Tensor]:
        picks, candidates = PUBLISH(*blocks_of(a, 60))
        return picks, candidates, PICK(*a._replace(candidates=candidates, candidate_block=SIZE))

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for seed in (5, 6):
        for old, new in zip(mine, (x for x in call(12, 50, seed=seed) if isinstance(x, Tensor)), strict=True):
            old.copy_(new)
        graph.replay()
        want = REFERENCES["index_topk_blocks"](*blocks_of(a, 60))
        inside = REFERENCES["index_topk"](*a._replace(candidates=want[1], candidate_block=SIZE))
        assert all(map(torch.equal, out, (*want, inside)))


def test_a_hundred_runs_are_equal_bit_for_bit() -> None:
    a = call(128, 60)
    a = a._replace(q=torch.randn_like(a.q), weights=torch.randn_like(a.weights))
    first = PUBLISH(*blocks_of(a, 100))
    assert all(all(map(torch.equal, PUBLISH(*blocks_of(a, 100)), first)) for _ in range(100))


def test_calls_of_the_model_are_supported() -> None:
    why, why_blocks = refusal("index_topk"), refusal("index_topk_blocks")
    assert why is not None and why_blocks is not None
    assert why(*call(1, 1)) == why_blocks(*blocks_of(call(1, 1))) == ""
