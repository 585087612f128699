"""One op call, saved with its arguments and the results of two forms, and called again alone.

    python -m dsv4_compile.debug.rerun FILE

prints which of the two results the op gives here, on its own. The file is data without code: tensors, numbers, text.
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
from .._compat import OpOverload, pytree
from ..errors import check
from .rounding import Distance, distance

SCHEMA = "dsv4.call/1"


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


def save_call(path: Path, op: OpOverload, args: Any, kwargs: Any, first: Tensor, second: Tensor) -> Path:
    """Write a call of `op` and one of its results in both forms to `path`, and return it."""
    place = {"schema": SCHEMA, "op": op.name(), "overload": op._overloadname}
    content = {**place, "args": _plain(args), "kwargs": _plain(kwargs), "first": first, "second": second}
    torch.save(content, path)
    return path


def rerun(path: str | Path) -> Rerun:
    """Call the op that `save_call` wrote, and compare its results. E201 for another file."""
    rule, fix = f"rerun takes a file with schema {SCHEMA}", "pass the file that diverge has written"
    check(Path(path).is_file(), "E201", got=f"no file {str(path)!r}", rule=rule, fix=fix)
    content = torch.load(path, weights_only=True, map_location=None if torch.cuda.is_available() else "cpu")
    got = content.get("schema") if isinstance(content, dict) else type(content).__name__
    check(got == SCHEMA, "E201", got=f"schema {got!r}", rule=rule, fix=fix)
    namespace, _, name = content["op"].partition("::")
    packet = getattr(getattr(torch.ops, namespace), name.partition(".")[0])
    op = getattr(packet, content["overload"])
    args, kwargs = list(content["args"]), dict(content["kwargs"])
    with torch.no_grad():
        returned = op(*args, **kwargs)
    named = dict(zip((argument.name for argument in op._schema.arguments), args, strict=False)) | kwargs
    written = [named.get(a.name) for a in op._schema.arguments if a.alias_info and a.alias_info.is_write]
    leaves = [leaf for leaf in (*pytree.tree_leaves(returned), *written) if isinstance(leaf, Tensor)]
    want: Tensor = content["first"]
    fitting = [leaf for leaf in leaves if leaf.shape == want.shape and leaf.dtype == want.dtype]
    check(bool(fitting), "E201", got=f"results of {content['op']} without {tuple(want.shape)}", rule=rule)
    # Of several results of one shape, the one that is nearest to the first form's.
    result = min(fitting, key=lambda leaf: distance(leaf, want, 0.0).largest)
    return Rerun(content["op"], distance(result, want, 0.0), distance(result, content["second"], 0.0))


def _plain(tree: Any) -> Any:
    """Return lists and dicts of tensors and plain values; a device as text is what torch.load accepts."""
    if isinstance(tree, (list, tuple)):
        return [_plain(each) for each in tree]
    if isinstance(tree, dict):
        return {name: _plain(each) for name, each in tree.items()}
    return tree


def main(argv: Sequence[str] | None = None) -> int:
    """Rerun the file named on the command line; return 0 if the op agrees with the first form, otherwise 1."""
    given = list(sys.argv[1:] if argv is None else argv)
    check(len(given) == 1, "E201", got=f"{len(given)} arguments", rule="python -m dsv4_compile.debug.rerun FILE")
    found = rerun(given[0])
    sys.stdout.write(f"{found}\n")
    return int(found.first.differs)


if __name__ == "__main__":
    raise SystemExit(main())
