"""The report as plain text, and as one HTML page."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from .rows import Findings
from .sections import Finding, Section, Table, clipped, heading, sections, verdict

DEFAULT_WIDTH = 96

_GAP = "  "
_LABEL = 8
_NARROWEST_COLUMN = 20

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.05rem; margin-top: 2rem; border-bottom: 1px solid #ccc; }
.verdict { font-weight: 600; padding: .4rem .8rem; border-left: 4px solid #b3261e; background: #fbeeed; }
.verdict.ok { border-color: #1b7f3b; background: #edf7f0; }
.finding { margin: 1rem 0; } .place, code, pre, td { font-family: ui-monospace, monospace; font-size: .85rem; }
.place { font-weight: 600; } .aside { color: #666; } pre { margin: .3rem 0; padding: .4rem .8rem; background: #f4f4f4; }
dl { display: grid; grid-template-columns: 7rem 1fr; margin: .2rem 0; } dt { color: #666; } dd { margin: 0; }
dd { white-space: pre-wrap; overflow-wrap: anywhere; } pre { overflow-x: auto; }
table { border-collapse: collapse; margin: .6rem 0; } th { text-align: left; color: #666; font-weight: 500; }
th, td { padding: .15rem .9rem .15rem 0; vertical-align: top; overflow-wrap: anywhere; }
"""


def text(report: Findings, width: int) -> str:
    """Return `report` in lines of at most `width` columns, except where a name is too long to wrap."""
    lines = [heading(report), verdict(report)]
    for section in sections(report):
        lines += ["", section.title.upper()]
        for number, block in enumerate(section.blocks, 1):
            lines += _table(block, width) if isinstance(block, Table) else _finding(number, block, width)
    return "\n".join(line.rstrip() for line in lines)


def rich_text(report: Findings) -> Any:
    """Return `report` for rich: its text, with titles, places and labels in colour."""
    from rich.text import Text

    shown = Text(text(report, DEFAULT_WIDTH))
    shown.highlight_regex(r"(?m)^[A-Z][A-Z0-9 ,:]+$", "bold")
    shown.highlight_regex(r"\S+\.py:\d+", "cyan")
    shown.highlight_regex(r"(?m)^ +(cause|values|guard|torch|limit|called from) ", "dim")
    shown.highlight_regex(r"(?m)^ +fix ", "green")
    shown.highlight_words([verdict(report)], "bold green" if report.ok else "bold red")
    return shown


def _finding(number: int, finding: Finding, width: int) -> Iterator[str]:
    yield f"{number:>3}  {finding.place}{_GAP}{finding.aside}"
    indent = " " * 5
    if finding.source:
        yield clipped(f"{indent}    {finding.source}", width)
    for label, sentence in finding.points:
        head = f"{indent}{label:<{_LABEL}}" if len(label) < _LABEL else f"{indent}{label} "
        yield from _wrapped(sentence, head, indent + " " * _LABEL, width)


def _wrapped(sentence: str, head: str, indent: str, width: int) -> Iterator[str]:
    """Yield the lines of `head` and `sentence`; line breaks in `sentence` are kept."""
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
    """Yield the lines of one row. Cells wrap within their columns; the last takes the remaining width."""
    left = max(_NARROWEST_COLUMN, width - 2 - sum(widths) - len(_GAP) * len(widths))
    cells = [_fit(cell, size) for cell, size in zip(row, [*widths, left], strict=True)]
    for line in range(max(map(len, cells))):
        parts = [cell[line] if line < len(cell) else "" for cell in cells]
        padded = [f"{part:<{size}}" for part, size in zip(parts, [*widths, 0], strict=True)]
        yield "  " + _GAP.join(padded)


def _fit(cell: str, size: int) -> list[str]:
    return textwrap.wrap(cell, size, break_long_words=True, break_on_hyphens=False) or [""]


def html(report: Findings) -> str:
    """Return `report` as one HTML page: no script, no external resource, every value escaped."""
    body = "\n".join(_html_section(section) for section in sections(report))
    state = "verdict ok" if report.ok else "verdict"
    return f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>{escape(report.target)}: dsv4 explain</title><style>{_STYLE}</style></head>
<body>
<h1>dsv4 explain</h1>
<p>{escape(heading(report))}</p>
<p class="{state}">{escape(verdict(report))}</p>
{body}
</body>
</html>
"""


def _html_section(section: Section) -> str:
    blocks = "\n".join(_html_table(b) if isinstance(b, Table) else _html_finding(b) for b in section.blocks)
    return f"<h2>{escape(section.title)}</h2>\n{blocks}"


def _html_table(table: Table) -> str:
    head = f"<tr>{''.join(f'<th>{escape(name)}</th>' for name in table.headers)}</tr>" if table.headers else ""
    rows = "\n".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in table.rows)
    return f"<table>{head}\n{rows}</table>"


def _html_finding(finding: Finding) -> str:
    source = f"<pre>{escape(finding.source)}</pre>" if finding.source else ""
    points = "".join(f"<dt>{escape(label)}</dt><dd>{escape(text)}</dd>" for label, text in finding.points)
    return f"""<div class="finding">
<span class="place">{escape(finding.place)}</span> <span class="aside">{escape(finding.aside)}</span>
{source}<dl>{points}</dl></div>"""
