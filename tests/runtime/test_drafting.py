"""Tests of runners that verify drafts: tokens, caches, captures and counters."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_compile import explain_replay
from dsv4_compile.cache import PagedCaches
from dsv4_compile.errors import DSV4Error
from dsv4_compile.metadata import MetadataBuffers
from dsv4_compile.runtime import DecodeRunner, DraftStatistics
from dsv4_compile.runtime.drafting import accept_and_draft
from tests.runtime.engine import CONFIG, MAX_SEQ_LEN, REQUESTS, ROWS, SMALL, Stack, new_caches
from tests.support.draft_sources import Arbitrary, Biased, Forced, Source, Wrong
from tests.support.live_rows import live_rows, poison, set_rows

VOCAB = 40
COUNT = 5
STAGES = ("verify", "accept", "draft", "advance")


class Target:
    """A model with its caches, and the text that it chooses greedily after one token, one token a step."""

    def __init__(self) -> None:
        self.stack = Stack(SMALL)
        generator = torch.Generator().manual_seed(7)
        self.embed = torch.randn(VOCAB, CONFIG.hidden_size, generator=generator)
        self.head = torch.randn(CONFIG.hidden_size, VOCAB, generator=generator)
        # Logits by position too, or the text soon repeats one token.
        self.by_position = 8 * torch.randn(97, VOCAB, generator=generator)

    def __call__(self, ids: Tensor, metadata: Any, caches: Any) -> Tensor:
        hidden = self.stack(self.embed[ids], metadata, caches)
        return hidden @ self.head + self.by_position[metadata.positions % 97]

    def buffers(self, caches: Any, tokens: int) -> MetadataBuffers:
        return MetadataBuffers(
            max_num_batched_tokens=tokens,
            max_num_seqs=REQUESTS,
            max_model_len=MAX_SEQ_LEN,
            window=CONFIG.sliding_window,
            block_tables=caches.block_tables,
        )

    @torch.no_grad()
    def prefill(self, caches: Any, texts: Tensor, lengths: list[int]) -> None:
        """Run the first `lengths` tokens of each text."""
        ids = [texts[row, :length] for row, length in enumerate(lengths)]
        starts = [sum(lengths[:row]) for row in range(len(lengths) + 1)]
        buffers = self.buffers(caches, max(starts[-1], REQUESTS))
        buffers.load(starts, lengths, input_ids=torch.cat(ids))
        buffers.refresh(starts[-1])
        self(buffers.tensors["input_ids"][: starts[-1]], buffers.metadata(starts[-1]), caches.layers)

    @torch.no_grad()
    def texts(self, first: list[int], length: int) -> tuple[Tensor, Any]:
        """Return the greedy text of each request from its first token on, and the caches after all but its last."""
        caches = new_caches()
        buffers = self.buffers(caches, REQUESTS)
        rows = len(first)
        texts = [torch.tensor(first)]
        for step in range(length - 1):
            buffers.load(list(range(rows + 1)), [step + 1] * rows, input_ids=texts[-1])
            buffers.refresh(rows)
            logits = self(buffers.tensors["input_ids"][:rows], buffers.metadata(rows), caches.layers)
            texts.append(logits.argmax(-1))
        return torch.stack(texts, 1), caches

    def runner(self, caches: Any, source: Source, **options: Any) -> DecodeRunner:
        buffers = self.buffers(caches, REQUESTS * (source.num_drafts + 1))
        inputs = {"input_ids": buffers.tensors["input_ids"]}
        options = {"graphs": "standin", "debug": True, **options}
        runner = DecodeRunner(self, buffers, inputs=inputs, caches=caches.layers, drafts=source, **options)
        runner.warm_up()
        return runner


@pytest.fixture(scope="module")
def target() -> Target:
    return Target()


@pytest.fixture(scope="module")
def truth(target: Target) -> tuple[Tensor, Any]:
    texts, caches = target.texts([3, 1, 4], 190)
    assert len(texts[:, -100:].unique()) > 10
    return texts, caches


def kept_texts(tokens: Tensor, counts: Tensor) -> list[list[int]]:
    """Return the tokens of each request that a run keeps."""
    steps, rows = counts.shape
    return [[t for s in range(steps) for t in tokens[s, r, : counts[s, r]].tolist()] for r in range(rows)]


SOURCES: dict[str, Callable[[Tensor], Source]] = {
    "a pattern": lambda texts: Forced(texts, lambda lengths: lengths * 5 % 6, COUNT, VOCAB),
    "all right": lambda texts: Forced(texts, lambda lengths: torch.full_like(lengths, COUNT), COUNT, VOCAB),
    "all wrong": lambda texts: Wrong(texts, COUNT, VOCAB),
    "arbitrary": lambda texts: Arbitrary(COUNT, VOCAB),
    "one draft": lambda texts: Forced(texts, lambda lengths: lengths % 2, 1, VOCAB),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_a_run_with_drafts_decodes_the_text_of_plain_decode(
    kind: str, target: Target, truth: tuple[Tensor, Any]
) -> None:
    """Captured at length 0 in padded buckets, replayed at other lengths, which cross groups of 4 and 128."""
    texts, _ = truth
    caches, lengths = new_caches(), [5, 64, 124]
    target.prefill(caches, texts, lengths)
    runner = target.runner(caches, SOURCES[kind](texts))
    runner.drafting.load([int(texts[r, n]) for r, n in enumerate(lengths)], lengths)
    runner.draft()
    tokens, counts = (result.clone() for result in runner.run(6, num_reqs=3))
    more = runner.run(3, num_reqs=3)
    texts_kept = kept_texts(torch.cat((tokens, more[0])), torch.cat((counts, more[1])))
    for row, text in enumerate(texts_kept):
        begin = lengths[row] + 1
        assert text == texts[row, begin : begin + len(text)].tolist()
    statistics = runner.draft_statistics()
    assert (statistics.steps, statistics.tokens) == (27, sum(map(len, texts_kept)))
    if kind == "all right":
        assert statistics.accepted == (0, 0, 0, 0, 0, 27) and statistics.tokens_per_step == COUNT + 1
    if kind == "all wrong":
        assert statistics.accepted == (27, 0, 0, 0, 0, 0) and statistics.acceptance == (0.0,) * COUNT
    assert runner.statistics.captures == len(runner.buckets) + 1
    assert runner.statistics.replays == 10 and runner.statistics.uncaptured == 0


def test_no_step_makes_a_text_of_a_tensor(
    target: Target, truth: tuple[Tensor, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the text waits for it, and invalidates a capture without an error where its failure is caught."""
    texts, _ = truth
    written: list[str] = []
    monkeypatch.setattr(Tensor, "__repr__", lambda self, **_: written.append("a text") or "a tensor")
    runner = target.runner(new_caches(), SOURCES["a pattern"](texts))
    runner._run_of(runner.buckets.sizes[0])()
    runner.run(2, num_reqs=3)
    assert not written


