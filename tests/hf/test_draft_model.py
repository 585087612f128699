"""Tests of draft layers: logits against float32 formulas, and the rows that they read and write."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from dsv4_compile import DeepseekV4Config
from dsv4_compile.cache import CacheFormat
from dsv4_compile.hf.model.draft_caches import DraftCaches
from dsv4_compile.hf.model.draft_settings import stage_config
from dsv4_compile.hf.tiny import tiny_config
from tests.hf.drafting import NOISE, SIZE, N, W, close, formulas, inject, propose, spoil, taps_of, tokens_of
from tests.hf.small import random_ids

# Logits.


@pytest.mark.parametrize("length", [1, 2, W - 1, W, W + 1, 101])
def test_dspark_hidden_states_and_logits_are_those_of_the_formulas(dspark: Any, length: int) -> None:
    """Context of 0 to W rows; drafted token by token, each biased by the one before."""
    spoil(dspark)
    taps, anchor, want = taps_of(dspark, length), 11, formulas(dspark)
    inject(dspark, taps, 0, request=2)
    drafts, logits = propose(dspark, [anchor], [length], requests=torch.tensor([2]))
    hidden, base = want.dspark(taps, anchor, NOISE, N)
    for number in range(N):
        before = [anchor, *drafts[0, :number].tolist()]
        close(logits[0, number], want.markov(base[number : number + 1], before[-1:])[0])
        assert drafts[0, number] == logits[0, number].argmax()
    model = dspark.dsv4_drafts
    with torch.no_grad():
        streams = model.block(torch.tensor([anchor]), torch.tensor([length]), torch.tensor([2]))
        close(model._logits(streams)[0], base)
        w1, proj = (want.w[f"mtp.1.{name}.weight"] for name in ("markov_head.markov_w1", "confidence_head.proj"))
        pairs = torch.cat((hidden, w1[[anchor, *drafts[0, :-1].tolist()]]), 1)
        close(model.confidence(streams, torch.tensor([anchor]), drafts)[0], pairs @ proj[0])


def test_dspark_at_every_length_of_a_growing_request(dspark: Any) -> None:
    """Every place in the ring: rows of a block lie where context rows of later positions go."""
    spoil(dspark)
    taps, want = taps_of(dspark, 4 * W + 8), formulas(dspark)
    length = 0
    for step in range(26):
        new = min(1 + step % 6, len(taps) - length)
        inject(dspark, taps[length : length + new], length, request=1)
        length += new
        _, logits = propose(dspark, [-1, step], [0, length])
        if step % 5 == 0:
            _, base = want.dspark(taps[:length], step, NOISE, N)
            close(logits[1, 0], want.markov(base[:1], [step])[0])


@pytest.mark.parametrize("length", [1, 2, W - 1, W, W + 1, 75])
def test_mtp_logits_are_those_of_the_formulas(mtp: Any, length: int) -> None:
    """Each draft feeds the layer's own streams, not those of its head, and the token before."""
    spoil(mtp)
    taps, tokens = taps_of(mtp, length), random_ids(length)
    inject(mtp, taps, 0, 3, tokens)
    drafts, logits = propose(mtp, [int(tokens[-1])], [length], requests=torch.tensor([3]))
    want = formulas(mtp).mtp(taps.view(length, 4, SIZE), tokens.tolist(), 3)
    close(logits[0], want)
    assert torch.equal(drafts[0], want.argmax(1))


def test_mtp_rows_of_drafts_are_replaced_by_those_of_the_target(mtp: Any) -> None:
    """After drafts, a verify step keeps 2 of 4 tokens: their rows come from the target's streams and true tokens."""
    spoil(mtp)
    taps, tokens = taps_of(mtp, 44), random_ids(44)
    inject(mtp, taps[:40], 0, 0, tokens[:40])
    propose(mtp, [int(tokens[39])], [40])
    rejected = torch.cat((tokens[40:42], torch.tensor([-1, -1])))
    inject(mtp, taps[40:], 40, 0, rejected, num_new=torch.tensor([2], dtype=torch.int32))
    _, logits = propose(mtp, [int(tokens[41])], [42])
    close(logits[0], formulas(mtp).mtp(taps[:42].view(42, 4, SIZE), tokens[:42].tolist(), 3))


