"""The data of a report: one dataclass for each kind of row, and `Findings` with all of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from .places import Place


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
        scope: "function" when the whole function runs eagerly, "break" when the rest is compiled as a second graph.
        seen: number of times tracing stopped here; a line in a called function counts once per caller.
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
        guard: torch's text of the check when it first failed.
        values: the value compiled for, then the values that failed the guard, in order.
        limit_hit: the function has reached torch's recompile limit and runs eagerly for new values.
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
    """Upper bound of the bytes and flops of a call, from its shapes, and the least time an H200 needs for them.

    `measured_us` is the time of such a call on the GPU that the graph is compiled for, where `measured.json` has it.
    """

    bytes: int
    flops: int
    floor_us: float
    measured_us: float | None = None


@dataclass(slots=True)
class OpDecision:
    """Calls of one dsv4 op that use the same implementation: "ir", "triton", "eager", or "undecided" elsewhere.

    `costs` has one entry for each call with a known cost.
    """

    op: str
    impl: str
    reason: str
    count: int = 1
    where: list[str] = field(default_factory=list)
    costs: list[OpCost] = field(default_factory=list)


@dataclass(slots=True)
class OpDependence:
    """Launches of one op that may give a row other bits in a call of another size, for the same reason."""

    op: str
    reason: str
    count: int = 1
    where: list[str] = field(default_factory=list)


@dataclass(slots=True)
class OpFusion:
    """Groups of the same ops that a pass fused into one op, or did not fuse for the same reason."""

    by: str
    ops: list[str]
    into: str
    fused: bool
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
    """Tensors that a graph clones before an op mutates them. Expected where the user's code clones them itself."""

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
    """The exception of a call. Findings from before it are still in the report."""

    type: str
    message: str
    place: Place


@dataclass(slots=True)
class Findings:
    """All rows of a report, with the target and its environment."""

    target: str
    backend: str
    torch: str
    calls: int = 0
    seconds: float = 0.0
    graphs: list[Graph] = field(default_factory=list)
    breaks: list[Break] = field(default_factory=list)
    recompiles: list[Recompile] = field(default_factory=list)
    decisions: list[OpDecision] = field(default_factory=list)
    fusions: list[OpFusion] = field(default_factory=list)
    dependent: list[OpDependence] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    cache_copies: list[CacheCopy] = field(default_factory=list)
    missed_reinplace: list[MissedReinplace] = field(default_factory=list)
    cache_hazards: list[CacheHazard] = field(default_factory=list)
    failure: Failure | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True if nothing was found that costs speed or correctness."""
        problems = (self.breaks, self.recompiles, self.cache_copies, self.cache_hazards)
        return self.failure is None and not any(problems)
