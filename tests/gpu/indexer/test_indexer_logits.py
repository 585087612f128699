"""The indexer's scoring and selecting kernels on a GPU against the reference on the same GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.kernels.indexer import indexer_logits as kernel
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.ops.common.kernels import launcher
from dsv4_compile.reference.common.kv_format import store_indexer
from dsv4_compile.reference.indexer.indexer_logits import select_topk
from dsv4_compile.testing import poison_, samples  # noqa: F401  (importing the package registers the ops)

FORMATS = pytest.mark.parametrize("fmt", layout.INDEXER_FORMATS)
SCORE, SELECT = REFERENCES["indexer_logits"], REFERENCES["indexer_logits_topk"]
LOGITS, TOPK = launcher("indexer_logits"), launcher("indexer_logits_topk")


def arguments(
    fmt: str, tokens: int, *, heads: int = 64, block: int = 64, columns: int = 64, requests: int = 4, seed: int = 0
) -> tuple[Any, ...]:
    """Contexts of every length, a block of each request missing, pages that nobody owns full of NaN."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    q, weights = randn(tokens, heads, 128).bfloat16(), randn(tokens, heads).bfloat16()
    table = torch.cat((torch.ones(1, 32), torch.zeros(1, 32)), dim=1).cuda()
    origin = torch.zeros(tokens, dtype=torch.int64, device="cuda")
    prepared = REFERENCES["indexer_q_rope_quant"](q, origin, table, weights, fmt)
    pages = requests * columns + 2
    cache = poison_(layout.allocate_cache(fmt, pages, block, 128, device="cuda"))
    blocks = (
        torch.randperm(pages, device="cuda", generator=generator)[: requests * columns].int().view(requests, columns)
    )
    slots = (blocks.long()[..., None] * block + torch.arange(block, device="cuda")).flatten()
    for chunk in slots.split(65536):
        store_indexer(cache, fmt, block, chunk, randn(len(chunk), 128))
    blocks[:, columns // 2] = -1
    owners = torch.randint(-1, requests, (tokens,), device="cuda", generator=generator).int()
    lens = torch.randint(columns * block + 1, (tokens,), device="cuda", generator=generator).int()
    owners[0], lens[0] = 0, columns * block
    return (*prepared, cache, blocks, owners, lens, block, fmt)


def own_selection(args: tuple[Any, ...], topk: int, **tiles: Any) -> tuple[Tensor, Tensor]:
    """Return what the rule of the reference selects from the logits of the kernel, and these."""
    values = LOGITS(*args, args[4].shape[1] * args[7], **tiles)
    return torch.cat([select_topk(v, v != -torch.inf, topk) for v in values.split(64)]), values


def assert_close(got: Tensor, want: Tensor) -> None:
    assert torch.equal(got.isneginf(), want.isneginf())
    finite = want.isfinite()
    error = torch.where(finite, got - want, 0.0).abs()
    assert (error <= 3e-5 * torch.where(finite, want, 0.0).abs() + 1e-4).all(), error.max()


@FORMATS
@pytest.mark.parametrize(
    ("heads", "block", "columns"), [(64, 64, 64), (17, 16, 9), (64, 24, 7), (128, 128, 5), (3, 2, 50)]
)
def test_logits_are_those_of_the_reference(fmt: str, heads: int, block: int, columns: int) -> None:
    for tokens in (1, 37, 130):
        args = arguments(fmt, tokens, heads=heads, block=block, columns=columns)
        for width in (columns * block, columns * block // 2 + 1):
            assert_close(LOGITS(*args, width), SCORE(*args, width))


@FORMATS
@pytest.mark.parametrize("topk", [512, 1024, 100])
@pytest.mark.parametrize("tokens", [1, 32, 128, 300])
def test_selection_is_exact_for_the_logits(fmt: str, topk: int, tokens: int) -> None:
    args = arguments(fmt, tokens)
    selected = TOPK(*args, topk)
    expected, _ = own_selection(args, topk)
    assert torch.equal(selected, expected)


@FORMATS
def test_selection_is_nearly_that_of_the_reference(fmt: str) -> None:
    """Only entries with logits next to the boundary may be chosen differently."""
    args = arguments(fmt, 64)
    ours, theirs = TOPK(*args, 512), SELECT(*args, 512)
    mine = torch.zeros(64, 4097, dtype=torch.int32, device="cuda").scatter_(
        1, torch.where(ours < 0, 4096, ours).long(), 1
    )
    other = torch.zeros_like(mine).scatter_(1, torch.where(theirs < 0, 4096, theirs).long(), 1)
    assert (mine != other)[:, :4096].sum(1).max() <= 2
    assert torch.equal((ours >= 0).sum(1), (theirs >= 0).sum(1))


def with_logits(values: Tensor, tokens: int, block: int) -> tuple[Any, ...]:
    """Contexts of every length of one request with the logits `values`, a whole number of blocks.

    Two heads see k and -k, with weights 1 and -1, so that the logit of a key is its only element.
    """
    generator = torch.Generator("cuda").manual_seed(tokens)
    cache = torch.zeros(len(values) // block, block, 16, device="cuda")
    cache[..., 0] = values.view(-1, block)
    q = torch.zeros(tokens, 2, 16, device="cuda")
    q[:, 0, 0], q[:, 1, 0] = 1.0, -1.0
    weights = torch.tensor([1.0, -1.0], device="cuda").repeat(tokens, 1)
    table = torch.arange(len(cache), device="cuda").int()[None]
    lens = torch.randint(1, len(values) + 1, (tokens,), device="cuda", generator=generator).int()
    lens[:2] = torch.tensor([len(values), len(values) - 1])
    return q, q[..., :0], weights, cache, table, torch.zeros_like(lens), lens, block, "plain"


@pytest.mark.parametrize("kinds", [2, 40, 10**6])
@pytest.mark.parametrize(
    ("select", "columns"), [((8192, 16), 64), ((4096, 8), 64), ((2048, 8), 200), ((8192, 16), 700), ((4096, 8), 1)]
)
def test_ties_go_to_the_smaller_index(kinds: int, select: tuple[int, int], columns: int) -> None:
    generator = torch.Generator("cuda").manual_seed(kinds)
    values = torch.randint(kinds, (64 * columns,), device="cuda", generator=generator) - kinds // 2
    args = with_logits(values.float(), 20, 64)
    for topk in (512, 7):
        assert torch.equal(TOPK(*args, topk, select_tile=select), SELECT(*args, topk))


@pytest.mark.parametrize("topk", [7, 512])
@pytest.mark.parametrize("columns", [4, 150, 1100])
@pytest.mark.parametrize("spread", ["outlier", "infinities", "exponents", "clusters", "rising", "subnormal"])
def test_logits_of_any_distribution(spread: str, columns: int, topk: int) -> None:
    """Few bins of the first pass hold them, or one."""
    generator = torch.Generator("cuda").manual_seed(columns)
    values = torch.randn(16 * columns, device="cuda", generator=generator)
    if spread == "outlier":
        values[3], values[5] = 3e38, -3e38
    elif spread == "infinities":
        values[1::5], values[2::7], values[3::11] = torch.inf, -torch.inf, torch.nan
    elif spread == "exponents":
        values = torch.exp2(40 * values)
    elif spread == "clusters":
        values = torch.where(values > 0, 1 + 1e-6 * values, 1e6 + values.round())
    elif spread == "rising":
        values = values.sort().values
    else:
        values *= 1e-40
    args = with_logits(values, 9, 16)
    assert torch.equal(TOPK(*args, topk), SELECT(*args, topk))


@pytest.mark.parametrize("score", [(64, 4, 1), (64, 4, 2), (64, 4, 3), (64, 4, 4), (64, 8, 3), (32, 4, 3), (16, 1, 2)])
def test_every_tile_selects_by_its_logits(score: tuple[int, int, int]) -> None:
    args = arguments("indexer_fp8", 40)
    expected, values = own_selection(args, 512, score_tile=score)
    assert_close(values, SCORE(*args, values.shape[1]))
    assert torch.equal(TOPK(*args, 512, score_tile=score), expected)


def test_chunks_of_tokens_do_not_change_the_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments("indexer_fp8", 100)
    unchunked = TOPK(*args, 512)
    monkeypatch.setattr(kernel, "WORKSPACE_BYTES", 7 * 4 * 4096)
    assert torch.equal(TOPK(*args, 512), unchunked)


def test_a_prompt_of_many_tokens_and_a_long_context() -> None:
    args = arguments("indexer_fp8", 3000, requests=1, columns=1100)
    selected = TOPK(*args, 512)
    expected, _ = own_selection(args, 512)
    assert torch.equal(selected, expected)


def test_seventy_thousand_tokens_and_a_cache_past_two_gibibytes() -> None:
    pages = 2**31 // layout.INDEXER_FP8.page_stride(64) + 9
    args = list(arguments("indexer_fp8", 70_000, columns=3))
    cache = layout.allocate_cache("indexer_fp8", pages, 64, device="cuda")
    cache[-len(args[3]) :] = args[3]
    expected = TOPK(*args, 8)
    args[3], args[4] = cache, torch.where(args[4] >= 0, args[4] + pages - len(args[3]), -1).int()
    assert torch.equal(TOPK(*args, 8), expected)


def test_a_captured_launch_follows_its_inputs() -> None:
    args = arguments("indexer_fp8", 40)
    TOPK(*args, 512)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = TOPK(*args, 512)
    for seed in (5, 6):
        for mine, new in zip(args[:7], arguments("indexer_fp8", 40, seed=seed)[:7], strict=True):
            mine.copy_(new)
        graph.replay()
        assert torch.equal(out, own_selection(args, 512)[0])


def test_a_hundred_runs_are_equal_bit_for_bit() -> None:
    args = arguments("indexer_fp8", 128)
    first = TOPK(*args, 512)
    assert all(torch.equal(TOPK(*args, 512), first) for _ in range(100))


@pytest.mark.parametrize("tokens", [8, 32, 128])
def test_scores_do_not_change_while_pages_come_out_of_the_cache(tokens: int) -> None:
    """Copies are fastest then: a buffer that is filled again before all have read it shows."""
    args = list(arguments("indexer_fp8", tokens, requests=tokens))
    args[5], args[6] = torch.arange(tokens, device="cuda").int(), torch.full_like(args[6], 4096)
    first = LOGITS(*args, 4096)
    assert_close(first, SCORE(*args, 4096))
    assert all(torch.equal(LOGITS(*args, 4096), first) for _ in range(300))