# What a row of a block depends on.


def test_a_later_noise_embedding_changes_the_first_row(dspark: Any) -> None:
    taps, want = taps_of(dspark, 20), formulas(dspark)
    noises = want.embed[[NOISE] * (N - 1)].clone()
    _, base = want.dspark(taps, 3, NOISE, N, noises)
    noises[-1] += torch.randn(SIZE)
    _, changed = want.dspark(taps, 3, NOISE, N, noises)
    assert (base[0] - changed[0]).abs().max() > 1e-3
    other = copy.copy(dspark.dsv4_drafts.settings)._replace(noise_token=9)
    inject(dspark, taps, 0, 0)
    first = propose(dspark, [3], [20])[1][0, 0]
    drafts = dspark.dsv4_drafts
    before, drafts.settings = drafts.settings, other
    try:
        assert (propose(dspark, [3], [20])[1][0, 0] - first).abs().max() > 1e-3
    finally:
        drafts.settings = before


@torch.no_grad()
def test_the_first_draft_changes_the_second_logits_only_through_w1(dspark: Any) -> None:
    inject(dspark, taps_of(dspark, 20), 0, 0)
    drafts = dspark.dsv4_drafts
    streams = drafts.block(torch.tensor([3]), torch.tensor([20]))
    base = drafts._logits(streams)[0]
    chosen, logits = propose(dspark, [3], [20])
    bias = drafts.markov_w1[chosen[0, :-1]] @ drafts.markov_w2.t()
    close(logits[0, 1:] - base[1:], bias)
    assert not torch.equal(bias[0], bias[1])


# Rows of requests.


def test_drafts_belong_to_requests_and_not_to_rows_of_the_batch(dspark: Any, mtp: Any) -> None:
    """Requests of different lengths, in other orders, with padding between them, and a slot that is used again."""
    for model in (dspark, mtp):
        spoil(model)
        lengths, anchors = [9, 40, 70], [1, 2, 3]
        taps = [taps_of(model, length) for length in lengths]
        ids = [random_ids(length) for length in lengths]
        for request, (rows, tokens) in enumerate(zip(taps, ids, strict=True)):
            inject(model, rows, 0, request, tokens)
        alone = [propose(model, [anchors[r]], [lengths[r]], requests=torch.tensor([r])) for r in range(3)]
        order = [2, 0, 1]
        together = propose(
            model,
            [*(anchors[r] for r in order), -1],
            [*(lengths[r] for r in order), 0],
            requests=torch.tensor([*order, 0]),
        )
        for row, request in enumerate(order):
            close(together[1][row], alone[request][1][0])
            assert torch.equal(together[0][row], alone[request][0][0])
        assert together[0][3].eq(-1).all()
        inject(model, taps[1], 0, 2, ids[1])  # the slot of a request that has ended
        close(propose(model, [2], [40], requests=torch.tensor([2]))[1], alone[1][1])


@pytest.mark.parametrize("chunks", [(1, 1, 1, 1), (3, 2, 4), (7, 33, 1, 2), (64,), (65, 3), (130,)])
def test_prompts_in_odd_chunks_leave_the_rows_of_a_whole_prompt(dspark: Any, mtp: Any, chunks: tuple[int, ...]) -> None:
    """Chunks below N + 1 too, and drafts between chunks: their rows are overwritten."""
    for model in (dspark, mtp):
        length = sum(chunks)
        taps, ids = taps_of(model, length), random_ids(length)
        spoil(model)
        inject(model, taps, 0, 0, ids)
        want = propose(model, [int(ids[-1])], [length])
        spoil(model)
        start = 0
        for chunk in chunks:
            inject(model, taps[start : start + chunk], start, 1, ids[start : start + chunk])
            start += chunk
            got = propose(model, [-1, int(ids[start - 1])], [0, start])
        close(got[1][1], want[1][0])


def test_mtp_needs_the_token_after_a_prompt_when_it_drafts(mtp: Any) -> None:
    """It is sampled after the prompt's rows were written, the last one with any token."""
    taps, ids = taps_of(mtp, 21), random_ids(21)
    inject(mtp, taps, 0, 0, torch.cat((ids[:-1], torch.tensor([-1]))))
    _, logits = propose(mtp, [int(ids[-1])], [21])
    close(logits[0], formulas(mtp).mtp(taps.view(21, 4, SIZE), ids.tolist(), 3))