def test_statistics_name_acceptance_by_position() -> None:
    statistics = DraftStatistics((2, 1, 1))
    assert (statistics.steps, statistics.tokens, statistics.tokens_per_step) == (4, 7, 1.75)
    assert statistics.acceptance == (0.5, 0.25)
    assert str(statistics) == "1.75 tokens a step over 4 steps; accepted by position: 0.50 0.25"
    assert str(DraftStatistics((0, 0))) == "nan tokens a step over 0 steps; accepted by position: nan"


def small_caches(count: int) -> PagedCaches:
    """Return caches of NaN with the smallest rings for steps with `count` drafts."""
    options = {"max_step_tokens": count + 1, "cache_format": ROWS}
    caches = PagedCaches(CONFIG, max_batch_size=REQUESTS, max_seq_len=MAX_SEQ_LEN, **options)
    poison(caches, [])
    return caches


class Verification:
    """A captured step of forced acceptance, and the plain decode that it is compared with."""

    def __init__(self, target: Target, count: int) -> None:
        self.target, self.count = target, count
        self.whole, self.plain, self.drafted = new_caches(), small_caches(count), small_caches(count)
        self.texts = torch.zeros(REQUESTS, MAX_SEQ_LEN, dtype=torch.int64)
        self.wanted = torch.zeros(REQUESTS, dtype=torch.int64)
        source = Forced(self.texts, lambda lengths: self.wanted[: len(lengths)], count, VOCAB)
        self.runner = target.runner(self.drafted, source, debug=False)
        self.buffers = target.buffers(self.plain, REQUESTS)

    @torch.no_grad()
    def decode(self, lengths: list[int], steps: int, caches: PagedCaches) -> None:
        """Decode greedily, one token a step, after `lengths` tokens and one more of each text."""
        for step in range(steps):
            fed = torch.stack([self.texts[row, n + step] for row, n in enumerate(lengths)])
            self.buffers.load(list(range(REQUESTS + 1)), [n + step + 1 for n in lengths], input_ids=fed)
            self.buffers.refresh(REQUESTS)
            logits = self.target(self.buffers.tensors["input_ids"], self.buffers.metadata(REQUESTS), caches.layers)
            for row, n in enumerate(lengths):
                self.texts[row, n + step + 1] = logits[row].argmax()

    def check(self, lengths: list[int], accepted: list[int]) -> None:
        """Verify from `lengths` tokens; compare with plain decode all that later tokens can read, and their choice."""
        self.texts.copy_(torch.randint(0, VOCAB, self.texts.shape))
        self.target.prefill(self.whole, self.texts, lengths)
        for row, length in enumerate(lengths):
            for caches in (self.plain, self.drafted):
                set_rows(caches, row, length, live_rows(self.whole, row, length))
        ends = [length + k + 1 for length, k in zip(lengths, accepted, strict=True)]
        want: list[dict[str, Tensor]] = [{} for _ in lengths]
        for step in range(self.count + 2):
            for row, end in enumerate(ends):
                if lengths[row] + step == end:
                    want[row] = live_rows(self.plain, row, end)
            self.decode([n + step for n in lengths], 1, self.plain)
        self.wanted.copy_(torch.tensor(accepted))
        drafting = self.runner.drafting
        poison(self.drafted, lengths)
        drafting.load([int(self.texts[row, n]) for row, n in enumerate(lengths)], lengths)
        self.runner.draft()
        tokens, counts = (result.clone() for result in self.runner.run(1, REQUESTS))
        assert counts[0].tolist() == [k + 1 for k in accepted]
        for row, (length, end) in enumerate(zip(lengths, ends, strict=True)):
            assert tokens[0, row, : end - length].tolist() == self.texts[row, length + 1 : end + 1].tolist()
            for name, rows in live_rows(self.drafted, row, end).items():
                torch.testing.assert_close(rows, want[row][name], atol=1e-4, rtol=0, msg=f"{name}, {length}, {end}")
        poison(self.drafted, ends)
        again, _ = self.runner.run(1, REQUESTS)
        for row, end in enumerate(ends):
            if end - lengths[row] <= self.count + 1:
                assert again[0, row, 0] == self.texts[row, end + 1], f"{lengths[row]}, {end}"


