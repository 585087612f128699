"""Tests of callers of a RunningBatch: they cancel, meddle, change the model, use threads, copy and fork."""

from __future__ import annotations

import copy
import math
import os
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dsv4_compile import DSV4Error, hf
from tests.hf.serving import assert_as_alone, damaged, good


@pytest.fixture(scope="module")
def model() -> Any:
    return damaged()


@pytest.fixture
def batch(model: Any) -> Any:
    return hf.RunningBatch(model, slots=3, prefill_chunk=32)


class TestCancel:
    """Cancelling, wherever it is called."""

    def test_another_batch_refuses_and_nothing_changes(self, model: Any, batch: Any) -> None:
        other = hf.RunningBatch(model, slots=3, prefill_chunk=32)
        mine, theirs = batch.submit(good(9), max_new_tokens=5), other.submit(good(9, 1), max_new_tokens=5)
        for step in (None, batch.step, other.step):
            if step:
                step()
            for wrong in (theirs, None, "x", 3, object(), good(9)):
                with pytest.raises(ValueError, match="E201"):
                    batch.cancel(wrong)
        other.run()
        batch.run()
        assert_as_alone(mine)
        assert_as_alone(theirs)

    def test_twice_waiting_and_after_the_end(self, batch: Any) -> None:
        requests = [batch.submit(good(9, i), max_new_tokens=3) for i in range(5)]
        for request in (requests[1], requests[1], requests[4]):
            request.cancel()
        batch.run()
        requests[0].cancel()
        assert [r.state for r in requests] == ["length", "cancelled", "length", "length", "cancelled"]
        assert_as_alone(requests[3])

    def test_in_callbacks_of_others_and_submitting_there(self, batch: Any) -> None:
        late: list[Any] = []

        def call(token: int) -> None:
            victim.cancel()
            waiting.cancel()
            if not late:
                late.append(batch.submit(good(9, 7), max_new_tokens=4))

        first = batch.submit(good(9), max_new_tokens=4, on_token=call)
        victim, third, waiting = (batch.submit(good(9, i), max_new_tokens=4) for i in (1, 2, 3))
        batch.run()
        assert (victim.state, len(victim.tokens), waiting.state) == ("cancelled", 1, "cancelled")
        for request in (first, third, late[0]):
            assert_as_alone(request)

    def test_in_the_middle_of_a_step_waits_for_its_end(self, batch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Cancel inside a decode step, as a second thread or a signal handler may."""
        requests = [batch.submit(good(9, i), max_new_tokens=5) for i in range(3)]
        batch.step()
        decode = batch._steps.decode

        def cancelling(*args: Any) -> None:
            requests[0].cancel()
            thread = threading.Thread(target=requests[1].cancel)
            thread.start()
            thread.join(30)
            decode(*args)

        with monkeypatch.context() as patch:
            patch.setattr(batch._steps, "decode", cancelling)
            batch.step()
        assert [request.state for request in requests] == ["cancelled", "cancelled", "decode"]
        batch.run()
        assert_as_alone(requests[2])


def test_a_second_thread_cannot_step_in_the_middle_but_may_submit(batch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = batch.submit(good(9), max_new_tokens=4)
    later: list[Any] = []
    codes: list[str] = []
    decode = batch._steps.decode

    def meddle() -> None:
        later.append(batch.submit(good(9, 1), max_new_tokens=4))
        for call in (batch.step, batch.run, lambda: next(iter(later[-1]))):
            try:
                call()
            except DSV4Error as fault:
                codes.append(fault.code)

    def meddled(*args: Any) -> None:
        thread = threading.Thread(target=meddle)
        thread.start()
        thread.join(30)
        decode(*args)

    monkeypatch.setattr(batch._steps, "decode", meddled)
    for _ in range(2):
        batch.step()
    monkeypatch.undo()
    batch.run()
    assert codes == ["E208"] * len(codes) and len(codes) >= 3
    for request in (first, *later):
        assert_as_alone(request)


def test_two_batches_of_one_model_and_an_abandoned_iteration(model: Any, batch: Any) -> None:
    other = hf.RunningBatch(model, slots=2, prefill_chunk=16)
    requests = [b.submit(good(n), max_new_tokens=6) for n in (40, 9) for b in (batch, other)]
    abandoned = iter(requests[0])
    next(abandoned)
    abandoned.close()  # type: ignore[attr-defined]
    while not (batch.idle and other.idle):
        batch.step()
        other.step()
    for request in requests:
        assert_as_alone(request)


def test_callers_cannot_change_what_a_batch_keeps(batch: Any) -> None:
    """A request whose tokens a caller empties would shift the tokens of others."""
    requests = [batch.submit(good(9, i), max_new_tokens=5) for i in range(3)]
    batch.step()
    requests[0].tokens.clear()
    requests[0].prompt.append(3)
    for name, value in (("tokens", []), ("state", "stop"), ("prompt", [1]), ("max_new_tokens", 2.5), ("error", None)):
        with pytest.raises(AttributeError):
            setattr(requests[0], name, value)
    with pytest.raises(AttributeError):
        requests[0].sampling.temperature = math.nan
    batch.run()
    for request in requests:
        assert_as_alone(request)


class TestModels:
    """A model that changes under its batch."""

    def test_a_step_in_training_mode_or_autocast_runs_nothing(self, batch: Any) -> None:
        request = batch.submit(good(9), max_new_tokens=5)
        batch.step()
        batch.model.train()
        with pytest.raises(ValueError, match=r"E208[\s\S]*training"):
            batch.step()
        batch.model.eval()
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match=r"E208[\s\S]*autocast"):
            batch.step()
        batch.run()
        assert_as_alone(request)

    def test_a_reverted_model_is_refused(self) -> None:
        model = damaged()
        batch = hf.RunningBatch(model, slots=2, prefill_chunk=32)
        batch.submit(good(9), max_new_tokens=5)
        batch.step()
        hf.revert(model)
        with pytest.raises(ValueError, match=r"E208[\s\S]*reverted"):
            batch.run()
        hf.convert(model, max_batch_size=1, max_seq_len=128)
        with pytest.raises(ValueError, match=r"E208[\s\S]*converted again"):
            batch.run()


COPIES: dict[str, Callable[[Any], Any]] = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": pickle.dumps}


@pytest.mark.parametrize("how", COPIES)
def test_batches_and_requests_are_not_copied(batch: Any, how: str) -> None:
    request = batch.submit(good(9), max_new_tokens=5)
    batch.step()
    for thing in (batch, request, {"inside": [request]} if how != "copy" else request):
        with pytest.raises(DSV4Error, match="E432"):
            COPIES[how](thing)
    batch.run()
    assert_as_alone(request)


def test_a_forked_process_cannot_use_a_batch(batch: Any) -> None:
    request = batch.submit(good(9), max_new_tokens=5)
    batch.step()
    read, write = os.pipe()
    child = os.fork()
    if not child:
        codes = []
        try:
            for call in (
                batch.step,
                request.cancel,
                lambda: list(request),
                lambda: batch.submit([1], max_new_tokens=1),
            ):
                try:
                    call()
                except DSV4Error as fault:
                    codes.append(fault.code)
            os.write(write, " ".join(codes).encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    assert os.read(read, 100) == b"E432 E432 E432 E432"
    batch.run()
    assert_as_alone(request)


class TestCaches:
    """Copies of a conversation's cache go on by themselves, or raise."""

    @pytest.mark.parametrize("how", ["deepcopy", "pickle"])
    @pytest.mark.parametrize("given", [True, False], ids=["new_cache", "none-given"])
    def test_a_deep_copy_continues_by_itself(self, model: Any, how: str, given: bool) -> None:
        ids = torch.tensor([good(30)])
        ends = [torch.tensor([good(5, i)]) for i in range(2)]
        want = [model(torch.cat([ids, end], 1)).logits[:, -1] for end in ends]
        cache = model(ids, past_key_values=hf.new_cache(model) if given else None).past_key_values
        copied = copy.deepcopy(cache) if how == "deepcopy" else pickle.loads(pickle.dumps(cache))
        got = [model(end, past_key_values=c).logits[:, -1] for end, c in zip(ends, (cache, copied), strict=True)]
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, atol=2e-4, rtol=0)

    def test_a_shallow_copy_would_share_memory(self, model: Any) -> None:
        for cache in (hf.new_cache(model), model(torch.tensor([good(3)])).past_key_values):
            with pytest.raises(DSV4Error, match="E432"):
                copy.copy(cache)
