"""One HTML page of a replay: a timeline with a lane for each part and stream, and tables; nothing outside the page.

Each node is a button in its lane, as long as its time and coloured by its op. Tab reaches the timeline, arrow keys move
in it, and the panel below tells about the node that has the pointer or the focus; a click keeps it there. Without a
script the tables have everything.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from ...columns import is_numeric
from ..render import STYLE, escape, html_section
from ..sections import Section
from .rows import PARTS, Node, Replay

_COLOURS = ("#1967d2", "#b06000", "#7627bb", "#137333", "#c5221f", "#007b83", "#a8146f", "#8a5a2b")
"""Colours of the ops that take most time; white text is readable on all of them."""
_OTHERS = "#5f6368"
_SMALLEST = 0.02
"""Percent of the timeline that the shortest node takes."""

_LANES = """
body { max-width: 80rem; }
.tools { display: flex; gap: .5rem; align-items: center; margin: .5rem 0; flex-wrap: wrap; }
.tools button { font: inherit; color: inherit; background: var(--code); border: 1px solid var(--line);
  border-radius: .3rem; padding: .1rem .6rem; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: .3rem; }
.lanes { width: calc(100% * var(--zoom, 1)); min-width: 100%; box-sizing: border-box; padding-right: 4px; }
.lane { position: relative; height: 2.6rem; border-bottom: 1px solid var(--line); }
.lane > span { position: sticky; left: .3rem; font-size: .7rem; color: var(--dim); pointer-events: none; }
.node { position: absolute; top: 1.1rem; height: 1.2rem; min-width: 2px; padding: 0 2px; border: 0; cursor: pointer;
  overflow: hidden; box-shadow: inset 1px 0 #ffffff80; color: #fff; font: .7rem/1.2rem system-ui, sans-serif;
  text-align: left; text-overflow: ellipsis; white-space: nowrap; }
