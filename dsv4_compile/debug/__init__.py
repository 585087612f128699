"""Explain a model's compilation by torch.compile, and the contents of a captured graph.

`explain` reports calls of a model, `explain_script` a script, `explain_replay` one replay of a captured graph, and
`diverge` the first op that differs between two forms of a step. `compile_log` lists what still compiles after warm-up,
and `witness` finds the buffer that a captured step would read although nobody wrote it.

    entry -> state     compile without history, and restore the compiler afterwards
          -> watch     record torch's log (`breaks`, `recompiles`), graphs and generated code (`graphs`)
          -> report    assemble `rows`; `sections` and `render` show them as text and HTML
    replay             one replay of a captured graph, node by node
    serving            log compilations, captures and builds of kernels after warm-up
    witness            raise before a replay that reads a stale buffer: `writes`, rules of `staleness`, `contexts`
    divergence         compare results of two runs, beyond `rounding`; `rerun` calls one op again
    ranks              compare results of one run on all ranks

Each module imports only from those to its right and below; `places` has the lines of user code that all refer to.
"""

from __future__ import annotations

from .divergence import Divergence, diverge
from .entry import explain, explain_script
from .ranks import diverge_ranks
from .replay import ReplayReport, explain_replay
from .report import Report
from .serving import LateWork, compile_log
from .staleness import Stale
from .witness import Witness, witness

__all__ = [
    "Divergence",
    "LateWork",
    "ReplayReport",
    "Report",
    "Stale",
    "Witness",
    "compile_log",
    "diverge",
    "diverge_ranks",
    "explain",
    "explain_replay",
    "explain_script",
    "witness",
]
