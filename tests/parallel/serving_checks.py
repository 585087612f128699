"""Not a test: a `RunningBatch` of a split model, which each rank checks in a separate process."""

from __future__ import annotations

import datetime
import functools
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from dsv4_compile import hf
from dsv4_compile.errors import DSV4Error
from dsv4_compile.hf.tiny import tiny_model
from dsv4_compile.parallel import Ranks, agreement, gather_objects
from dsv4_compile.parallel.collectives import first_object
from tests.hf.serving import SAMPLED, prompt
from tests.parallel.checks import MODEL, SIZES, divided, fails, generated, tokens, whole
from tests.parallel.draft_checks import KINDS, drafting
from tests.support.draft_sources import Known

BATCH: dict[str, Any] = {"slots": 3, "prefill_chunk": 32}
LENGTHS = 5, 1, 70, 20, 3, 40, 9, 33


def options_of(i: int) -> dict[str, Any]:
    """Return options of request `i`; every third one samples, with a seed of any size."""
    sampled = {**SAMPLED, "seed": i + 10**5000 * (i % 2)} if i % 3 == 0 else {}
    return {"max_new_tokens": 4 + i, **sampled}


def texts(batch: Any, which: Sequence[int] = range(len(LENGTHS))) -> list[list[int]]:
    requests = [batch.submit(prompt(LENGTHS[i], LENGTHS[i]), **options_of(i)) for i in which]
    batch.run()
    assert all(request.state == "length" for request in requests), requests
    return [request.tokens for request in requests]


def lead(mesh: Any, run: Callable[[Any], Any], model: Any = None, **options: Any) -> Any:
    """Return what `run(batch)` returns on rank 0 while the others follow; all ranks have the same tokens and caches."""
    with hf.RunningBatch(divided(mesh) if model is None else model, **BATCH | options) as batch:
        result = run(batch) if mesh.get_rank() == 0 else batch.serve()
    cached = [tensor for layer in batch.caches for tensor in layer.tensors().values()]
    states = gather_objects((batch._ranks._checksum, agreement.digest(*cached), batch.running), Ranks.of(mesh))
    assert all(state == (*states[0][:2], []) for state in states), states
    return first_object(result, Ranks.of(mesh))


def refused(call: Callable[[], object], *words: str, code: str = "E208") -> None:
    try:
        call()
    except DSV4Error as fault:
        assert fault.code == code and all(word in str(fault) for word in words), fault
        return
    raise AssertionError(f"no {code} with {words}")


@functools.cache
def texts_of_whole(mesh: Any) -> list[list[int]]:
    on_rank_0 = mesh.get_rank() == 0
    wanted: list[list[int]] = first_object(
        texts(hf.RunningBatch(whole(), **BATCH)) if on_rank_0 else None, Ranks.of(mesh)
    )
    return wanted


def requests_get_the_text_of_the_whole_model(mesh: Any) -> None:
    want = texts_of_whole(mesh)
    assert len(set(map(tuple, want))) == len(want)
    assert lead(mesh, texts) == want
    assert lead(mesh, texts, graphs="standin", prefill_chunk=16, slots=2) == want

    def alone(batch: Any) -> list[list[int]]:
        return [list(batch.submit(prompt(n, n), **options_of(i))) for i, n in enumerate(LENGTHS[:4])]

    with hf.unchanged(divided(mesh)):
        assert lead(mesh, alone, slots=1) == want[:4]
    assert torch.equal(generated(divided(mesh), tokens(2, 9)), generated(divided(mesh), tokens(2, 9)))


