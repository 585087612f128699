"""The report as one HTML page: no script, no request to anywhere, every value escaped."""

from __future__ import annotations

from html import escape

from .report import Report
from .sections import Finding, Section, Table, heading, sections, verdict

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


def render(report: Report) -> str:
    """A complete page."""
    body = "\n".join(_section(section) for section in sections(report))
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


def _section(section: Section) -> str:
    blocks = "\n".join(_table(b) if isinstance(b, Table) else _finding(b) for b in section.blocks)
    return f"<h2>{escape(section.title)}</h2>\n{blocks}"


def _table(table: Table) -> str:
    head = f"<tr>{''.join(f'<th>{escape(name)}</th>' for name in table.headers)}</tr>" if table.headers else ""
    rows = "\n".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in table.rows)
    return f"<table>{head}\n{rows}</table>"


def _finding(finding: Finding) -> str:
    source = f"<pre>{escape(finding.source)}</pre>" if finding.source else ""
    points = "".join(f"<dt>{escape(label)}</dt><dd>{escape(text)}</dd>" for label, text in finding.points)
    return f"""<div class="finding">
<span class="place">{escape(finding.place)}</span> <span class="aside">{escape(finding.aside)}</span>
{source}<dl>{points}</dl></div>"""
