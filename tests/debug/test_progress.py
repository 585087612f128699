"""Progress events reach all listeners; nothing is printed without a terminal."""

from __future__ import annotations

import io
import sys

import pytest
import torch

import dsv4_compile
from dsv4_compile import progress
from dsv4_compile.progress import Event


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_listener_gets_every_step_in_order() -> None:
    events: list[Event] = []
    with progress.listen(events.append), progress.stage("compile", total=2) as work:
        work.note("prefill graph")
        work.advance("decode graph")
        work.advance()
    assert [(e.done, e.note, e.finished) for e in events] == [
        (0, "", False),
        (0, "prefill graph", False),
        (1, "decode graph", False),
        (2, "", False),
        (2, "", True),
    ]
    assert {(e.stage, e.total) for e in events} == {("compile", 2)}
    assert events[0].eta is None
    assert events[2].eta == pytest.approx(events[2].elapsed)
    assert events[3].eta == 0
    assert [e.elapsed for e in events] == sorted(e.elapsed for e in events)


def test_end_is_reported_when_the_work_raises() -> None:
    events: list[Event] = []
    with pytest.raises(ValueError, match="stop"), progress.listen(events.append), progress.stage("capture"):
        raise ValueError("stop")
    assert events[-1].finished


def test_nothing_is_printed_where_stderr_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.stage("compile", total=1) as work:
        work.advance("graph")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_a_log_gets_one_line_for_each_stage_and_none_for_its_steps() -> None:
    log = io.StringIO()
    with progress.listen(progress.lines(log)):
        for _ in range(2):
            with progress.stage("bench") as work:
                work.note("tokens 1")
                work.advance("tokens 1")
                work.advance("tokens 8")
    assert log.getvalue().splitlines() == ["bench tokens 1  0 s", "bench 2 tokens 8  0 s"] * 2


def test_line_on_a_terminal_is_drawn_and_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress.stage("compile", total=3) as work:
        work.advance("prefill graph")
    text = terminal.getvalue()
    assert "compile 1/3 prefill graph" in text
    assert text.endswith("\r\x1b[2K")


def test_listener_replaces_the_terminal_and_none_silences_it(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    for listener in (lambda event: None, None):
        with progress.listen(listener), progress.stage("compile") as work:
            work.advance("graph")
    assert terminal.getvalue() == ""


def test_inner_listener_gets_events_beside_the_outer_one_until_its_block_ends() -> None:
    outer: list[Event] = []
    inner: list[Event] = []
    with progress.listen(outer.append):
        with progress.listen(inner.append), progress.stage("a"):
            pass
        with progress.stage("b"):
            pass
    assert {event.stage for event in outer} == {"a", "b"}
    assert {event.stage for event in inner} == {"a"}


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (Event("compile", 1, 4, "graph", 3.0, 9.0), "compile 1/4 graph  3 s, about 9 s left"),
        (Event("compile", 0, None, "", 0.2, None), "compile  0 s"),
        (Event("capture", 4, 4, "", 300.0, 0.0, finished=True), "capture 4/4  5.0 min"),
    ],
)
def test_event_reads_as_a_line(event: Event, text: str) -> None:
    assert str(event) == text


def test_explain_reports_each_graph() -> None:
    events: list[Event] = []

    def two_graphs(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        print("between")
        return y + 1

    with progress.listen(events.append):
        dsv4_compile.explain(two_graphs, torch.ones(2), backend="eager")
    assert [event.note for event in events if event.note and not event.finished] == ["graph 1", "graph 2"]