def requests_with_drafts_get_their_text_on_all_ranks(mesh: Any) -> None:
    want = texts_of_whole(mesh)

    def drafted(batch: Any, which: Sequence[int] = (7, 1, 3, 4)) -> list[list[int]]:
        got = texts(batch, which)
        assert batch.draft_statistics.steps > 1
        return got

    for kind in KINDS:
        greedy, other, sampled, last = lead(mesh, drafted, drafting(mesh, kind))
        assert [greedy, other, last] == [want[7], want[1], want[4]] and sampled != want[3]
        assert lead(mesh, partial(drafted, which=[3]), drafting(mesh, kind), graphs="standin") == [sampled]
    assert lead(mesh, partial(texts, which=[3]), drafting(mesh, "mtp"), drafts=False) == [want[3]]

    def accepted(batch: Any) -> list[Any]:
        return [texts(batch), batch.draft_statistics.tokens_per_step]

    model = divided(mesh)
    try:
        model.__dict__["dsv4_drafts"] = Known([prompt(n, n) + text for n, text in zip(LENGTHS, want, strict=True)])
        got, tokens_per_step = lead(mesh, accepted)
    finally:
        model.__dict__["dsv4_drafts"] = None
    assert [text for i, text in enumerate(got) if i % 3] == [text for i, text in enumerate(want) if i % 3]
    assert tokens_per_step > 1.5


def callers_on_rank_0_stream_cancel_and_fail_alone(mesh: Any) -> None:
    want = texts_of_whole(mesh)

    def run(batch: Any) -> list[Any]:
        refused(lambda: batch.submit([600], max_new_tokens=1), code="E201")
        refused(lambda: batch.submit([1] * 500, max_new_tokens=1), code="E204")
        assert batch.step() == []  # nothing is sent
        stopped = batch.submit(prompt(9, 9), **options_of(6) | {"temperature": 0.0})
        first = next(iter(stopped))
        long = batch.submit(prompt(70, 70), max_new_tokens=40)
        in_callback: list[int] = []

        def call(token: int) -> None:
            in_callback.append(token)
            if len(in_callback) == 2:
                raise KeyError(token)

        failing = batch.submit(prompt(1, 1), max_new_tokens=8, on_token=call)
        waiting = batch.submit(prompt(20, 20), **options_of(3))
        other = batch.submit(prompt(5, 5), **options_of(0))
        waiting.cancel()
        for _ in range(4):
            try:
                batch.step()
            except KeyError:
                in_callback.append(-1)
        long.cancel()
        thread = threading.Thread(target=lambda: batch.submit(prompt(1, 1), **options_of(1)))
        thread.start()
        thread.join()
        batch.run()
        assert (failing.state, long.state, waiting.state) == ("cancelled",) * 3 and in_callback[2] == -1
        assert stopped.tokens[0] == first
        return [other.tokens, failing.tokens, stopped.state]

    assert lead(mesh, run) == [want[0], want[1][:2], "length"]


def a_batch_is_led_by_rank_0_alone(mesh: Any) -> None:
    model = divided(mesh)
    batch = hf.RunningBatch(model, **BATCH)
    if mesh.get_rank() == 0:
        refused(batch.serve, "on rank 0")
        assert len(batch.submit(prompt(9), max_new_tokens=2).tokens) == 0
        batch.run()
        for call in (
            lambda: generated(model, tokens(2, 9)),
            lambda: model(tokens(1, 1)),
            lambda: model(tokens(1, 5)),
            lambda: hf.RunningBatch(model, slots=1),
            lambda: hf.convert(tiny_model(**MODEL), **SIZES, mesh=mesh),
            torch.distributed.barrier,
        ):
            refused(call, "follow a RunningBatch")
        request = batch.submit(prompt(9), max_new_tokens=2)
        batch.run()
        assert request.state == "length"
        waiting = batch.submit(prompt(9), max_new_tokens=2)
        batch.close()
        assert waiting.state == "cancelled" and batch.idle
    else:
        for refusal in (
            lambda: batch.submit([1], max_new_tokens=1),
            batch.step,
            batch.run,
        ):
            refused(refusal, f"on rank {mesh.get_rank()} of {mesh.size()}", "batch.serve()")
        batch.serve()
        batch.serve()  # has nothing to do
    batch.close()
    batch.close()
    if mesh.get_rank() == 0:
        for call in (lambda: batch.submit([1], max_new_tokens=1), batch.step, batch.run):
            refused(call, "was closed")
    try:
        with hf.RunningBatch(model, **BATCH) as batch:
            if mesh.get_rank() == 0:
                next(iter(batch.submit(prompt(9), max_new_tokens=5)))
                raise KeyError("of the caller")
            batch.serve()
    except KeyError:
        assert mesh.get_rank() == 0 and batch.idle
    batch = hf.RunningBatch(model, **BATCH)
    if mesh.get_rank() == 0:
        list(batch.submit(prompt(9), max_new_tokens=2))
        del batch, request, waiting  # nobody closes it
        gc.collect()
    else:
        batch.serve()
    unsplit = hf.RunningBatch(whole(), slots=1)
    refused(unsplit.serve, "whole model")
    with unsplit:
        request = unsplit.submit(prompt(9), max_new_tokens=5, on_token=lambda _: unsplit.close())
        unsplit.step()
    assert request.state == "cancelled" and len(request.tokens) == 1
    torch.distributed.barrier()


