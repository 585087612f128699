"""Every split of a sequence into steps gives the logits of one step, whatever caches held before.

`DSV4_LONG=1` runs 300 decode steps, and every chunk size.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from dsv4_compile.models.v41 import V41Caches, V41Format, V41Model, prefill
from dsv4_compile.models.v41.prefill import Prompt, chunks_of
from tests.models.v41.worked import token_ids

LONG = bool(os.environ.get("DSV4_LONG"))
STEPS = 300 if LONG else 30
TOKENS = 330 if LONG else 46
PLAIN = V41Format.plain()


def caches_of(model: V41Model, tokens: int = TOKENS, step: int | None = None, requests: int = 1) -> V41Caches:
    sizes = {"max_batch_size": requests, "max_seq_len": tokens, "max_step_tokens": step}
    return model.new_caches(cache_format=PLAIN, **sizes)


def poison(caches: V41Caches) -> V41Caches:
    """Fill all tensors, which a step may read only after it wrote them, with NaN or an id."""
    for tensor in caches.tensors():
        tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor.fill_(7)
    return caches


@torch.no_grad()
def run(model: V41Model, ids: Tensor, caches: V41Caches, chunks: list[int], request: int = 0) -> Tensor:
    """Logits of every token, in steps of these sizes."""
    logits, start = [], 0
    for size in chunks:
        piece = ids[start : start + size]
        positions = torch.arange(start, start + len(piece))
        logits.append(model(piece, positions, torch.full((len(piece),), request), caches))
        start += len(piece)
    assert start == len(ids)
    return torch.cat(logits)


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return token_ids(TOKENS)


@pytest.fixture(scope="module")
def full(worked: V41Model, ids: Tensor) -> Tensor:
    return run(worked, ids, caches_of(worked), [TOKENS])


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


def test_a_prefix_has_the_logits_of_the_whole(worked: V41Model, ids: Tensor, full: Tensor) -> None:
    for length in (1, 2, 13, 25):
        close(run(worked, ids[:length], poison(caches_of(worked)), [length]), full[:length])


@pytest.mark.parametrize("size", range(1, 60) if LONG else [3, 6, 17])
def test_chunks_of_any_size_give_the_logits_of_one_step(worked: V41Model, ids: Tensor, full: Tensor, size: int) -> None:
    """Chunks begin at even and odd positions, inside pairs, windows and candidate blocks; rings hold one chunk."""
    chunks = [size] * (TOKENS // size) + ([TOKENS % size] if TOKENS % size else [])
    close(run(worked, ids, poison(caches_of(worked, step=size)), chunks), full)


def test_decoding_a_token_at_a_time_is_the_prefill(worked: V41Model, ids: Tensor, full: Tensor) -> None:
    """From an odd position, over borders of ratio 2, of candidate blocks, and of selection, rings of one token."""
    prompt = TOKENS - STEPS
    chunks = [1] * TOKENS if LONG else [prompt - 1, *[1] * (STEPS + 1)]
    step = 1 if LONG else prompt
    close(run(worked, ids, poison(caches_of(worked, step=step)), chunks), full)


def test_caches_of_a_longer_request_leave_no_trace(worked: V41Model, ids: Tensor, full: Tensor) -> None:
    """A second request begins at position 0 where the first ended at an even and at an odd position."""
    for length in (20, 21):
        caches = caches_of(worked, step=TOKENS)
        run(worked, ids.flip(0)[:length], caches, [length])
        close(run(worked, ids[:19], caches, [1, 4, 13, 1]), full[:19])


def test_rejected_drafts_leave_no_trace(worked: V41Model, ids: Tensor, full: Tensor) -> None:
    """Steps of six tokens, one to five of them kept, at even and odd positions."""
    caches, wrong = poison(caches_of(worked, step=16)), ids.flip(0)
    start, counts = 16, [1, 3, 2, 5, 4]
    run(worked, ids[:start], caches, [start])
    for count in counts:
        tokens = torch.cat((ids[start : start + count], wrong[: 6 - count]))
        with torch.no_grad():
            logits = worked(tokens, torch.arange(start, start + 6), torch.zeros(6, dtype=torch.int64), caches)
        close(logits[:count], full[start : start + count])
        start += count


def test_requests_and_padding_of_a_step_do_not_mix(worked: V41Model, ids: Tensor, full: Tensor) -> None:
    """A chunk, a decode step and six tokens of three requests in one step, with padding between; one row is idle."""
    caches = poison(caches_of(worked, requests=4, step=20))
    starts, counts, rows = (0, 9, 14), (5, 1, 6), (3, 0, 2)
    for start, row in zip(starts, rows, strict=True):
        if start:
            run(worked, ids[:start], caches, [start], row)
    parts = [torch.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
    padding = torch.tensor([-1, -1])
    positions = torch.cat((parts[0], padding, parts[1], parts[2], padding))
    requests = torch.cat([torch.full((count,), row) for row, count in ((3, 5), (-1, 2), (0, 1), (2, 6), (-1, 2))])
    tokens = torch.where(positions >= 0, ids[positions.clamp_min(0)], 63)
    with torch.no_grad():
        logits = worked(tokens, positions, requests, caches)
    close(logits[positions >= 0], full[positions[positions >= 0]])
    assert all(bool(window.view(4, -1)[1].isnan().all()) for window in caches.windows), "an idle row is not written"


def test_a_position_beyond_the_caches_gives_nan(worked: V41Model, ids: Tensor) -> None:
    caches = caches_of(worked, 10)
    with torch.no_grad():
        logits = worked(ids[:2], torch.tensor([9, 10]), torch.zeros(2, dtype=torch.int64), caches)
    assert logits[0].isfinite().all() and logits[1].isnan().all()


def test_below_the_borders_of_selection_layers_are_dense(
    worked: V41Model, ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12 tokens at ratio 2, 6 at ratio 1: all entries are picked, so top-k may be anything larger."""
    short = ids[:6]
    want = run(worked, short, caches_of(worked), [6])
    for layer in worked.layers:
        monkeypatch.setattr(layer.attn, "topk", 60)
        monkeypatch.setattr(layer.attn, "blocks", 40)
    close(run(worked, short, caches_of(worked), [6]), want)


