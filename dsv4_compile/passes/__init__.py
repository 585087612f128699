"""The graph passes of the backend: merge neighbouring dsv4 ops, then choose an implementation for every one left.

All run in one slot of Inductor's, behind its own patterns and before mutations go back in place: the graph is
functional there, so what must happen before what is written in it. `choose` holds the pass that Inductor calls.
"""

from __future__ import annotations

from .choose import ChooseImplementations, source_digest, sources

__all__ = ["ChooseImplementations", "source_digest", "sources"]
