"""The report as plain text, and as one HTML page."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from html import escape as escaped
from itertools import groupby
from typing import Any

from ..columns import DEFAULT_WIDTH, GAP, clipped, is_numeric, table
from ..errors import printable
from .rows import Findings
from .sections import Finding, Section, Table, heading, sections, verdict

SAVED = Section("Saved", [Table([], [["report.save('report.html') writes this as a page, '.json' as a record."]])])
"""Last words of a report as text."""

_LABEL = 8

STYLE = """
:root { color-scheme: light dark; --ink: #222; --paper: #fff; --dim: #666; --line: #ccc; --code: #f4f4f4;
  --bad: #b3261e; --bad-paper: #fbeeed; --good: #1b7f3b; --good-paper: #edf7f0; --link: #0b57d0; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e4e4; --paper: #16181b; --dim: #a0a0a0; --line: #45484d;
  --code: #22252a; --bad: #f28b82; --bad-paper: #3a2220; --good: #81c995; --good-paper: #1d3024; --link: #8ab4f8; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: var(--ink);
  background: var(--paper); } a { color: var(--link); }
h1 { font-size: 1.3rem; } h2 { font-size: 1.05rem; margin-top: 2rem; border-bottom: 1px solid var(--line); }
.verdict { font-weight: 600; padding: .4rem .8rem; border-left: 4px solid var(--bad); background: var(--bad-paper); }
.verdict.ok { border-color: var(--good); background: var(--good-paper); }
.finding { margin: 1rem 0; } .place, code, pre, td { font-family: ui-monospace, monospace; font-size: .85rem; }
.place { font-weight: 600; } .aside { color: var(--dim); }
pre { margin: .3rem 0; padding: .4rem .8rem; background: var(--code); overflow-x: auto; }
dl { display: grid; grid-template-columns: 7rem 1fr; margin: .2rem 0; } dt { color: var(--dim); } dd { margin: 0; }
dd { white-space: pre-wrap; overflow-wrap: anywhere; }
table { border-collapse: collapse; margin: .6rem 0; } th { text-align: left; color: var(--dim); font-weight: 500; }
th, td { padding: .15rem .9rem .15rem 0; vertical-align: top; } th, .number { white-space: nowrap; }
.number { text-align: right; } .wide { overflow-x: auto; }
"""
_ADDRESS = re.compile(r"https?://[^\s<>\"']+[^\s<>\"'.,;:)]|\bpytorch#(\d+)")


def escape(value: str) -> str:
    """Return `value` as HTML, for text and attributes; characters that turn or hide text are shown as escapes."""
    return escaped(printable(value, lines=True))


def text(report: Findings, width: int) -> str:
    """Return `report` in lines of at most `width` columns, except where a name is too long to wrap."""
    return page_text([heading(report), verdict(report)], [*sections(report), SAVED], width)


def page_text(head: Sequence[str], parts: Iterable[Section], width: int) -> str:
    """Return lines of `head`, then of sections, in at most `width` columns."""
    lines = [line for sentence in head for line in _wrapped(sentence, "", "  ", width)]
    for section in parts:
        lines += ["", section.title.upper()]
        number = 1
        for block in section.blocks:
            if isinstance(block, Table):
                lines += (f"  {line}" for line in table(block.headers, block.rows, width - 2, merge=block.merge))
            else:
                lines += _finding(number, block, width)
                number += block.count
    return "\n".join(printable(line.expandtabs(4).rstrip()) for line in lines)


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
    yield f"{number:>3}  {finding.place}{GAP}{finding.aside}"
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


def html(report: Findings) -> str:
    """Return `report` as one HTML page: no script, no external resource, every value escaped."""
    body = "\n".join(html_section(section) for section in sections(report))
    state = "verdict ok" if report.ok else "verdict"
    return f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>{escape(report.target)}: dsv4 explain</title><style>{STYLE}</style></head>
<body>
<h1>dsv4 explain</h1>
<p>{escape(heading(report))}</p>
<p class="{state}">{escape(verdict(report))}</p>
{body}
</body>
</html>
"""


def linked(text: str) -> str:
    """Return `text` as HTML, with a link in place of each web address and of each issue of PyTorch."""
    parts, end = [], 0
    for match in _ADDRESS.finditer(text):
        target = f"https://github.com/pytorch/pytorch/issues/{match[1]}" if match[1] else match[0]
        parts += [escape(text[end : match.start()]), f'<a href="{escape(target)}">{escape(match[0])}</a>']
        end = match.end()
    return "".join([*parts, escape(text[end:])])


def html_section(section: Section) -> str:
    """Return a section as HTML, every value escaped."""
    blocks = "\n".join(_html_table(b) if isinstance(b, Table) else _html_finding(b) for b in section.blocks)
    return f"<h2>{escape(section.title)}</h2>\n{blocks}"


def _html_table(block: Table) -> str:
    columns = list(zip(*block.rows, strict=True)) or [()] * len(block.headers)
    kinds = [' class="number"' if is_numeric(column) else "" for column in columns]
    heads = (f"<th{kind}>{escape(name)}</th>" for kind, name in zip(kinds, block.headers, strict=False))
    head = f"<tr>{''.join(heads)}</tr>" if block.headers else ""
    groups = [[*group] for _, group in groupby(block.rows, lambda row: row[-1])] if block.merge else None
    spans = [len(group) * (i == 0) for group in groups for i in range(len(group))] if groups else [1] * len(block.rows)
    body = "\n".join(_html_row(row, kinds, span) for row, span in zip(block.rows, spans, strict=True))
    return f'<div class="wide"><table>{head}\n{body}</table></div>'


def _html_row(row: Sequence[str], kinds: Sequence[str], span: int) -> str:
    """Return a row, whose last cell is that of `span` rows, or none with 0: an earlier row has it."""
    cells = [f"<td{kind}>{linked(cell)}</td>" for kind, cell in zip(kinds, row, strict=True)]
    if span != 1:
        last = [f'<td rowspan="{span}"{kinds[-1]}>{linked(row[-1])}</td>'] if span else []
        cells = [*cells[:-1], *last]
    return f"<tr>{''.join(cells)}</tr>"


def _html_finding(finding: Finding) -> str:
    source = f"<pre>{escape(finding.source)}</pre>" if finding.source else ""
    points = "".join(f"<dt>{escape(label)}</dt><dd>{linked(text)}</dd>" for label, text in finding.points)
    return f"""<div class="finding">
<span class="place">{escape(finding.place)}</span> <span class="aside">{escape(finding.aside)}</span>
{source}<dl>{points}</dl></div>"""
