"""Validity of a capture, and events on the host during it.

A forbidden call invalidates a capture. If the error of that call is caught, the next launch reports it, wherever it is.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .structured_log import TRACE, failed_guards

_INVALIDATED = 2
"""CU_STREAM_CAPTURE_STATUS_INVALIDATED of the CUDA driver; torch tells no more than that a stream is being captured."""
_lock = threading.Lock()


@functools.cache
def _driver() -> Any:
    """Return the library of the CUDA driver, None where there is none."""
    if torch.version.hip is not None:
        return None
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def is_invalidated() -> bool:
    """Return whether the capture of the current stream is no longer valid; False where the driver cannot tell."""
    if not torch.cuda.is_initialized() or (driver := _driver()) is None:
        return False
    status, stream = ctypes.c_int(0), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    return driver.cuStreamIsCapturing(stream, ctypes.byref(status)) == 0 and status.value == _INVALIDATED


class _Collector:
    """Number of open `without_collections` blocks of this process, and whether to enable collections after them."""

    blocks = 0
    enabled = False


@contextmanager
def without_collections() -> Iterator[None]:
    """Disable Python's cyclic garbage collector inside the block; restore it after the last open block of all threads.

    What it frees may be memory, a graph or an event of a device, and freeing one may invalidate a capture.
    """
    with _lock:
        if not _Collector.blocks:
            _Collector.enabled = gc.isenabled()
            gc.disable()
        _Collector.blocks += 1
    try:
        yield
    finally:
        with _lock:
            _Collector.blocks -= 1
            if not _Collector.blocks and _Collector.enabled:
                gc.enable()


class _RecompileReasons(logging.Handler):
    """Reads from torch's structured log which guard failed before the first compilation."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.first = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the reason, if it is one and the first."""
        artifact = getattr(record, "metadata", {}).get("artifact") or {}
        if not self.first and artifact.get("name") == "recompile_reasons":
            self.first = " ".join(failed_guards(str(getattr(record, "payload", "")))[0].split())


class HostEvents:
    """Events on the host inside a block, for the error of a capture: `with HostEvents() as events:`.

    Attributes:
        last: the last op that ended while the capture was valid, "" for none.
    """

    def __init__(self) -> None:
        self.last = ""
        self._collections = 0
        self._graphs = _compiled_graphs()
        self._reasons = _RecompileReasons()

    def __enter__(self) -> HostEvents:
        gc.callbacks.append(self._collected)
        logging.getLogger(TRACE).addHandler(self._reasons)
        return self

    def __exit__(self, *failure: Any) -> None:
        gc.callbacks.remove(self._collected)
        logging.getLogger(TRACE).removeHandler(self._reasons)

    def _collected(self, phase: str, info: Any) -> None:
        self._collections += phase == "stop"

    def __str__(self) -> str:
        texts = [f"the last op that ended in the valid capture is {self.last}"] if self.last else []
        if self._collections:
            texts.append("garbage was collected during the capture")
        if compiled := max(0, _compiled_graphs() - self._graphs):
            texts.append(f"{compiled} graphs were compiled during the capture")
            if self._reasons.first:
                texts.append(f"torch compiled again because this did not hold: {self._reasons.first}")
        return "; ".join(texts)


def _compiled_graphs() -> int:
    """Return the number of graphs that torch has compiled in this process."""
    if "torch._dynamo.utils" not in sys.modules:
        return 0
    from .._compat import counters

    return int(counters["stats"]["unique_graphs"])
