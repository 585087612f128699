"""Requests of a converted model in random company, against the same requests alone: logits bit for bit."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..errors import fail
from ..hf.model.causal_lm import CompilableForCausalLM
from ..hf.model.token_buckets import COMPILED_AS, CompiledAs
from ..hf.serving.running_batch import RunningBatch
from ..ops.common.invariance import STEP, STEP_TOKENS, watchers

PROMPTS = (1, 2, 5, 17, 33, 40, 64, 81)
"""Tokens of random requests."""
Calls = list[tuple[str, list[Tensor]]]
"""Batch-invariant calls in their order: op, and its results."""


def check_of(target: Any) -> Callable[..., int]:
    """Return the check of a converted model or a running batch, or raise E201."""
    if isinstance(target, RunningBatch):
        return check_running
    if isinstance(target, CompilableForCausalLM):
        return check_model
    fail("E201", got=f"{type(target).__name__}", rule="the target is a converted causal language model")


def check_model(
    model: CompilableForCausalLM,
    *,
    compositions: int,
    generator: torch.Generator,
    prompts: Sequence[Sequence[int]] | None = None,
) -> int:
    """Compare the logits of all tokens of random batches with those of the same requests alone.

    A batch has random requests in random rows, and gets their tokens in random chunks, padded on the left, the last of
    them one by one. A model that was compiled with "step" gets calls that this value makes a promise for. Returns the
    number of tokens that were compared.
    """
    compiled: CompiledAs | None = model.__dict__.get(COMPILED_AS)
    at_step = compiled is not None and compiled.batch_invariant == STEP
    with torch.no_grad():
        return _check_model(model, compositions, generator, prompts, STEP_TOKENS if at_step else sys.maxsize)


def _check_model(model: Any, compositions: int, generator: torch.Generator, prompts: Any, most_tokens: int) -> int:
    cache = model.model.dsv4_cache.paged
    device, most = model.model.dsv4_cache.seq_lens.device, min(cache.max_batch_size, most_tokens)
    requests = _requests(model, prompts, min(cache.max_seq_len, most_tokens), generator)
    alone = [model(request[None].to(device)).logits[0].clone() for request in requests]
    compared = 0
    for number in range(compositions):
        # Small batches are likelier, so that large ones, which take longest, are a part of all.
        size = 1 + int(torch.randint(1 + int(torch.randint(most, (), generator=generator)), (), generator=generator))
        members = torch.randint(len(requests), (size,), generator=generator).tolist()
        cuts = [_cuts(len(requests[i]), generator, most_tokens // size) for i in members]
        state, begins = None, [0] * size
        for call in range(max(map(len, cuts))):
            ends = [ends_of_row[min(call, len(ends_of_row) - 1)] for ends_of_row in cuts]
            width = max(end - begin for begin, end in zip(begins, ends, strict=True))
            ids = torch.zeros(size, width, dtype=torch.int64)
            mask = torch.zeros_like(ids)
            for row, (i, begin, end) in enumerate(zip(members, begins, ends, strict=True)):
                ids[row, width - (end - begin) :] = requests[i][begin:end]
                mask[row, width - (end - begin) :] = 1
            options: dict[str, Any] = {} if state is None else {"past_key_values": state}
            result = model(ids.to(device), attention_mask=mask.to(device), **options)
            state = result["cache"] if "cache" in result else result["past_key_values"]
            for row, (i, begin, end) in enumerate(zip(members, begins, ends, strict=True)):
                got, want = result.logits[row, width - (end - begin) :], alone[i][begin:end]
                if not torch.equal(got, want):
                    first = int((got != want).any(-1).to(torch.uint8).argmax())
                    where = f"composition {number}, call {call} of {size} rows of {width} tokens"
                    who = f"request {i} of {len(requests[i])} tokens in row {row}, its token {begin + first}"
                    cause = _first_op(model, requests, members, device) if call == 0 else ""
                    raise AssertionError(f"{where}: {who} has other logits than alone{cause}")
                compared += end - begin
            begins = ends
    return compared


def _requests(model: Any, prompts: Any, most: int, generator: torch.Generator) -> list[Tensor]:
    if prompts is not None:
        return [torch.as_tensor(prompt, dtype=torch.int64) for prompt in prompts]
    vocabulary = model.config.vocab_size
    return [torch.randint(vocabulary, (size,), generator=generator) for size in PROMPTS if size <= most]


def _cuts(length: int, generator: torch.Generator, longest: int) -> list[int]:
    """Return the ends of the chunks of a request: up to two random ones, a rest, and steps of one token.

    No chunk has more than `longest` tokens.
    """
    steps = int(torch.randint(min(length, 5), (), generator=generator))
    chunks = int(torch.randint(3, (), generator=generator))
    inner = torch.randint(1, max(2, length - steps), (chunks,), generator=generator).tolist()
    chunked = sorted({end for end in (*inner, length - steps) if 0 < end <= length - steps})
    ends = []
    for begin, end in pairwise((0, *chunked)):
        ends += [*range(begin + longest, end, longest), end]
    return ends + [length - steps + 1 + step for step in range(steps)]


@contextmanager
def recorded() -> Iterator[Calls]:
    """Record all batch-invariant calls in the block."""
    calls: Calls = []

    def watch(op: str, args: tuple[Any, ...], result: Any) -> None:
        tensors = [result] if isinstance(result, Tensor) else [] if result is None else list(result)
        calls.append((op, [x.clone() for x in tensors]))

    watchers.append(watch)
    try:
        yield calls
    finally:
        watchers.remove(watch)


def _first_op(model: Any, requests: list[Tensor], members: list[int], device: torch.device) -> str:
    """Return the first op with different rows, of all requests of a batch in one call each and together."""
    width = max(len(requests[i]) for i in members)
    ids, mask = (torch.zeros(len(members), width, dtype=torch.int64) for _ in range(2))
    for row, i in enumerate(members):
        ids[row, width - len(requests[i]) :], mask[row, width - len(requests[i]) :] = requests[i], 1
    with recorded() as together:
        model(ids.to(device), attention_mask=mask.to(device))
    if not together:
        return "; no op of it was compiled with dsv4.batch_invariant"
    for row, i in enumerate(members):
        with recorded() as alone_calls:
            model(requests[i][None].to(device))
        length = len(requests[i])
        for number, ((op, got), (name, want)) in enumerate(zip(together, alone_calls, strict=False)):
            if op != name:
                break
            for a, b in zip(got, want, strict=True):
                if a.shape[:1] == (ids.numel(),) and b.shape[:1] == (length,):
                    rows = a.view(len(members), width, *a.shape[1:])[row, width - length :]
                    if not torch.equal(rows.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)):
                        return f"; the first op with other rows is {op}, op {number} of {len(alone_calls)}"
    return ""


def check_running(
    batch: RunningBatch,
    *,
    compositions: int,
    generator: torch.Generator,
    max_new_tokens: int = 6,
    prompts: Sequence[Sequence[int]] | None = None,
) -> int:
    """Compare requests that join and leave a batch at random times with the same requests in it one by one.

    Tokens are compared, and without drafts the logits that they were chosen from. Every third request is sampled.
    Returns the number of tokens that were compared.
    """
    if not batch.idle:
        fail("E201", got="a RunningBatch with requests", rule="the batch is idle", fix="run it to its end")
    most = batch.max_seq_len - max_new_tokens
    known = [request.tolist() for request in _requests(batch.model, prompts, most, generator)]
    sampled: dict[str, Any] = {"temperature": 1.3, "top_k": 40, "top_p": 0.95}
    options: list[dict[str, Any]] = [
        (sampled if i % 3 == 2 else {}) | {"seed": i, "max_new_tokens": max_new_tokens} for i in range(len(known))
    ]
    with _logits_of(batch) as logits:
        alone = []
        for prompt, option in zip(known, options, strict=True):
            request = batch.submit(prompt, **option)
            batch.run()
            alone.append((list(request.tokens), logits.pop(id(request), [])))
        compared = 0
        for number in range(compositions):
            size = 1 + int(torch.randint(2 * batch.slots, (), generator=generator))
            members = torch.randint(len(known), (size,), generator=generator).tolist()
            running = []
            for i in members:
                running.append((i, batch.submit(known[i], **options[i])))
                for _ in range(int(torch.randint(3, (), generator=generator))):
                    batch.step()
            batch.run()
            for i, request in running:
                tokens, rows = list(request.tokens), logits.pop(id(request), [])
                for number_of_token, (got, want) in enumerate(zip(rows, alone[i][1], strict=True)):
                    if not torch.equal(got, want):
                        who = f"new token {number_of_token} of request {i}"
                        raise AssertionError(
                            f"composition {number} of {size} requests: {who} has other logits than alone"
                        )
                assert tokens == alone[i][0], f"composition {number}: request {i} got {tokens}, alone {alone[i][0]}"
                compared += len(tokens)
    return compared


@contextmanager
def _logits_of(batch: RunningBatch) -> Iterator[dict[int, list[Tensor]]]:
    """Record the logits that tokens of a batch are chosen from, by the id of their request."""
    rows: dict[int, list[Tensor]] = {}
    steps, choose = batch._steps, batch._steps._choose

    def recording(logits: Tensor, likeliest: Tensor, served: Any, places: Tensor, part: Any) -> None:
        if steps.drafts is None:
            for progress, row in zip(served, logits, strict=True):
                rows.setdefault(id(progress.request), []).append(row.clone())
        choose(logits, likeliest, served, places, part)

    steps.__dict__["_choose"] = recording
    try:
        yield rows
    finally:
        del steps.__dict__["_choose"]
