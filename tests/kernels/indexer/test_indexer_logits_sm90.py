"""The sm_90 kernels that score entries, on the simulator of tests/simulator/gluon.py."""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from dsv4_compile import layout
from dsv4_compile.kernels.indexer.score_triton import RaggedScoreCall, ScoreCall
from dsv4_compile.ops.common.define import REFERENCES
from dsv4_compile.reference.common.kv_format import quantize_indexer, store_indexer
from dsv4_compile.reference.indexer.indexer_logits import LogitsArguments, RaggedTopkArguments
from dsv4_compile.testing import poison_, samples  # noqa: F401  (importing the package registers the ops)
from tests.kernels.handed_over import handed_over
from tests.kernels.indexer.test_select_topk import INVISIBLE, order_keys
from tests.simulator import copies as simulated_copies
from tests.simulator.gluon import GLUON, Barrier, Shared
from tests.simulator.values import Value, raw

pytestmark = pytest.mark.interpreted
LOGITS = REFERENCES["indexer_logits"]


class Groups:
    """Copies that land when they are waited for, as late as possible."""

    def __init__(self) -> None:
        self.open: list[tuple[Any, ...]] = []
        self.committed: list[list[tuple[Any, ...]]] = []

    def copy(self, target: Any, source: Any, mask: Any = None) -> None:
        self.open.append((target, source, mask))

    def commit(self) -> None:
        self.committed.append(self.open)
        self.open = []

    def wait(self, outstanding: int) -> None:
        while len(self.committed) > outstanding:
            for group in self.committed.pop(0):
                simulated_copies.copy_elements(*group)


class Reads(threading.local):
    """Reads of shared memory, which may be under way until a GEMM on their values is done."""

    pending = 0

    def load(self, shared: Shared) -> Value:
        self.pending += 1
        return Value(shared.data.clone())

    def finish(self, pending: int, deps: list[Value]) -> Any:
        self.pending = 0
        return simulated_copies.finish(pending, deps)

    def arrive(self, barrier: Barrier, count: int) -> None:
        assert self.pending == 0, "a buffer is freed while it is read"
        barrier.arrive(count)


READS = Reads()


class Launched(simulated_copies.Persistent):
    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, maxnreg: int = 0, **constants: Any) -> None:
            start(*args, **constants)

        start = super().__getitem__(grid)
        return launch


def modules(late: bool) -> dict[str, types.ModuleType]:
    stand_ins = _modules()
    groups = Groups()
    copies: dict[str, Callable[..., None]] = {"commit_group": groups.commit, "wait_group": groups.wait}
    hopper = stand_ins[f"{GLUON}.language.nvidia.hopper"]
    if late:
        copies |= {"async_load": groups.copy}
    vars(hopper.mbarrier).update(arrive=READS.arrive)
    vars(hopper).update(warpgroup_mma_wait=READS.finish)
    vars(stand_ins[f"{GLUON}.language.nvidia.ampere"].async_copy).update(copies)
    vars(stand_ins[GLUON]).update(jit=lambda f=None, **_: Launched(f) if f else Launched)
    vars(stand_ins[f"{GLUON}.language"]).update(
        uint8=torch.uint8,
        float16=torch.float16,
        num_programs=lambda axis: 2,
        maximum=lambda a, b, **_: Value(torch.maximum(*(torch.as_tensor(raw(x)) for x in (a, b)))),
    )
    return stand_ins


_modules = simulated_copies.modules