def test_several_requests_in_one_prefill(dspark: Any, mtp: Any) -> None:
    """Requests one after the other, padding at the end; each keeps its last rows."""
    for model in (dspark, mtp):
        lengths = [50, 3]
        taps, ids = taps_of(model, 60), random_ids(60)
        spoil(model)
        inject(model, taps[:50], 0, 0, ids[:50])
        inject(model, taps[50:53], 0, 1, ids[50:53])
        want = propose(model, [4, 5], lengths)
        spoil(model)
        positions = [*range(50), *range(3), *[0] * 7]
        metadata = tokens_of(positions, [0] * 50 + [1] * 3 + [0] * 7, [True] * 53 + [False] * 7)
        with torch.no_grad():
            model.dsv4_drafts.inject(taps, metadata, ids)
        close(propose(model, [4, 5], lengths)[1], want[1])


@pytest.mark.parametrize("kept", range(1, N + 2))
def test_rejected_rows_are_not_written(dspark: Any, kept: int) -> None:
    """After a step of N + 1 tokens that keeps `kept`, rows of the others leave the caches as they are."""
    taps = taps_of(dspark, 40 + N + 1)
    spoil(dspark)
    inject(dspark, taps[:40], 0, 0)
    before = {name: tensor.clone() for name, tensor in dspark.dsv4_drafts.caches.tensors().items()}
    inject(dspark, taps[40:], 40, 0, num_new=torch.tensor([kept], dtype=torch.int32))
    ring = dspark.dsv4_drafts.caches.ring
    for name, tensor in dspark.dsv4_drafts.caches.tensors().items():
        rows, old = tensor.flatten(0, 1)[:ring], before[name].flatten(0, 1)[:ring]
        written = [i for i in range(ring) if not torch.equal(rows[i].nan_to_num(), old[i].nan_to_num())]
        assert written == list(range(40, 40 + kept))


def test_padding_writes_nothing_and_drafts_nothing(dspark: Any) -> None:
    before = {name: tensor.clone() for name, tensor in dspark.dsv4_drafts.caches.tensors().items()}
    drafts, _ = propose(dspark, [-1, 5, -1], [9, 0, 0])
    assert drafts.eq(-1).all()
    with torch.no_grad():
        rows = tokens_of([0] * 6, [0] * 6, [False] * 6)
        dspark.dsv4_drafts.inject(taps_of(dspark, 6), rows, None, torch.tensor([0], dtype=torch.int32))
    for name, tensor in dspark.dsv4_drafts.caches.tensors().items():
        assert torch.equal(tensor.nan_to_num(), before[name].nan_to_num())


def test_the_ring_holds_a_window_and_a_step() -> None:
    """Depths 4, 5 and 6 with the window of the real model; index rows are padded to whole blocks."""
    for depth in (4, 5, 6):
        config = dspark_config(sliding_window=128)
        formats = dsv4_format()
        caches = DraftCaches(config, formats, max_batch_size=2, step_tokens=depth + 1)
        assert caches.ring >= 128 + depth and caches.ring % 64 == 0
        keep = torch.tensor([True, False])
        for length in (1, 127, 128, 129, 1000):
            first = torch.tensor([length, 0])
            block = caches.block(torch.tensor([1, 0]), first, keep, count=depth, context=128)
            seen = min(length, 128) + depth
            assert block.window.indices.shape == (2 * depth, 192)
            assert block.window.lens.tolist() == [seen] * depth + [0] * depth
            rows = block.window.indices[0, :seen].tolist()
            positions = range(length - min(length, 128), length + depth)
            assert rows == [caches.ring + p % caches.ring for p in positions] and len(set(rows)) == seen
            assert block.window.indices[0, seen:].eq(-1).all() and block.window.indices[depth:].eq(-1).all()
            assert torch.equal(block.window.indices[:depth], block.window.indices[:1].expand(depth, -1))


def dspark_config(**changes: Any) -> Any:
    return DeepseekV4Config.from_hf(stage_config(tiny_config(**changes), 3))


def dsv4_format() -> Any:
    return CacheFormat.resolve(model_dtype=torch.float32)