WHOLE = bool(os.environ.get("DSV4_LONG"))
"""Whether tests run all cases of a property, minutes long, in place of a sample."""


@pytest.mark.parametrize("count", [5, 4, 6, 1])
def test_fault_5_and_6_forced_acceptance_at_every_length_leaves_what_plain_decode_leaves(
    count: int, target: Target
) -> None:
    """Caches of the least size, with NaN in all rows that no later token may read, before and after the step."""
    rng = random.Random(count)
    cases = [(128 + length, k) for length in range(128) for k in range(count + 1)]
    cases += [(length, k) for length in (1, 2, 3, 4, 7, 8, 11, 12, 13, 126, 127) for k in range(count + 1)]
    rng.shuffle(cases)
    edges = [c for c in cases if 0 <= -(c[0] + 1) % 128 <= count]
    chosen = cases if WHOLE else [*edges[: 2 * REQUESTS], *cases[: 2 * REQUESTS]]
    chosen += chosen[: -len(chosen) % REQUESTS]
    verification = Verification(target, count)
    for begin in range(0, len(chosen), REQUESTS):
        lengths, accepted = zip(*chosen[begin : begin + REQUESTS], strict=True)
        verification.check(list(lengths), list(accepted))


def test_fault_10_the_batch_advances_once_a_step_and_replays_at_other_lengths(
    target: Target, truth: tuple[Tensor, Any]
) -> None:
    """Captured without requests, replayed twice at different lengths with different numbers of accepted drafts."""
    texts, _ = truth
    caches = new_caches()
    runner = target.runner(caches, Forced(texts, lambda lengths: lengths * 5 % 6, COUNT, VOCAB), buckets=(18, 36))
    for lengths in ([5, 120, 64], [123, 3, 160]):
        target.prefill(caches, texts, lengths)
        runner.drafting.load([int(texts[r, n]) for r, n in enumerate(lengths)], lengths)
        runner.draft()
        _, counts = runner.run(3, num_reqs=3)
        tensors = runner.buffers.tensors
        ends = [n + int(new) for n, new in zip(lengths, counts.sum(0), strict=True)]
        assert tensors["seq_lens"].tolist() == [*(end + COUNT + 1 for end in ends), 0, 0, 0]
        fed = tensors["input_ids"][:18].view(3, 6)
        assert fed[:, 0].tolist() == [int(texts[r, end]) for r, end in enumerate(ends)]
        assert len(set(counts.flatten().tolist())) > 2


