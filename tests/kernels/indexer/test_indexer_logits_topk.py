"""The indexer's scoring and selecting kernels against the reference, every access checked."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.kernels.indexer import indexer_logits as kernel
from dsv4_compile.kernels.indexer import select_topk
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.ops.common.kernels import launcher, refusal
from dsv4_compile.reference.indexer import indexer_logits as reference
from dsv4_compile.reference.indexer.indexer_q_rope_quant import indexer_q_rope_quant
from dsv4_compile.testing import (
    Tolerance,
    assert_bitwise,
    assert_close,
    hostile_indices,
    hostile_values,
    padded,
    poison_,
    random_cache,
    strided,
)
from dsv4_compile.testing.samples import op_samples
from tests.kernels.gpus import GPUS, sees, shared_out
from tests.kernels.handed_over import handed_over
from tests.ops.preprocess.compressor_engine import rope_table
from tests.support import fake_triton
from tests.support.bounds import checked
from tests.tools.compiled_facts import compiled_for

interpreted = pytest.mark.interpreted
FORMATS = pytest.mark.parametrize("fmt", layout.INDEXER_FORMATS)
SUM = Tolerance(abs=2e-5, rel=2e-5, cosine=1e-10)
"""float32 sums of 128 products of order one, then of up to 64 heads, in a different order."""
INF, NAN = math.inf, math.nan
LOGITS = REFERENCES["indexer_logits"]
OUTPUTS = ("p_out", "outputs[0]", "best[0]", "best[1]", "p_arrived")


def logits(*args: Any) -> Tensor:
    with checked(OUTPUTS):
        return launcher("indexer_logits")(*args)


def select(*args: Any, **tiles: Any) -> Tensor:
    with checked(OUTPUTS):
        return launcher("indexer_logits_topk")(*args, **tiles)


def batch(
    fmt: str, tokens: int, heads: int = 4, block: int = 4, columns: int = 6, requests: int = 3
) -> tuple[Any, ...]:
    """Requests of `columns` full blocks of a cache with NaN elsewhere, and a context of every length among them."""
    kind = torch.bfloat16 if fmt in layout.PAGE_LAYOUTS else torch.float32
    q, positions = torch.randn(tokens, heads, 128).to(kind), torch.randint(40, (tokens,))
    prepared = indexer_q_rope_quant(q, positions, rope_table(40, 64), torch.randn(tokens, heads), fmt)
    pages = requests * columns + 2
    cache = random_cache(fmt, pages, block, live=pages * block, head_dim=128, dtype=kind).cache
    if fmt == "plain":
        cache = poison_(torch.empty(pages, block + 1, 128))[:, :block].copy_(torch.randn(pages, block, 128))
    table = torch.randperm(pages)[: requests * columns].int().view(requests, columns)
    owner = torch.randint(requests, (tokens,), dtype=torch.int32)
    lens = torch.randint(columns * block + 1, (tokens,), dtype=torch.int32)
    lens[:1] = columns * block
    return (*prepared, cache, table, owner, lens, block, fmt)


def by_own_logits(args: tuple[Any, ...], topk: int) -> Tensor:
    """Select by the rule of the reference from the logits that the kernel calculates."""
    values = logits(*args, args[4].shape[1] * args[7])
    return reference.select_topk(values, values != -INF, topk)


@interpreted
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("number", range(len(op_samples("indexer_logits"))))
def test_samples(number: int) -> None:
    args = op_samples("indexer_logits")[number]
    assert_close(logits(*args), LOGITS(*args), SUM)
    args = op_samples("indexer_logits_topk")[number]
    assert_bitwise(select(*args), REFERENCES["indexer_logits_topk"](*args), strides=True)


@interpreted
@pytest.mark.usefixtures("poisoned_memory")
@FORMATS
@pytest.mark.parametrize(("heads", "block"), [(64, 64), (3, 16), (17, 24), (1, 1), (8, 128)])
def test_logits_for_any_number_of_heads_and_page_size(fmt: str, heads: int, block: int) -> None:
    args = batch(fmt, 3, heads, block, columns=2)
    for width in (0, 2 * block - 1, 2 * block, 2 * block + 70):
        ours, theirs = logits(*args, width), LOGITS(*args, width)
        assert ours.is_contiguous()
        assert_close(ours, theirs, SUM)


@interpreted
@pytest.mark.usefixtures("poisoned_memory")
@FORMATS
@pytest.mark.parametrize("topk", [1, 5, 24, 40])
def test_selection_is_exact_for_the_logits(fmt: str, topk: int) -> None:
    args = batch(fmt, 12)
    assert_bitwise(select(*args, topk), by_own_logits(args, topk))


@interpreted
@pytest.mark.parametrize("select_tile", [(16, 1), (32, 2), (4096, 8)])
@pytest.mark.parametrize("score_tile", [(16, 1, 1), (64, 4, 2)])
def test_tiles_do_not_change_the_selection(
    monkeypatch: pytest.MonkeyPatch, score_tile: tuple[int, int, int], select_tile: tuple[int, int]
) -> None:
    args = batch("indexer_fp8", 3, block=16)
    expected = by_own_logits(args, 9)
    assert_bitwise(select(*args, 9, score_tile=score_tile, select_tile=select_tile), expected)
    monkeypatch.setattr(kernel, "WORKSPACE_BYTES", 4 * 96 * 2)
    tiles: dict[str, Any] = {"programs": 1, "score_tile": score_tile, "select_tile": select_tile}
    assert_bitwise(select(*args, 9, **tiles), expected)


@interpreted
def test_counters_are_left_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = torch.zeros(9, dtype=torch.int32)
    monkeypatch.setattr(select_topk, "arrival_counters", lambda count, device: counters[:count])
    args = batch("indexer_fp8", 9, block=16)
    args[6][:5] = torch.tensor([0, 1, 7, 33, 96])
    for _ in range(2):
        assert_bitwise(select(*args, 5, select_tile=(16, 1)), by_own_logits(args, 5))
        assert not counters.any()


class Scored:
    """One request for each list of logits. Two heads see k and -k, with weights 1 and -1: relu(k) - relu(-k) is k."""

    BLOCK = 4

    def __init__(self, *requests: list[float]) -> None:
        columns = max(layout.cdiv(len(r), self.BLOCK) for r in requests)
        pages = torch.randperm(len(requests) * columns + 1)[: len(requests) * columns]
        self.table = pages.int().view(len(requests), columns)
        self.cache = poison_(torch.empty(len(requests) * columns + 1, self.BLOCK, 16))
        for row, values in zip(self.table, requests, strict=True):
            keys = torch.zeros(columns * self.BLOCK, 16)
            keys[:, 0] = torch.tensor(values + [NAN] * (len(keys) - len(values)))
            self.cache[row.long()] = keys.view(columns, self.BLOCK, 16)

    def args(self, requests: list[int], lens: list[int]) -> tuple[Any, ...]:
        q = torch.zeros(len(requests), 2, 16)
        q[:, 0, 0], q[:, 1, 0] = 1.0, -1.0
        weights = torch.tensor([1.0, -1.0]).repeat(len(requests), 1)
        owner, length = torch.tensor(requests, dtype=torch.int32), torch.tensor(lens, dtype=torch.int32)
        return q, q[:, :, :0], weights, self.cache, self.table, owner, length, self.BLOCK, "plain"

    def check(self, requests: list[int], lens: list[int], topk: int) -> list[list[int]]:
        """Return the selection, which equals the reference whatever part of a row stays in registers."""
        args = self.args(requests, lens)
        expected = REFERENCES["indexer_logits_topk"](*args, topk)
        for tile in (16, 64):
            assert_bitwise(select(*args, topk, select_tile=(tile, 1)), expected)
        return expected.tolist()


@interpreted
@pytest.mark.parametrize("kinds", [2, 5, 1000])
def test_ties_go_to_the_smaller_index(kinds: int) -> None:
    requests = [(torch.randint(kinds, (n,)) - kinds // 2).float().tolist() for n in (49, 9)]
    for topk in (1, 20):
        Scored(*requests).check([0, 0, 1], [49, 30, 9], topk)


@interpreted
@pytest.mark.parametrize(
    "values",
    [
        pytest.param([0.0] * 9, id="all equal"),
        pytest.param([-0.0, 0.0, -0.0, 0.0, -1.0], id="signs of zero"),
        pytest.param([1.0, 3.0, 2.0, 3.0, 3.0, 3.0], id="tie at the last place"),
        pytest.param([-5.0, -1.0, -7.0, -3.0, -2.0], id="negative"),
        pytest.param([-INF, 1.0, INF, -2.0, INF], id="infinities"),
        pytest.param([-INF, -INF, -INF, -INF, 3e38, -3e38], id="a boundary at minus infinity"),
        pytest.param([INF] * 5 + [NAN], id="infinities alone"),
        pytest.param([NAN, 1.0, NAN, -2.0, -INF], id="NaN loses to minus infinity"),
        pytest.param([NAN, NAN, 1.0, NAN, 2.0], id="NaN fills up by index"),
        pytest.param([NAN] * 6, id="NaN alone"),
        pytest.param([1.0, 1.0 + 2**-23, 1.0 - 2**-24, 1.0, 0.0], id="neighbouring floats"),
        pytest.param([3.4e38, -3.4e38, 3.3e38, -3.3e38, 1e-37, -1e-37], id="the ends of float32"),
        pytest.param([2.0**-e for e in range(120)], id="every exponent"),
    ],
)
def test_special_values(values: list[float]) -> None:
    for topk in (1, 3, 5):
        Scored(values).check([0, 0], [len(values), len(values) - 1], topk)


@interpreted
def test_contexts_of_up_to_k_entries_are_selected_whole_whatever_the_logits() -> None:
    scored = Scored([NAN, -INF, 2.0, NAN, -3.0, INF, 0.0])
    assert scored.check([0] * 5, [7, 5, 1, 8, 0], 8) == [
        [0, 1, 2, 3, 4, 5, 6, -1],
        [0, 1, 2, 3, 4, -1, -1, -1],
        [0, -1, -1, -1, -1, -1, -1, -1],
        [0, 1, 2, 3, 4, 5, 6, 7],
        [-1] * 8,
    ]


@interpreted
@pytest.mark.parametrize("block", hostile_values(4))
def test_entries_in_illegal_blocks_are_never_selected(block: int) -> None:
    scored = Scored([1.0, 2.0, 3.0, 4.0, 9.0, 9.0, 9.0, 9.0, -1.0, -2.0, -3.0, NAN])
    scored.table[0, 1] = block
    assert scored.check([0, 0, 0], [12, 12, 7], 3) == [[1, 2, 3], [1, 2, 3], [1, 2, 3]]
    assert scored.check([0, 0], [12, 6], 10) == [[0, 1, 2, 3, 8, 9, 10, 11, -1, -1], [0, 1, 2, 3] + [-1] * 6]
    assert scored.check([0], [11], 8) == [[0, 1, 2, 3, 8, 9, 10, -1]]  # more columns than K, fewer visible


@interpreted
@FORMATS
def test_hostile_requests_blocks_and_lengths(fmt: str) -> None:
    q, q_scale, weights, cache, _, _, _, block, _ = batch(fmt, 14)
    owner = hostile_indices((14,), 3, fraction=0.3, dtype=torch.int32 if fmt == "plain" else torch.int64)
    table = hostile_indices((3, 6), len(cache), fraction=0.3)
    lens = torch.tensor([0, -1, -(2**31), 2**31 - 1, 24, 25, *range(3, 11)]).to(owner.dtype)
    args = q, q_scale, weights, cache, table, owner, lens, block, fmt
    assert_close(logits(*args, 30), LOGITS(*args, 30), SUM)
    assert_bitwise(select(*args, 5), by_own_logits(args, 5))


@interpreted
@pytest.mark.parametrize("spread", [padded, strided])
@FORMATS
def test_any_strides_and_spare_tokens(fmt: str, spread: Callable[[Tensor], Tensor]) -> None:
    q, q_scale, weights, cache, table, owner, lens, block, _ = batch(fmt, 5)
    expected = select(q[:4], q_scale[:4], weights[:4], cache, table, owner, lens, block, fmt, 7)
    keys = spread(cache) if fmt == "plain" else cache
    spread_args = spread(q[:4]), spread(q_scale[:4]), spread(weights[:4]), keys, spread(table), spread(owner)
    assert_bitwise(select(*spread_args, spread(lens), block, fmt, 7), expected)


@interpreted
@FORMATS
def test_the_accounting_view_of_a_cache(fmt: str) -> None:
    args = list(batch(fmt, 3))
    expected = select(*args, 6)
    if fmt in layout.PAGE_LAYOUTS:
        page = layout.PAGE_LAYOUTS[fmt]
        args[3] = args[3].clone(memory_format=torch.contiguous_format).view(-1, args[7], page.data + page.scale)
        assert_bitwise(select(*args, 6), expected)


@interpreted
def test_nothing_reachable_gives_padding() -> None:
    q, q_scale, weights, cache, table, owner, lens, block, fmt = batch("indexer_fp8", 3)
    for some_cache, some_table in ((cache[:0], table), (cache, table[:, :0]), (cache, table[:0])):
        args = q, q_scale, weights, some_cache, some_table, owner, lens, block, fmt
        assert select(*args, 4).tolist() == [[-1] * 4] * 3
        assert logits(*args, 5).isneginf().all()
    # A page that a tile divides is read whole.
    q, q_scale, weights, cache, table, owner, lens, block, fmt = batch("plain", 3, block=64)
    assert logits(q, q_scale, weights, cache[:0], table, owner, lens, block, fmt, 5).isneginf().all()
    none = q[:0], q_scale[:0], weights[:0], cache, table, owner, lens, block, fmt
    assert select(*none, 4).shape == (0, 4)
    assert logits(*none, 4).shape == (0, 4)


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_of_narrow_dtypes(dtype: torch.dtype) -> None:
    q, q_scale, weights, cache, *rest = batch("plain", 4)
    args = (q.to(dtype), q_scale, weights, cache.to(dtype), *rest)
    assert_close(logits(*args, 24), LOGITS(*args, 24), SUM)


def test_unsupported_calls_name_the_limit_and_the_value() -> None:
    plain, quantised = batch("plain", 2), batch("indexer_fp8", 2)
    of_logits, of_topk = refusal("indexer_logits"), refusal("indexer_logits_topk")
    assert of_logits is not None and of_topk is not None
    assert of_logits(*plain, 8) == of_topk(*quantised, 8) == ""
    assert "torch.bfloat16, torch.float32" in of_logits(plain[0].bfloat16(), *plain[1:], 8)
    assert "from 16 to 128, these have 8" in of_logits(plain[0][..., :8], *plain[1:], 8)
    odd = quantised[3].as_strided((2, 528), (529, 1))
    assert "multiples of 4 bytes, these start at byte 0, 529" in of_topk(*quantised[:3], odd, *quantised[4:], 8)
    odd = handed_over(quantised[3], 2)
    assert "multiples of 4 bytes, these start at byte 2" in of_topk(*quantised[:3], odd, *quantised[4:], 8)


@pytest.mark.parametrize("target", fake_triton.TARGETS)
def test_it_compiles_ahead_of_time(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    early = sees(monkeypatch, target)
    monkeypatch.setattr(kernel, "gpu_of", lambda device: GPUS[target][0])
    formats = shared_out(layout.INDEXER_FORMATS)[target]
    with compiled_for(target) as compiled:
        for fmt in formats:
            launcher("indexer_logits_topk")(*batch(fmt, 2, heads=64, block=64, columns=8), 512)
        launcher("indexer_logits")(*batch("indexer_fp8", 2, heads=64, block=64, columns=8), 512)
    assert len(compiled) == 2 * len(formats) + 1
    assert all(binary.assembled for binary in compiled)
    # The selection starts while entries are scored; it waits for them before it reads a key.
    waits = {binary.metadata.name for binary in compiled if fake_triton.WAIT in binary.asm.get("ptx", "")}
    sm90 = {"indexer_score_sm90_kernel"} if target == "sm_90" else set()
    assert waits == (sm90 | {"select_topk_kernel"} if early else set())