@pytest.fixture(scope="module", params=["early", "late"])
def kernel(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Return the kernel for paged keys, with copies that land as early as possible, or as late."""
    late = request.param == "late"
    with (
        simulated_copies.landing_late() if late else contextlib.nullcontext(),
        mock.patch.object(simulated_copies, "modules", lambda: modules(late)),
    ):
        yield simulated_copies.simulated("indexer.score_sm90")


@pytest.fixture(autouse=True)
def reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shared, "load", lambda shared, layout: READS.load(shared))
    READS.pending = 0


def arguments(tokens: int, heads: int, columns: int, block: int) -> tuple[Any, ...]:
    """Contexts of every length, a missing and an illegal block, pages of no request full of NaN."""
    generator = torch.Generator().manual_seed(tokens)
    q = torch.randn(tokens, heads, 128, generator=generator).bfloat16()
    weights = torch.randn(tokens, heads, generator=generator).bfloat16()
    table = torch.cat((torch.ones(1, 32), torch.zeros(1, 32)), dim=1)
    origin = torch.zeros(tokens, dtype=torch.int64)
    prepared = REFERENCES["indexer_q_rope_quant"](q, origin, table, weights, "indexer_fp8")
    pages = 2 * columns + 2
    cache = poison_(layout.allocate_cache("indexer_fp8", pages, block))
    blocks = torch.randperm(pages, generator=generator)[: 2 * columns].int().view(2, columns)
    slots = (blocks.long()[..., None] * block + torch.arange(block)).flatten()
    store_indexer(cache, "indexer_fp8", block, slots, torch.randn(len(slots), 128, generator=generator))
    blocks[:, columns // 2], blocks[1, 0] = -1, pages
    owners = torch.tensor([0, 1, -1, 2] * tokens).int()[:tokens]
    lens = torch.tensor([columns * block, 70, 5, 0, columns * block - 1, 10**6, -3] * tokens).int()[:tokens]
    return (*prepared, cache, blocks, owners, lens, block, "indexer_fp8")


def scored(kernel: Any, args: tuple[Any, ...], dtype: torch.dtype, width: int, topk: int, stages: int) -> Tensor:
    out = torch.full((len(args[0]), width), -7, dtype=dtype)
    kernel.score(ScoreCall(LogitsArguments(*args, max_context=width), out, width, topk), 2, stages)
    return out


@pytest.mark.parametrize(
    ("heads", "columns", "block", "stages"), [(64, 9, 64, 4), (5, 3, 128, 3), (17, 1, 192, 2), (16, 12, 64, 3)]
)
def test_hostile_tables_give_the_references_logits(
    kernel: Any, heads: int, columns: int, block: int, stages: int
) -> None:
    args = arguments(9, heads, columns, block)
    for width in (columns * block, columns * block // 2 + 1):
        want = LOGITS(*args, width)
        got = scored(kernel, args, torch.float32, width, 0, stages)
        assert torch.equal(got.isneginf(), want.isneginf())
        torch.testing.assert_close(got, want, rtol=3e-5, atol=1e-4)


@pytest.mark.parametrize("topk", [0, 69, 10**6])
def test_order_keys_are_those_of_the_logits(kernel: Any, topk: int) -> None:
    """Contexts of up to `topk` entries are not scored: they have 0 where something is visible."""
    args = arguments(9, 5, 3, 64)
    width = args[4].shape[1] * args[7]
    values, keys = (scored(kernel, args, dtype, width, topk, 3) for dtype in (torch.float32, torch.int32))
    seen = values > -torch.inf
    lens = torch.where(args[5].clamp(0, 1) == args[5], args[6].clamp(0, width), 0)[:, None]
    want = torch.where(lens > topk, order_keys(values), 0).masked_fill(~seen, INVISIBLE)
    assert torch.equal(keys, torch.where(torch.arange(width) < lens, want, -7))


@pytest.mark.parametrize("group", [4, 8, 16])
def test_the_largest_key_of_each_group_is_written(kernel: Any, group: int) -> None:
    """Contexts of up to 69 entries are not scored, and have none."""
    args = arguments(9, 5, 3, 64)
    width = args[4].shape[1] * args[7]
    keys = torch.full((9, width + 64), -7, dtype=torch.int32)
    best = torch.full((9, (width + 64) // group), -7, dtype=torch.int32)
    kernel.score(ScoreCall(LogitsArguments(*args, max_context=width), keys, width, 69, best=best), 2, 3)
    assert torch.equal(keys[:, :width], scored(kernel, args, torch.int32, width, 69, 3))
    lens = torch.where(args[5].clamp(0, 1) == args[5], args[6].clamp(0, width), 0)[:, None]
    seen = torch.where(torch.arange(width + 64) < lens, keys, INVISIBLE).view(9, -1, group).amax(2)
    written = (torch.arange(best.shape[1]) * group < lens) & (lens > 69)
    assert torch.equal(best, torch.where(written, seen, -7))


@pytest.fixture(scope="module", params=["early", "late"])
def ragged(request: pytest.FixtureRequest) -> Any:
    """Return the kernel for gathered keys, with copies that land as early as possible, or as late."""
    with mock.patch.object(simulated_copies, "modules", lambda: modules(request.param == "late")):
        return simulated_copies.simulated("indexer.score_ragged_sm90")


@pytest.mark.parametrize(
    ("tokens", "heads", "rows", "entries", "stages"), [(70, 5, 300, 64, 4), (3, 64, 150, 128, 3), (9, 1, 20, 64, 2)]
)
def test_hostile_runs_of_gathered_keys_give_the_references_logits(
    ragged: Any, tokens: int, heads: int, rows: int, entries: int, stages: int
) -> None:
    q, _, weights, *_ = arguments(tokens, heads, 1, 64)
    k, k_scale = (x.view(torch.uint8) for x in quantize_indexer(torch.randn(rows, 128), "indexer_fp8"))
    starts = torch.randint(-2, rows, (tokens,)).sort().values.int()
    ends = starts + torch.randint(-5, rows, (tokens,)).int()
    scores = torch.einsum("thd,nd->thn", q.float(), k.view(torch.float8_e4m3fn).float()).relu()
    logits = torch.einsum("thn,th->tn", scores, weights) * k_scale.view(torch.float32).T
    lens = torch.empty(tokens, dtype=torch.int32)
    out, keys, few = (
        torch.full((tokens, rows), x, dtype=type_)
        for x, type_ in ((-torch.inf, None), (-7, lens.dtype), (-7, lens.dtype))
    )
    op = RaggedTopkArguments(q, q[..., :0], weights, k, k_scale, starts, ends, "indexer_fp8", 1)
    for into, topk in ((out, 0), (keys, 0), (few, rows)):
        ragged.score(RaggedScoreCall(op, into, lens, topk), 2, entries, stages)
    for t, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        want = logits[t, start:end] if start >= 0 else logits[t, :0]
        number = len(want)
        assert lens[t] == number
        torch.testing.assert_close(out[t, :number], want, rtol=3e-5, atol=1e-4)
        assert out[t, number:].isneginf().all()
        assert torch.equal(keys[t, :number], order_keys(out[t, :number]))
        assert (keys[t, number:] == -7).all()
        assert (few[t] == torch.where(torch.arange(rows) < number, 0, -7)).all()


def paged_call(q: Tensor, cache: Tensor, fmt: str = "indexer_fp8", block: int = 64) -> ScoreCall:
    none, out = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(len(q), 64)
    weights, owners = out[:, : q.shape[1]], torch.zeros(len(q), dtype=torch.int32)
    return ScoreCall(LogitsArguments(q, q[..., :0], weights, cache, none, owners, owners, block, fmt, 64), out, 64)


def ragged_call(q: Tensor, k: Tensor, k_scale: Tensor, fmt: str = "indexer_fp8") -> RaggedScoreCall:
    bounds = torch.zeros(len(q), dtype=torch.int32)
    op = RaggedTopkArguments(q, q[..., :0], torch.zeros(q.shape[:2]), k, k_scale, bounds, bounds, fmt, 1)
    return RaggedScoreCall(op, torch.zeros(len(q), len(k)), bounds)


def test_unsupported_calls_name_the_limit_and_the_value(kernel: Any, ragged: Any) -> None:
    q, pages = torch.zeros(3, 4, 128, dtype=torch.uint8), torch.zeros(2, 8640, dtype=torch.uint8)[:, :8448]
    k, k_scale = torch.zeros(9, 128, dtype=torch.uint8), torch.zeros(9, 4, dtype=torch.uint8)
    of_pages, of_rows = kernel.why_unsupported, ragged.why_unsupported
    assert of_pages(paged_call(q, pages)) == of_rows(ragged_call(q, k, k_scale)) == ""
    odd_queries = q.new_zeros(3, 4, 136)[..., :128], q.flatten()[8:1032].view(2, 4, 128), q[..., ::2]
    for odd in odd_queries:
        for why in (of_pages(paged_call(odd, pages)), of_rows(ragged_call(odd, k, k_scale))):
            assert "multiples of 16 bytes" in why and str(odd.stride()) in why
    assert "multiple of 64 entries, this is indexer_fp8 in pages of 96" in of_pages(paged_call(q, pages, block=96))
    wide = torch.zeros(2, 8456, dtype=torch.uint8)[:, :8448]
    assert "multiples of 16 bytes, these start at byte 0, 8456" in of_pages(paged_call(q, wide))
    assert "at least 1 page, this has 0" in of_pages(paged_call(q, pages[:0]))
    assert "this is plain in pages of 64" in of_pages(paged_call(q, pages, "plain"))
    assert "indexer_fp8, this is plain" in of_rows(ragged_call(q, k, k_scale, "plain"))
    assert "contiguous, these have strides (256, 1)" in of_rows(ragged_call(q, k[::2], k_scale[::2]))
    odd_keys = torch.zeros(9 * 128 + 8, dtype=torch.uint8)[8:].view(9, 128)
    assert "16 bytes and scales at one of 4, these start at bytes 8 and 0" in of_rows(ragged_call(q, odd_keys, k_scale))
    aligned = handed_over(pages.contiguous(), 16)
    assert of_pages(paged_call(handed_over(q, 32), aligned)) == of_rows(ragged_call(q, handed_over(k), k_scale)) == ""
    assert "multiples of 16 bytes" in of_pages(paged_call(handed_over(q, 8), pages))
    assert "these start at byte 8" in of_pages(paged_call(q, handed_over(pages, 8)))
    assert "at bytes 4 and 0" in of_rows(ragged_call(q, handed_over(k, 4), k_scale))
    assert "at bytes 0 and 2" in of_rows(ragged_call(q, k, handed_over(k_scale, 2)))
