"""The graph passes of the backend: fuse neighbouring dsv4 ops, then choose an implementation for every op.

They run in one slot of Inductor's post-grad passes, after its own patterns and before mutations are made in place
again: the graph is still functional, so its edges contain the order of all reads and writes. `choose` has the pass that
Inductor calls, `pipeline` the order of the fusion passes, `fusion` their common checks.

Before them, `regional` compiles each kind of layer of a graph once.
"""

from __future__ import annotations

from .choose import ChooseImplementations, source_digest, sources
from .regional import Regional

__all__ = ["ChooseImplementations", "Regional", "source_digest", "sources"]
