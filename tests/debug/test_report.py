"""Forms of the report: text fits its width, JSON round-trips, HTML is escaped."""

from __future__ import annotations

import html.parser
import json
from pathlib import Path

import pytest
import torch

import dsv4_compile
from dsv4_compile.debug.places import Place
from dsv4_compile.debug.report import SCHEMA, Report
from dsv4_compile.debug.rows import (
    Break,
    CacheCopy,
    CacheHazard,
    Failure,
    Graph,
    GraphInput,
    Kernel,
    MissedReinplace,
    OpCost,
    OpDecision,
    OpFusion,
    Recompile,
)

PLACE = Place("/models/attention.py", 31, "forward", "if scores.max() > 30: " + "scores = scores - 1; " * 8)

COSTS = [OpCost(3_000_000, 0, 0.7, 1.5), OpCost(1_000_000, 2_000_000_000, 0.25)]


@pytest.fixture
def full() -> Report:
    """Return a report with every field set."""
    return Report(
        target="Attention<script>alert(1)</script>",
        backend="dsv4",
        torch="2.13.0",
        calls=2,
        seconds=1.5,
        graphs=[
            Graph(1, "0/0", PLACE, {"mul": 3, "dsv4.q_norm_rope": 1}, [GraphInput("x", ["s0=4", "8"], "bf16", True)], 7)
        ],
        breaks=[
            Break(PLACE, "Data-dependent branching", "a <b>bold</b> cause", "the fix & more", called_from=PLACE),
            Break(Place(), "Odd", "cause", "fix", scope="function", seen=3, stack=["a.py:1 in f"], link="https://x"),
        ],
        recompiles=[Recompile(PLACE, "n == 3", "the value of `n` changed", "a tensor", ["3", "4"], 2, limit_hit=True)],
        decisions=[OpDecision("q_norm_rope", "ir", "fuses", 2, ["a.py:1", "b.py:2", "c.py:3", "d.py:4"], COSTS)],
        fusions=[OpFusion("fuse_attention", ["sparse_mla_decode", "inv_rope"], "sparse_mla_decode", False, "a reason")],
        kernels=[Kernel(1, "triton", "triton_poi_fused_0", 2)],
        cache_copies=[CacheCopy(1, "cache", ["8", "64"], "u8", 1 << 20, PLACE, "aten.index_put")],
        missed_reinplace=[MissedReinplace(1, 2, 4096)],
        cache_hazards=[CacheHazard(1, "cache", ["s4=8", "64"], "dsv4.kv_rope_insert", PLACE)],
        failure=Failure("InputError", "[E201] wrong\n  rule  right\n  fix   so", PLACE),
        notes=["A note."],
    )


def test_json_round_trips(full: Report) -> None:
    assert Report.from_json(full.to_json()) == full
    assert json.loads(full.to_json(indent=None)) == full.to_dict()


def test_report_of_a_real_call_round_trips() -> None:
    report = dsv4_compile.explain(lambda x: x.sum().item(), torch.ones(3), backend="eager")
    assert report.breaks
    assert Report.from_json(report.to_json()) == report


def test_json_keeps_its_field_names(full: Report) -> None:
    data = full.to_dict()
    assert data["schema"] == SCHEMA == "dsv4.explain/1"
    assert data["ok"] is False
    assert set(data) >= {"target", "backend", "torch", "graphs", "breaks", "recompiles", "decisions", "kernels"}
    assert set(data["breaks"][0]) >= {"place", "kind", "cause", "fix", "scope", "seen", "called_from", "stack"}
    assert set(data["breaks"][0]["place"]) == {"file", "line", "function", "source"}


@pytest.mark.parametrize("text", ['{"schema": "dsv4.explain/0"}', "[]", "{}"])
def test_another_schema_is_rejected(text: str) -> None:
    with pytest.raises(dsv4_compile.DSV4Error, match="E201"):
        Report.from_json(text)


@pytest.mark.parametrize("width", [80, 100])
def test_text_fits_its_width(full: Report, width: int) -> None:
    lines = full.text(width).splitlines()
    assert max(map(len, lines)) <= width
    assert not any(line != line.rstrip() for line in lines)


