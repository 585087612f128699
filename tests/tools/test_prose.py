"""Tests of tests/tools/prose.py, and of the rates that it counts in package and tests."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from tests.tools import prose

CLEAN = '''
    """Return the sum of both rows, without the padding."""

    MESSAGE = "another text of its own, beside what is in which"  # a string is no prose


    def total(found: int, rows: list[int]) -> int:
        """Add all rows to `found`."""
        rows.found = sum(rows)
        return rows.found + found
'''
SENTENCES = {
    "of what": "An index of what the row holds.",
    "in which": "A table whose rows are sorted.",
    "another": "Another row follows.",
    "of its own": "Every row has a page of its\nown.",
    "beside": "Padding lies beside the rows.",
}


def rates(path: Path, text: str) -> dict[str, float]:
    path.write_text(dedent(text), encoding="utf-8")
    return prose.rates([path])


def test_clean_text_has_no_hits(tmp_path: Path) -> None:
    assert rates(tmp_path / "a.py", CLEAN) == dict.fromkeys((*prose.PHRASES, "names"), 0.0)
    assert list(prose.hits(tmp_path / "a.py")) == []


@pytest.mark.parametrize("form", ["docstring", "comment"])
@pytest.mark.parametrize("phrase", prose.PHRASES)
def test_a_phrase_is_counted_per_10000_words(phrase: str, form: str, tmp_path: Path) -> None:
    sentence = SENTENCES[phrase]
    lines = [f'"""{sentence}"""'] if form == "docstring" else [f"# {line}" for line in sentence.splitlines()]
    counted = rates(tmp_path / "a.py", "\n".join(["", *lines, "rows = 1", ""]))
    assert counted == dict.fromkeys((*prose.PHRASES, "names"), 0.0) | {phrase: 1e4 / len(sentence.split())}
    (hit,) = prose.hits(tmp_path / "a.py")
    assert f"a.py:2: {phrase}: ..." in hit


def test_names_are_counted_per_1000_assigned_ones(tmp_path: Path) -> None:
    counted = rates(tmp_path / "a.py", "rows = [1]\nfor _found in rows:\n    first = last = _found\n")
    assert counted["names"] == 1000 / 4
    assert list(prose.hits(tmp_path / "a.py")) == [f"{tmp_path / 'a.py'}:2: name _found"]


@pytest.mark.parametrize("tree", prose.TREES)
def test_rates_stay_at_their_ceilings(tree: str) -> None:
    files = prose.files(tree)
    assert len(files) > 100
    above = {name: rate for name, rate in prose.rates(files).items() if rate > prose.CEILINGS[tree][name]}
    assert not above, f"above the ceilings of {tree}: {above}; tests/tools/prose.py PATH lists every hit"


def test_tool_prints_rates_ceilings_and_goals(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    source = tmp_path / "a.py"
    source.write_text('"""Another row."""\n', encoding="utf-8")
    monkeypatch.setattr(prose, "files", lambda tree: [source])
    assert prose.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(prose.TREES) * len(prose.LIMITS)
    assert f"at most {prose.CEILINGS['package']['another']:g}, goal {prose.LIMITS['another']:g}" in lines[2]
    source.write_text('"""The next row."""\n', encoding="utf-8")
    assert prose.main([]) == 0
