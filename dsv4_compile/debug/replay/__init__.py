"""Explain one replay of a captured graph, node by node.

entry -> captures   observe a capture while it is made (`observe`, `sources`, `driver`), measure replays (`times`)
      -> assemble   rows with op, line, cost and time
      -> report     text, JSON and, in `page`, HTML with a timeline; `diff` compares two reports
"""

from __future__ import annotations

from .entry import explain_replay, replay_of_script
from .report import ReplayReport

__all__ = ["ReplayReport", "explain_replay", "replay_of_script"]