.node.near { border-bottom: 4px double #fff; }
.node.shown { outline: 2px solid var(--ink); outline-offset: 1px; z-index: 2; }
.node[aria-pressed=true] { outline-width: 4px; }
#node { min-height: 15rem; grid-template-columns: 7rem minmax(0, 1fr); }
.legend i { display: inline-block; width: .8rem; height: .8rem; margin: 0 .3rem 0 .8rem; }
.legend span { white-space: nowrap; } #all-nodes td { white-space: nowrap; }
[data-theme=light] { color-scheme: light; } [data-theme=dark] { color-scheme: dark; }
"""

_SCRIPT = """
const nodes = JSON.parse(document.getElementById('data').textContent);
const buttons = nodes.map((_, i) => document.getElementById('n' + i));  // by time, not by lane
const panel = document.getElementById('node');
const lanes = document.querySelector('.lanes');
let zoom = 1, current = 0, kept = null;
function show(i) {
  current = i;
  panel.replaceChildren();
  for (const [label, text] of nodes[i].rows) {
    const dt = document.createElement('dt'), dd = document.createElement('dd');
    dt.textContent = label; dd.textContent = text; panel.append(dt, dd);
  }
  buttons.forEach((b, k) => {
    b.tabIndex = k === i ? 0 : -1;
    b.classList.toggle('shown', k === i);
    b.classList.toggle('near', nodes[i].near.includes(k));
    b.setAttribute('aria-pressed', String(k === kept));
  });
}
function keep(i) { kept = i; show(i === null ? current : i); }
function go(i) { if (i >= 0 && i < buttons.length) { if (kept !== null) kept = i; show(i); buttons[i].focus(); } }
function goToHash() {
  const i = buttons.findIndex(button => '#' + button.id === location.hash);
  if (i >= 0) { keep(i); buttons[i].focus(); }
}
buttons.forEach((button, i) => {
  button.addEventListener('mouseenter', () => { if (kept === null) show(i); });
  button.addEventListener('focus', () => { if (kept === null) show(i); });
  button.addEventListener('click', () => keep(kept === i ? null : i));
  button.addEventListener('keydown', event => {
    const step = {ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1}[event.key];
    if (step) { event.preventDefault(); go(i + step); }
    if (event.key === 'Home') { event.preventDefault(); go(0); }
    if (event.key === 'End') { event.preventDefault(); go(buttons.length - 1); }
    if (event.key === 'Escape') keep(null);
  });
});
window.addEventListener('hashchange', goToHash);
function zoomTo(value) {
  zoom = Math.min(256, Math.max(1, value));
  lanes.style.setProperty('--zoom', zoom);
  if (buttons[current]) buttons[current].scrollIntoView({block: 'nearest', inline: 'center'});
}
document.getElementById('in').addEventListener('click', () => zoomTo(zoom * 2));
document.getElementById('out').addEventListener('click', () => zoomTo(zoom / 2));
document.getElementById('all').addEventListener('click', () => zoomTo(1));
if (buttons.length) { show(0); goToHash(); }
"""


def html(report: Replay, heading: str, verdict: str, sections: Iterable[Section]) -> str:
    """Return the page: heading, verdict, timeline, `sections`, and a table of all nodes."""
    body = "\n".join(html_section(section) for section in sections)
    data = json.dumps(_about(report.nodes)).replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{escape(report.target)}: dsv4 explain --replay</title><style>{STYLE}{_LANES}</style></head>
<body>
<h1>What is in one replay</h1>
<p>{escape(heading)}</p>
<p class="verdict ok">{escape(verdict)}</p>
{_timeline(report.nodes)}
{body}
<h2>Nodes</h2>
<div class="wide" id="all-nodes" role="region" aria-label="All nodes" tabindex="0">{_nodes(report.nodes)}</div>
<script type="application/json" id="data">{data}</script>
<script>{_SCRIPT}</script>
</body>
</html>
"""


def _timeline(nodes: Sequence[Node]) -> str:
    """Return lanes of buttons, in proportion to time, or of equal width where no node was timed."""
    spans = _spans(nodes)
    total_us = max((start + length for start, length in spans), default=1.0) or 1.0
    several = len({node.stream for node in nodes}) > 1
    colours = _colours(nodes)
    lanes: dict[tuple[int, int], list[str]] = {}
    for node, (start, length) in zip(nodes, spans, strict=True):
        part_index = PARTS.index(node.part)
        style = f"left:{100 * start / total_us:.4f}%;width:{max(_SMALLEST, 100 * length / total_us):.4f}%"
        label = f"{node.index}: {node.op}, {'not timed' if node.us is None else f'{node.us:.2f} us'}"
        lanes.setdefault((part_index, node.stream), []).append(
            f'<button type="button" class="node" id="n{escape(str(node.index))}" tabindex="{-1 if node.index else 0}" '
            f'aria-label="node {escape(label)}" title="{escape(label)}" '
            f'style="{style};background:{colours.get(node.op, _OTHERS)}">{escape(_short(node.op))}</button>'
        )
    rows = []
    for (part_index, stream), buttons in sorted(lanes.items()):
        name = f"{PARTS[part_index]}{f', stream {stream}' if several else ''}"
        lane = "".join(buttons)
        rows.append(
            f'<div class="lane" role="group" aria-label="{escape(name)}"><span>{escape(name)}</span>{lane}</div>'
        )
    shown = {**colours, **({"others": _OTHERS} if {node.op for node in nodes} - {*colours} else {})}
    legend = "".join(f'<span><i style="background:{c}"></i>{escape(_short(op))}</span> ' for op, c in shown.items())
    return f"""<h2>Timeline</h2>
<div class="tools" role="toolbar" aria-label="Zoom"><button type="button" id="in">Zoom in</button>
<button type="button" id="out">Zoom out</button><button type="button" id="all">All</button>
<span class="legend aside">{legend}</span></div>
<p class="aside">Outlined: the node below; a click keeps it, Escape lets it go. Underlined: the nodes that it waits for,
and those that wait for it.</p>
<div class="scroll" role="region" aria-label="Timeline, arrow keys move from node to node" tabindex="0">
<div class="lanes">{"".join(rows)}</div></div>
<dl id="node" aria-live="polite"></dl>"""


def _colours(nodes: Sequence[Node]) -> Mapping[str, str]:
    """Return a colour for each of the ops that take most time, or that have most nodes where none was timed."""
    spent: Counter[str] = Counter()
    for node, (_, length) in zip(nodes, _spans(nodes), strict=True):
        spent[node.op] += length  # type: ignore[assignment]  # a Counter adds floats too
    return dict(zip((op for op, _ in spent.most_common(len(_COLOURS))), _COLOURS, strict=False))


def _short(op: str) -> str:
    return op.removeprefix("dsv4.").removeprefix("aten.")


def _spans(nodes: Sequence[Node]) -> list[tuple[float, float]]:
    """Return start and length of each node's own time; in order and of length one if none was timed.

    A node that starts while earlier ones run (PDL) has its own time after them.
    """
    if all(node.us is None for node in nodes):
        return [(float(i), 1.0) for i in range(len(nodes))]
    spans, end = {}, 0.0
    for node in sorted(nodes, key=lambda node: node.start_us or 0.0):
        start, length = max(node.start_us or 0.0, end), node.us or 0.0
        spans[node.index], end = (start, length), start + length
    return [spans[node.index] for node in nodes]


def _about(nodes: Sequence[Node]) -> list[dict[str, object]]:
    """Return what the panel says of each node, and its neighbours in the graph."""
    later: dict[int, list[int]] = {}
    for node in nodes:
        for edge in node.after:
            later.setdefault(edge.node, []).append(node.index)
    near = ([*(edge.node for edge in node.after), *later.get(node.index, [])] for node in nodes)
    return [{"rows": _rows(node), "near": near_nodes} for node, near_nodes in zip(nodes, near, strict=True)]


def _rows(node: Node) -> list[tuple[str, str]]:
    waits = ", ".join(f"{e.node}{' (programmatic)' if e.programmatic else ''}" for e in node.after)
    launch = f"grid {node.grid}, block {node.block}, {node.shared_bytes} bytes shared, {node.registers} registers"
    fields = [
        ("node", f"{node.index}, {node.kind}, stream {node.stream}"),
        ("kernel", node.name),
        ("op", ", ".join(node.ops)),
        ("line", f"{node.place}  {node.place.source}".strip() if node.place.file else "unknown"),
        ("called from", f"{node.caller}  {node.caller.source}".strip() if node.caller.file else ""),
        ("also", ", ".join(node.where) if len(node.where) > 1 else ""),
        ("module", node.module),
        ("time", "" if node.us is None else f"{node.us:.2f} us, then {node.gap_us or 0.0:.2f} us until the next node"),
        ("floor", "" if node.floor_us is None else f"{node.floor_us:.2f} us on an H200, by {node.basis}"),
        ("work", "" if node.bytes is None else f"{node.bytes:,} bytes, {node.flops or 0:,} flops"),
        ("launch", launch if node.grid else ""),
        ("after", waits),
        ("tensors", ", ".join(node.shapes)),
    ]
    return [(label, text) for label, text in fields if text]


def _nodes(nodes: Sequence[Node]) -> str:
    """Return a table with a row for each node and all that is known of it."""
    names = ("node", "us", "gap", "floor", "op", "line", "kernel", "module", "grid", "shared", "registers", "after")
    rows = [
        (
            str(node.index),
            *("" if value is None else f"{value:.2f}" for value in (node.us, node.gap_us, node.floor_us)),
            node.op,
            str(node.place) if node.place.file else "",
            node.name,
            node.module,
            "x".join(map(str, node.grid)),
            *("" if value is None else str(value) for value in (node.shared_bytes, node.registers)),
            " ".join(f"{edge.node}{'p' if edge.programmatic else ''}" for edge in node.after),
        )
        for node in nodes
    ]
    kinds = [' class="number"' if is_numeric(column) else "" for column in zip(*rows, strict=True)] or [""] * len(names)
    head = "".join(f'<th scope="col"{kind}>{name}</th>' for kind, name in zip(kinds, names, strict=True))
    body = []
    for index, *cells in rows:
        link = f'<td{kinds[0]}><a href="#n{escape(index)}">{escape(index)}</a></td>'
        others = "".join(f"<td{kind}>{escape(cell)}</td>" for kind, cell in zip(kinds[1:], cells, strict=True))
        body.append(f"<tr>{link}{others}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{chr(10).join(body)}</tbody></table>"
