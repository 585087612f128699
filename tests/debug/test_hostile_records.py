"""Records and reports from strangers: wrong types raise E201 without a traceback, and their texts are escaped."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from dsv4_compile import DSV4Error, doctor, errors, progress
from dsv4_compile.cli import main
from dsv4_compile.debug.places import Place
from dsv4_compile.debug.replay.report import ReplayReport
from dsv4_compile.debug.replay.rows import Edge, Node
from dsv4_compile.debug.report import Report
from dsv4_compile.debug.rows import Break, Failure

TRICK = (
    "x\x1b[2J\x9b1A\u202e\u2028\r\nverdict: all is well\ud800</script><script>alert(1)</script>\"' onfocus=alert(2) x='"
)
"""Clears a screen, turns text, forges a line, ends a script, an element and an attribute."""


def replay() -> ReplayReport:
    places = Place("model.py", 3, "forward", "y = x @ w"), Place()
    first = Node(0, "kernel", "mm", "aten.mm", ["aten.mm"], *places, grid=[1, 1, 1], start_us=0.0, us=2.0)
    second = Node(1, "kernel", "add", "aten.add", part="attention", after=[Edge(0, True)], start_us=2.0, us=1.0)
    return ReplayReport("step", "the step", "dsv4", "2.13", "H200", "cuda", replay_us=3.0, nodes=[first, second])


def report() -> Report:
    row = Break(Place("model.py", 3), "kind", "cause", "fix", called_from=Place("main.py", 1))
    return Report("step", "dsv4", "2.13", breaks=[row], failure=Failure("ValueError", "text", Place()))


def paths(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all values of a tree of JSON."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [path, *(inner for name, value in items for inner in paths(value, (*path, name)))]


def changed(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    content = json.loads(json.dumps(content))
    inner = content
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    return content


ODD = ("text", True, -7, 2**70, 1e300, None, [], {}, [["x"]], {"a": {}})


@pytest.mark.parametrize("make", [replay, report])
def test_every_odd_value_is_read_as_it_is_or_raises_e201(make: Callable[[], Any], tmp_path: Path) -> None:
    kind, content = type(make()), make().to_dict()
    refused = 0
    for path in paths(content)[1:]:
        for value in ODD:
            try:
                read = kind.from_json(json.dumps(changed(content, path, value)))
            except DSV4Error as fault:
                assert (fault.code == "E201" and "schema" not in fault.got) or path == ("schema",), fault
                refused += 1
                continue
            assert str(read)
            read.save(tmp_path / "page.html")
            if kind is ReplayReport:
                assert str(read.diff(make())) and str(make().diff(read))
    assert refused > 100


BAD = {
    "nothing": "",
    "text": "hello",
    "a list": "[]",
    "a number": "5",
    "null": "null",
    "half": '{"schema": "dsv4.replay/1", "nodes": [',
    "deep": "[" * 100_000,
    "deep inside": '{"schema": "dsv4.replay/1", "target": ' + "[" * 100_000,
    "a long number": '{"schema": "dsv4.replay/1", "captures": ' + "1" * 5000 + "}",
    "no number": '{"schema": "dsv4.replay/1", "captures": NaN}',
    "an infinite number": '{"schema": "dsv4.replay/1", "replay_us": 1e999}',
    "fields missing": '{"schema": "dsv4.replay/1"}',
    "another schema": '{"schema": "dsv4.explain/1"}',
    "a schema that tricks": json.dumps({"schema": TRICK}),
}


@pytest.mark.parametrize("name", BAD)
def test_a_diff_of_a_bad_record_prints_e201(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = replay().save(tmp_path / "good.json"), tmp_path / "bad.json"
    bad.write_text(BAD[name])
    assert main(["explain", "--diff", str(good), str(bad)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("[E201]") and "Traceback" not in printed.err
    assert_tame(printed.err)


def test_a_diff_of_other_files_prints_e201(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, binary, tricky = (tmp_path / name for name in ("good.json", "binary.json", TRICK.split("<")[0][:-1]))
    replay().save(good)
    binary.write_bytes(b"\xff\xfe\x00\x80")
    for path in (binary, tmp_path, tmp_path / "none", Path("/dev/zero"), tricky):
        assert main(["explain", "--diff", str(path), str(good)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("[E201]")
        assert_tame(error)


def test_records_of_any_size_take_a_moment() -> None:
    made = replay()
    made.nodes[0].op = made.nodes[1].module = "x" * 1_000_000
    began = time.process_time()
    assert len(str(made)) < 100_000 and len(str(made.diff(replay()))) < 100_000
    content = replay().to_dict()
    kept = content | {"nodes": [content["nodes"][0] | {"index": i} for i in range(1000)]}
    assert len(ReplayReport.from_json(json.dumps(kept)).nodes) == 1000
    assert time.process_time() - began < 2
    kept["nodes"] = [node | {"after": [{"node": 0}] * 101} for node in kept["nodes"]]
    for odd, got in ((kept, "101000 edges"), (content | {"graphs": "x" * 100_000}, "graphs 'x")):
        with pytest.raises(DSV4Error, match=got) as caught:
            ReplayReport.from_json(json.dumps(odd))
        assert len(str(caught.value)) < 1000


def assert_tame(text: str) -> None:
    """Assert that text has no control characters but line breaks, and that no line is forged."""
    assert re.sub(r"[\n -~\xa1-\xff\u2026]", "", text) == "", ascii(text)
    assert not [line for line in text.splitlines() if line.startswith("verdict: all is well")]


def tricky(content: dict[str, Any]) -> dict[str, Any]:
    """Return a record with the trick in every field that takes any text."""
    kept = ("schema", "graphs", "part", "kind")
    for path in paths(content):
        value = content
        for name in path:
            value = value[name]
        if isinstance(value, str) and path[-1] not in kept:
            content = changed(content, path, TRICK)
    return content


class Page(HTMLParser):
    """Elements and attributes of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += [name for name, _ in attrs]


@pytest.mark.parametrize("make", [replay, report])
def test_no_text_of_a_record_leaves_its_place(make: Callable[[], Any], tmp_path: Path) -> None:
    kind = type(make())
    read = kind.from_json(json.dumps(tricky(make().to_dict())))
    assert_tame(str(read))
    pages = []
    for each in (make(), read):
        page = Page()
        page.feed(each.save(tmp_path / "page.html").read_text(encoding="utf-8"))
        pages.append(page)
    assert pages[0].names.count("script") == pages[1].names.count("script")
    assert not {"onfocus", "onclick"} & set(pages[1].attributes)
    if kind is ReplayReport:
        assert_tame(str(read.diff(make())))
        read.nodes[1].index = TRICK  # not from a file
        page = Page()
        page.feed(read.save(tmp_path / "page.html").read_text(encoding="utf-8"))
        assert page.names.count("script") == 2 and "onfocus" not in page.attributes


def test_errors_doctor_and_progress_print_no_control_characters() -> None:
    for text in (
        str(errors.error("E209", got=TRICK, why=TRICK, fix=TRICK, rule=TRICK)),
        doctor.render([doctor.Check(TRICK, TRICK, "fix", TRICK), doctor.Check("b", "c")]),
        str(progress.Event(TRICK, 1, 2, TRICK, 1.0, None)),
    ):
        assert_tame(text)
    assert str(errors.error("E209", got="café\tx\ny")).splitlines()[2:4] == ["  got   café\tx", "        y"]