def batches_that_differ_are_made_on_no_rank(mesh: Any) -> None:
    odd = mesh.get_rank() == mesh.size() - 1
    model = divided(mesh)
    for options, words in (
        ({"slots": 4}, ("slots = ", f"4 on rank {mesh.size() - 1}")),
        ({"prefill_chunk": 16}, ("prefill_chunk",)),
        ({"max_seq_len": 64}, ("max_seq_len",)),
        ({"graphs": "standin"}, ("graphs",)),
        ({"slots": 0}, ("rejected", "E204")),
        ({"drafts": True}, ("rejected", "drafts")),
        ({"backend": "nonsense"}, ("rejected", "E301")),
    ):
        with fails("E702", "RunningBatch", *words):
            hf.RunningBatch(model, **BATCH | (options if odd else {}))
    refused(lambda: hf.RunningBatch(model, slots=-1), code="E204")
    with fails("E702", "call = "):
        generated(model, tokens(2, 9)) if odd else hf.RunningBatch(model, **BATCH)
    assert len(lead(mesh, texts)) == len(LENGTHS)  # what has failed leaves the ranks in step


def a_step_that_a_rank_cannot_run_is_launched_on_none(mesh: Any) -> None:
    want, model, odd = texts_of_whole(mesh), divided(mesh), mesh.get_rank() == 1
    norm = model.model.layers[0].input_layernorm
    before = norm.weight
    with hf.RunningBatch(model, **BATCH) as batch:
        if mesh.get_rank() == 0:
            waiting = batch.submit(prompt(20, 20), **options_of(3))
            for words in (("rejected", "ZeroDivisionError", "on rank 1"), ("bits of weights", "on rank 1")):
                refused(batch.step, *words, code="E702")
                assert waiting.state == "waiting" and not batch.running
            model.train()
            refused(batch.step, "training mode")
            model.eval()
            batch.run()
            assert waiting.tokens == want[3]
        else:
            prepare, calls = batch._steps.prepare, iter(range(100))

            def differing(joins: bool) -> None:
                number = next(calls)
                if odd and number == 0:
                    raise ZeroDivisionError
                if odd:
                    norm.weight = torch.nn.Parameter(before + 1, False) if number == 1 else before
                prepare(joins)

            batch._steps.prepare = differing
            batch.serve()
            assert next(calls) > 2


def an_idle_batch_outlives_the_timeout_of_its_group(mesh: Any) -> None:
    from torch.distributed.device_mesh import DeviceMesh

    group = torch.distributed.new_group(timeout=datetime.timedelta(seconds=2))
    model = hf.convert(tiny_model(**MODEL), **SIZES, mesh=DeviceMesh.from_group(group, "cpu"))
    torch.distributed.barrier()
    with hf.RunningBatch(model, **BATCH) as batch:
        if mesh.get_rank() == 0:
            first = list(batch.submit(prompt(9), max_new_tokens=3))
            time.sleep(3)
            assert list(batch.submit(prompt(9), max_new_tokens=3)) == first
        else:
            batch.serve()


def rank_0_dies_in_a_step_and_the_others_say_so(mesh: Any) -> None:
    """The last check of its world."""
    model, count = hf.convert(tiny_model(**MODEL), **SIZES, mesh=mesh), iter(range(100))
    batch = hf.RunningBatch(model, **BATCH)
    if mesh.get_rank() == 0:
        model.model.layers[1].mlp.register_forward_pre_hook(
            lambda *_: os.kill(os.getpid(), signal.SIGKILL) if next(count) == 2 else None
        )
        batch.submit(prompt(9), max_new_tokens=9)
        batch.run()
    refused(batch.serve, "rank 0 (process", "ended", code="E703")
