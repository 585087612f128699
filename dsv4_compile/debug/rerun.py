"""Call an op again, alone, with the arguments that `diverge` saved, and compare its result with those of both forms.

    python -m dsv4_compile.debug.rerun FILE

prints which of the two results the op gives here. The file is data: see `saved_call` for the names it may contain.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import ops as ops  # registers torch.ops.dsv4
from .._compat import pytree
from ..errors import DSV4Error, check, error, printable
from .rounding import Distance, distance
from .saved_call import SCHEMA as SCHEMA
from .saved_call import load_call
from .saved_call import save_call as save_call

WRONG = 2
"""Exit status for a file that cannot be called again."""


@dataclass(frozen=True, slots=True)
class Rerun:
    """Result of an op called alone, against those of both forms."""

    op: str
    first: Distance
    second: Distance

    def __str__(self) -> str:
        lines = [f"{self.op}, called alone"]
        for name, far in (("first", self.first), ("second", self.second)):
            verdict = "differs from" if far.differs else "agrees with"
            lines.append(f"  {verdict} the {name} form: distance {far.largest:.3g}, limit {far.limit:.3g}")
        return "\n".join(lines)


def rerun(path: str | Path) -> Rerun:
    """Call the op that `save_call` wrote, and compare its results. E201 for any other file."""
    call = load_call(path)
    try:
        with torch.no_grad():
            returned = call.op(*call.args, **call.kwargs)
        return _compared(call.op, call.args, call.kwargs, returned, call.first, call.second)
    except DSV4Error:
        raise
    except Exception as fault:
        why = f"{type(fault).__name__}: {(str(fault).splitlines() or [''])[0][:200]}"
        got = f"a call of {call.op.name()} that fails"
        raise error("E201", got=got, why=printable(why), rule="a saved call runs alone") from None


def _compared(op: Any, args: Any, kwargs: Any, returned: Any, first: Tensor, second: Tensor) -> Rerun:
    declared = op._schema.arguments
    named = dict(zip((argument.name for argument in declared), args, strict=False)) | kwargs
    written = [named.get(a.name) for a in declared if a.alias_info and a.alias_info.is_write]
    leaves = [leaf for leaf in (*pytree.tree_leaves(returned), *written) if isinstance(leaf, Tensor)]
    fitting = [leaf for leaf in leaves if leaf.shape == first.shape and leaf.dtype == first.dtype]
    rule = "one result of the op has shape and dtype of the results in the file"
    check(bool(fitting), "E201", got=f"results of {op.name()} without {tuple(first.shape)}", rule=rule)
    # Of several results of one shape, the one that is nearest to the first form's.
    result = min(fitting, key=lambda leaf: distance(leaf, first, 0.0).largest)
    return Rerun(op.name(), distance(result, first, 0.0), distance(result, second, 0.0))


def main(argv: Sequence[str] | None = None) -> int:
    """Rerun the file named on the command line; return 0 if the op agrees with the first form, otherwise 1."""
    files = list(sys.argv[1:] if argv is None else argv)
    check(len(files) == 1, "E201", got=f"{len(files)} arguments", rule="python -m dsv4_compile.debug.rerun FILE")
    result = rerun(files[0])
    sys.stdout.write(f"{result}\n")
    return int(result.first.differs)


def run() -> int:
    """Return the exit status of `main`; an error of this package is printed without a traceback."""
    try:
        return main()
    except DSV4Error as fault:
        sys.stderr.write(f"{fault}\n")
        return WRONG


if __name__ == "__main__":
    raise SystemExit(run())
