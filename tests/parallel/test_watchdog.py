"""The watchdog of split models: who is named when a rank is gone in a step, and who is let be. Processes, no GPU."""

from __future__ import annotations

import multiprocessing
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch

from dsv4_compile.parallel.watchdog import STATUS, DeviceWork, _within
from tests.parallel import watched
from tests.parallel.processes import rank_context

KILLED = -9
INTERPRETER = "a_rank_ends_its_interpreter_in_a_step"
"""The scenario with a separate interpreter as second rank: forked ones skip exit handlers."""
GONE = {
    "a_rank_is_killed": ("rank 1 (process", "has ended without leaving: it was killed or crashed"),
    "a_rank_that_is_not_visible_is_killed": ("rank 1 (process", "has given no sign of life for 2 s"),
    "the_host_of_the_store_is_killed": ("rank 0 (process", "which held the group's store, has ended without leaving"),
    "the_host_of_the_store_that_is_not_visible_is_killed": ("rank 0 (process", "has given no sign of life for 2 s"),
    "a_rank_is_killed_while_the_host_is_inside_a_call": ("rank 1 (process", "has ended without leaving"),
    "a_rank_destroys_the_group_in_a_step": ("rank 1 (process", "has left: it destroyed the group"),
    "the_host_of_the_store_destroys_the_group_in_a_step": ("rank 0 (process", "group's store, has left: it destroyed"),
    "the_store_is_closed_whose_host_runs": ("rank 0 (process", "group's store, has left: it destroyed the group"),
    "the_host_of_the_store_that_is_not_visible_hangs": ("rank 0 (process", "has given no sign of life for 2 s"),
    INTERPRETER: ("rank 1 (process", "has left: it destroyed the group, or its interpreter ended"),
    "a_group_is_destroyed_and_made_again": ("rank 1 (process", "has ended without leaving"),
}
"""Words about the rank that is gone, by scenario."""
LET_BE = (
    "a_rank_that_has_left_is_not_asked_for_more",
    "a_rank_that_has_left_has_finished_the_call",
    "a_rank_is_slow",
    "a_rank_is_stopped",
    "the_host_of_the_store_is_stopped",
    "a_fork_ends_that_is_no_rank",
    "a_thread_fails",
)


class Outcome(NamedTuple):
    """How a rank ended: its exit status, None if it hung, and its stderr."""

    status: int | None
    text: str


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    """Run all scenarios side by side, since they mostly wait."""
    folder = tmp_path_factory.mktemp("watched")
    context = rank_context()
    running: dict[str, list[multiprocessing.process.BaseProcess | subprocess.Popen[bytes]]] = {}
    for name in (*GONE, *LET_BE):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        ranks = [context.Process(target=watched.run, args=(name, rank, port, str(folder))) for rank in range(2)]
        if name == INTERPRETER:
            ranks[0].start()
            command = [sys.executable, "-m", watched.__name__, name, "1", str(port), str(folder)]
            running[name] = [ranks[0], subprocess.Popen(command)]
            continue
        for rank in ranks:
            rank.start()
        running[name] = [*ranks]
    deadline = time.monotonic() + watched.HANGS / 2
    return {
        name: [outcome(process, deadline, folder / f"{name}.{rank}") for rank, process in enumerate(two)]
        for name, two in running.items()
    }


def outcome(rank: multiprocessing.process.BaseProcess | subprocess.Popen[bytes], deadline: float, log: Path) -> Outcome:
    """Wait for a rank until `deadline` and kill it then."""
    status: int | None
    if isinstance(rank, subprocess.Popen):
        while (status := rank.poll()) is None and time.monotonic() < deadline:
            time.sleep(0.05)
    else:
        rank.join(max(0.0, deadline - time.monotonic()))
        status = rank.exitcode
    if status is None:
        rank.kill()
    return Outcome(status, log.read_text() if log.exists() else "")


@pytest.mark.parametrize("name", GONE)
def test_process_ends_whose_step_waits_for_a_rank_that_is_gone(name: str, outcomes: dict[str, list[Outcome]]) -> None:
    survivor = outcomes[name][1 if "the_store" in name else 0]
    assert survivor.status == STATUS, survivor
    assert survivor.text.count("[E706]") == 1
    assert all(words in survivor.text for words in GONE[name]), survivor.text


def test_process_that_leaves_ends_by_itself(outcomes: dict[str, list[Outcome]]) -> None:
    assert outcomes[INTERPRETER][1].status == 3, outcomes[INTERPRETER][1]
    assert outcomes["a_rank_is_killed"][1].status == KILLED


@pytest.mark.parametrize("name", LET_BE)
def test_processes_are_let_be(name: str, outcomes: dict[str, list[Outcome]]) -> None:
    assert [rank.status for rank in outcomes[name]] == [0, 0], outcomes[name]


def test_one_event_marks_the_newest_work_outside_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        events: ClassVar[list[Event]] = []
        on: Any = None

        def __init__(self) -> None:
            self.events.append(self)

        def record(self, stream: Any) -> None:
            self.on = stream

        def query(self) -> bool:
            return False

    capturing, entered, work = [True], list[Any](), DeviceWork(torch.device("cuda", 1))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[-1])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: (device, len(entered)))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(entered.append(device)))
    work.record()
    assert work.done()
    assert not Event.events
    capturing.append(False)
    for _ in range(2):
        work.record()
        assert not work.done()
    assert [event.on for event in Event.events] == [(work.device, 1)]
    assert entered == [work.device, work.device]


def test_device_that_does_not_answer_counts_as_pending_and_one_that_fails_as_done(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert not _within(0.1, lambda: time.sleep(1) is None)
    assert _within(5.0, lambda: True)
    assert _within(5.0, lambda: 1 / 0 > 0)
    assert "the device or stdout fails" in caplog.text


def test_fault_of_the_thread_is_logged_once(outcomes: dict[str, list[Outcome]]) -> None:
    for rank in outcomes["a_thread_fails"]:
        assert rank.text.count("the watchdog has failed, trying again") == 1, rank.text
        assert rank.text.count("ValueError: no /proc") == 1
