"""The report as plain text: tables and indented findings, wrapped to a width."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from .report import Report
from .sections import Finding, Table, heading, sections, verdict

_GAP = "  "
_LABEL = 8
_NARROWEST_COLUMN = 20


def render(report: Report, width: int) -> str:
    """`report` in lines of at most `width` columns, names too long to wrap aside."""
    lines = [heading(report), verdict(report)]
    for section in sections(report):
        lines += ["", section.title.upper()]
        for number, block in enumerate(section.blocks, 1):
            lines += _table(block, width) if isinstance(block, Table) else _finding(number, block, width)
    return "\n".join(line.rstrip() for line in lines)


def render_rich(report: Report) -> Any:
    """`report` for rich: the same text, with titles, places and labels in colour."""
    from rich.text import Text

    text = Text(report.text())
    text.highlight_regex(r"(?m)^[A-Z][A-Z0-9 ,:]+$", "bold")
    text.highlight_regex(r"\S+\.py:\d+", "cyan")
    text.highlight_regex(r"(?m)^ +(cause|values|guard|torch|limit|called from) ", "dim")
    text.highlight_regex(r"(?m)^ +fix ", "green")
    text.highlight_words([verdict(report)], "bold green" if report.ok else "bold red")
    return text


def _finding(number: int, finding: Finding, width: int) -> Iterator[str]:
    yield f"{number:>3}  {finding.place}{_GAP}{finding.aside}"
    indent = " " * 5
    if finding.source:
        yield _clipped(f"{indent}    {finding.source}", width)
    for label, sentence in finding.points:
        head = f"{indent}{label:<{_LABEL}}" if len(label) < _LABEL else f"{indent}{label} "
        yield from _wrapped(sentence, head, indent + " " * _LABEL, width)


def _clipped(line: str, width: int) -> str:
    return line if len(line) <= width else f"{line[: width - 4]} ..."


def _wrapped(sentence: str, head: str, indent: str, width: int) -> Iterator[str]:
    """`sentence` behind `head`; lines of its own stay lines of their own."""
    for paragraph in sentence.splitlines() or [""]:
        yield from textwrap.wrap(
            paragraph,
            width,
            initial_indent=head,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        ) or [head]
        head = indent


def _table(table: Table, width: int) -> Iterator[str]:
    rows = [list(table.headers), *table.rows] if table.headers else list(table.rows)
    columns = range(len(rows[0]) - 1)
    widths = [max(len(row[column]) for row in rows) for column in columns]
    widths = [min(size, max(_NARROWEST_COLUMN, width // 3)) for size in widths]
    for row in rows:
        yield from _row(row, widths, width)


def _row(row: Sequence[str], widths: Sequence[int], width: int) -> Iterator[str]:
    """One row; a cell wider than its column goes on in the next line, except the last, which wraps in what is left."""
    left = max(_NARROWEST_COLUMN, width - 2 - sum(widths) - len(_GAP) * len(widths))
    cells = [_fit(cell, size) for cell, size in zip(row, [*widths, left], strict=True)]
    for line in range(max(map(len, cells))):
        parts = [cell[line] if line < len(cell) else "" for cell in cells]
        padded = [f"{part:<{size}}" for part, size in zip(parts, [*widths, 0], strict=True)]
        yield "  " + _GAP.join(padded)


def _fit(cell: str, size: int) -> list[str]:
    return textwrap.wrap(cell, size, break_long_words=True, break_on_hyphens=False) or [""]
