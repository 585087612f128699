"""Kernels of `index_topk` and `index_topk_blocks` against the reference, every access checked."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.kernels.indexer import index_topk as kernel
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.ops.common.kernels import launcher, refusal
from dsv4_compile.reference.common.row_format import store_rows
from dsv4_compile.reference.indexer.index_topk import BlocksArguments, IndexArguments
from dsv4_compile.testing import assert_bitwise, hostile_indices, hostile_values, padded, poison_, strided
from dsv4_compile.testing.samples import op_samples
from tests.kernels.gpus import GPUS, sees
from tests.support import fake_triton
from tests.support.bounds import checked
from tests.tools.compiled_facts import compiled_for

interpreted = pytest.mark.interpreted
OUTPUTS = (
    "p_out",
    "p_blocks_out",
    *(f"of_rows[{i}]" for i in range(3)),
    "outputs[0]",
    "outputs[1]",
    "best[0]",
    "best[1]",
)
INF, NAN = math.inf, math.nan
PAGE, REQUESTS = 8, 3
Call = IndexArguments | BlocksArguments


def op_of(a: Call) -> str:
    return "index_topk_blocks" if isinstance(a, BlocksArguments) else "index_topk"


def select(a: Call, **tiles: Any) -> list[Tensor]:
    with checked((*OUTPUTS, "p_arrived")):
        results = launcher(op_of(a))(*a, **tiles)
    return [results] if isinstance(results, Tensor) else list(results)


def want(a: Call) -> list[Tensor]:
    results = REFERENCES[op_of(a)](*a)
    return [results] if isinstance(results, Tensor) else list(results)


def compare(a: Call, **tiles: Any) -> list[Tensor]:
    """Compare with the reference, and return the results."""
    expected = want(a)
    names = ("picks", "blocks")[: len(expected)]
    for name, got, wanted in zip(names, select(a, **tiles), expected, strict=True):
        assert_bitwise(got, wanted, strides=True, label=name)
    return expected


def blocks_of(a: IndexArguments, size: int, blocks: int) -> BlocksArguments:
    """Return the call of `a` without candidates that publishes `blocks` of `size` entries."""
    return BlocksArguments(*a[:12], None, size, blocks)


def call(
    fmt: str = "mxfp4",
    tokens: int = 5,
    *,
    heads: int = 2,
    dim: int = 32,
    page: int = PAGE,
    columns: int = 3,
    dtype: torch.dtype = torch.float32,
    keys_dtype: torch.dtype | None = None,
    topk: int = 6,
    **changes: Any,
) -> IndexArguments:
    """Small integers: scores are exact if heads * dim is a power of four. Unseen memory is NaN."""
    pages = REQUESTS * columns + 2
    table = torch.randperm(pages)[: REQUESTS * columns].int().view(REQUESTS, columns)
    cache = poison_(layout.allocate_cache(fmt, pages, page, dim, dtype=keys_dtype or dtype))
    slots = (table.long()[..., None] * page + torch.arange(page)).flatten()
    rows = torch.tensor([0.0, 0.5, 1.0, -1.0, 2.0, -3.0, 4.0])[torch.randint(7, (len(slots), dim))]
    rows *= 2.0 ** torch.randint(-2, 3, (len(slots), 1))
    store_rows(cache, fmt, page, slots, rows)
    visible = torch.randint(columns * page + 1, (tokens,), dtype=torch.int32)
    visible[:1] = columns * page
    values: dict[str, Any] = {
        "q": torch.randint(-3, 4, (tokens, heads, dim)).to(dtype),
        "weights": torch.randint(-4, 5, (tokens, heads)).to(dtype),
        "positions": torch.zeros(tokens, dtype=torch.int64),
        "cos_sin_cache": torch.cat((torch.ones(9, 4), torch.zeros(9, 4)), 1),
        "keys": cache,
        "block_table": table,
        "requests": torch.randint(REQUESTS, (tokens,), dtype=torch.int32),
        "visible": visible,
        "block_size": page,
        "cache_format": fmt,
        "topk": topk,
        "grid": "mxfp4" if fmt == "mxfp4" else "",
    }
    return IndexArguments(**(values | changes))


@interpreted
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    ("op", "number"), [(op, i) for op in ("index_topk", "index_topk_blocks") for i in range(len(op_samples(op)))]
)
def test_samples(op: str, number: int) -> None:
    kinds = {"index_topk": IndexArguments, "index_topk_blocks": BlocksArguments}
    compare(kinds[op](*op_samples(op)[number]))


@interpreted
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    ("fmt", "heads", "dim", "page", "dtype"),
    [
        ("mxfp4", 32, 128, 64, torch.bfloat16),
        ("mxfp4", 4, 64, 64, torch.float16),
        ("mxfp4", 2, 32, 8, torch.float32),
        ("plain", 32, 128, 64, torch.bfloat16),
        ("plain", 4, 16, 5, torch.float16),
        ("plain", 1, 16, 128, torch.float32),
        ("plain", 16, 64, 24, torch.float32),
    ],
)
def test_formats_sizes_and_equal_scores(fmt: str, heads: int, dim: int, page: int, dtype: torch.dtype) -> None:
    """Integers score alike in any order of sums, and many entries have equal scores."""
    a = call(fmt, 3, heads=heads, dim=dim, page=page, dtype=dtype, columns=2, topk=page // 2 + 1)
    compare(a)
    compare(blocks_of(a, 4, max(1, page // 4)))
    compare(a._replace(candidates=torch.tensor([[0, 2, 3, -1]] * 3).int(), candidate_block=4))


@interpreted
@pytest.mark.parametrize(
    ("dtype", "grid", "keys_dtype"),
    [
        (torch.bfloat16, "mxfp4", torch.bfloat16),
        (torch.float16, "mxfp4", torch.float16),
        (torch.bfloat16, "", torch.float32),
        (torch.bfloat16, "", torch.float16),
    ],
)
def test_queries_and_keys_of_two_dtypes(dtype: torch.dtype, grid: str, keys_dtype: torch.dtype) -> None:
    """Keys that are equal in bfloat16, and queries that float16 does not hold on their grid or at all."""
    a = call("plain", tokens=4, dtype=dtype, keys_dtype=keys_dtype, grid=grid)
    if keys_dtype is not torch.bfloat16:
        a.keys[~a.keys.isnan()] = torch.randint(1024, 1028, (int((~a.keys.isnan()).sum()),)).to(keys_dtype)
    a.q.mul_(21824 if dtype is torch.float16 else 2.0**20)
    compare(a)


@interpreted
def test_queries_are_rotated_and_rounded_as_the_keys_are() -> None:
    """Random queries of any magnitude, denormal ones too, at positions inside and outside the table."""
    angles = torch.randn(9, 4)
    a = call(
        tokens=8, heads=17, dtype=torch.bfloat16, topk=5, q=(torch.randn(8, 17, 32) * 4).bfloat16(),
        cos_sin_cache=torch.cat((angles.cos(), angles.sin()), 1), positions=torch.tensor([0, 1, 5, 8, 9, -3, 2**40, 2]),
    )  # fmt: skip
    a.q[1] *= 2.0**-120
    a.q[2] *= 2.0**-133
    compare(a)
    compare(blocks_of(a, 2, 4))
    unturned = a._replace(positions=torch.zeros_like(a.positions))
    assert any(not torch.equal(x, y) for x, y in zip(want(a), want(unturned), strict=True))


def scored(values: list[float], counts: list[int], topk: int = 3) -> IndexArguments:
    """One request, with scores of `values` times a constant: heads see k and -k, with weights 1 and -1."""
    pages = layout.cdiv(len(values), PAGE)
    keys, table = poison_(torch.empty(pages + 1, PAGE, 16)), torch.randperm(pages + 1)[:pages].int()[None]
    rows = torch.zeros(pages * PAGE, 16)
    rows[:, 0] = torch.tensor(values + [NAN] * (len(rows) - len(values)))
    keys[table[0].long()] = rows.view(pages, PAGE, 16)
    q, weights = torch.zeros(len(counts), 2, 16), torch.tensor([1.0, -1.0]).repeat(len(counts), 1)
    q[:, 0, 0], q[:, 1, 0] = 1.0, -1.0
    zero = torch.zeros(len(counts), dtype=torch.int64)
    angles = torch.tensor([[1.0, 0.0]])
    return IndexArguments(q, weights, zero, angles, keys, table, zero, torch.tensor(counts), PAGE, "plain", topk)


@interpreted
@pytest.mark.parametrize(
    "values",
    [
        pytest.param([0.0] * 9, id="all equal"),
        pytest.param([-0.0, 0.0, -0.0, 0.0, -1.0], id="signs of zero"),
        pytest.param([1.0, 3.0, 2.0, 3.0, 3.0, 3.0], id="tie at the last place"),
        pytest.param([-5.0, -1.0, -7.0, -3.0, -2.0, -9.0], id="negative"),
        pytest.param([-INF, 1.0, INF, -2.0, INF, INF, -INF], id="infinities"),
        pytest.param([-INF] * 4 + [3e38, -3e38, -INF], id="a boundary at minus infinity"),
        pytest.param([-INF] * 9, id="minus infinity alone"),
        pytest.param([INF] * 7 + [NAN], id="infinities alone"),
        pytest.param([NAN, 1.0, NAN, -2.0, -INF, NAN, NAN, -INF], id="NaN loses to minus infinity"),
        pytest.param([NAN] * 7, id="NaN alone"),
        pytest.param([NAN, 9.0, 1.0, 1.0, 2.0, 2.0, 9.0, NAN, 3.0, 3.0], id="NaN in blocks with the largest number"),
        pytest.param([1.0, 1.0 + 2**-22, 1.0 - 2**-22, 1.0, 0.0], id="neighbouring floats"),
        pytest.param([2.0**-126 * n for n in (1, 2, 0.5, 0.25, -1, 1, 2)], id="denormals"),
        pytest.param([2.0**-e for e in range(100)], id="every exponent"),
        pytest.param([float(n * 7 % 5) for n in range(150)], id="many ties in several tiles"),
    ],
)
def test_special_scores(values: list[float]) -> None:
    """Scores of entries, of blocks of two, and inside candidates."""
    counts = [len(values), len(values) - 1, 4]
    candidates = torch.tensor([[0, 1, 2, 3, 40], [1, 3, -1, -1, -1], [0, 2, -1, -1, -1]]).int()
    for topk in (1, 3, 5):
        a = scored(values, counts, topk)
        compare(a)
        compare(blocks_of(a, 2, topk), select_tile=(16, 1))
        compare(a._replace(candidates=candidates, candidate_block=2), select_tile=(16, 1))


@interpreted
def test_the_newest_block_is_a_candidate_whatever_its_score() -> None:
    a = scored([9.0, 9.0, 8.0, 8.0, 7.0, 7.0, -INF, NAN, 1.0, 1.0], [8, 7, 10, 99, 0, 2], topk=10)
    _, blocks = compare(blocks_of(a, 2, 2))
    # 99 entries reach beyond the table: no block in it is the newest.
    assert blocks.tolist() == [[0, 3], [0, 3], [0, 4], [0, 1], [-1, -1], [0, -1]]


@interpreted
def test_blocks_are_scored_where_picks_are_not_and_need_no_score_where_all_fit() -> None:
    a = scored([float(n * 5 % 7) for n in range(20)], [20, 12, 11, 5], topk=20)
    for size, blocks in ((2, 3), (4, 3), (8, 2), (64, 1)):
        picks, _ = compare(blocks_of(a, size, blocks))
        assert (picks >= 0).sum(1).tolist() == [20, 12, 11, 5]


@interpreted
@pytest.mark.parametrize("size", [1, 3, 8])
def test_hostile_candidates(size: int) -> None:
    """Blocks that are missing, unsorted, repeated, or beyond the context; columns of equal score go by their order."""
    rows = [[-1] * 6, [5, 1, -1, 0, 1, 2], [2**31 - 1, -7, 0, 3, 1, 2**30], [-1, -1, 2, 2, -1, 23], [0, 1, 2, 3, 4, 5]]
    for topk in (1, 4, 50):
        a = call("plain", len(rows), topk=topk, candidates=torch.tensor(rows).int(), candidate_block=size)
        compare(a)
        compare(a._replace(visible=torch.full((len(rows),), 2 * size + 1)), select_tile=(16, 1))


@interpreted
def test_candidates_that_are_published_restrict_a_later_selection() -> None:
    a = call(tokens=6, topk=4, columns=6)
    _, blocks = compare(blocks_of(a, 8, 3))
    inside = a._replace(candidates=blocks, candidate_block=8, q=-a.q)
    [picks] = compare(inside)
    allowed = (picks[..., None] // 8 == blocks[:, None]).any(2) | (picks < 0)
    assert allowed.all() and not torch.equal(picks, want(a._replace(q=-a.q))[0])


@interpreted
@pytest.mark.parametrize("fmt", ["mxfp4", "plain"])
def test_hostile_requests_pages_and_counts(fmt: str) -> None:
    a = call(fmt, 14, page=64 if fmt == "plain" else PAGE, columns=3)
    a = a._replace(
        requests=hostile_indices((14,), REQUESTS, fraction=0.3, dtype=torch.int64),
        block_table=hostile_indices((REQUESTS, 3), len(a.keys), fraction=0.3),
        visible=torch.tensor([0, -1, -(2**31), 2**31 - 1, 24, 25, *range(3, 11)]),
    )
    compare(a)
    compare(blocks_of(a, 4, 3))
    compare(a._replace(candidates=hostile_indices((14, 5), 8, fraction=0.3).int(), candidate_block=4))


@interpreted
@pytest.mark.parametrize("block", hostile_values(4))
def test_entries_of_illegal_pages_are_never_selected(block: int) -> None:
    a = scored([float(n % 9) for n in range(24)], [24, 15], topk=20)
    a.block_table[0, 1] = block
    picks, _ = compare(blocks_of(a, 4, 5))
    assert not ((picks >= 8) & (picks < 16)).any()


@interpreted
@pytest.mark.parametrize("spread", [padded, strided])
@pytest.mark.parametrize("fmt", ["mxfp4", "plain"])
def test_any_strides_and_wide_integers(fmt: str, spread: Callable[[Tensor], Tensor]) -> None:
    a = call(fmt, 4)
    candidates = torch.tensor([[0, 1, 2], [2, 4, -1], [1, 5, -1], [3, -1, -1]]).int()
    for dtype in (torch.int32, torch.int64):
        wide = {name: getattr(a, name).to(dtype) for name in ("positions", "requests", "visible", "block_table")}
        names = ["q", "weights", "cos_sin_cache", *wide, *(["keys"] if fmt == "plain" else [])]
        b = a._replace(**wide)
        b = b._replace(**{name: spread(getattr(b, name)) for name in names})
        compare(b)
        compare(blocks_of(b, 4, 3))
        compare(b._replace(candidates=spread(candidates), candidate_block=4))


@interpreted
def test_pages_seen_as_rows_with_their_scales() -> None:
    a = call()
    rows = a.keys.clone(memory_format=torch.contiguous_format).view(-1, PAGE, 17)
    assert_bitwise(select(a._replace(keys=rows))[0], want(a)[0])


@interpreted
@pytest.mark.parametrize("tiles", [{"programs": 1}, {"programs": 64}, {"select_tile": (16, 1)}])
def test_tiles_and_chunks_of_tokens_change_nothing(monkeypatch: pytest.MonkeyPatch, tiles: dict[str, Any]) -> None:
    a = call("plain", 5, page=80, columns=2, topk=9)
    candidates = torch.randperm(20)[:15].sort().values.int().repeat(5, 1)
    for limit in (kernel.WORKSPACE_BYTES, 4 * 2 * 200):
        monkeypatch.setattr(kernel, "WORKSPACE_BYTES", limit)
        compare(a, **tiles)
        compare(blocks_of(a, 8, 5), **tiles)
        compare(a._replace(candidates=candidates, candidate_block=8), **tiles)


@interpreted
def test_nothing_reachable_gives_padding() -> None:
    a, none = call("plain", 3, page=64), call("plain", 0)
    candidates = torch.zeros(3, 2, dtype=torch.int32)
    for changes in ({"keys": a.keys[:0]}, {"block_table": a.block_table[:, :0]}, {"block_table": a.block_table[:0]}):
        b = a._replace(**changes)
        calls: list[Call] = [b, blocks_of(b, 4, 3), b._replace(candidates=candidates)]
        assert all((x == -1).all() for some in calls for x in compare(some))
    assert (compare(a._replace(candidates=candidates[:, :0]))[0] == -1).all()
    assert [x.shape for x in compare(blocks_of(none, 4, 3))] == [(0, 6), (0, 3)]


def test_unsupported_calls_name_the_limit_and_the_value() -> None:
    why, why_blocks = refusal("index_topk"), refusal("index_topk_blocks")
    assert why is not None and why_blocks is not None
    a = call()
    assert why(*a) == why_blocks(*blocks_of(a, 64, 3)) == ""
    assert "these are mxfp8" in why(*call("mxfp8"))
    assert "these are mxfp4, nvfp4" in why(*a._replace(grid="nvfp4"))
    assert "from 16 to 128, these have 8" in why(*call("plain", dim=8))
    assert "from 16 to 128, these have 96" in why(*call(dim=96))
    assert "without heads" in why(*call(heads=0))
    assert "up to 64, this one 12" in why_blocks(*blocks_of(a, 12, 3))
    assert "up to 64, this one 128" in why_blocks(*blocks_of(a, 128, 3))


@pytest.mark.parametrize("target", fake_triton.TARGETS)
def test_it_compiles_ahead_of_time(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    early = sees(monkeypatch, target)
    a = call(tokens=2, heads=32, dim=128, page=64, columns=40, dtype=torch.bfloat16, topk=512)
    small = call("plain", 2, heads=4, dim=32, page=64)
    with compiled_for(target) as compiled:
        launcher("index_topk")(*small)
        launcher("index_topk_blocks")(*blocks_of(a, 8, 2048))
        launcher("index_topk")(*a._replace(candidates=torch.zeros(2, 2048).int(), candidate_block=8))
    assert len(compiled) == 2 + 3 + 2
    assert all(binary.assembled for binary in compiled)
    # The selection of picks starts while entries are scored; that of blocks and inside candidates after it.
    waits = [fake_triton.WAIT in binary.asm.get("ptx", "") for binary in compiled]
    assert waits == ([False, True, False, True, False, False, False] if early else [False] * 7)
    assert all(binary.metadata.shared <= 1024 * GPUS[target][1] for binary in compiled)
