"""The data of a replay's report: one `Node` for each node of the captured graph, and `Replay` with all of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..places import Place

PARTS = ("attention", "experts", "hyper-connections", "collectives", "other")
"""Parts of a model that times are summed by, in the order of reports."""
BY_EXPRESSION, BY_TENSORS = "expression", "tensors"
"""Values of `Node.basis`."""


@dataclass(frozen=True, slots=True)
class Edge:
    """A dependency on node `node`. A programmatic one (PDL) lets the later kernel start before that one has ended."""

    node: int
    programmatic: bool = False


@dataclass(slots=True)
class Node:
    """One node of a captured graph, or one call of the CPU stand-in.

    Attributes:
        kind: "kernel", "copy" or "fill" on a GPU, "call" on the stand-in, otherwise the driver's word for it.
        name: name of the kernel; on the stand-in of the op or of the generated function.
        op: the op it was launched for: the dsv4 op if there is one in a fused kernel, otherwise the last.
        ops: all ops that were fused into it, in graph order.
        place: line of the model that called `op`; `where` has the lines of all ops.
        caller: the next line outwards in a different file, where there is one.
        module: path of the module that called it, "layers.3.attn"; `layer` is its part up to the first number.
        part: one of `PARTS`.
        stage: of a step with drafts: "verify", "accept", "draft" or "advance"; else "".
        call: number of the op call; nodes that one call launched have the same.
        stream: number of the stream it was captured on, in the order of their first use.
        after: the nodes it waits for.
        grid, block: programs and threads by dim; empty where the driver does not tell.
        shared_bytes: static and dynamic shared memory of a CTA.
        registers: registers of a thread.
        shapes: dtypes and shapes of the tensors that the call got, `bf16[8, 4096]`.
        bytes, flops: upper bounds of the work of the call. Several nodes of one call share them by their times.
        floor_us: least time that an H200 needs for them; None where no cost is known.
        basis: "expression" for costs of `selection.costs`, "tensors" for bytes of arguments and results, each once.
        start_us: start since that of the replay.
        us: time without any earlier node running, so that times add up; median over replays.
        gap_us: idle time until the next node starts.
    """

    index: int
    kind: str
    name: str
    op: str
    ops: list[str] = field(default_factory=list)
    place: Place = field(default_factory=Place)
    caller: Place = field(default_factory=Place)
    where: list[str] = field(default_factory=list)
    module: str = ""
    layer: str = ""
    part: str = "other"
    stage: str = ""
    call: int = 0
    stream: int = 0
    after: list[Edge] = field(default_factory=list)
    grid: list[int] = field(default_factory=list)
    block: list[int] = field(default_factory=list)
    shared_bytes: int | None = None
    registers: int | None = None
    shapes: list[str] = field(default_factory=list)
    bytes: int | None = None
    flops: int | None = None
    floor_us: float | None = None
    basis: str = ""
    start_us: float | None = None
    us: float | None = None
    gap_us: float | None = None

    @property
    def win_us(self) -> float | None:
        """Time above the floor; None if one of them is not known."""
        return None if self.us is None or self.floor_us is None else max(0.0, self.us - self.floor_us)


@dataclass(frozen=True, slots=True)
class Total:
    """Sums over nodes that have something in common. `win_us` is over nodes with a floor alone."""

    name: str
    nodes: int
    us: float
    floor_us: float
    win_us: float


@dataclass(slots=True)
class Replay:
    """A captured graph, node by node.

    Attributes:
        graphs: "cuda", or "standin" for the CPU stand-in.
        device: name of the GPU, or "cpu".
        what: the capture's name in errors.
        captures: number of captures of the script or call; this one had the most replays.
        replay_us: time of one replay, without a profiler where `timed_apart` is true.
        breaks, recompiles: number of graph breaks and recompiles while the code compiled.
    """

    target: str
    what: str
    backend: str
    torch: str
    device: str
    graphs: str
    captures: int = 1
    breaks: int = 0
    recompiles: int = 0
    replay_us: float | None = None
    timed_apart: bool = False
    nodes: list[Node] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def us(self) -> float | None:
        """Sum of the nodes' times and of the gaps between them; None if no node was timed."""
        times = [node.us + (node.gap_us or 0.0) for node in self.nodes if node.us is not None]
        return sum(times) if times else None

    @property
    def floor_us(self) -> float:
        """Sum of the floors that are known."""
        return sum(node.floor_us for node in self.nodes if node.floor_us is not None)

    def totals(self, by: str) -> list[Total]:
        """Return sums by "op", "layer", "part" or any other field, the longest first."""
        groups: dict[str, list[Node]] = {}
        for node in self.nodes:
            groups.setdefault(str(getattr(node, by)), []).append(node)
        totals = [
            Total(
                name or "outside layers",
                len(nodes),
                sum(node.us or 0.0 for node in nodes),
                sum(node.floor_us or 0.0 for node in nodes),
                sum(node.win_us or 0.0 for node in nodes),
            )
            for name, nodes in groups.items()
        ]
        return sorted(totals, key=lambda total: -total.us)

    def most_to_win(self, count: int = 10) -> list[Node]:
        """Return the nodes that are furthest above their floors."""
        timed = [node for node in self.nodes if node.win_us]
        return sorted(timed, key=lambda node: -(node.win_us or 0.0))[:count]