@pytest.mark.parametrize("mode", ["full", "tail"])
@pytest.mark.parametrize("chunk", [None, 7])
def test_the_tail_of_a_prompt_gives_exact_logits_and_windows(
    worked: V41Model, ids: Tensor, full: Tensor, mode: str, chunk: int | None
) -> None:
    """Layers after the last source run on 22 tokens; decoding goes on from their windows."""
    caches, length = poison(caches_of(worked, step=chunk)), TOKENS - 6
    close(prefill(worked, [ids[:length]], caches, chunk=chunk, mode=mode)[0], full[length - 1])
    for position in range(length, TOKENS):
        with torch.no_grad():
            logits = worked(ids[position : position + 1], torch.tensor([position]), torch.zeros(1).long(), caches)
        close(logits[0], full[position])


def test_the_exact_tail_is_as_short_as_it_can_be(worked: V41Model, ids: Tensor) -> None:
    """With one token less, the oldest window row of the last layer is wrong, and it alone."""

    def last_window(tail: int | None) -> Tensor:
        caches = caches_of(worked)
        [chunk] = chunks_of([Prompt(ids[:40], 0, 0)], 40, tail)
        with torch.no_grad():
            worked(chunk.ids, chunk.positions, chunk.requests, caches, tail=chunk.tail)
        return caches.windows[-1].view(-1, 64)[32:40]

    want, exact = last_window(None), worked.config.exact_tail
    assert exact == 22
    close(last_window(exact), want)
    shorter = last_window(exact - 1)
    close(shorter[1:], want[1:])
    assert (shorter[0] - want[0]).abs().max() > 2e-4


def test_replay_runs_the_window_alone_and_is_an_approximation(worked: V41Model, ids: Tensor, full: Tensor) -> None:
    """Windows begin at the first token of the tail; whatever caches held before it does not matter."""
    clean = prefill(worked, [ids[:40]], caches_of(worked), mode="replay")
    dirty = prefill(worked, [ids[:40]], poison(caches_of(worked, step=7)), mode="replay", chunk=7)
    close(dirty, clean)
    difference = (clean[0] - full[39]).abs().max()
    assert 1e-3 < difference < 1.0


def test_a_second_turn_continues_from_the_windows_of_the_first(worked: V41Model, ids: Tensor, full: Tensor) -> None:
    caches = poison(caches_of(worked))
    prefill(worked, [ids[:33]], caches)
    close(prefill(worked, [ids[33:46]], caches, starts=[33])[0], full[45])


def test_encoding_writes_what_a_step_of_all_layers_writes_up_to_the_last_source(worked: V41Model, ids: Tensor) -> None:
    """Later layers' windows stay as they are."""
    complete, encoded = caches_of(worked), poison(caches_of(worked))
    tokens = ids[:20], torch.arange(20), torch.zeros(20, dtype=torch.int64)
    with torch.no_grad():
        worked(*tokens, complete)
        worked.encode(*tokens, encoded)
    last = worked.config.last_source
    for got, want in zip(encoded.windows[: last + 1], complete.windows[: last + 1], strict=True):
        close(got.view(-1, 64)[:20], want.view(-1, 64)[:20])
    close(encoded.sources[last].entries.view(-1, 64)[:20], complete.sources[last].entries.view(-1, 64)[:20])
    assert all(bool(window.isnan().all()) for window in encoded.windows[last + 1 :])
