"""Tests that a request which fails, raises or is interrupted ends alone, and that others get their tokens."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from dsv4_compile import hf
from tests.hf.serving import BAD_TOKEN, HUGE_TOKEN, SAMPLED, alone, assert_as_alone, damaged, good

INTERRUPTS = [KeyboardInterrupt, SystemExit, GeneratorExit, StopIteration, RuntimeError]


@pytest.fixture(scope="module")
def model() -> Any:
    return damaged()


@pytest.fixture
def batch(model: Any) -> Any:
    return hf.RunningBatch(model, slots=3, prefill_chunk=32)


@pytest.mark.parametrize("options", [{}, SAMPLED, {"temperature": 1e-45}], ids=["greedy", "sampled", "tiny"])
@pytest.mark.parametrize("token", [BAD_TOKEN, HUGE_TOKEN], ids=["nan", "inf"])
def test_a_request_whose_logits_are_not_finite_fails_alone(batch: Any, token: int, options: dict[str, Any]) -> None:
    """It is prefilled in the chunk of a good one, and between good ones."""
    first = batch.submit(good(20), max_new_tokens=9)
    batch.step()
    bad = batch.submit([*good(7), token], max_new_tokens=9, **options)
    second = batch.submit(good(20, 1), max_new_tokens=9, **SAMPLED, seed=4)
    batch.run()
    assert (bad.state, bad.tokens, bad.error.code) == ("failed", [], "E211")
    with pytest.raises(ValueError, match="E211"):
        list(bad)
    assert_as_alone(first)
    assert_as_alone(second, **SAMPLED, seed=4)


def test_the_next_user_of_a_slot_sees_nothing_of_a_prompt_of_nan(model: Any) -> None:
    """All of its cached rows, entries and compressor states hold NaN."""
    batch = hf.RunningBatch(model, slots=1, prefill_chunk=48)
    bad = batch.submit([BAD_TOKEN, *good(140)], max_new_tokens=3)
    batch.run()
    assert bad.state == "failed"
    for length in (3, 40, 150):
        request = batch.submit(good(length), max_new_tokens=6)
        batch.run()
        assert_as_alone(request)


def test_a_request_that_fails_after_tokens_keeps_them(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = hf.RunningBatch(model, slots=2, prefill_chunk=32)
    bad, other = (batch.submit(good(9, i), max_new_tokens=8) for i in range(2))
    for _ in range(3):
        batch.step()
    iterated = iter(bad)
    assert [next(iterated) for _ in range(3)] == bad.tokens
    with monkeypatch.context() as patch:
        chosen = batch._steps.chosen
        patch.setattr(batch._steps, "chosen", lambda: [-1, chosen()[1]])
        with pytest.raises(ValueError, match=r"E211[\s\S]*after 3 new tokens"):
            next(iterated)
    batch.run()
    assert len(bad.tokens) == 3
    assert_as_alone(other)


@pytest.mark.parametrize("fault", INTERRUPTS)
def test_what_a_callback_raises_ends_its_request_alone(batch: Any, fault: type[BaseException]) -> None:
    def fail(token: int) -> None:
        raise fault

    seen: dict[int, list[int]] = {0: [], 2: []}
    requests = [
        batch.submit(good(9, i), max_new_tokens=5, on_token=fail if i == 1 else seen[i].append) for i in range(3)
    ]
    with pytest.raises(fault):
        batch.step()
    batch.run()
    assert requests[1].state == "cancelled" and len(requests[1].tokens) == 1
    for i, tokens in seen.items():
        assert_as_alone(requests[i])
        assert tokens == requests[i].tokens


def test_iterating_raises_the_error_of_its_own_callback_alone(batch: Any) -> None:
    def fail(token: int) -> None:
        raise KeyError(token)

    bad, other = batch.submit(good(9), max_new_tokens=4, on_token=fail), batch.submit(good(9, 1), max_new_tokens=4)
    assert len(list(other)) == 4
    got = []
    with pytest.raises(KeyError):
        got.extend(bad)
    assert len(bad.tokens) == 1 and isinstance(bad.error, KeyError)


def test_an_interrupt_between_callbacks_loses_none(batch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = [[], [], []]
    requests = [batch.submit(good(9, i), max_new_tokens=2, on_token=seen[i].append) for i in range(3)]
    batch.step()
    with monkeypatch.context() as patch:
        patch.setattr(batch, "_call_back", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            batch.step()
    assert not batch.idle and all(request.ended for request in requests)
    batch.run()
    assert seen == [request.tokens for request in requests]


def interrupt_forward(batch: Any, fault: type[BaseException]) -> Callable[[], None]:
    """Raise in the second layer, after the first has written its cache; return what ends that."""

    def hook(*_: Any) -> None:
        raise fault

    return batch.model.model.layers[1].mlp.register_forward_pre_hook(hook).remove


def interrupt_read(batch: Any, fault: type[BaseException]) -> Callable[[], None]:
    chosen = batch._steps.chosen

    def read() -> Any:
        batch._steps.chosen = chosen
        raise fault

    batch._steps.chosen = read
    return lambda: None


def interrupt_record(batch: Any, fault: type[BaseException]) -> Callable[[], None]:
    """Raise when some requests have their token and others do not."""
    end, batch._end = batch._end, lambda progress, state: (_ for _ in ()).throw(fault)

    def restore(progress: Any, state: str) -> None:
        end(progress, state)

    record = batch._record

    def recorded(*args: Any) -> Any:
        try:
            return record(*args)
        finally:
            batch._end = restore

    batch._record = recorded
    return lambda: None


@pytest.mark.parametrize("fault", [KeyboardInterrupt, SystemExit, RuntimeError])
@pytest.mark.parametrize("interrupt", [interrupt_forward, interrupt_read, interrupt_record])
def test_an_interrupted_step_fails_what_ran_and_nothing_else(
    batch: Any, interrupt: Callable[[Any, Any], Callable[[], None]], fault: type[BaseException]
) -> None:
    running = [batch.submit(good(n), max_new_tokens=2 + (n == 60)) for n in (9, 10, 60)]
    waiting = batch.submit(good(11), max_new_tokens=5)
    batch.step()
    end = interrupt(batch, fault)
    with pytest.raises(fault):
        batch.step()
    end()
    assert [request.state for request in running] == ["failed"] * 3
    assert all(request.error.code == "E211" for request in running)
    assert waiting.state == "waiting"
    again = [batch.submit(good(n), max_new_tokens=5) for n in (9, 60)]
    batch.run()
    for request in (waiting, *again):
        assert_as_alone(request)


def test_an_interrupted_join_loses_no_request(batch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Waiting(type(batch._waiting)):  # type: ignore[misc]
        def popleft(self) -> Any:
            raise KeyboardInterrupt

    requests = [batch.submit(good(9, i), max_new_tokens=3) for i in range(4)]
    batch._waiting = Waiting(batch._waiting)
    with pytest.raises(KeyboardInterrupt):
        batch.step()
    assert not any(request.ended for request in requests)
    batch.run()
    for request in requests:
        assert_as_alone(request)


def test_an_interrupted_recovery_is_repeated(batch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    request = batch.submit(good(9), max_new_tokens=5)
    batch.step()
    with monkeypatch.context() as patch:
        patch.setattr(batch, "_record", lambda *_: (_ for _ in ()).throw(RuntimeError))
        patch.setattr(batch, "_fail", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            batch.step()
    again = batch.submit(good(9), max_new_tokens=5)
    batch.run()
    assert request.state == "failed" and request.error.code == "E211"
    assert_as_alone(again)


def test_ctrl_c_at_any_time_gives_no_wrong_token(model: Any) -> None:
    """A signal arrives at one of many bytecodes of a step, of its callbacks or of the code between steps."""
    if threading.current_thread() is not threading.main_thread():
        pytest.fail("signals reach the main thread alone")
    batch = hf.RunningBatch(model, slots=3, prefill_chunk=32)
    want = [alone(model, good(9, i), max_new_tokens=6) for i in range(3)]
    before = signal.getsignal(signal.SIGALRM)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    interrupted = 0
    try:
        for attempt in range(12):
            seen: list[list[int]] = [[], [], []]
            requests = [batch.submit(good(9, i), max_new_tokens=6, on_token=seen[i].append) for i in range(3)]
            signal.setitimer(signal.ITIMER_REAL, 0.002 + 0.007 * attempt)
            while not batch.idle:
                try:
                    batch.step()
                except KeyboardInterrupt:
                    interrupted += 1
            for i, request in enumerate(requests):
                assert request.ended and request.tokens == want[i][: len(request.tokens)]
                assert request.state == "failed" or (request.tokens == want[i] == seen[i])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupted > 0
