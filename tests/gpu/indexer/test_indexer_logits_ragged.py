"""The kernels that score and select gathered indexer keys on a GPU, against the reference on the same GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.kernels.indexer import indexer_logits as kernel
from dsv4_compile.kernels.indexer.score_triton import RAGGED_SCORE_TILE, RaggedScoreCall
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.ops.common.kernels import launcher
from dsv4_compile.reference.common.kv_format import quantize_indexer
from dsv4_compile.reference.indexer.indexer_logits import RaggedTopkArguments, select_topk

FORMATS = pytest.mark.parametrize("fmt", layout.INDEXER_FORMATS)
OP = "indexer_logits_topk_ragged"
SELECT, TOPK = REFERENCES[OP], launcher(OP)


def arguments(fmt: str, queries: list[int], contexts: list[int], heads: int = 64, seed: int = 0) -> tuple[Any, ...]:
    """Prompts of `queries[r]` tokens at the end of `contexts[r]` compressed entries, gathered one after the other."""
    generator = torch.Generator("cuda").manual_seed(seed)
    tokens, rows = sum(queries), sum(contexts)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    table = torch.cat((torch.ones(1, 32), torch.zeros(1, 32)), dim=1).cuda()
    origin = torch.zeros(tokens, dtype=torch.int64, device="cuda")
    q, weights = randn(tokens, heads, 128).bfloat16(), randn(tokens, heads).bfloat16()
    prepared = REFERENCES["indexer_q_rope_quant"](q, origin, table, weights, fmt)
    keys = randn(rows, 128)
    gathered: tuple[Tensor, ...] = (keys.bfloat16(), torch.empty(rows, 0, dtype=torch.uint8, device="cuda"))
    if fmt != "plain":
        gathered = tuple(tensor.view(torch.uint8) for tensor in quantize_indexer(keys.bfloat16().float(), fmt))
    starts, ends, first = [], [], 0
    for count, context in zip(queries, contexts, strict=True):
        starts += [first] * count
        ends += [first + max(context - (count - 1 - i) // 4, 0) for i in range(count)]
        first += context
    bounds = (torch.tensor(x, device="cuda", dtype=torch.int32) for x in (starts, ends))
    return (*prepared, *gathered, *bounds, fmt)


def own_selection(args: tuple[Any, ...], topk: int) -> tuple[Tensor, Tensor]:
    """Return what the rule of the reference selects from the logits of the kernel, and these."""
    values = torch.full((args[0].shape[0], args[3].shape[0]), -torch.inf, device="cuda")
    lens = torch.empty(len(values), dtype=torch.int32, device="cuda")
    kernel.score_ragged(RaggedScoreCall(RaggedTopkArguments(*args, topk), values, lens, topk))
    assert torch.equal(lens, (values != -torch.inf).sum(1, dtype=torch.int32))
    return torch.cat([select_topk(v, v != -torch.inf, topk) for v in values.split(256)]), values


@FORMATS
@pytest.mark.parametrize("topk", [512, 1024, 100])
@pytest.mark.parametrize(
    ("queries", "contexts"), [([1], [4000]), ([700], [2000]), ([300, 5, 64, 1, 900], [90, 700, 64, 1200, 3000])]
)
def test_selection_is_exact_for_the_logits(fmt: str, topk: int, queries: list[int], contexts: list[int]) -> None:
    args = arguments(fmt, queries, contexts)
    assert torch.equal(TOPK(*args, topk), own_selection(args, topk)[0])


@FORMATS
@pytest.mark.parametrize("heads", [64, 17, 3])
def test_logits_and_selection_are_nearly_those_of_the_reference(fmt: str, heads: int) -> None:
    args = arguments(fmt, [130, 70], [900, 1500], heads)
    _, values = own_selection(args, 512)
    for t in (0, 100, 129, 130, 199):
        q, q_scale, weights, k, k_scale, starts, ends, _ = args
        first, last = int(starts[t]), int(ends[t])
        one = torch.zeros(1, dtype=torch.int32, device="cuda"), torch.full((1,), last - first, device="cuda")
        # A separate request in pages of one entry.
        pages = REFERENCES["indexer_logits"]
        cache = torch.cat((k[first:last], k_scale[first:last]), dim=1) if fmt != "plain" else k[first:last, None]
        table = torch.arange(last - first, device="cuda", dtype=torch.int32)[None]
        want = pages(q[t : t + 1], q_scale[t : t + 1], weights[t : t + 1], cache, table, *one, 1, fmt, last - first)
        got = values[t, : last - first]
        assert ((got - want[0]).abs() <= 3e-5 * want[0].abs() + 1e-4).all()
    ours, theirs = TOPK(*args, 512), SELECT(*args, 512)
    mine = torch.zeros(200, 2401, device="cuda").scatter_(1, torch.where(ours < 0, 2400, ours).long(), 1.0)
    other = torch.zeros_like(mine).scatter_(1, torch.where(theirs < 0, 2400, theirs).long(), 1.0)
    assert (mine != other)[:, :2400].sum(1).max() <= 2


@pytest.mark.parametrize("tile", [(64, 128, 8, 1), (64, 128, 4, 3), (64, 256, 8, 3), (128, 128, 8, 2)])
def test_neither_tiles_nor_the_bound_on_logits_change_the_selection(tile: tuple[int, int, int, int]) -> None:
    args = arguments("indexer_fp8", [300, 90], [1500, 800])
    want = TOPK(*args, 512, score_tile=RAGGED_SCORE_TILE)
    assert torch.equal(TOPK(*args, 512, score_tile=tile), want)
    want = TOPK(*args, 512)
    for limit in (0, 10_000, 4 * 2304 * 100):
        assert torch.equal(TOPK(*args, 512, limit), want)


@pytest.mark.parametrize("kinds", [2, 40])
def test_ties_go_to_the_smaller_index(kinds: int) -> None:
    """Two heads see k and -k, with weights 1 and -1, so that the logit of a key is its only element."""
    k = torch.zeros(9000, 16, device="cuda")
    k[:, 0] = (torch.randint(kinds, (9000,), device="cuda") - kinds // 2).float()
    q = torch.zeros(200, 2, 16, device="cuda")
    q[:, 0, 0], q[:, 1, 0] = 1.0, -1.0
    starts = torch.randint(0, 8000, (200,), device="cuda").sort().values
    ends = starts + torch.randint(-3, 5000, (200,), device="cuda")
    weights = torch.tensor([1.0, -1.0], device="cuda").repeat(200, 1)
    args = q, q[..., :0], weights, k, k[:, :0].byte(), starts, ends, "plain"
    for topk in (512, 7):
        assert torch.equal(TOPK(*args, topk), SELECT(*args, topk))


def test_seventy_thousand_tokens() -> None:
    args = arguments("indexer_fp8", [70_000], [17_500], heads=8)
    got = TOPK(*args, 64)
    some = torch.arange(0, 70_000, 997, device="cuda")
    few = tuple(x[some] if i in (0, 1, 2, 5, 6) else x for i, x in enumerate(args))
    assert torch.equal(got[some], own_selection(few, 64)[0])


def test_a_captured_launch_follows_its_inputs() -> None:
    args = arguments("indexer_fp8", [150, 50], [900, 700])
    TOPK(*args, 512)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = TOPK(*args, 512)
    for seed in (5, 6):
        for mine, new in zip(args[:7], arguments("indexer_fp8", [80, 120], [1000, 600], seed=seed)[:7], strict=True):
            mine.copy_(new)
        graph.replay()
        assert torch.equal(out, own_selection(args, 512)[0])


def test_a_hundred_runs_are_equal_bit_for_bit() -> None:
    args = arguments("indexer_fp8", [128], [3000])
    first = TOPK(*args, 512)
    assert all(torch.equal(TOPK(*args, 512), first) for _ in range(100))
