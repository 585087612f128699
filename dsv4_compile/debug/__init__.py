"""Explain what torch.compile makes of a model: `explain` for calls of it, `explain_script` for a script.

    entry -> state     compile without history, and restore the compiler afterwards
          -> watch     record torch's log (`breaks`, `recompiles`), graphs and generated code (`graphs`)
          -> report    assemble `rows`; `sections` and `render` show them as text and HTML

Each module imports only from those to its right and below; `places` has the lines of user code that all refer to.
"""

from __future__ import annotations

from .entry import explain, explain_script
from .report import Report

__all__ = ["Report", "explain", "explain_script"]