def test_the_report_of_a_replay_groups_verification_acceptance_and_drafting(target: Target) -> None:
    runner = target.runner(new_caches(), Arbitrary(COUNT, VOCAB), buckets=(6,), debug=False)
    report = explain_replay(runner, 6)
    ops = {stage: {node.op for node in report.nodes if node.stage == stage} for stage in STAGES}
    assert [stage for stage in STAGES if not ops[stage]] == [] and {node.stage for node in report.nodes} == set(STAGES)
    assert "dsv4.sparse_mla_decode" in ops["verify"] and "dsv4.batch_metadata" in ops["verify"]
    assert ops["accept"] == {"dsv4.accept_drafts"} and "dsv4.advance" in ops["advance"]
    assert "TIME BY STAGE" in str(report) and {total.name for total in report.totals("stage")} == set(STAGES)


def test_an_empty_batch_changes_nothing_and_counts_nothing(target: Target) -> None:
    caches = new_caches()
    runner = target.runner(caches, Arbitrary(COUNT, VOCAB))
    before = [t.clone() for layer in caches.layers for t in layer.tensors().values()]
    runner.drafting.load([0, 0], [-1, -1])
    runner.draft()
    _, counts = runner.run(2, num_reqs=2)
    assert counts.tolist() == [[0, 0]] * 2 and runner.draft_statistics().steps == 0
    after = [t for layer in caches.layers for t in layer.tensors().values()]
    assert all(map(torch.equal, before, after))


def test_a_request_stops_where_its_next_drafts_have_no_room(target: Target, truth: tuple[Tensor, Any]) -> None:
    texts, _ = truth
    caches, lengths = new_caches(), [20, 20]
    target.prefill(caches, texts, lengths)
    runner = target.runner(caches, Forced(texts, lambda lengths: lengths % 6, COUNT, VOCAB))
    runner.drafting.load([int(texts[r, 20]) for r in range(2)], lengths, reserved=[40, 200])
    tokens, counts = runner.run(12, num_reqs=2)
    new = kept_texts(tokens, counts)
    assert all(new[row] == texts[row, 21 : 21 + len(new[row])].tolist() for row in range(2))
    overflow = runner.buffers.tensors["overflow"].tolist()[:2]
    assert overflow == [20 + len(new[0]), 0] and 34 < overflow[0] <= 40
    assert counts[-1].tolist()[0] == 0


def test_every_step_verifies_with_logits_of_drafts_if_there_are_any(target: Target) -> None:
    """The first steps too, or what follows the logits of a step is compiled once for steps without them."""

    class Noted(Biased):
        def accept_and_draft(self, *args: Any) -> Any:
            kept.append(args[-1].draft_logits is not None)
            return accept_and_draft(self, *args)

    kept: list[bool] = []
    target.runner(new_caches(), Noted(COUNT, VOCAB), buckets=[COUNT + 1])
    assert kept == [True] * 4


def test_a_request_samples_alike_in_any_row_and_company(target: Target, truth: tuple[Tensor, Any]) -> None:
    texts, _ = truth
    numbers = torch.tensor([[20.0, 12.0, 0.9, 0.0]], dtype=torch.float64)

    def sample(rows: list[int], row: int) -> list[int]:
        caches = new_caches()
        target.prefill(caches, texts[:1].expand(len(rows), -1), rows)
        runner = target.runner(caches, Biased(COUNT, VOCAB))
        options = {"numbers": numbers.expand(len(rows), -1), "seeds": [7 if n == row else n for n in range(len(rows))]}
        runner.drafting.load([int(texts[0, n]) for n in rows], rows, **options)
        runner.draft()
        return kept_texts(*runner.run(8, num_reqs=len(rows)))[row]

    alone = sample([30], 0)
    assert sample([9, 140, 30, 64], 2)[: len(alone)] == alone
    assert len(set(alone)) > 5


