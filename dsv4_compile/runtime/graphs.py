"""Where captures live: CUDA graphs over one memory pool, or their stand-in on a CPU (see `standin`).

Both obey the same rules, which are CUDA's: a capture records what a call launches and executes none of it; a replay
executes it at the addresses, sizes and Python values that the capture saw; nothing captured may read the device.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .._compat import pytree, recover_from_failed_capture, without_cudagraph_trees
from ..errors import GraphError, check
from .capture_errors import explain_failure
from .capture_stream import OnCaptureStream

Call = Callable[[], Any]
_SEGMENT = 2 << 20
"""What CUDA's caching allocator takes at least at a time."""
_capturing: ContextVar[str] = ContextVar("dsv4_capturing", default="")


@dataclass(frozen=True, slots=True)
class Capture:
    """A captured call.

    Attributes:
        outputs: what the call returned. Their memory belongs to the capture; every replay writes it anew.
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
        peak: at its peak; outputs: what it returns.
        reserved: what the allocator takes for it in a pool of its own, whose segments are larger than what lies in
            them; 0 where there are none.
    """

    peak: int
    outputs: int
    reserved: int = 0


class Graphs(Protocol):
    """A pool of captures on one device. `kind` is "cuda" or "standin"."""

    kind: str
    device: torch.device

    def warm_up(self, call: Call) -> Any:
        """Run `call` where captures will run, for what a first run does once: load, tune, allocate workspaces."""

    def measure(self, call: Call) -> Footprint:
        """Run `call` and say what it allocates."""

    def capture(self, call: Call, what: str) -> Capture:
        """Record `call`. `what` names it in errors: E422 not capturable, E423 empty, E424 inside another capture."""

    def memory(self) -> int:
        """Bytes that the captures hold."""

    def predict(self, footprints: Sequence[Footprint]) -> int:
        """Bytes that captures of these calls, the largest first, will hold together."""


def graphs_for(device: torch.device, kind: str = "auto", standin: str = 'graphs_for(device, "standin")') -> Graphs:
    """Captures on `device`: CUDA graphs, or the stand-in where `kind` asks for it by name. E420 where neither fits.

    `standin` is how the caller's user asks for the stand-in, for that error.
    """
    if kind == "standin":
        from .standin import StandInGraphs

        check(
            device.type == "cpu",
            "E420",
            got=f"the stand-in on {device}",
            why="it replays on the CPU, to test there what a GPU would do",
            fix="ask for no stand-in on a GPU",
        )
        return StandInGraphs()
    rule, fix = "graphs is auto, cuda or standin", "pass one of them"
    check(kind in ("auto", "cuda"), "E420", got=f"graphs={kind!r}", rule=rule, fix=fix)
    check(
        device.type == "cuda",
        "E420",
        got=f"CUDA graphs on {device}",
        why="a CPU has no graphs to capture, and running without them in silence would not be what was asked for",
        fix=f"run on a GPU, or without graphs; in tests on a CPU ask for the stand-in: {standin}",
    )
    return CudaGraphs(device)


def capturing() -> str:
    """What is being captured in this context, or ""."""
    return _capturing.get()


@contextmanager
def capture_of(what: str) -> Iterator[None]:
    """Mark the block as the capture of `what`; E424 inside another one."""
    outer = capturing()
    if not outer and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        outer = "the current stream, by somebody else"
    check(not outer, "E424", got=f"the capture of {what} inside the capture of {outer}")
    token = _capturing.set(what)
    try:
        with without_cudagraph_trees(lambda: refuse_capture("Inductor's CUDA graphs")):
            yield
    finally:
        _capturing.reset(token)


def refuse_capture(inner: str) -> None:
    """Raise E424 for `inner` where a capture is under way in this context."""
    outer = capturing()
    check(not outer, "E424", got=f"{inner} inside the capture of {outer}")


def tensor_bytes(tree: Any) -> int:
    """Bytes of the distinct storages of the tensors in `tree`."""
    storages = (leaf.untyped_storage() for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class CudaGraphs:
    """CUDA graphs of one device, captured on one side stream into one memory pool.

    Memory that a capture's outputs hold is not shared; the rest of the pool is, so the largest call comes first.
    """

    kind = "cuda"

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        with torch.cuda.device(self.device):
            self._stream = torch.cuda.Stream()
            self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, call: Call) -> Any:
        """Run `call` on the stream that captures, ordered between what came before and what comes after."""
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                result = call()
            current.wait_stream(self._stream)
        return result

    def measure(self, call: Call) -> Footprint:
        """Peak of the caching allocator over one run, in a pool as empty as that of a first capture."""
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool, self.device):
            outputs = self.warm_up(call)
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device) - before
        found = Footprint(peak, tensor_bytes(outputs), _segments(pool.id))
        del outputs  # before the pool that it lies in
        return found

    def capture(self, call: Call, what: str) -> Capture:
        """Record `call` as one CUDA graph."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device), capture_of(what):
            # What torch.cuda.graph does before a capture: memory must not be freed while one is under way.
            torch.cuda.synchronize()
            gc.collect()
            torch.cuda.empty_cache()
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream), warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                try:
                    outputs = self._record(graph, call, what)
                except GraphError:
                    raise
                except RuntimeError as fault:
                    raise explain_failure(fault, what) from fault
            torch.cuda.current_stream().wait_stream(self._stream)
        empty = False
        for warning in told:
            empty |= "graph is empty" in str(warning.message).lower()
            if not empty:
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        check(not empty, "E423", got=f"{what} launched nothing on {self.device}")
        return Capture(outputs, graph.replay, what)

    def _record(self, graph: torch.cuda.CUDAGraph, call: Call, what: str) -> Any:
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            with OnCaptureStream(what, self.device.type):  # not around the beginning, where torch seeds generators
                outputs = call()
        except BaseException:
            with suppress(RuntimeError):  # the first error says more than "the capture is invalid"
                self._end(graph)
            raise
        self._end(graph)
        return outputs

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            graph.capture_end()
        except RuntimeError:
            recover_from_failed_capture(self.device, self._pool)
            raise

    def memory(self) -> int:
        """Bytes of the pool's segments."""
        return _segments(self._pool)

    def predict(self, footprints: Sequence[Footprint]) -> int:
        """The largest call, and all other outputs as far as it leaves no room: captures share what is free."""
        largest = max(footprints, key=lambda f: f.reserved)
        outputs = sum(_round(f.outputs, 512) for f in footprints) - _round(largest.outputs, 512)
        room = largest.reserved - largest.peak
        return largest.reserved + _round(max(0, outputs - room), _SEGMENT)


def _segments(pool: Sequence[int]) -> int:
    """Bytes that the caching allocator holds for `pool`."""
    segments = torch.cuda.memory_snapshot()
    return sum(s["total_size"] for s in segments if tuple(s.get("segment_pool_id", ())) == tuple(pool))


def _round(size: int, step: int) -> int:
    return -(-size // step) * step
