"""Find out what torch.compile makes of a model: `explain` for a call, `explain_script` for a script.

The modules, in the order in which they work: `state` makes the compiler forget and restores it, `events` hears what
torch says, `observe` looks at graphs (`graphs`) and generated code (`kernels`), `breaks` with `causes` and
`recompiles` with `guards` put findings into words, `assemble` makes a `report` of `rows`, `text` and `html` show it.
"""

from __future__ import annotations

from .entry import explain
from .report import Report
from .script import explain_script

__all__ = ["Report", "explain", "explain_script"]
