"""What was chosen for every op of a compiled graph, and why.

    with dsv4_compile.selection.decisions.collect() as decisions:
        compiled(x)
    for d in decisions:
        print(d)
    for f in decisions.fusions:
        print(f)

The backend records one `Decision` for each dsv4 op node that reaches Inductor, whether the op became Inductor IR, a
hand-written kernel or stayed the reference; and one `Fusion` for each group of ops that a pass merged before, or looked
at and left apart.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:  # importing costs imports sympy, most of the time that this package would add to `import torch`
    from .costs import Cost

log = logging.getLogger(__name__)

IMPLEMENTATIONS = ("ir", "triton", "eager")
"""`ir`: Inductor IR, fuses with its neighbours. `triton`: a hand-written kernel. `eager`: the PyTorch reference."""

_collectors: ContextVar[tuple[Decisions, ...]] = ContextVar("dsv4_decisions", default=())
_times: ContextVar[int] = ContextVar("dsv4_decisions_times", default=1)


@dataclass(frozen=True, slots=True)
class Decision:
    """The implementation chosen for one op node.

    Attributes:
        op: name of the op in `torch.ops.dsv4`.
        impl: one of `IMPLEMENTATIONS`.
        reason: why this one, in one clause.
        node: name of the node in the compiled graph.
        where: "file:line" of the user's call, or "" when it is not known.
        cost: what the call must do, see `call_costs`; None where it is not known, and where nobody collects.
        measured_us: time of this implementation at a size like the call's, where the table of `measured` has one.
    """

    op: str
    impl: str
    reason: str
    node: str = ""
    where: str = ""
    cost: Cost | None = None
    measured_us: float | None = None

    def __str__(self) -> str:
        location = f" at {self.where}" if self.where else ""
        return f"{self.op}{location}: {self.impl} ({self.reason})"


@dataclass(frozen=True, slots=True)
class Fusion:
    """A group of ops that a pass fused into one op, or did not fuse.

    Attributes:
        by: name of the pass.
        ops: names of the ops that the graph had, in its order.
        into: name of the fused op.
        fused: whether they were fused.
        reason: the reason, in one clause.
        where: "file:line" of the user's call of the first op, or "".
    """

    by: str
    ops: tuple[str, ...]
    into: str
    fused: bool
    reason: str
    where: str = ""

    def __str__(self) -> str:
        location = f" at {self.where}" if self.where else ""
        verb = "fused into" if self.fused else "not fused into"
        return f"{' + '.join(self.ops)}{location}: {verb} {self.into} ({self.reason})"


@dataclass(frozen=True, slots=True)
class Dependence:
    """A launch that may give a row other bits in a call of another size.

    Attributes:
        op: name of the op.
        reason: what its sums or roundings follow from, in one clause.
        where: "file:line" of the user's call, or "".
    """

    op: str
    reason: str
    where: str = ""

    def __str__(self) -> str:
        location = f" at {self.where}" if self.where else ""
        return f"{self.op}{location}: not batch-invariant ({self.reason})"


class Decisions(list[Decision]):
    """Decisions in graph order, with the preceding `fusions`, and launches that are `dependent` on other rows."""

    def __init__(self) -> None:
        super().__init__()
        self.fusions: list[Fusion] = []
        self.dependent: list[Dependence] = []


@dataclass(frozen=True, slots=True)
class Call:
    """One dsv4 op node of a graph, as the code that chooses an implementation sees it.

    Attributes:
        op: name of the op.
        arguments: fake tensors and plain values by schema name. A mutated cache is absent from functional graphs.
        device: where the op runs.
        codegen: the language Inductor generates for `device`, "cpp" or "triton".
        architecture: see `_compat.device_architecture`.
    """

    op: str
    arguments: Mapping[str, Any]
    device: torch.device
    codegen: str
    architecture: str
    node: str = ""
    where: str = ""

    def choose(self, impl: str, reason: str) -> Decision:
        """The decision for `impl` on this call."""
        return Decision(self.op, impl, reason, self.node, self.where)


@contextmanager
def collect() -> Iterator[Decisions]:
    """Collect the decisions of everything that compiles inside the block, in graph order.

    Caches of compiled graphs are bypassed meanwhile: a graph that comes from a cache decides nothing. Functions that
    this process has compiled before do not compile again; call `torch.compiler.reset()` first to see theirs.
    """
    collected = Decisions()
    token = _collectors.set((*_collectors.get(), collected))
    try:
        yield collected
    finally:
        _collectors.reset(token)


def collecting() -> bool:
    """Whether somebody collects decisions right now."""
    return bool(_collectors.get())


@contextmanager
def times(count: int) -> Iterator[None]:
    """Record each decision in the block `count` times: code is compiled once for `count` parts of a graph."""
    token = _times.set(count)
    try:
        yield
    finally:
        _times.reset(token)


def record(found: Decision | Fusion | Dependence) -> None:
    """Add `found` to every open collector."""
    log.debug("%s", found)
    for collected in _collectors.get():
        if isinstance(found, Fusion):
            collected.fusions += [found] * _times.get()
        elif isinstance(found, Dependence):
            collected.dependent += [found] * _times.get()
        else:
            collected += [found] * _times.get()
