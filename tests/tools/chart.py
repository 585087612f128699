"""Draw the README's bar chart from the record of `headline`: `make docs` draws it again when its numbers change.

The numbers are kept in the picture's metadata, so that a test compares them with the record and not pixels, which
differ between versions of matplotlib.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt

PICTURE = Path("dsv4_compile/docs/eager_and_compiled.svg")
EAGER, COMPILED = "#9aa0a6", "#1a73e8"


def draw(lines: Sequence[Sequence[str]], path: Path) -> None:
    """Draw a table of `headline`, its head first, as horizontal bars in milliseconds, and write it as SVG."""
    _, *rows = lines
    figure, axes = plt.subplots(figsize=(8, 2.8), layout="constrained", facecolor="white")
    for height, (what, eager, compiled, faster) in enumerate(reversed(rows)):
        for offset, ms, colour, note in ((0.2, eager, EAGER, ""), (-0.2, compiled, COMPILED, f"  ({faster})")):
            bar = axes.barh(height + offset, float(ms), height=0.38, color=colour)
            axes.bar_label(bar, [f"{ms} ms{note}"], padding=3, fontsize=9)
        axes.text(-1, height, what, ha="right", va="center", fontsize=10)
    axes.set(yticks=[], xlim=(0, 1.12 * max(float(row[1]) for row in rows)), xlabel="ms, lower is better")
    axes.legend(
        handles=[plt.Rectangle((0, 0), 1, 1, color=colour) for colour in (EAGER, COMPILED)],
        labels=["eager transformers", 'backend="dsv4"'],
        loc="upper right",
        frameon=False,
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
    with plt.rc_context({"svg.hashsalt": "dsv4", "svg.fonttype": "path"}):
        figure.savefig(path, metadata={"Date": None, "Description": json.dumps(lines)})
    plt.close(figure)


def numbers(path: Path) -> list[list[str]] | None:
    """Return the table that a picture was drawn from, or None without a picture."""
    if not path.exists():
        return None
    match = re.search(r"<dc:description>(.*?)</dc:description>", path.read_text(encoding="utf-8"), re.DOTALL)
    return None if match is None else json.loads(html.unescape(match[1]))
