"""The committed report of a captured V4-Flash layer on a GPU: its page equals the page of its record."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

import dsv4_compile
from dsv4_compile.debug import ReplayReport

DOCS = Path(dsv4_compile.__file__).parent / "docs"
RECORD = DOCS / "replay_csa_h100.json"


@pytest.fixture
def report() -> ReplayReport:
    return ReplayReport.from_json(RECORD.read_text(encoding="utf-8"))


def test_the_page_is_what_the_record_gives(report: ReplayReport, tmp_path: Path) -> None:
    report.save(tmp_path / "again.html")
    page = RECORD.with_suffix(".html").read_text(encoding="utf-8")
    assert (tmp_path / "again.html").read_text(encoding="utf-8") == page
    assert f"({RECORD.with_suffix('.html').name})" in (DOCS / "replay.md").read_text(encoding="utf-8")


def test_every_node_has_a_line_and_a_time_and_they_add_up(report: ReplayReport) -> None:
    assert report.us is not None and report.replay_us is not None
    assert report.us == pytest.approx(report.replay_us, rel=0.05)
    assert all(node.place.file and node.us is not None and node.grid for node in report.nodes)


def test_nodes_of_a_timeline_do_not_overlap_where_they_ran_at_once() -> None:
    page = RECORD.with_suffix(".html").read_text(encoding="utf-8")
    spans = [tuple(map(float, numbers)) for numbers in re.findall(r"left:([\d.]+)%;width:([\d.]+)%", page)]
    assert len(spans) > 5
    for (left, width), (following, _) in pairwise(spans):
        assert -1e-3 < following - left - width < 1  # of a percent; gaps of this replay are below 1 %
    assert sum(spans[-1]) == pytest.approx(100, abs=0.1)
