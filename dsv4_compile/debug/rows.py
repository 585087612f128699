"""One dataclass for each kind of row that a report of `explain` has."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Place:
    """A line of code. `source` is its text, stripped; fields are empty or 0 where torch does not tell.

    As text it is short: relative to the working directory, or to the folder of installed packages.
    """

    file: str = ""
    line: int = 0
    function: str = ""
    source: str = ""

    def __str__(self) -> str:
        if not self.file:
            return "unknown place"
        path = Path(self.file)
        roots = (Path.cwd(), Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("platlib")))
        shown = next((path.relative_to(root) for root in roots if path.is_relative_to(root)), path)
        return f"{shown}:{self.line}"


@dataclass(frozen=True, slots=True)
class GraphInput:
    """A tensor or number that a graph takes. Dynamic dims read `s0=4`: symbol and the size seen first."""

    name: str
    shape: list[str]
    dtype: str
    dynamic: bool


@dataclass(slots=True)
class Graph:
    """One captured graph. `compile_id` is torch's name for it in its own logs, `0/1` for example."""

    index: int
    compile_id: str
    place: Place
    ops: dict[str, int]
    inputs: list[GraphInput]
    parameters: int

    @property
    def op_count(self) -> int:
        """Number of calls in the graph."""
        return sum(self.ops.values())


@dataclass(slots=True)
class Break:
    """A place where tracing stopped.

    Attributes:
        place: innermost line outside torch and the standard library.
        called_from: the line of the user's own code that led there, when `place` is in an installed package.
        kind: torch's name for the cause, stable enough to search for.
        scope: "function" when the whole function runs eagerly, "break" when the rest is compiled as another graph.
        seen: how often tracing stopped here; a line inside a called function is met once per caller.
    """

    place: Place
    kind: str
    cause: str
    fix: str
    scope: str = "break"
    seen: int = 1
    called_from: Place | None = None
    stack: list[str] = field(default_factory=list)
    detail: str = ""
    link: str = ""


@dataclass(slots=True)
class Recompile:
    """A guard that failed, in one function, over all calls.

    Attributes:
        guard: the check as torch words it the first time it failed.
        values: what was compiled for and then seen, in order.
        limit_hit: the function has used up torch's recompile limit and runs eagerly for new values.
    """

    place: Place
    guard: str
    cause: str
    fix: str
    values: list[str] = field(default_factory=list)
    count: int = 1
    limit_hit: bool = False


@dataclass(frozen=True, slots=True)
class OpCost:
    """What a call must do at the most, as far as its shapes tell, and the time below which no H200 does it.

    `measured_us` is what such a call took, on the GPU that the graph is compiled for, where `measured.json` says so.
    """

    bytes: int
    flops: int
    floor_us: float
    measured_us: float | None = None


@dataclass(slots=True)
class OpDecision:
    """Calls of one dsv4 op that share an implementation: "ir", "triton", "eager", or "undecided" elsewhere.

    `costs` are theirs one by one, of calls whose cost is known.
    """

    op: str
    impl: str
    reason: str
    count: int = 1
    where: list[str] = field(default_factory=list)
    costs: list[OpCost] = field(default_factory=list)


@dataclass(slots=True)
class OpFusion:
    """Groups of ops, alike, that a pass merged into one op, or left apart for the same reason."""

    by: str
    ops: list[str]
    into: str
    merged: bool
    reason: str
    count: int = 1
    where: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Kernel:
    """A kernel of the generated code: `kind` is "triton", "cpp" or "extern", `calls` its launches per graph call."""

    graph: int
    kind: str
    name: str
    calls: int


@dataclass(slots=True)
class CacheCopy:
    """A temporary as large as a mutated graph input: generated code copies the input in and back on each call."""

    graph: int
    argument: str
    shape: list[str]
    dtype: str
    bytes: int
    place: Place
    origin: str


@dataclass(slots=True)
class MissedReinplace:
    """Tensors that a graph clones before an op mutates them. Where the code itself clones them that is as it should."""

    graph: int
    tensors: int
    bytes: int


@dataclass(slots=True)
class CacheHazard:
    """A cache argument of an op with a dynamic dim: writes through a view may land at offset 0 (pytorch#198068)."""

    graph: int
    argument: str
    shape: list[str]
    op: str
    place: Place


@dataclass(slots=True)
class Failure:
    """The call raised. What was found before it did is still in the report."""

    type: str
    message: str
    place: Place
