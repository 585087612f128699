"""CUDA graphs of one device: captures on a side stream into one memory pool."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from .._compat import OpOverload, pytree, recover_from_failed_capture
from ..errors import GraphError, check, fail
from ..layout import align_up
from ..metadata.fixed import AtFixedAddresses
from .capture_budget import CaptureBudget
from .capture_status import HostEvents, is_invalidated
from .captures import (
    SEGMENT_BYTES,
    Call,
    Capture,
    Footprint,
    TransparentMode,
    capture_scope,
    explain_failure,
    tensor_bytes,
)
from .groups import group_of, replay_of

_BLOCK_BYTES = 512
"""Granularity of an allocation in CUDA's caching allocator."""


class CudaGraphs(AtFixedAddresses):
    """CUDA graphs of one device in one memory pool.

    Captures share the pool's memory, except for the outputs, which stay allocated. So the largest call comes first.
    torch takes no capture into a pool after all its graphs were freed or one of its captures failed: the next capture
    begins a new pool.
    """

    kind = "cuda"

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        with torch.cuda.device(self.device):
            self._stream = torch.cuda.Stream()
            self._pool = torch.cuda.graph_pool_handle()
        self._begun = False
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()  # of the pool
        self._failed: list[torch.cuda.CUDAGraph] = []
        self.lock, self.budget = threading.RLock(), CaptureBudget()
        self._last: torch.cuda.Stream | None = None

    def wait(self) -> None:
        """Wait for all work of the device."""
        torch.cuda.synchronize(self.device)

    def follow(self) -> None:
        """Let the current stream wait for the work so far of the last call's stream, if they differ."""
        current = torch.cuda.current_stream(self.device)
        if self._last is not None and self._last != current:
            current.wait_stream(self._last)
        self._last = current

    def warm_up(self, call: Call) -> Any:
        """Run `call` on the capture stream, after the work of the current stream so far and before its later work."""
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                result = call()
            current.wait_stream(self._stream)
        return result

    def measure(self, call: Call) -> Footprint:
        """Return the allocator's peak over one run, in a pool as empty as that of a first capture."""
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool, self.device):
            outputs = self.warm_up(call)
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device) - before
        footprint = Footprint(peak, tensor_bytes(outputs), _segments(pool.id))
        del outputs  # before the pool that holds it
        return footprint

    def capture(self, call: Call, what: str) -> Capture:
        """Record `call` as one CUDA graph."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device), capture_scope(what):
            # As torch.cuda.graph does: memory must not be freed during a capture.
            torch.cuda.synchronize()
            gc.collect()
            torch.cuda.empty_cache()
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream), warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                with HostEvents() as events:
                    try:
                        outputs, groups = self._record(graph, call, what, events)
                    except GraphError:
                        raise
                    except RuntimeError as fault:
                        raise explain_failure(fault, what, str(events)) from fault
            torch.cuda.current_stream().wait_stream(self._stream)
        empty = False
        for warning in caught:
            empty |= "graph is empty" in str(warning.message).lower()
            if not empty:
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        check(not empty, "E423", got=f"{what} launched nothing on {self.device}")
        return Capture(outputs, replay_of(graph, groups, what), what)

    def _record(
        self, graph: torch.cuda.CUDAGraph, call: Call, what: str, events: HostEvents
    ) -> tuple[Any, frozenset[str]]:
        """Return the result of `call`, and the process groups that it communicates with."""
        another = self._another()  # held until this capture holds the pool too
        if another is None and self._begun:
            self._begin_pool()
        self._begun = True
        try:
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        except RuntimeError:
            self._recover(graph)
            raise
        mode = CheckCaptureStream(what, self.device.type, events)
        try:
            with mode:  # not around capture_begin, which seeds generators
                outputs = call()
        except BaseException:
            with suppress(RuntimeError):  # the first error says more than "the capture is invalid"
                self._end(graph)
            raise
        self._end(graph)
        self._graphs.add(graph)
        return outputs, frozenset(mode.groups)

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            graph.capture_end()
        except RuntimeError:
            self._recover(graph)
            raise

    def _recover(self, graph: torch.cuda.CUDAGraph) -> None:
        """Clean up after a capture that could not begin or end."""
        recover_from_failed_capture(self.device, self._pool)
        self._failed.append(graph)  # torch's allocator of pinned memory goes on asking it which streams it captures
        self._begin_pool()

    def _begin_pool(self) -> None:
        self._pool, self._begun, self._graphs = torch.cuda.graph_pool_handle(), False, weakref.WeakSet()

    def _another(self) -> torch.cuda.CUDAGraph | None:
        """Return a graph that holds the pool, or None."""
        for graph in tuple(self._graphs):
            with suppress(RuntimeError):  # it was reset before its process group was destroyed
                graph.pool()
                return graph
        return None

    def memory(self) -> int:
        """Return the bytes of the pool's segments."""
        return _segments(self._pool)

    def predict(self, footprints: Sequence[Footprint]) -> int:
        """Return the segments of the largest call plus the outputs of all others that do not fit into its free part."""
        largest = max(footprints, key=lambda f: f.reserved)
        outputs = sum(align_up(f.outputs, _BLOCK_BYTES) for f in footprints) - align_up(largest.outputs, _BLOCK_BYTES)
        free = largest.reserved - largest.peak
        return largest.reserved + align_up(max(0, outputs - free), SEGMENT_BYTES)


def _segments(pool: Sequence[int]) -> int:
    """Return the bytes that the caching allocator holds for `pool`."""
    segments = torch.cuda.memory_snapshot()
    return sum(s["total_size"] for s in segments if tuple(s.get("segment_pool_id", ())) == tuple(pool))


class CheckCaptureStream(TransparentMode):
    """Dispatch mode that raises E422 for an op on tensors of `device_type` while the current stream is not captured.

    CUDA records what reaches the capturing stream and the streams that wait for it. A kernel on any other stream runs
    once, at capture time, and every replay reads its old result. CUDA reports no error for that.

    E422 names the ops too between which the capture became invalid: a caught error leaves no other trace.

    Attributes:
        groups: names of the process groups that the ops communicated with.
    """

    def __init__(self, what: str, device_type: str, events: HostEvents | None = None) -> None:
        super().__init__()
        self._what, self._device_type = what, device_type
        self._events = HostEvents() if events is None else events
        self.groups: set[str] = set()

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`."""
        kwargs = kwargs or {}
        if (group := group_of(func, args, kwargs)) is not None:
            self.groups.add(group)
        if not torch.cuda.is_current_stream_capturing() and self._launches(func, args, kwargs):
            fail(
                "E422",
                got=f"{self._what}: {func} on a stream that is not captured",
                why="it would run once, now, and no replay would repeat it",
                fix="launch on torch.cuda.current_stream(); fork a stream with wait_stream and join it before the step "
                "returns",
            )
        self._check_valid(f"before {func}")
        out = func(*args, **kwargs)
        self._check_valid(f"by {func}")
        self._events.last = str(func)
        return out

    def _check_valid(self, when: str) -> None:
        if is_invalidated():
            raise explain_failure(RuntimeError(f"the capture was invalidated {when}"), self._what, str(self._events))

    def _launches(self, func: OpOverload, args: Any, kwargs: Any) -> bool:
        """Return whether `func` launches work on the device; views do not."""
        aliases = [returned.alias_info for returned in func._schema.returns]
        if any(alias is not None and not alias.is_write for alias in aliases):
            return False
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        devices = [tensor.device for tensor in tensors]
        if kwargs.get("device") is not None:
            devices.append(torch.device(kwargs["device"]))
        return any(device.type == self._device_type for device in devices)