def test_text_contains_every_finding(full: Report) -> None:
    text = " ".join(full.text(100).split())
    for words in (
        "/models/attention.py:31",
        "the whole function runs eagerly, 3 times",
        "unknown place",
        "recompile limit is reached",
        "3, 4",
        "`cache` [8, 64] u8, 1.0 MiB, is copied as a whole",
        "mark_static(cache)",
        "a.py:1, b.py:2, c.py:3 +1",
        "x [s0=4, 8] bf16, 7 parameters",
        "dsv4.q_norm_rope, mul x3",
        "1 group not fused into sparse_mla_decode",
        "Kernel launches: 2 triton".upper(),
        "[E201] wrong",
        "A note.",
        "failed, 2 graph breaks, 2 recompiles, 1 cache copy, 1 cache hazard; 1 graph",
    ):
        assert words in text, words


def test_costs_of_an_op_are_summed(full: Report) -> None:
    line = next(line for line in full.text(200).splitlines() if "4.000" in line)
    assert line.split() == ["q_norm_rope", "2", "4.000", "2.000", "0.95", "1.5", "for", "1"]


def test_equal_findings_and_reasons_are_shown_once(full: Report, tmp_path: Path) -> None:
    full.graphs = [full.graphs[0], full.graphs[0], Graph(3, "2/0", PLACE, {"add": 1}, [], 0)]
    full.fusions += [OpFusion("fuse_attention", ["inv_rope"], "sparse_mla_decode", False, "a reason", 2, ["a.py:9"])]
    full.decisions += [OpDecision(op, "eager", "no kernel for it") for op in ("topk", "route", "head")]
    lines = full.text(120).splitlines()
    numbers = [line.split()[0] for line in lines[lines.index("GRAPHS") :] if line.startswith(tuple("  123"))]
    assert "forward, 4 ops, 2 times" in full.text(120) and numbers[:1] == ["1"] and "3" in numbers
    assert "3 groups not fused into sparse_mla_decode" in full.text(120) and full.text(120).count("a reason") == 1
    assert full.text(120).count("no kernel for it") == 1
    page = full.save(tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count("no kernel for it") == 1 and '<td rowspan="3">no kernel for it</td>' in page


def test_empty_report_says_that_no_graph_was_captured() -> None:
    report = dsv4_compile.explain(lambda: 3, backend="eager")
    assert "No graph was captured" in report.text()
    assert report.ok


class _Tags(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs


def test_html_escapes_every_value_and_uses_no_external_resource(full: Report, tmp_path: Path) -> None:
    text = full.save(tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "a &lt;b&gt;bold&lt;/b&gt; cause" in text
    assert "the fix &amp; more" in text
    tags = _Tags()
    tags.feed(text)
    assert not {"script", "link", "img", "iframe", "b"} & set(tags.tags)
    assert not {"src", "onclick"} & {name for name, _ in tags.attributes}
    assert len(text) < 20_000


def test_addresses_in_the_page_are_links(full: Report, tmp_path: Path) -> None:
    tags = _Tags()
    full.breaks[1].link = "https://example.org/a?b=1&c=<2>"
    tags.feed(full.save(tmp_path / "report.html").read_text(encoding="utf-8"))
    links = [value for name, value in tags.attributes if name == "href"]
    assert links == ["https://example.org/a?b=1&c=", "https://github.com/pytorch/pytorch/issues/198068"]


def test_suffix_of_the_path_selects_the_saved_form(full: Report, tmp_path: Path) -> None:
    assert Report.from_json(full.save(tmp_path / "r.json").read_text(encoding="utf-8")) == full
    assert full.save(tmp_path / "r.txt").read_text(encoding="utf-8") == full.text()
    with pytest.raises(dsv4_compile.DSV4Error, match=r"\.json, \.txt or \.html"):
        full.save(tmp_path / "r.pdf")


def test_rich_shows_the_same_text(full: Report) -> None:
    assert full.__rich__().plain == full.text()


def test_every_kind_of_problem_makes_the_report_not_ok() -> None:
    base = Report(target="f", backend="eager", torch="2")
    assert base.ok
    for name in ("breaks", "recompiles", "cache_copies", "cache_hazards"):
        report = Report(target="f", backend="eager", torch="2", **{name: [object()]})
        assert not report.ok
    assert Report(target="f", backend="eager", torch="2", missed_reinplace=[MissedReinplace(1, 1, 1)]).ok
