"""Captures of a call, and the rules that CUDA graphs and their CPU stand-in (`standin`) have in common.

A capture records what a call launches and executes none of it. A replay executes it at the addresses, sizes and Python
values that the capture saw. Nothing captured may read the device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .._compat import TorchDispatchMode, pytree, without_cudagraph_trees
from ..errors import GraphError, check, error, fail, warn
from ..metadata.fixed import AtFixedAddresses
from .capture_budget import CaptureBudget
from .capture_status import without_collections

Call = Callable[[], Any]
SEGMENT_BYTES = 2 << 20
"""Smallest segment that CUDA's caching allocator reserves."""
_TOLERANCE = 1.2
_capturing: ContextVar[str] = ContextVar("dsv4_capturing", default="")

_CAUSES = (
    (
        ("previous error during capture", "captureinvalidated", "invalidated"),
        "a call before it is forbidden during a capture, and its error was caught or ran outside of torch's dispatcher",
        "look there for what reads the device, as the text of a tensor does, waits for it or frees its memory",
    ),
    (
        ("legacy stream", "unjoined", "isolation", "capturing stream", "wrong thread"),
        "work was launched on a stream that the capture does not cover, or that did not join it again",
        "launch on torch.cuda.current_stream(); fork a stream with wait_stream and join it before the step returns",
    ),
    (
        ("unsupported", "not permitted", "synchronize", "item", "nonzero", "host"),
        "the step waits for the device or reads from it, which a replay could not repeat",
        "keep .item(), .cpu(), print, boolean indexing and tensors made from Python lists out of the step",
    ),
    (("out of memory",), "the captures do not fit", "fewer or smaller buckets; see runner.plan()"),
)
"""Words in an error of CUDA or torch during a capture, the rule that was broken, and the fix."""


class TransparentMode(TorchDispatchMode):  # type: ignore[misc]
    """Dispatch mode inside which compiled functions run compiled."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: the mode sees the ops that compiled code calls, and lets it run."""
        return True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True: the name of `ignore_compile_internals` in older torch."""
        return True


@dataclass(frozen=True)
class Capture(AtFixedAddresses):
    """A captured call.

    Attributes:
        outputs: what the call returned. Their memory belongs to the capture and is overwritten by every replay.
        replay: executes the captured work on the current stream.
        what: its name in errors.
    """

    outputs: Any
    replay: Callable[[], None]
    what: str


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that one call allocates.

    Attributes:
        peak: most bytes at a time.
        outputs: bytes of its outputs.
        reserved: segments that the allocator reserves for it in an empty pool; 0 where there is no pool.
    """

    peak: int
    outputs: int
    reserved: int = 0


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory of a runner in bytes, known before anything is captured.

    Attributes:
        persistent: memory at captured addresses that the engine owns: inputs, metadata, caches, weights.
        footprints: what one step allocates, by bucket, measured in a run of it.
        graphs: predicted memory of all captures together.
    """

    persistent: int
    footprints: Mapping[int, Footprint]
    graphs: int

    def check(self, measured: int) -> None:
        """Warn (W602) when the captures hold a fifth and one segment more than was predicted."""
        if measured > self.graphs * _TOLERANCE + SEGMENT_BYTES:
            warn("W602", got=f"{measured:,} bytes in graphs, {self.graphs:,} predicted")

    def __str__(self) -> str:
        head = f"{'tokens':>8}{'peak bytes':>16}{'output bytes':>16}"
        rows = [f"{size:>8}{f.peak:>16,}{f.outputs:>16,}" for size, f in sorted(self.footprints.items())]
        return "\n".join([head, *rows, f"graphs {self.graphs:,} bytes, plus {self.persistent:,} at fixed addresses"])


class Graphs(Protocol):
    """A pool of captures on one device. `kind` is "cuda" or "standin".

    Captures of one pool share memory: who writes their inputs, replays and reads their outputs holds `lock`.
    """

    kind: str
    device: torch.device
    lock: threading.RLock
    budget: CaptureBudget

    def wait(self) -> None:
        """Wait until no replay runs any more."""

    def follow(self) -> None:
        """Let the current stream wait for the stream of the last caller, because its replay uses the same memory."""

    def warm_up(self, call: Call) -> Any:
        """Run `call` where captures run, so that it loads, tunes and allocates workspaces before them."""

    def measure(self, call: Call) -> Footprint:
        """Run `call` and return what it allocates."""

    def capture(self, call: Call, what: str) -> Capture:
        """Record `call`. `what` names it in errors: E422 not capturable, E423 empty, E424 inside a capture."""

    def memory(self) -> int:
        """Return the bytes that the captures hold."""

    def predict(self, footprints: Sequence[Footprint]) -> int:
        """Return the bytes that captures of these calls, the largest first, will hold together."""


@contextmanager
def capture_scope(what: str) -> Iterator[None]:
    """Mark the block as the capture of `what`, and collect no garbage in it. Raise E424 inside an outer capture."""
    outer = _capturing.get()
    if not outer and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        outer = "the current stream, which other code started"
    check(not outer, "E424", got=f"the capture of {what} inside the capture of {outer}")
    token = _capturing.set(what)
    try:
        with without_collections(), without_cudagraph_trees(lambda: check_not_capturing("Inductor's CUDA graphs")):
            yield
    finally:
        _capturing.reset(token)


def check_not_capturing(inner: str) -> None:
    """Raise E424 for `inner` during a capture in this context."""
    outer = _capturing.get()
    check(not outer, "E424", got=f"{inner} inside the capture of {outer}")


def tensor_bytes(tree: Any) -> int:
    """Return the bytes that the storages of the tensors in `tree` span, where several overlap once."""
    tensors = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    spans = {(str(t.device), t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in tensors}
    total, last, end = 0, "", 0
    for device, begin, length in sorted(spans):
        counted = max(end - begin, 0) if device == last else 0
        total += max(length - counted, 0)
        last, end = device, max(end if device == last else 0, begin + length)
    return total


def explain_failure(fault: BaseException, what: str, events: str = "") -> GraphError:
    """Build the E422 for an error of torch or CUDA during the capture of `what`, with the broken rule and the fix.

    `events` says what happened on the host during the capture.
    """
    text = str(fault).strip() or type(fault).__name__
    known = next((cause for cause in _CAUSES if any(word in text.lower() for word in cause[0])), None)
    why, fix = known[1:] if known else ("", "")
    why = "; ".join(part for part in (why, events) if part)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # "backend='dsv4' raised:" names its cause in the next line.
    first = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    built = error("E422", got=f"{what}: {first}", why=why, fix=fix)
    assert isinstance(built, GraphError)
    return built


def fail_host_read(what: str, op: str) -> None:
    """Raise E422 for an op with a result that the host needs, as a CUDA capture would."""
    fail(
        "E422",
        got=f"{what}: {op} during a capture",
        why="the step reads a value, or a number of elements, from the device",
        fix="keep .item(), .cpu(), boolean indexing and nonzero out of the step",
    )