def test_logits_of_nan_end_a_request_with_no_token(target: Target, truth: tuple[Tensor, Any]) -> None:
    texts, _ = truth
    caches, lengths = new_caches(), [20, 30]
    target.prefill(caches, texts, lengths)
    runner = target.runner(caches, Forced(texts, lambda lengths: torch.full_like(lengths, 5), COUNT, VOCAB))
    runner.drafting.load([int(texts[r, n]) for r, n in enumerate(lengths)], lengths)
    caches.layers[0].window[caches.block_tables.window[1, 0]].fill_(math.nan)
    tokens, counts = runner.run(1, num_reqs=2)
    assert counts.tolist() == [[1, 1]] and tokens[0, 1, 0] == -1 and tokens[0, 0, 0] == texts[0, 21]


MISUSE: dict[str, tuple[str, str, Callable[[Target], Any]]] = {
    "with a sampler": ("E201", "sampler='greedy'", lambda t: t.runner(new_caches(), Arbitrary(), sampler="greedy")),
    "other tokens_each": ("E201", "tokens_each=2", lambda t: t.runner(new_caches(), Arbitrary(), tokens_each=2)),
    "no source": ("E201", "drafts=5", lambda t: DecodeRunner(t, t.buffers(new_caches(), 36), inputs={}, drafts=5)),
    "a step": ("E201", "step of a runner with drafts", lambda t: t.runner(new_caches(), Arbitrary()).step(6)),
    "statistics without drafts": (
        "E201",
        "without drafts",
        lambda t: DecodeRunner(t, t.buffers(new_caches(), 36), inputs={}, graphs="standin").draft_statistics(),
    ),
    "buffers too small": (
        "E204",
        "6 requests of 6 tokens",
        lambda t: DecodeRunner(t, t.buffers(new_caches(), 30), inputs={}, graphs="standin", drafts=Arbitrary()),
    ),
}


@pytest.mark.parametrize("case", MISUSE)
def test_misuse_raises_a_code_with_what_was_got(case: str, target: Target) -> None:
    code, got, call = MISUSE[case]
    with pytest.raises(DSV4Error) as caught:
        call(target)
    assert caught.value.code == code and got in caught.value.got


LOADS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "anchors": ("1 anchors and 2 lengths", ([1], [3, 3]), {}),
    "an anchor of -1": ("anchors=[1, -1]", ([1, -1], [3, 3]), {}),
    "one seed": ("1 seeds", ([1, 1], [3, 3]), {"seeds": [4]}),
    "a negative seed": ("seeds=[4, -1]", ([1, 1], [3, 3]), {"seeds": [4, -1]}),
    "a large seed": ("seeds=", ([1, 1], [3, 3]), {"seeds": [4, 2**63]}),
    "numbers of one": ("numbers=", ([1, 1], [3, 3]), {"numbers": torch.zeros(1, 4)}),
    "three numbers": ("numbers=", ([1, 1], [3, 3]), {"numbers": torch.zeros(2, 3)}),
    "a list": ("numbers=[[0, 0, 1, 0]", ([1, 1], [3, 3]), {"numbers": [[0, 0, 1, 0]] * 2}),
    "reserved": ("1 reserved", ([1, 1], [3, 3]), {"reserved": [90]}),
}


def test_a_load_that_is_refused_leaves_the_batch_as_it_was(target: Target) -> None:
    runner = target.runner(new_caches(), Arbitrary(COUNT, VOCAB))
    runner.drafting.load([5, 6], [4, -1], seeds=[8, 9])
    held = {**runner.drafting.tensors(), **runner.buffers.tensors}
    before = {name: tensor.clone() for name, tensor in held.items()}
    for got, args, options in LOADS.values():
        with pytest.raises(DSV4Error, match="E201") as caught:
            runner.drafting.load(*args, **options)
        assert got in caught.value.got
    assert all(torch.equal(tensor, before[name]) for name, tensor in held.items())
    with pytest.raises(DSV4Error, match=f"a run of {REQUESTS + 1} requests"):
        runner.run(1, REQUESTS + 1)
